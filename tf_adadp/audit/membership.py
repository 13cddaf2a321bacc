"""Membership inference: who was in the training data, by the loss, and by LiRA."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import dp_accounting
import keras
import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.audit.losses import example_losses
from tf_adadp.audit.one_run import OneRunBound, one_run_bound
from tf_adadp.utils.checks import check_integer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMALLEST_LOSS = 1e-12  # below, expm1 and log lose the confidence's distance to 1


@dataclasses.dataclass(frozen=True, eq=False)
class MembershipReport:
    """Tells how well an attack separates records in the data from records that were not.

    Needs scikit-learn, and `plot` matplotlib. A report on real records is not private.

    Attributes:
        scores: numbers [N], higher for records that seem to be in.
        members: bool [N], which were in.
        fair_coins: whether members were chosen by independent fair coins; `epsilon_lower_bound`
            rests on it.
        name: of the attack.

    Example:
        >>> members = np.array([True, True, False])
        >>> dp.audit.MembershipReport(np.array([3.0, 2.0, 1.0]), members).auc
        1.0
    """

    scores: np.ndarray
    members: np.ndarray
    fair_coins: bool = False
    name: str = "attack"

    def __post_init__(self):
        scores, members = np.asarray(self.scores, np.float64), np.asarray(self.members)
        if scores.ndim != 1 or scores.shape != members.shape or members.dtype != bool:
            raise ValueError(
                f"scores of shape {scores.shape} and members of shape {members.shape} and type "
                f"{members.dtype}: give two vectors of one length, members of bool."
            )
        if not np.isfinite(scores).all():
            raise ValueError("scores hold NaN or infinities: give a finite number for each record.")
        if members.all() or not members.any():
            raise ValueError("members are all alike: an ROC needs records in and records out.")
        object.__setattr__(self, "scores", scores)
        object.__setattr__(self, "members", members)

    def roc(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (false positive rates, true positive rates) of all thresholds, rising."""
        from sklearn.metrics import roc_curve

        fpr, tpr, _ = roc_curve(self.members, self.scores, drop_intermediate=False)
        return fpr, tpr

    @property
    def auc(self) -> float:
        """Returns the area under the ROC: 1/2 for guessing."""
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(self.members, self.scores))

    def tpr_at(self, fpr: float) -> float:
        """Returns the largest true positive rate at a false positive rate of at most `fpr`."""
        rates, tpr = self.roc()
        return float(tpr[rates <= fpr].max())

    def epsilon_lower_bound(
        self,
        delta: float,
        confidence: float = 0.95,
        num_guesses: int | None = None,
        claim: PrivacyLedger | dp_accounting.DpEvent | str | None = None,
    ) -> OneRunBound:
        """Bounds ε of the training from below; see `one_run_bound`, also for `claim`.

        Not the textbook's log((TPR − δ)/FPR) with intervals for the two rates: all scores come from
        ONE model, so the records are not independent trials. Only the coins are independent.

        Raises:
            ValueError: members were not chosen by fair coins.
        """
        if not self.fair_coins:
            raise ValueError(
                "fair_coins=False: ε can be bounded only where each record was in by a fair coin "
                "of its own. Choose members so (`lira` does), and pass fair_coins=True."
            )
        return one_run_bound(self.scores, self.members, delta, confidence, num_guesses, claim)

    def plot(self, axes: "Axes | None" = None) -> "Axes":
        """Draws the ROC, both axes logarithmic, and returns the matplotlib axes."""
        if axes is None:
            from matplotlib.figure import Figure

            axes = Figure(figsize=(5.2, 4.6), layout="constrained").subplots()
            least = 1.0 / max(np.sum(~self.members), np.sum(self.members))
            axes.plot([least, 1], [least, 1], "--", color="gray", label="guessing")
            axes.set(
                xscale="log",
                yscale="log",
                xlim=(least, 1),
                ylim=(least, 1.1),
                xlabel="false positive rate",
                ylabel="true positive rate",
            )
        fpr, tpr = self.roc()
        axes.plot(fpr, tpr, drawstyle="steps-post", label=f"{self.name}, AUC {self.auc:.3f}")
        axes.legend()
        return axes


