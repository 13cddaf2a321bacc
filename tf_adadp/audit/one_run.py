"""An audit of one whole training: canaries that a secret coin leaves in or out."""

import dataclasses
import secrets

import dp_accounting
import keras
import numpy as np
from numpy.typing import ArrayLike

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.audit.bounds import _level, best_guesses, one_run_epsilon_lower_bound
from tf_adadp.audit.losses import example_losses
from tf_adadp.audit.tradeoff import one_run_family, one_run_family_bound
from tf_adadp.sampling import PoissonLots
from tf_adadp.sampling.sources import ArraySource

# Of 1 − confidence, where there are two bounds. The f-DP bound is much the larger, and at 0.9 of
# the level it is above what Steinke's would be at all of it.
_STEINKE_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class OneRunBound:
    """Holds the bound that guesses about canaries prove for one run.

    Attributes:
        epsilon: the lower bound on ε, ≥ 0.
        delta, confidence: at which δ, and the probability that the bound holds.
        canaries, guesses, correct: m, and r and v of the best of the numbers of guesses tried.
        method: "steinke", which holds for any mechanism, or "f-dp", which holds within the family
            of the claim that was given.
        steinke_epsilon: the bound by "steinke" alone, which holds together with `epsilon`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> coins = rng.random(1000) < 0.5
        >>> bound = dp.audit.one_run_bound(coins + rng.normal(0, 0.5, 1000), coins, delta=1e-5)
        >>> print(bound.canaries, bound.method)
        1000 steinke
    """

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    correct: int
    method: str
    steinke_epsilon: float


