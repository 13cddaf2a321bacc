"""Sampling laws: how the records of a lot were chosen, and what one step on such a lot costs.

A law is made by the object that samples and travels with its lots to the ledger, so that the
sampling probability charged can never differ from the one used. A user who samples by other means
may state the law (`declared=True`); every report then says that it was only stated.

Throughout, σ* is the noise multiplier of one step: the standard deviation of the noise added to
the sum of clipped vectors, over the L2 bound C of ONE such vector.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import dp_accounting

from tf_adadp.accounting import _checks

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


class SamplingLaw(abc.ABC):
    """How the records of each lot are chosen from a data set of public size.

    Attributes (of every subclass):
      num_examples: N, the number of records; public. None where unknown.
      declared: True where the user states the law and no sampler of this package enforces it.
    """

    num_examples: int | None
    declared: bool
    _known: ClassVar[dict[str, type["SamplingLaw"]]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        SamplingLaw._known[cls.__name__] = cls

    @property
    @abc.abstractmethod
    def neighboring_relation(self) -> dp_accounting.NeighboringRelation | None:
        """The neighbouring relation the event is stated for; None where nothing is known."""

    @abc.abstractmethod
    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns the event of ONE step: a sum of clipped vectors released with noise.

        Args:
          noise_multiplier: σ*, noise standard deviation over the L2 bound of one clipped vector.
            0 means no noise and gives a `NonPrivateDpEvent`.
          microbatched: whether the clipped vectors are averages over independently drawn slots
            of several examples. One record can then turn one clipped vector into any other,
            which doubles the sensitivity.

        Raises:
          ValueError: noise_multiplier is negative or not finite.
        """

    @abc.abstractmethod
    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """Whether a sampling event (outermost class and its sizes) is one of this law."""

    @abc.abstractmethod
    def _summary(self) -> str:
        """One sentence without the note on declared laws."""

    def describe(self) -> str:
        """Returns one sentence for people; says so where the law is declared by the user."""
        note = " (declared by the user, not enforced by a sampler)" if self.declared else ""
        return self._summary() + note

    def to_config(self) -> dict[str, Any]:
        """Returns a JSON-able dict; `from_config` restores an equal law."""
        return {"law": type(self).__name__, **dataclasses.asdict(self)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "SamplingLaw":
        """Builds the law described by `to_config`.

        Raises:
          ValueError: unknown law, wrong fields or values out of range.
        """
        if not isinstance(config, Mapping):
            raise ValueError(f"the config of a sampling law must be a mapping, got {config!r}.")
        fields = dict(config)
        name = fields.pop("law", None)
        law = SamplingLaw._known.get(name) if isinstance(name, str) else None
        if law is None or not issubclass(law, cls):
            raise ValueError(
                f"unknown sampling law {name!r}; known are {', '.join(SamplingLaw._known)}."
            )
        try:
            return law(**fields)
        except TypeError as error:
            raise ValueError(f"config of {name} has wrong fields: {error}.") from error

    def _check_num_examples_and_declared(self) -> None:
        n = _checks.integer("num_examples", self.num_examples, "an integer ≥ 1", lambda x: x >= 1)
        object.__setattr__(self, "num_examples", n)
        if not isinstance(self.declared, bool):
            raise ValueError(f"declared must be True or False, got {self.declared!r}.")


@dataclasses.dataclass(frozen=True)
class PoissonSampling(SamplingLaw):
    """Each record enters a lot independently with probability q = expected_size / num_examples.

    Guarantee: neighbouring data sets differ by adding or removing one record, which moves the sum
    by at most C: PoissonSampled(q, Gaussian(σ*)) per step, Gaussian(σ*) at q = 1. Microbatched
    sums move by at most 2C: σ*/2 in place of σ*. Sums must be divided by the EXPECTED size, since
    the realised one is private.

    Args:
      num_examples: N ≥ 1.
      expected_size: L in (0, N], the expected number of records in a lot.
      declared: True where the user states the law.

    Raises:
      ValueError: a size is not positive, or expected_size > num_examples.
    """

    num_examples: int
    expected_size: float
    declared: bool = False

    def __post_init__(self):
        self._check_num_examples_and_declared()
        size = _checks.real(
            "expected_size",
            self.expected_size,
            f"positive and at most num_examples = {self.num_examples}",
            lambda x: 0 < x <= self.num_examples,
        )
        object.__setattr__(self, "expected_size", int(size) if size.is_integer() else size)

    @property
    def probability(self) -> float:
        """q, the probability with which each record enters a lot."""
        return self.expected_size / self.num_examples

    @property
    def neighboring_relation(self) -> dp_accounting.NeighboringRelation:
        """Add or remove one record."""
        return _Relation.ADD_OR_REMOVE_ONE

    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns PoissonSampled(q, Gaussian(σ*)), with σ*/2 if microbatched."""
        noise_multiplier = _checks.noise_multiplier(noise_multiplier)
        return poisson_event(self.probability, noise_multiplier / (2 if microbatched else 1))

    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """Whether the event samples by Poisson with this probability (and size, if it has one)."""
        q = getattr(sampling_event, "sampling_probability", None)
        return q == self.probability and (
            getattr(sampling_event, "dataset_size", self.num_examples) == self.num_examples
        )

    def _summary(self) -> str:
        return (
            f"Poisson sampling: each of {self.num_examples} records enters a lot independently "
            f"with probability {self.probability:.6g} (expected lot size {self.expected_size})"
        )


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(SamplingLaw):
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
    """

    num_examples: int
    size: int
    declared: bool = False

    def __post_init__(self):
        self._check_num_examples_and_declared()
        size = _checks.integer(
            "size",
            self.size,
            f"an integer from 1 to num_examples = {self.num_examples}",
            lambda x: 1 <= x <= self.num_examples,
        )
        object.__setattr__(self, "size", size)

    @property
    def neighboring_relation(self) -> dp_accounting.NeighboringRelation:
        """Replace one record."""
        return _Relation.REPLACE_ONE

    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns SampledWithoutReplacement(N, n, Gaussian(σ*/2)), microbatched or not."""
        noise_multiplier = _checks.noise_multiplier(noise_multiplier)
        if noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        if self.size == self.num_examples:
            return gaussian
        return dp_accounting.SampledWithoutReplacementDpEvent(
            self.num_examples, self.size, gaussian
        )

    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """Whether the event samples this many of this many records without replacement."""
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


@dataclasses.dataclass(frozen=True)
class UnknownSampling(SamplingLaw):
    """Nothing is known about how the records were chosen: no ε can be reported.

    Args:
      reason: why, in words for the error message and the privacy statement.

    Raises:
      ValueError: reason is not a non-empty string.
    """

    reason: str
    num_examples: ClassVar[None] = None
    declared: ClassVar[bool] = False

    def __post_init__(self):
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise ValueError(f"reason must be a non-empty string, got {self.reason!r}.")

    @property
    def neighboring_relation(self) -> None:
        """None: no relation can be named."""
        return

    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns an `UnsupportedDpEvent`, which every accountant refuses."""
        del microbatched  # Changes nothing about what is unknown.
        if _checks.noise_multiplier(noise_multiplier) == 0:
            return dp_accounting.NonPrivateDpEvent()
        return dp_accounting.UnsupportedDpEvent()

    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """False: nothing can be checked against an unknown law."""
        del sampling_event
        return False

    def _summary(self) -> str:
        return f"unknown sampling: {self.reason}"
