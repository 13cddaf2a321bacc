"""Sampling of users: privacy for all records of a person."""

import dataclasses
from typing import ClassVar

import dp_accounting

from tf_adadp.accounting.laws.base import SamplingLaw
from tf_adadp.accounting.laws.poisson import poisson_event
from tf_adadp.utils.checks import check_noise_multiplier

_Relation = dp_accounting.NeighboringRelation


@dataclasses.dataclass(frozen=True)
class UserSampling(SamplingLaw):
    """Each user enters a lot independently, with at most k of the user's records.

    A user is drawn with probability q = expected_users / num_users; of a drawn user who has more
    than k = max_records_per_user records, a fresh, uniformly random set of k enters the lot.

    Guarantee: neighbouring data sets differ by adding or removing one USER with all records, of
    whatever number. Given what the other users put in, that moves the sum by at most kC:
    PoissonSampled(q, Gaussian(σ*/k)) per step. Microbatched, each of the k records can turn one
    clipped vector into any other: σ*/(2k). Needs every record to belong to one user, and no
    record's content or user to depend on other users.

    The number of records, in the data and in a lot, is private, so sums are divided by a number
    that the caller states.

    Args:
      num_users: U ≥ 1, public.
      expected_users: expected number of users in a lot, in (0, U].
      max_records_per_user: k ≥ 1.
      expected_size: L in (0, k · expected_users], the divisor of sums: a PUBLIC guess of the
        number of records in a lot, not one counted in the data.
      declared: True where the user of this package states the law.

    Raises:
      ValueError: a number is out of range.

    Example:
        >>> law = accounting.UserSampling(
        ...     num_users=1000, expected_users=100, max_records_per_user=2, expected_size=150
        ... )
        >>> law.event(noise_multiplier=1.1)
        PoissonSampledDpEvent(sampling_probability=0.1,
        event=GaussianDpEvent(noise_multiplier=0.55))
    """

    num_users: int
    expected_users: float
    max_records_per_user: int
    expected_size: float
    declared: bool = False
    num_examples: ClassVar[None] = None
    unit: ClassVar[str] = "user"

    def __post_init__(self):
        self._set_integer("num_users", "an integer ≥ 1", at_least=1)
        self._set_size(
            "expected_users",
            f"a number > 0, at most num_users = {self.num_users}",
            self.num_users,
        )
        self._set_integer("max_records_per_user", "an integer ≥ 1", at_least=1)
        most = self.max_records_per_user * self.expected_users
        self._set_size(
            "expected_size",
            f"a number > 0, at most max_records_per_user · expected_users = {most:g}",
            most,
        )
        self._check_declared()

    @property
    def probability(self) -> float:
        """Returns q, the probability with which each user enters a lot."""
        return self.expected_users / self.num_users

    @property
    def num_units(self) -> int:
        """Returns U, the number of users."""
        return self.num_users

    @property
    def neighboring_relation(self) -> dp_accounting.NeighboringRelation:
        """Returns the relation "add or remove one user"."""
        return _Relation.ADD_OR_REMOVE_ONE

    @property
    def expected_lot_size(self) -> float:
        """Returns L, in records, as the caller stated it."""
        return self.expected_size

    @property
    def protects(self) -> str:
        """Returns the unit of privacy in words for a privacy statement."""
        return "one user: all records of the training data with that user's id, however many"

    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns PoissonSampled(q, Gaussian(σ*/k)), with σ*/(2k) if microbatched."""
        noise_multiplier = check_noise_multiplier(noise_multiplier)
        sensitivity = self.max_records_per_user * (2 if microbatched else 1)
        return poisson_event(self.probability, noise_multiplier / sensitivity)

    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """Tells whether the event samples by Poisson with this probability."""
        return (
            isinstance(sampling_event, dp_accounting.PoissonSampledDpEvent)
            and sampling_event.sampling_probability == self.probability
        )

    def _summary(self) -> str:
        return (
            f"Poisson sampling of users: each of {self.num_users} users enters a lot independently "
            f"with probability {self.probability:.6g} (expected number {self.expected_users}), "
            f"with at most {self.max_records_per_user} of the user's records, drawn anew each time"
        )
