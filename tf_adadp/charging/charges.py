"""Records what an optimizer was charged for and what it released."""

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import dp_accounting
import tensorflow as tf

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.accounting.events import is_non_private
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.charging.lot_releases import LotReleases, when_run
from tf_adadp.distribution import replicas
from tf_adadp.noise import SecretKey
from tf_adadp.persistence.weights_ledger import note_charged, note_optimizer
from tf_adadp.utils.checks import check_integer

# A class that defines one of these charges or makes steps by itself, see `cover_metrics`.
_OWN_CHARGE = ("event", "before_charge", "charge", "charged", "step_on_lot")
_LOCK = threading.Lock()


class Releasing(Protocol):
    """A private optimizer as `Charges` sees it: a description of its releases."""

    noise_multiplier: float | None
    microbatch_size: int
    seed: int | None
    event_varies: bool
    releases_one_sum: bool
    ledger_origin: str
    built: bool

    def event(self, law: SamplingLaw) -> dp_accounting.DpEvent:
        """Returns the privacy event of one step on a lot drawn by `law`."""

    def before_charge(self, ledger: PrivacyLedger, law: SamplingLaw, steps: int) -> None:
        """Raises where a budget of the optimizer's own has no room for these steps."""

    def charge(self, ledger: PrivacyLedger, law: SamplingLaw, steps: int = 1) -> None:
        """Charges a ledger; calls `Charges.charge`."""


