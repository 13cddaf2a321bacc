"""The base class of sampling laws."""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import dp_accounting

from tf_adadp.accounting.joint import joint_noise_multiplier
from tf_adadp.utils.checks import check_bool, check_instance, check_integer, check_number

ONE_RECORD = (
    "one record of the training data; for a person with k records epsilon is up to k times as "
    "large, and delta larger still"
)


class SamplingLaw(abc.ABC):
    """Describes how the records of each lot are chosen from a data set of public size.

    A subclass is a frozen dataclass whose fields are JSON numbers, strings or lists of them, one of
    them `declared`. It states the neighbouring relation, the event of a step that is independent of
    all others (or of a pass, see `lots_per_pass`), `matches` and a summary; lots need an
    `expected_lot_size` as well. Every property and method that would lower a cost, or admit another
    use of the lots, returns None or False by default, or raises. A subclass is registered under its
    class name, by which ledger files refer to it.

    Attributes (of every subclass):
      num_examples: N, the number of records; public. None where unknown or private.
      declared: True where the user states the law and no sampler of this package enforces it.
      unit: the unit of privacy, by one of which neighbouring data sets differ: "record" or "user".
      lots_per_pass: the number of consecutive lots that are drawn, and charged, together; 1 where
        the lots of different steps are independent.
      can_be_declared: True where a user may state the law for batches drawn elsewhere: lots of
        different steps are independent, and `lot_size_probability` is known.

    Example:
        >>> isinstance(accounting.PoissonSampling(60000, 600), accounting.SamplingLaw)
        True
    """

    num_examples: int | None
    declared: bool
    unit: ClassVar[str] = "record"
    lots_per_pass: int = 1
    can_be_declared: ClassVar[bool] = False
    _known: ClassVar[dict[str, type["SamplingLaw"]]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        name = cls.__name__
        if name.startswith("_"):  # a base that laws share
            return
        known = SamplingLaw._known.setdefault(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"there is a sampling law {name} in {known.__module__}, and ledger files know laws "
                "by name. Give this class another name."
            )
        SamplingLaw._known[name] = cls  # a notebook's cell may run again

    @property
    @abc.abstractmethod
    def neighboring_relation(self) -> dp_accounting.NeighboringRelation | None:
        """Returns the neighbouring relation of the event; None where nothing is known."""

    @property
    def num_units(self) -> int | None:
        """Returns the number of units of privacy; public. None where unknown."""
        return self.num_examples

    @property
    def expected_lot_size(self) -> float | None:
        """Returns L, the public divisor of sums over a lot; None where unknown."""
        return None

    @property
    def max_lot_size(self) -> int | None:
        """Returns the largest size of a lot; None if it is not a public constant."""
        return None

    @property
    def record_probability(self) -> float | None:
        """Returns q, each record's probability of being in a lot, independently of other steps.

        None where lots of different steps depend on each other, or q is unknown or private.
        """
        return None

    @property
    def full_batch(self) -> bool:
        """Tells whether every lot holds every record, so that sampling amplifies nothing.

        Then several releases from one lot cost as much as releases from as many lots.
        """
        return False

    @property
    def unknown_reason(self) -> str | None:
        """Returns why no ε can be reported for releases from these lots; None for a known law."""
        return None

    @property
    def protects(self) -> str:
        """Returns the unit of privacy in words for a privacy statement."""
        return ONE_RECORD if self.unit == "record" else f"one {self.unit} of the training data"

    def as_declared(self) -> "SamplingLaw":
        """Returns the law, marked as stated by the user and not enforced by a sampler."""
        return dataclasses.replace(self, declared=True)

    def lot_size_probability(self, size: int) -> float | None:
        """Returns the probability that a lot has exactly `size` records; None where unknown."""
        del size
        return None

    @abc.abstractmethod
    def event(self, noise_multiplier: float, microbatched: bool = False) -> dp_accounting.DpEvent:
        """Returns the event of ONE step: a sum of clipped vectors released with noise.

        Where `lots_per_pass` > 1, returns the event of one step on every lot of a whole pass.

        Args:
          noise_multiplier: σ*, noise standard deviation over the L2 bound of one clipped vector.
            0 means no noise and gives a `NonPrivateDpEvent`.
          microbatched: whether the clipped vectors are averages over independently drawn slots
            of several examples. One record can then turn one clipped vector into any other,
            which doubles the sensitivity.

        Raises:
          ValueError: noise_multiplier is negative or not finite.
        """

    def event_with_metrics(
        self,
        noise_multiplier: float,
        metrics_noise_multiplier: float,
        microbatched: bool = False,
    ) -> dp_accounting.DpEvent:
        """Returns the event of ONE step that releases metrics of the same lot as well.

        The metrics are the sum over the records of the lot of vectors in a box Π [0, b_i], with
        Gaussian noise of standard deviation σ_m‖b‖₂ in every coordinate.

        Guarantee: both sums, over the standard deviations of their noise, are one vector with noise
        N(0, I), released once from one lot: one Gaussian mechanism under this law's sampling. A
        record that is added moves the parts by 1/σ* and 1/σ_m. Where a record is REPLACED, by the
        law's relation, or turns the vector of a microbatch into another, the first part moves by
        2/σ*, and the second still by 1/σ_m: two points of a box are no further apart than its
        diagonal. With up to k records of a user both count k times; where a cut lot loses another
        record for one that is added, both are taken to move twice as far. So this is `event` with
        the multiplier (σ*⁻² + (cσ_m)⁻²)^(−1/2), c = 2 where the law counts the clipped vectors
        twice, by relation or by microbatches, and 1 otherwise.

        Args:
          noise_multiplier, microbatched: as in `event`.
          metrics_noise_multiplier: σ_m ≥ 0.

        Raises:
          ValueError: as `event`.
        """
        replaced = self.neighboring_relation is dp_accounting.NeighboringRelation.REPLACE_ONE
        counted = 2 if microbatched or replaced else 1
        joint = joint_noise_multiplier(noise_multiplier, counted * metrics_noise_multiplier)
        return self.event(joint, microbatched)

    def selection_event(self, selection_epsilon: float) -> dp_accounting.DpEvent:
        """Returns the event of one exponential mechanism on a lot; see `selection_event`.

        Raises:
          ValueError: no bound is known for this law.
        """
        del selection_epsilon
        raise ValueError(
            f"the cost of a selection under this sampling is not known: {self.describe()}"
        )

    def charges(
        self, event: dp_accounting.DpEvent, steps: int, position: int = 0
    ) -> list[tuple[dp_accounting.DpEvent, int]]:
        """Returns the cost of `steps` further steps, as pairs (event, count ≥ 1).

        A whole pass is charged at its first lot; its other lots cost nothing more.

        Args:
          event: the result of `event` for these steps.
          steps: their number, ≥ 1.
          position: the number of consecutive lots, from the first lot of a pass on, charged
            before. 0 is always sound: it charges a new pass.

        Raises:
          ValueError: an argument is out of range; the event cannot be charged once a pass.
        """
        steps, p = check_integer("steps", steps, at_least=1), self.lots_per_pass
        position = check_integer("position", position, at_least=0)
        if p > 1 and not self.covers_pass(event):
            raise ValueError(
                f"event {event} is not one noisy sum over the lot, so it cannot be charged once "
                f"for a pass ({self.describe()}). Use Poisson or fixed-size lots with this "
                "optimizer."
            )
        passes = -(-(position + steps) // p) - -(-position // p)
        counted = [(event, passes), (dp_accounting.NoOpDpEvent(), steps - passes)]
        return [(kind, count) for kind, count in counted if count]

    def covers_pass(self, event: dp_accounting.DpEvent) -> bool:
        """Tells whether an event is that of one noisy sum over every lot of a whole pass.

        Any other event is refused where `lots_per_pass` > 1: an optimizer makes its other releases
        at every step, and one charge a pass would not cover them.
        """
        del event
        return False

    def affordable_steps(self, events: int, position: int = 0) -> int:
        """Returns the number of further steps that `events` events cover; see `charges`."""
        return events * self.lots_per_pass + -position % self.lots_per_pass

    @abc.abstractmethod
    def matches(self, sampling_event: dp_accounting.DpEvent) -> bool:
        """Tells whether a sampling event (outermost class and its sizes) is one of this law."""

    @abc.abstractmethod
    def _summary(self) -> str:
        """Returns one sentence, without the note on declared laws."""

    def describe(self) -> str:
        """Returns one sentence for people, which states if the user declared the law."""
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
        check_instance("config", config, Mapping, "a mapping", wrong_type=ValueError)
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

    def _set_integer(
        self, name: str, wanted: str, *, at_least: float, at_most: float = math.inf
    ) -> None:
        """Checks an integer field and makes it a plain int."""
        value = getattr(self, name)
        value = check_integer(name, value, wanted, at_least=at_least, at_most=at_most)
        object.__setattr__(self, name, value)

    def _set_size(self, name: str, wanted: str, at_most: float) -> None:
        """Checks a field > 0 and makes it a plain int where it is whole, else a float."""
        size = check_number(name, getattr(self, name), wanted, above=0, at_most=at_most)
        object.__setattr__(self, name, int(size) if size.is_integer() else size)

    def _set_expected_size(self) -> None:
        """Checks the expected size of a lot of single records, and makes it a plain number."""
        self._set_size(
            "expected_size",
            f"a number > 0, at most num_examples = {self.num_examples}",
            self.num_examples,
        )

    def _check_num_examples_and_declared(self) -> None:
        self._set_integer("num_examples", "an integer ≥ 1", at_least=1)
        self._check_declared()

    def _check_declared(self) -> None:
        check_bool("declared", self.declared)
