"""Poisson sampling: each record enters a lot independently."""

import dataclasses
from typing import ClassVar

import dp_accounting
from scipy import stats

from tf_adadp.accounting.amplification import amplified
from tf_adadp.accounting.laws.base import SamplingLaw
from tf_adadp.utils.checks import check_noise_multiplier

_Relation = dp_accounting.NeighboringRelation


def poisson_event(sampling_probability: float, noise_multiplier: float) -> dp_accounting.DpEvent:
    """Returns the event of one noisy sum over a Poisson lot, in its simplest form.

    PoissonSampled(q, Gaussian(σ)) for 0 < q < 1; Gaussian(σ) for q = 1; NoOp for q = 0;
    NonPrivate for σ = 0, which adds no noise.
    """
    if noise_multiplier == 0:
        return dp_accounting.NonPrivateDpEvent()
    if sampling_probability == 0:
        return dp_accounting.NoOpDpEvent()
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    if sampling_probability == 1:
        return gaussian
    return dp_accounting.PoissonSampledDpEvent(sampling_probability, gaussian)


@dataclasses.dataclass(frozen=True)
class PoissonSampling(SamplingLaw):
    """Each record enters a lot independently with probability q = expected_size / num_examples.

    Guarantee: neighbouring data sets differ by adding or removing one record, which moves the sum
    by at most C: PoissonSampled(q, Gaussian(σ*)) per step, Gaussian(σ*) at q = 1. Microbatched
    sums move by at most 2C: σ*/2 in place of σ*. Sums must be divided by the EXPECTED size, since
    the realised one is private.

    Full batches are this law with expected_size = num_examples: every lot holds every record, and
    a step costs Gaussian(σ*) for records added or removed.

    Args:
      num_examples: N ≥ 1.
      expected_size: L in (0, N], the expected number of records in a lot.
      declared: True where the user states the law.

    Raises:
      ValueError: a size is not positive, or expected_size > num_examples.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> law.event(noise_multiplier=1.1)
        PoissonSampledDpEvent(sampling_probability=0.01,
        event=GaussianDpEvent(noise_multiplier=1.1))
    """

    num_examples: int
    expected_size: float
    declared: bool = False
    can_be_declared: ClassVar[bool] = True

    def __post_init__(self):
        self._check_num_examples_and_declared()
        self._set_expected_size()

    @property
    def probability(self) -> float:
        """Returns q, the probability with which each record enters a lot."""
        return self.expected_size / self.num_examples

    @property
    def neighboring_relation(self) -> dp_accounting.NeighboringRelation:
        """Returns the relation "add or remove one record"."""
        return _Relation.ADD_OR_REMOVE_ONE

    @property
    def expected_lot_size(self) -> float:
        """Returns L, the mean of a lot's size."""
        return self.expected_size

    @property
    def record_probability(self) -> float:
        """Returns q."""
        return self.probability

    @property
    def full_batch(self) -> bool:
        """Tells whether q = 1."""
        return self.probability == 1

    def lot_size_probability(self, size: int) -> float:
        """Returns Binomial(N, q) at `size`."""
        return float(stats.binom.pmf(size, self.num_examples, self.probability))

    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns PoissonSampled(q, Gaussian(σ*)), with σ*/2 if microbatched."""
        noise_multiplier = check_noise_multiplier(noise_multiplier)
        return poisson_event(self.probability, noise_multiplier / (2 if microbatched else 1))

    def selection_event(self, selection_epsilon: float) -> dp_accounting.DpEvent:
        """Returns ZCDp(ε'²/8), ε' = log(1 + q(e^ε_s − 1)), for records added or removed.

        Proof: for the records S drawn beside the one in question, the output is M(S) without it and
        (1−q)M(S) + qM(S+x) with it. The log-ratio of the second to the first is
        g(t) = log(1 − q + qe^t), t in an interval [a, a + ε_s], a ≤ 0; g is convex, so its range is
        at most g(ε_s) − g(0) = ε'. A log-ratio of range ε' gives Rényi divergences ≤ αε'²/8 in both
        directions (Hoeffding's lemma; Cesar and Rogers 2021, "Bounding, Concentrating, and
        Truncating", on bounded range), and joint quasi-convexity carries that over to the mean
        over S.
        """
        return dp_accounting.ZCDpEvent(amplified(selection_epsilon, self.probability) ** 2 / 8)

    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """Tells whether the event is Poisson sampling with this probability."""
        return (
            isinstance(sampling_event, dp_accounting.PoissonSampledDpEvent)
            and sampling_event.sampling_probability == self.probability
        )

    def _summary(self) -> str:
        if self.probability == 1:
            return f"full batches: every lot holds all {self.num_examples} records"
        return (
            f"Poisson sampling: each of {self.num_examples} records enters a lot independently "
            f"with probability {self.probability:.6g} (expected lot size {self.expected_size})"
        )
