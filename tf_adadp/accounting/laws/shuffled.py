"""Shuffled epochs: passes over random permutations, without amplification."""

import dataclasses

import dp_accounting

from tf_adadp.accounting.laws.one_size import _OneSizeSampling
from tf_adadp.utils.checks import check_noise_multiplier


@dataclasses.dataclass(frozen=True)
class ShuffledSampling(_OneSizeSampling):
    """Passes of ⌊N/n⌋ lots of exactly n records, no record twice in a pass.

    Guarantee: neighbouring data sets differ by replacing one record. Given the permutation, the
    record is in at most one lot of the pass, whose sum it moves by at most 2C, and nothing else of
    the pass depends on it but through what was released: a WHOLE pass costs one Gaussian(σ*/2)
    (adaptive steps included). Random permutations are mixtures of such pairs and cost no more.
    They are not charged less either: no amplification by shuffling is claimed. The first lot of a
    pass pays for all of it (`charges`); a pass that is broken off has cost the same. The factor 2
    covers microbatched sums as well.

    For records added or removed there is no such bound: one more record moves the borders of all
    lots.

    Args:
      num_examples: N ≥ 1.
      size: n in 1..N, the number of records in every lot. The N mod n records at the end of a
        permutation are left out of that pass.
      declared: True where the user states the law.

    Raises:
      ValueError: a size is not a positive integer, or size > num_examples.

    Example:
        >>> accounting.ShuffledSampling(num_examples=60000, size=600).event(noise_multiplier=1.1)
        GaussianDpEvent(noise_multiplier=0.55)
    """

    @property
    def lots_per_pass(self) -> int:
        """Returns ⌊N/n⌋."""
        return self.num_examples // self.size

    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns Gaussian(σ*/2), the cost of a whole PASS, with and without microbatches."""
        noise_multiplier = check_noise_multiplier(noise_multiplier)
        if noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        return dp_accounting.GaussianDpEvent(noise_multiplier / 2)

    def covers_pass(self, event: dp_accounting.DpEvent) -> bool:
        """Tells whether the event is one Gaussian, or has no privacy at all."""
        return isinstance(event, dp_accounting.GaussianDpEvent | dp_accounting.NonPrivateDpEvent)

    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """Returns False: events of this law claim no sampling."""
        del sampling_event
        return False

    def _summary(self) -> str:
        return (
            f"shuffled epochs: passes over random permutations of {self.num_examples} records, "
            f"{self.lots_per_pass} lots of exactly {self.size} each; every pass is charged whole "
            "at its first lot, without amplification"
        )