def one_run_bound(
    scores: ArrayLike,
    coins: ArrayLike,
    delta: float,
    confidence: float = 0.95,
    num_guesses: int | None = None,
    claim: PrivacyLedger | dp_accounting.DpEvent | str | None = None,
) -> OneRunBound:
    """Bounds ε from below by one run's scores of m canaries, each in by a fair coin.

    The canaries with the highest scores are guessed to be in, those with the lowest to be out (see
    `best_guesses`). `one_run_epsilon_lower_bound` says what that proves of any mechanism. With a
    claim `one_run_fdp_epsilon_lower_bound` is asked, too, and the larger bound is taken: Steinke's
    at a tenth of 1 − confidence, the f-DP bound at nine tenths, fixed in advance. With several
    numbers of guesses each is tested at (1 − confidence)/(how many), so that the best of them may
    be taken.

    Guarantee: without a claim the bound holds with probability ≥ confidence for any mechanism. With
    one it ASSUMES that the mechanism's trade-off function is of the claim's family, as
    `one_run_fdp_epsilon_lower_bound` says; `steinke_epsilon` does not.

    Args:
        scores: numbers [m], higher for a canary that seems to be in; of the run's output only, not
            of the coins.
        coins: bool [m], independent and fair, tossed before training.
        delta: δ in [0, 1] for the mechanism, with neighbours by adding or removing one record; in
            (0, 1) with a claim.
        confidence: in (0, 1).
        num_guesses: an integer, or several, chosen before looking at the coins; None for m/16, m/4
            and m.
        claim: None, "gaussian", or the run's releases as a `PrivacyLedger` or `DpEvent`; chosen
            before looking at the coins.

    Returns:
        A `OneRunBound`.

    Raises:
        ValueError: see `best_guesses`, `one_run_p_value` and `one_run_fdp_epsilon_lower_bound`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> coins = rng.random(1000) < 0.5
        >>> bound = dp.audit.one_run_bound(coins + rng.normal(0, 0.5, 1000), coins, delta=1e-5)
        >>> print(f"{bound.epsilon:.2f}")
        3.24
    """
    m = len(coins)
    if num_guesses is None:
        num_guesses = (m // 16, m // 4, m)
    tried = sorted({int(r) for r in np.atleast_1d(num_guesses)})
    level = _level(confidence) / len(tried)
    family = None if claim is None else one_run_family(claim)
    share = 1.0 if family is None else _STEINKE_SHARE
    found = []
    for r in tried:
        correct = best_guesses(scores, coins, r)
        epsilon = one_run_epsilon_lower_bound(m, r, correct, delta, 1.0 - share * level)
        found.append((epsilon, "steinke", r, correct))
    steinke_epsilon = max(epsilon for epsilon, *_ in found)
    if family is not None:
        for _, _, r, correct in tuple(found):
            at = 1.0 - (1.0 - share) * level
            epsilon = one_run_family_bound(family, m, r, correct, delta, at)
            found.append((epsilon, "f-dp", r, correct))
    epsilon, method, r, correct = max(found, key=lambda bound: bound[0])
    return OneRunBound(epsilon, delta, confidence, m, r, correct, method, steinke_epsilon)


class OneRunAudit(keras.callbacks.Callback):
    """Audits one training of a `DPModel` with canaries, by `one_run_bound`.

        audit = OneRunAudit(x_canaries, y_canaries)            # m records, m secret coins
        model.fit(audit.lots(x, y, expected_size=600), epochs=10, callbacks=[audit])
        audit.bound(delta=1e-5).epsilon                        # to hold against
        model.epsilon(1e-5)

    Each canary is in the data with probability 1/2. The score of a canary is how far its loss fell
    between the beginning and the end of training; see `one_run_bound` for what scores prove. The
    sharpest canaries are records that the model can only fit by heart: wrong labels, odd inputs.

    Compatible with the guarantee: lots are `PoissonLots` over all N + m places, with q = L/(N + m)
    and the divisor L fixed, and canaries that are out are simply not `present`. The ledger charges
    what it always does, for neighbours that differ in one record; and those are what the theorem
    asks for.

    The audit itself is NOT private: it reads raw losses of records that are in the data, its coins
    say which, and ε covers neither. Use canaries that are nobody's record, and keep the report
    where the data are. The canaries that are in do cost accuracy.

    Args:
        x, y: the canaries, in the forms that `fit` takes.
        seed: for tests: makes the coins reproducible. By default the operating system tosses them.
        batch_size: how many canaries are looked at once.

    Attributes:
        coins: bool [m], which canaries are in. Secret until the run is over.

    Raises:
        TypeError, ValueError: as for `PoissonLots`.

    Example:
        >>> canaries = dp.audit.OneRunAudit(np.eye(4), np.ones((4, 1)), seed=0)
        >>> model = dp.DPModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        >>> model.compile(dp.DPSGD(noise_multiplier=2.0), "mse", log_raw_metrics=False)
        >>> lots = canaries.lots(np.zeros((20, 4)), np.zeros((20, 1)), expected_size=8)
        >>> history = model.fit(lots, epochs=1, verbose=0, callbacks=[canaries])
        >>> canaries.bound(delta=1e-5, claim=None).epsilon < model.epsilon(1e-5)
        True
    """

    def __init__(
        self, x: object, y: object, seed: int | None = None, batch_size: int = 256
    ) -> None:
        super().__init__()
        self._source = ArraySource(x, y)
        self._x, self._y = x, y
        self._batch_size = batch_size
        entropy = secrets.randbits(128) if seed is None else int(seed)
        self.coins = np.random.default_rng(entropy).random(len(self._source)) < 0.5
        self._begun = self._ended = None

    def lots(
        self, x: object, y: object, expected_size: float, seed: int | None = None
    ) -> PoissonLots:
        """Makes `PoissonLots` of the records and of the canaries whose coins say so.

        Args:
            x, y: the records to train on, of the canaries' form.
            expected_size: L, out of N + m.
            seed: as for `PoissonLots`, for tests.
        """
        num_records = len(keras.tree.flatten(x)[0])
        x, y = (
            keras.tree.map_structure(lambda a, b: np.concatenate([a, b]), mine, canaries)
            for mine, canaries in ((x, self._x), (y, self._y))
        )
        present = np.concatenate([np.ones(num_records, bool), self.coins])
        return PoissonLots(x, y, expected_size, seed=seed, present=present)

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Stores the losses that training begins with."""
        if self._begun is None:  # a second `fit` goes on with the same run
            self._begun = self._losses()

    def on_train_end(self, logs: dict | None = None) -> None:
        """Stores the losses that training ends with."""
        self._ended = self._losses()

    def _losses(self):
        return example_losses(self.model, self._x, self._y, self._batch_size)

    @property
    def scores(self) -> np.ndarray:
        """Returns the fall of each canary's loss, float64 [m]; −∞ if it is not a number.

        Raises:
            RuntimeError: before training ended.
        """
        if self._ended is None:
            raise RuntimeError(
                "The audited training has not ended: pass the audit to `fit`, callbacks=[audit]."
            )
        with np.errstate(invalid="ignore"):
            fall = self._begun - self._ended
        return np.where(np.isnan(fall), -np.inf, fall)

    def bound(
        self,
        delta: float,
        confidence: float = 0.95,
        num_guesses: int | None = None,
        claim: PrivacyLedger | dp_accounting.DpEvent | str | None = "ledger",
    ) -> OneRunBound:
        """Returns the `OneRunBound` of this run; see `one_run_bound`.

        Args:
            delta, confidence, num_guesses: see `one_run_bound`.
            claim: as there, or "ledger" for the model's own: the trade-off function is then ASSUMED
                to be that of the ledger's releases with all their noise times an unknown factor. A
                ledger that is not private, or that the "pld" accountant cannot analyse, counts as
                None.
        """
        scores = self.scores
        if isinstance(claim, str) and claim == "ledger":
            claim = self._ledger()
        return one_run_bound(scores, self.coins, delta, confidence, num_guesses, claim)

    def _ledger(self):
        """Returns the model's ledger where it has a trade-off function."""
        try:
            one_run_family(self.model.ledger)
        except ValueError:
            return None
        return self.model.ledger
