"""Truncated Poisson sampling: Poisson lots cut to a maximum size."""

import dataclasses

import dp_accounting

from tf_adadp.accounting.laws.base import SamplingLaw
from tf_adadp.utils.checks import check_noise_multiplier

_Relation = dp_accounting.NeighboringRelation


@dataclasses.dataclass(frozen=True)
class TruncatedPoissonSampling(SamplingLaw):
    """A Poisson lot of probability q; of more than `max_size` records drawn, a random subset.

    Each of N records is drawn independently with probability q = expected_size / num_examples; if
    more than M = max_size were drawn, the lot is a uniformly random set of M of those.

    Guarantee: neighbouring data sets differ by adding or removing one record. Where the lot is not
    cut, that moves the sum by at most C; where it is cut, the record pushes another one out, which
    moves the sum by up to 2C. `TruncatedSubsampledGaussianDpEvent(N, q, M, σ*)`: its multiplier is
    noise over C, it counts the 2C itself. Microbatched, both double: σ*/2. Only the "pld"
    accountant knows the event ("Tighter privacy analysis for truncated Poisson sampling", arXiv
    2508.15089, 2025). The larger of two neighbours is taken to have N records: the neighbours are
    the data at hand and the same data without one record.

    Args:
      num_examples: N ≥ 1.
      expected_size: L in (0, N], the expected number of records drawn, before the lot is cut. Sums
        are divided by it.
      max_size: M, an integer from L to N.
      declared: True where the user states the law.

    Raises:
      ValueError: a size is out of range.

    Example:
        >>> law = accounting.TruncatedPoissonSampling(60000, expected_size=600, max_size=800)
        >>> law.event(noise_multiplier=1.1)
        TruncatedSubsampledGaussianDpEvent(dataset_size=60000, sampling_probability=0.01,
        truncated_batch_size=800, noise_multiplier=1.1)
    """

    num_examples: int
    expected_size: float
    max_size: int
    declared: bool = False

    def __post_init__(self):
        self._check_num_examples_and_declared()
        self._set_expected_size()
        self._set_integer(
            "max_size",
            f"an integer from expected_size = {self.expected_size} to "
            f"num_examples = {self.num_examples}",
            at_least=self.expected_size,
            at_most=self.num_examples,
        )

    @property
    def probability(self) -> float:
        """Returns q, the probability with which each record is drawn."""
        return self.expected_size / self.num_examples

    @property
    def neighboring_relation(self) -> dp_accounting.NeighboringRelation:
        """Returns the relation "add or remove one record"."""
        return _Relation.ADD_OR_REMOVE_ONE

    @property
    def expected_lot_size(self) -> float:
        """Returns L, the mean size before lots are cut."""
        return self.expected_size

    @property
    def max_lot_size(self) -> int:
        """Returns M."""
        return self.max_size

    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns TruncatedSubsampledGaussian(N, q, M, σ*), with σ*/2 if microbatched.

        Raises:
          ValueError: as the base class; or the installed dp_accounting does not know the event.
        """
        noise_multiplier = check_noise_multiplier(noise_multiplier)
        if noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        event = getattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent", None)
        if event is None:
            raise ValueError(
                "the installed dp_accounting has no TruncatedSubsampledGaussianDpEvent; install "
                "0.6 or newer, or use PoissonSampling."
            )
        return event(
            self.num_examples,
            self.probability,
            self.max_size,
            noise_multiplier / (2 if microbatched else 1),
        )

    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """Tells whether the event draws and cuts by these numbers."""
        return (
            getattr(sampling_event, "dataset_size", None) == self.num_examples
            and getattr(sampling_event, "sampling_probability", None) == self.probability
            and getattr(sampling_event, "truncated_batch_size", None) == self.max_size
        )

    def _summary(self) -> str:
        return (
            f"truncated Poisson sampling: each of {self.num_examples} records is drawn "
            f"independently with probability {self.probability:.6g} (expected number "
            f"{self.expected_size}); of more than {self.max_size} drawn, a random {self.max_size} "
            'are the lot. Only accountant="pld" can analyse it'
        )
