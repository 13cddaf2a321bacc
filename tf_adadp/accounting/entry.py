"""One entry of a privacy ledger, checked on construction."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import dp_accounting

from tf_adadp.accounting.events import (
    decode_event,
    encode_event,
    event_from_key,
    event_key,
    sampling_parts,
)
from tf_adadp.accounting.laws.base import ONE_RECORD, SamplingLaw
from tf_adadp.accounting.trials import releases_of_winner
from tf_adadp.utils.checks import check_bool, check_instance, check_integer, check_text

_Relation = dp_accounting.NeighboringRelation


def check_dataset_name(value: str | None) -> str | None:
    """Returns the name that a user gave to a data set, or None; ValueError for anything else."""
    wanted = "a name, such as 'census-2025', or None. It is public: nothing computed from records"
    return value if value is None else check_text("dataset", value, wanted)


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """`count` equal releases in a row.

    Attributes:
      id: a random identifier; entries with the same id in two ledgers are the same releases.
      event: the event of one release.
      count: how many there were, ≥ 1.
      law: how the records were sampled, or None where the release used all of them or the event
        says all there is to say.
      neighboring_relation: the relation the event is stated for; None under an unknown law.
      origin: who released, for people to read.
      reproducible_noise: True if the noise came from a given seed.
      adaptive: True if the outcomes of earlier releases decided its noise or sampling.
      dataset: the name its user gave to the data set; None if none was given.
      key: the event in canonical form, see `event_key`.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> ledger = dp.PrivacyLedger()
        >>> ledger.add(law.event(1.1), 1000, law=law, origin="ADADP")
        >>> print(ledger.entries[0].origin, ledger.entries[0].count)
        ADADP 1000
    """

    id: str
    event: dp_accounting.DpEvent
    count: int
    law: SamplingLaw | None
    neighboring_relation: dp_accounting.NeighboringRelation | None
    origin: str | None
    reproducible_noise: bool
    adaptive: bool = False
    dataset: str | None = None
    key: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        check_text("id", self.id)
        for name, kinds, wanted in (
            ("law", SamplingLaw | None, "a sampling law or None"),
            ("origin", str | None, "a string or None"),
            ("neighboring_relation", _Relation | None, "a dp_accounting.NeighboringRelation"),
        ):
            check_instance(name, getattr(self, name), kinds, wanted, wrong_type=ValueError)
        for name in ("reproducible_noise", "adaptive"):
            check_bool(name, getattr(self, name))
        check_dataset_name(self.dataset)
        object.__setattr__(self, "count", check_integer("count", self.count, at_least=1))
        object.__setattr__(self, "neighboring_relation", self._resolved_relation())
        # Refuses unknown events and numbers out of range.
        object.__setattr__(self, "key", event_key(self.event))
        # A copy: the caller's may hold arrays or lists, and those may change.
        object.__setattr__(self, "event", event_from_key(self.key))
        self._check_event_against_law()

    def _resolved_relation(self) -> dp_accounting.NeighboringRelation | None:
        stated = self.neighboring_relation
        if self.law is None:
            return stated or _Relation.ADD_OR_REMOVE_ONE
        if stated not in (None, self.law.neighboring_relation):
            raise ValueError(
                f"neighboring_relation={stated.name} contradicts the law ({self.law.describe()}), "
                "which brings its own. Leave neighboring_relation out."
            )
        return self.law.neighboring_relation

    def _check_event_against_law(self) -> None:
        if self.law is None or self.law.unknown_reason:
            return
        for part in sampling_parts(self.event):
            if not self.law.matches(part):
                raise ValueError(
                    f"event {part} does not sample by the law given ({self.law.describe()}). "
                    "Build the event with law.event(noise_multiplier)."
                )

    @property
    def unit(self) -> str:
        """Names the unit by which neighbours differ, "record" or "user"."""
        return self.law.unit if self.law else "record"

    @property
    def protects(self) -> str:
        """Returns the unit of privacy in words for a privacy statement."""
        return self.law.protects if self.law else ONE_RECORD

    @property
    def steps(self) -> int:
        """Returns the number of releases in the weights: of a search, those of its winner."""
        return self.count * releases_of_winner(self.event)

    def repeats(self, other: "LedgerEntry") -> bool:
        """Tells whether both entries record the same kind of release."""
        return self._release() == other._release()

    def _release(self) -> tuple:
        return (
            self.event,
            self.law,
            self.neighboring_relation,
            self.origin,
            self.reproducible_noise,
            self.adaptive,
            self.dataset,
        )

    def to_config(self) -> dict[str, Any]:
        """Returns a JSON-able dict."""
        relation = self.neighboring_relation
        return {
            "id": self.id,
            "count": self.count,
            "event": encode_event(self.event),
            "law": None if self.law is None else self.law.to_config(),
            "neighboring_relation": None if relation is None else relation.name,
            "origin": self.origin,
            "reproducible_noise": self.reproducible_noise,
            "adaptive": self.adaptive,
            "dataset": self.dataset,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "LedgerEntry":
        """Builds the entry that `to_config` wrote; ValueError for anything else."""
        check_instance("entry", config, Mapping, "a mapping", wrong_type=ValueError)
        fields = dict(config)
        law, relation = fields.get("law"), fields.get("neighboring_relation")
        if relation is not None and relation not in list(_Relation.__members__):
            raise ValueError(f"unknown neighboring_relation {relation!r}.")
        fields["event"] = decode_event(fields.get("event"))
        fields["law"] = None if law is None else SamplingLaw.from_config(law)
        fields["neighboring_relation"] = None if relation is None else _Relation[relation]
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(f"an entry has wrong fields: {error}.") from error