def loss_attack(
    model: keras.Model,
    x: object,
    y: object,
    members: ArrayLike,
    *,
    fair_coins: bool = False,
    batch_size: int = 256,
) -> MembershipReport:
    """Attacks by a threshold on the loss: the lower the loss, the likelier a member.

    (Yeom, Giacomelli, Fredrikson and Jha 2018, "Privacy risk in machine learning".)

    Args:
        model: a trained, compiled `keras.Model` or `DPModel`.
        x, y: records that were in its training data, and others.
        members: bool [N], which were.
        fair_coins: see `MembershipReport`.
        batch_size: how many are looked at once.

    Returns:
        A `MembershipReport`.

    Example:
        >>> layer = keras.layers.Dense(1, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.Input((2,)), layer])
        >>> model.compile(loss="mse")
        >>> x, y = np.ones((2, 2)), np.array([[1.0], [2.0]])
        >>> loss = model.evaluate(x, y, verbose=0)
        >>> dp.audit.loss_attack(model, x, y, members=np.array([True, False])).auc
        1.0
    """
    losses = example_losses(model, x, y, batch_size)
    return MembershipReport(-_finite(losses), members, fair_coins, "loss threshold")


def lira(
    train: Callable[..., keras.Model],
    x: object,
    y: object,
    *,
    num_shadows: int = 8,
    online: bool = True,
    seed: int | None = None,
    batch_size: int = 256,
) -> MembershipReport:
    """Runs the likelihood ratio attack with a few shadow models (Carlini et al. 2022).

    A target and `num_shadows` shadow models are trained, each on records that fair coins chose. Of
    a record's loss ℓ, φ = log(p/(1 − p)) with p = e^(−ℓ), which for cross-entropy is the logit of
    the right class's probability, is near Gaussian. With μ_in and μ_out its means over the shadows
    that had the record and that had not, and variances pooled over all records, for few shadows
    give no variance of their own:

        online    log N(φ; μ_in, σ_in²) − log N(φ; μ_out, σ_out²)
        offline   (φ − μ_out)/σ_out, which needs no shadow that had the record

    ("Membership inference attacks from first principles", sections V and VI.)

    Args:
        train: `train(present)` returns a new model, compiled and trained on the records x[present],
            y[present] alone; present is bool [N]. For a `DPModel` pass
            `PoissonLots(x, y, L, present=present)`, which keeps N and q the same for every model.
        x, y: the N records.
        num_shadows: at least 4; the coins are balanced, so that every record is in half of the
            shadows (one more or less, if odd).
        online: which of the two.
        seed: for tests: makes the coins reproducible.
        batch_size: how many records are looked at once.

    Returns:
        (report, target): a `MembershipReport` with fair coins, and the target model.

    Raises:
        ValueError: num_shadows < 4: a variance takes two shadows with and two without a record.

    Example:
        >>> x, y = np.random.default_rng(0).normal(size=(20, 2)), np.zeros((20, 1))
        >>> def train(present):
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     model.fit(x[present], y[present], verbose=0)
        ...     return model
        ...
        >>> report, target = dp.audit.lira(train, x, y, num_shadows=4, seed=0)
        >>> report.scores.shape
        (20,)
    """
    num_shadows = check_integer("num_shadows", num_shadows, at_least=4)
    n = len(keras.tree.flatten(x)[0])
    rng = np.random.default_rng(seed)
    members = rng.random(n) < 0.5
    # Only the target's coins have to be independent.
    in_shadow = rng.permuted(np.tile(np.arange(num_shadows)[:, None] % 2 == 0, n), axis=0)

    def signals(model):
        losses = np.maximum(_finite(example_losses(model, x, y, batch_size)), _SMALLEST_LOSS)
        return -(losses + np.log(-np.expm1(-losses)))  # log(p/(1 − p)), p = e^−loss

    target = train(members)
    observed = signals(target)
    shadows = np.stack([signals(train(present)) for present in in_shadow])
    (mu_in, sigma_in), (mu_out, sigma_out) = (
        _fit(shadows, chosen) for chosen in (in_shadow, ~in_shadow)
    )
    if online:
        scores = stats.norm.logpdf(observed, mu_in, sigma_in)
        scores = scores - stats.norm.logpdf(observed, mu_out, sigma_out)
    else:
        scores = (observed - mu_out) / sigma_out
    name = f"LiRA {'online' if online else 'offline'}, {num_shadows} shadows"
    return MembershipReport(scores, members, True, name), target


def _fit(shadows, chosen):
    """Returns each record's mean [N] over the chosen shadows, and one deviation for all."""
    count = chosen.sum(axis=0)
    mean = np.where(chosen, shadows, 0.0).sum(axis=0) / count
    squares = np.where(chosen, (shadows - mean) ** 2, 0.0).sum()
    return mean, max(float(np.sqrt(squares / (count - 1).sum())), 1e-6)


def _finite(losses):
    """Losses with a large number for those that are infinite or none."""
    return np.nan_to_num(losses, nan=1e6, posinf=1e6, neginf=-1e6)