class Charges:
    """Charges ledgers for the releases of one optimizer and counts both.

    The optimizer describes a step (`event`, `seed`, `event_varies`, `releases_one_sum`) and counts
    its releases under its noise key; nothing in it writes to a ledger.

    Args:
        optimizer: the optimizer that releases.
        noise_key: the key that counts its releases.

    Attributes:
        lots: the lots that releases were made from.
        metrics_noise_multiplier: σ_m of the metrics that every step releases from its lot and that
            `optimizer.event` covers; None: none.
    """

    def __init__(self, optimizer: Releasing, noise_key: SecretKey):
        self.lots = LotReleases()
        self.metrics_noise_multiplier: float | None = None
        self._optimizer = optimizer
        self._noise_key = noise_key
        self._paid = 0  # releases that were charged for
        self._variables: Sequence[tf.Variable] | None = None
        self._before_build: list[PrivacyLedger] = []  # charged while the weights were not known

    @property
    def releases(self) -> int:
        """Returns the number of releases that this process made, charged or not."""
        return self._noise_key.releases

    @property
    def uncharged(self) -> int:
        """Returns the number of uncharged releases of this process."""
        return max(0, self.releases - self._paid)

    @property
    def waiting(self) -> int:
        """Returns the number of charges whose release was not made yet."""
        return max(0, self._paid - self.releases)

    @property
    def origin(self) -> str:
        """Returns the origin in the entries of a ledger."""
        with_metrics = "" if self.metrics_noise_multiplier is None else ", with released metrics"
        return self._optimizer.ledger_origin + with_metrics

    def cover_metrics(self, noise_multiplier: float | None) -> None:
        """Lets `optimizer.event` cover metrics of this multiplier (None: none) from now on.

        `DPModel.compile` calls it for its `released_metrics`, and refuses to train where the
        `compile` of another model changed it since. A subclass that overrides `event` counts the
        metrics with `SamplingLaw.event_with_metrics` and sets `covers_metrics = True` in its own
        body.

        Raises:
            ValueError: the steps are charged by an event that does not count metrics.
        """
        if noise_multiplier is not None:
            kind = type(self._optimizer)
            for name in _OWN_CHARGE:
                owner = next(c for c in kind.__mro__ if name in vars(c))
                if not vars(owner).get("covers_metrics", False):
                    raise ValueError(
                        f"released_metrics with {kind.__name__}: {owner.__name__}.{name} charges "
                        "or makes its steps by itself, without other releases from the same lot. "
                        "Leave released_metrics out (log_raw_metrics=False keeps raw ones out of "
                        "the logs), or take another optimizer."
                    )
        self.metrics_noise_multiplier = noise_multiplier

    def attach(self, variables: Sequence[tf.Variable]) -> None:
        """Ties the weights to this optimizer and to the ledgers charged before it was built."""
        self._variables = tuple(variables)  # the caller may change its list
        note_optimizer(variables, self._optimizer)
        for ledger in self._before_build:
            note_charged(variables, ledger)
        self._before_build.clear()

    def charge(
        self,
        ledger: PrivacyLedger,
        law: SamplingLaw,
        steps: int = 1,
        *,
        position: int = 0,
        reproducible_sampling: bool = False,
        releases_per_lot: int = 1,
    ) -> None:
        """Writes `steps` releases into a ledger, before they are made; see `DPOptimizer.charge`."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                "charge inside of a tf.function would charge once, when the graph is traced, and "
                "not when it runs. Call it from Python before every run; or call "
                "tf_adadp.private_step inside, which charges at every run."
            )
        self._noise_key.check_process()
        event = self._event_of_lot(law, releases_per_lot)
        self._optimizer.before_charge(ledger, law, steps)
        begins = self.lots.position(ledger, law, position, releases_per_lot)
        self._write(ledger, law, event, steps, begins, reproducible_sampling)
        self.lots.pay(ledger, law, steps, position, releases_per_lot)
        self._count(steps)
        if self._variables is None:
            self._before_build.append(ledger)
        else:
            note_charged(self._variables, ledger)

    def announce(
        self,
        ledger: PrivacyLedger,
        law: SamplingLaw,
        steps: int,
        *,
        position: int = 0,
        reproducible_sampling: bool = False,
    ) -> None:
        """Writes the entries of `charge`, without covering a release."""
        self._write(ledger, law, self._event_of_lot(law), steps, position, reproducible_sampling)

    @contextlib.contextmanager
    def expiring(self, steps: int) -> Iterator[None]:
        """Cancels the unused rest of `steps` charges after the `with` block."""
        before = self.releases
        try:
            yield
        finally:
            made = self.releases - before
            self._count(-max(0, steps - made))
            self.lots.expire()

    def charge_lot(
        self, ledger: PrivacyLedger, law: SamplingLaw, lot: tuple, variables: Sequence[tf.Variable]
    ) -> None:
        """Charges one release from a lot of eager tensors.

        Raises:
            ValueError: every release that the lot was charged for was made. Nothing is charged.
        """
        claim = self.lots.claim(lot, variables, ledger, law.full_batch)
        try:
            self._optimizer.charge(ledger, law)
        except BaseException:
            claim.undo()
            raise
        if law.full_batch:
            self.lots.expire()  # the lot was allowed above

    def claim(self, lot: tuple | None, variables: Sequence[tf.Variable]) -> list[tf.Operation]:
        """Takes a release from a lot before it is made, or refuses it.

        Args:
            lot: `((x, y, sample_weight), mask)`; None where it is not known.
            variables: the weights that the release is about.

        Returns:
            In a graph the operations that do so when it runs; else an empty list.
        """
        if lot is None or replicas.num_replicas() > 1:
            return []

        def claim(lot):
            if self.lots.claim(lot, variables).of_several:
                self._count(1)

        return when_run(claim, lot)

    def settle(self) -> None:
        """Counts every release as charged: a private state was loaded with its ledger."""
        self._paid = self.releases

    def _count(self, releases):
        with _LOCK:
            self._paid += releases

    def _write(self, ledger, law, event, steps, position, reproducible_sampling):
        for part, count in law.charges(event, steps, position):
            ledger.add(
                part,
                count,
                law=law,
                origin=self.origin,
                reproducible_noise=self._optimizer.seed is not None or reproducible_sampling,
                adaptive=self._optimizer.event_varies,
            )

    def _event_of_lot(self, law, releases_per_lot=1):
        """Returns the event of K steps on the same lot; that of one step for K = 1."""
        optimizer = self._optimizer
        event = optimizer.event(law)
        if check_integer("releases_per_lot", releases_per_lot, at_least=1) == 1:
            return event
        if is_non_private(event):
            return event
        microbatched = optimizer.microbatch_size > 1
        one_sum = law.event(optimizer.noise_multiplier, microbatched)
        if not optimizer.releases_one_sum or event != one_sum:
            raise ValueError(
                f"releases_per_lot={releases_per_lot} with {type(optimizer).__name__}: what "
                "several of its steps on one lot cost together is not known, because a step "
                "releases more than one noisy sum. Draw a new lot for every step."
            )
        return law.event(optimizer.noise_multiplier / math.sqrt(releases_per_lot), microbatched)


class Charged:
    """Mixin of `DPOptimizer` that counts charges and releases, by its `Charges`.

    Attributes:
        charges: the `Charges` of this optimizer.
    """

    charges: Charges
    covers_metrics: ClassVar[bool] = True

    @property
    def ledger_origin(self) -> str:
        """Returns the origin in the entries of a ledger, but for released metrics."""
        return type(self).__name__

    @property
    def metrics_noise_multiplier(self) -> float | None:
        """Returns σ_m of the metrics that each step releases and `event` covers, or None."""
        return self.charges.metrics_noise_multiplier

    def charge(
        self,
        ledger: PrivacyLedger,
        law: SamplingLaw,
        steps: int = 1,
        *,
        position: int = 0,
        reproducible_sampling: bool = False,
        releases_per_lot: int = 1,
    ) -> None:
        """Writes `steps` releases on lots drawn by `law` into a ledger, before they are made.

        `DPModel.fit` and `tf_adadp.private_step` charge by themselves; custom loops call it ahead
        of `apply_private`. The weights remember the ledger: a DPModel that has them, now or later,
        reports all its entries, too.

        One charge covers one release from one lot. K releases from the same lot share its
        sampling: together they are one Gaussian mechanism of multiplier σ*/√K on that lot (Dong,
        Roth and Su, arXiv:1905.02383, Corollary 3.3), which costs more than K releases from K
        lots. `releases_per_lot=K` charges that.

        Args:
            ledger: the `PrivacyLedger` that is charged.
            law: the sampling law of the lots, `lots.law`.
            steps: the number of lots.
            position: where lots are paid for by the pass (`ShuffledLots`), how many of one
                iteration over them were charged before; 0 charges a new pass, and so does any
                position that this optimizer's last charge of that ledger did not end at.
            reproducible_sampling: whether the lots are seeded.
            releases_per_lot: K ≥ 1, the number of releases to be made from each of these lots.

        Raises:
            ValueError: releases_per_lot > 1 and a step of this optimizer is not one noisy sum.
        """
        self.charges.charge(
            ledger,
            law,
            steps,
            position=position,
            reproducible_sampling=reproducible_sampling,
            releases_per_lot=releases_per_lot,
        )

    @contextlib.contextmanager
    def charged(
        self,
        ledger: PrivacyLedger,
        law: SamplingLaw,
        steps: int,
        *,
        position: int = 0,
        reproducible_sampling: bool = False,
    ) -> Iterator[None]:
        """Charges `steps` releases, to be made inside the `with` block.

        A charge whose release was not made, after an error, stays in the ledger and expires here:
        it does not cover a later release. Releases beyond `steps` stay uncharged.
        """
        self.charge(
            ledger, law, steps, position=position, reproducible_sampling=reproducible_sampling
        )
        with self.charges.expiring(steps):
            yield

    @property
    def releases(self) -> int:
        """Returns the number of releases that this process made, charged or not."""
        return self.charges.releases

    @property
    def uncharged_releases(self) -> int:
        """Returns the number of releases of this process that no `charge` covers."""
        return self.charges.uncharged
