"""Fixed-size sampling: a uniformly random subset of known size."""

import dataclasses
from typing import ClassVar

import dp_accounting

from tf_adadp.accounting.amplification import amplified
from tf_adadp.accounting.laws.one_size import _OneSizeSampling
from tf_adadp.utils.checks import check_noise_multiplier


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(_OneSizeSampling):
    """Each lot is a uniformly random set of exactly `size` of the `num_examples` records.

    Guarantee: neighbouring data sets differ by replacing one record, which moves the sum by at
    most 2C: SampledWithoutReplacement(N, n, Gaussian(σ*/2)) per step, Gaussian(σ*/2) at n = N. The
    factor 2 covers microbatched sums as well, it is charged once.

    Args:
      num_examples: N ≥ 1.
      size: n in 1..N, the number of records in every lot.
      declared: True where the user states the law.

    Raises:
      ValueError: a size is not a positive integer, or size > num_examples.

    Example:
        >>> accounting.FixedSizeSampling(num_examples=60000, size=600).event(noise_multiplier=1.1)
        SampledWithoutReplacementDpEvent(source_dataset_size=60000, sample_size=600,
        event=GaussianDpEvent(noise_multiplier=0.55))
    """

    can_be_declared: ClassVar[bool] = True

    @property
    def record_probability(self) -> float:
        """Returns n/N."""
        return self.size / self.num_examples

    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns SampledWithoutReplacement(N, n, Gaussian(σ*/2)), microbatched or not."""
        noise_multiplier = check_noise_multiplier(noise_multiplier)
        if noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        if self.size == self.num_examples:
            return gaussian
        return dp_accounting.SampledWithoutReplacementDpEvent(
            self.num_examples, self.size, gaussian
        )

    def selection_event(self, selection_epsilon: float) -> dp_accounting.DpEvent:
        """Returns ZCDp(ε'²/2), ε' = log(1 + q(e^ε_s − 1)), q = n/N, for one record replaced.

        ε' is a bound of pure differential privacy (Balle, Barthe and Gaboardi 2018, "Privacy
        amplification by subsampling", Theorem 9) but not of the range, and Bun and Steinke 2016,
        Proposition 1.4, applies.
        """
        epsilon = amplified(selection_epsilon, self.record_probability)
        return dp_accounting.ZCDpEvent(epsilon**2 / 2)

    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """Tells whether the event samples this many of this many records without replacement."""
        return (
            isinstance(sampling_event, dp_accounting.SampledWithoutReplacementDpEvent)
            and sampling_event.source_dataset_size == self.num_examples
            and sampling_event.sample_size == self.size
        )

    def _summary(self) -> str:
        return (
            f"sampling without replacement: each lot is a uniformly random set of exactly "
            f"{self.size} of {self.num_examples} records"
        )
