"""Unknown sampling: no figure can be given."""

import dataclasses
from typing import ClassVar

import dp_accounting

from tf_adadp.accounting.laws.base import SamplingLaw
from tf_adadp.utils.checks import check_noise_multiplier, check_text


@dataclasses.dataclass(frozen=True)
class UnknownSampling(SamplingLaw):
    """Nothing is known about how the records were chosen: no ε can be reported.

    Args:
      reason: why, in words for the error message and the privacy statement.

    Raises:
      ValueError: reason is not a non-empty string.

    Example:
        >>> law = accounting.UnknownSampling("batches of another program")
        >>> ledger = dp.PrivacyLedger()
        >>> ledger.mark_unknown(law.reason)
        >>> ledger.unknown_reasons
        ('batches of another program',)
    """

    reason: str
    num_examples: ClassVar[None] = None
    declared: ClassVar[bool] = False

    def __post_init__(self):
        check_text("reason", self.reason)

    @property
    def neighboring_relation(self) -> None:
        """Returns None: no relation can be named."""
        return

    @property
    def unknown_reason(self) -> str:
        """Returns the reason that was given."""
        return self.reason

    def as_declared(self) -> "UnknownSampling":
        """Returns the law as it is: it states nothing."""
        return self

    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns an `UnsupportedDpEvent`, which every accountant refuses."""
        del microbatched
        if check_noise_multiplier(noise_multiplier) == 0:
            return dp_accounting.NonPrivateDpEvent()
        return dp_accounting.UnsupportedDpEvent()

    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """Returns False: nothing can be checked against an unknown law."""
        del sampling_event
        return False

    def _summary(self) -> str:
        return f"unknown sampling: {self.reason}"
