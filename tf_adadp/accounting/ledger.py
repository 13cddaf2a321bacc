"""The privacy ledger: what was released, how it was sampled, and what that adds up to."""

import dataclasses
import os
import pathlib
import threading
import uuid
import warnings
from collections.abc import Iterable

import dp_accounting

from tf_adadp.accounting.accountants import Composition, check_accountant, is_non_private_key
from tf_adadp.accounting.bounds.comparison import Comparison, compare_releases
from tf_adadp.accounting.entry import LedgerEntry, check_dataset_name
from tf_adadp.accounting.files.storage import (
    format_document,
    lock_if_possible,
    parse_document,
    write_atomically,
)
from tf_adadp.accounting.filters import LedgerBudget, RenyiFilter
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.accounting.planning import largest_count, least_noise_multiplier
from tf_adadp.accounting.statement import privacy_statement
from tf_adadp.utils import process as _process
from tf_adadp.utils.checks import (
    check_delta,
    check_epsilon,
    check_instance,
    check_integer,
    check_target_epsilon,
    check_text,
)

_Relation = dp_accounting.NeighboringRelation


class PrivacyWarning(UserWarning):
    """A figure is correct as stated, but the way it was reached deserves attention."""


class PrivacyLedger:
    """An append-only record of releases on one data set, and the ε they add up to.

    Guarantee: with every release recorded BEFORE it is made, `epsilon(delta)` is an upper bound on
    the privacy loss of all of them together, for one unit (a record; a user under `UserSampling`)
    under the neighbouring relation of their sampling laws. Entries are never removed or lowered:
    not by saving and loading, not by merging. What cannot be analysed is refused, never left out.

    Equal consecutive releases share one entry. Each entry has a random id, and a ledger that was
    loaded, merged or copied starts new entries: so two continuations of one checkpoint stay
    apart, and `merge` can unite them without losing or double-counting a release.

    A figure is a guarantee for what was fixed before the first release. What this ledger knows to
    have been decided on the way is in `odometer_reasons`; a budget that holds all the same is in
    `budgets`.

    Adding is thread-safe.

    Args:
      dataset: a public name for the data set, written into every release from now on. A ledger of
        another data set is then refused by `merge`. Never a hash of the records: that would be a
        statistic of them, released without noise. None for no name.

    Raises:
      ValueError: dataset is neither None nor a non-empty string.
    """

    def __init__(self, dataset: str | None = None):
        self.dataset = dataset
        self._budgets: list[LedgerBudget] = []
        self._readings: list[str] = []
        self._not_covered: list[str] = []
        self._plan: str | None = None
        self._entries: dict[str, LedgerEntry] = {}
        self._unknown: list[str] = []
        self._open_id: str | None = None  # the entry this object may still count up
        self._process = _process.token()
        self._next_id = uuid.uuid4().hex  # of the entry that it begins next
        self._lock = threading.RLock()
        self._warned: set[str | float] = set()  # what was warned of: "declared", or a δ

    # Recording

    def add(
        self,
        event: dp_accounting.DpEvent,
        count: int = 1,
        *,
        law: SamplingLaw | None = None,
        neighboring_relation: dp_accounting.NeighboringRelation | None = None,
        origin: str | None = None,
        reproducible_noise: bool = False,
        adaptive: bool = False,
    ) -> None:
        """Records `count` releases of `event`. Call it before they are made.

        Args:
          event: one release, usually `law.event(noise_multiplier)`. Any sampling inside it must be
            the law's.
          count: how many, ≥ 1.
          law: how the records were sampled; it brings the neighbouring relation.
          neighboring_relation: for an event without a law; ADD_OR_REMOVE_ONE if left out.
          origin: who released, for people to read.
          reproducible_noise: True if the noise came from a given seed; every report says so.
          adaptive: True if the outcomes of earlier releases decided noise or sampling of this one.

        Raises:
          ValueError: an argument is out of range, the event is of an unknown class, it contradicts
            the law, or the relation does.
        """
        with self._lock:
            self._leave_parent()
            entry = LedgerEntry(
                self._next_id,
                event,
                count,
                law,
                neighboring_relation,
                origin,
                reproducible_noise,
                adaptive,
                self.dataset,
            )
            last = self._entries.get(self._open_id)
            if last is not None and last.repeats(entry):
                entry = dataclasses.replace(last, count=last.count + entry.count)
            else:
                # A chain, so that a copy from `announced` begins the same entries.
                self._next_id = uuid.uuid5(uuid.UUID(self._next_id), "next").hex
            self._entries[entry.id] = entry
            self._open_id = entry.id
            # Of replaced budgets too: what they said held for what was released until then.
            self._budgets = [b if self._fits(b) else b.plus(count) for b in self._budgets]

    def announced(self) -> "PrivacyLedger":
        """Returns a copy for releases that this ledger is about to record.

        Unlike any other copy it goes on in the same entries. So if releases were announced, and the
        announcement outlived the process, a checkpoint that counts some of them merges with it
        without counting them twice. Only releases that this ledger adds next may be added to it.
        """
        with self._lock:
            self._leave_parent()
            copy = PrivacyLedger.from_json(self.to_json())
            copy._open_id, copy._next_id = self._open_id, self._next_id
            return copy

    def _leave_parent(self) -> None:
        """In a child of `os.fork`: begins entries of its own, or both would count up the same."""
        if self._process is not _process.token():
            self._process = _process.token()
            self._begin_new_entries()

    def _begin_new_entries(self) -> None:
        self._open_id, self._next_id = None, uuid.uuid4().hex

    def begin_budget(self, budget: RenyiFilter) -> None:
        """Records that releases are held to a budget from now on, and replaces an earlier one.

        Asking before each release whether there is room (`remaining`, `RenyiFilter.has_room`) is
        the caller's part. The ledger counts what a budget does not speak for: releases before it
        began, and those that it had no room for. Nothing happens where the same budget runs.

        Raises:
          ValueError: budget is no `RenyiFilter`.
        """
        with self._lock:
            if self._budgets and self._budgets[-1].filter == budget:
                return
            begun = LedgerBudget(budget, self.steps)
            self._budgets = [b for b in self._budgets if b.filter != budget] + [begun]

    def mark_odometer(self, reason: str) -> None:
        """Records that results decided where releases ended or what they were.

        ε is then an odometer reading: what was spent, and no (ε, δ) that was promised beforehand.

        Raises:
          ValueError: reason is not a non-empty string.
        """
        self._add_reason(self._readings, reason)

    def declare_plan(self, plan: str) -> None:
        """Records your word that noise, sampling and numbers of steps were fixed beforehand.

        Without it a change of noise or sampling makes ε an odometer reading. It takes back nothing
        that was recorded by `mark_odometer`; every statement quotes it as your declaration.

        Args:
          plan: what was fixed, e.g. "noise multiplier 4 for 500 steps, then 2 for 100".

        Raises:
          ValueError: plan is not a non-empty string.
        """
        self._plan = check_text("plan", plan)

    def mark_unknown(self, reason: str) -> None:
        """Records that history was lost: from now on no ε or δ is reported. There is no undo.

        Raises:
          ValueError: reason is not a non-empty string.
        """
        self._add_reason(self._unknown, reason)

    def mark_not_covered(self, reason: str) -> None:
        """Records that the weights were changed by something that no entry describes.

        ε stays what the recorded releases cost; every statement says what it does not cover.

        Raises:
          ValueError: reason is not a non-empty string.
        """
        self._add_reason(self._not_covered, reason)

    def _add_reason(self, reasons: list[str], reason: str) -> None:
        check_text("reason", reason)
        with self._lock:
            if reason not in reasons:
                reasons.append(reason)

    def merge(self, other: "PrivacyLedger", *, same_data: bool = False) -> None:
        """Takes over the other ledger's entries: the union by id, the larger count for each.

        Merging checkpoints of one run, in any order and however often, gives the releases of that
        run; merging separate runs on the same data gives the releases of both.

        Args:
          other: the ledger to take over; it stays as it is.
          same_data: True if ledgers of different names, or with no number of records in common,
            are to be added up all the same: a part of the same records, a table that grew. That
            never lowers ε.

        Raises:
          ValueError: the ledgers are about different data sets; or the same id stands for
            different releases. Nothing is changed then.
        """
        check_instance("other", other, PrivacyLedger, "a PrivacyLedger", wrong_type=ValueError)
        if not same_data:
            self.check_data(*other._data(), whose="the other ledger")
        theirs = {entry.id: entry for entry in other.entries}
        with self._lock:
            merged = dict(self._entries)
            for entry in theirs.values():
                mine = merged.setdefault(entry.id, entry)
                if not mine.repeats(entry):
                    raise ValueError(
                        f"entry {entry.id} stands for different releases in the two ledgers; one "
                        "of them was altered."
                    )
                merged[entry.id] = max(mine, entry, key=lambda e: e.count)
            budgets = _merged_budgets(self, other)
            if self._plan is None and not self._entries:
                self._plan = other._plan
            elif other._plan != self._plan and _surplus(theirs, self._entries):
                self._plan = None  # it was about other releases
            self._entries = merged
            self._begin_new_entries()  # ids that this one announced may have come in
            self._budgets = budgets
            self.dataset = self.dataset or other.dataset
            for reason in other.unknown_reasons:
                self.mark_unknown(reason)
            for reason in other._readings:
                self.mark_odometer(reason)
            for reason in other._not_covered:
                self.mark_not_covered(reason)

    def unite(self, other: "PrivacyLedger") -> None:
        """Makes this ledger and the other one: both objects are the union from now on.

        For two ledgers that turn out to be about the same weights, whoever holds either of them.
        """
        if not self.is_one_with(other):
            self.merge(other, same_data=True)
            other.__dict__ = self.__dict__

    def is_one_with(self, other: "PrivacyLedger") -> bool:
        """Tells whether the two are the same ledger, or were united."""
        return self.__dict__ is other.__dict__

    def check_data(
        self,
        names: Iterable[str],
        sizes: Iterable[tuple[str, int]],
        whose: str = "the run",
    ) -> None:
        """Refuses data that are not those of this ledger, as far as names and sizes tell.

        Args:
          names: data set names; empty where none was given.
          sizes: pairs (unit, how many there are), e.g. ("record", 60000); empty where unknown.
          whose: what they belong to, for the message.

        Raises:
          ValueError: names, or numbers of the same unit, on both sides, and none in common.
        """
        my_names, my_sizes = self._data()
        sizes = set(sizes)
        sides = [("data set", my_names, set(names))]
        for unit in {unit for unit, _ in my_sizes}:
            numbers = [{n for u, n in side if u == unit} for side in (my_sizes, sizes)]
            sides.append((f"number of {unit}s", *numbers))
        for what, mine, theirs in sides:
            if mine and theirs and not mine & theirs:
                raise ValueError(
                    f"this ledger is about another data set: its {what} is {_listed(mine)}, that "
                    f"of {whose} {_listed(theirs)}. Keep one ledger for each data set; where both "
                    "hold the same records (a part of them, a table that grew), say same_data=True."
                )

    def covers(self, other: "PrivacyLedger") -> bool:
        """Whether this ledger says all that the other one does: releases, gaps, how they ended."""
        theirs = {entry.id: entry for entry in other.entries}
        mine = {entry.id: entry for entry in self.entries}
        outside = {budget.filter: budget.outside for budget in self._budgets}
        return (
            not _surplus(theirs, mine)
            and all(mine[id].repeats(entry) for id, entry in theirs.items())
            and set(other.unknown_reasons) <= set(self._unknown)
            and set(other._readings) <= set(self._readings)
            and set(other._not_covered) <= set(self._not_covered)
            and all(outside.get(b.filter, -1) >= b.outside for b in other.budgets)
        )

    # Reading

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The entries in the order they were begun."""
        with self._lock:
            return tuple(self._entries.values())

    @property
    def steps(self) -> int:
        """The number of releases recorded, training steps and others alike."""
        return sum(entry.count for entry in self.entries)

    @property
    def unknown_reasons(self) -> tuple[str, ...]:
        """Why history is incomplete; empty if it is complete."""
        return tuple(self._unknown)

    @property
    def not_covered_reasons(self) -> tuple[str, ...]:
        """Lists what changed the weights and is in no entry; empty where nothing is known to."""
        return tuple(self._not_covered)

    @property
    def dataset(self) -> str | None:
        """The data set's name, for releases from now on; None for none."""
        return self._dataset

    @dataset.setter
    def dataset(self, name: str | None) -> None:
        self._dataset = check_dataset_name(name)

    @property
    def budgets(self) -> tuple[LedgerBudget, ...]:
        """The budgets that releases were held to, the running one last."""
        return tuple(self._budgets)

    @property
    def plan(self) -> str | None:
        """What the user declared to have been fixed beforehand, or None."""
        return self._plan

    @property
    def odometer_reasons(self) -> tuple[str, ...]:
        """Why ε is an odometer reading; empty where nothing is known that makes it one.

        The ledger knows what it was told (`mark_odometer`, `adaptive`) and sees where noise or
        sampling changed. It cannot see why someone trained on, stopped, or began anew.
        """
        reasons = list(self._readings)
        origins = dict.fromkeys(e.origin or "a mechanism" for e in self.entries if e.adaptive)
        reasons += [f"{origin} chose its noise by earlier outcomes" for origin in origins]
        settings = {
            (e.key, e.law)
            for e in self.entries
            if e.law is not None
            and not e.adaptive
            # A lot that its pass has paid for.
            and not isinstance(e.event, dp_accounting.NoOpDpEvent)
        }
        if len(settings) > 1 and self._plan is None:
            reasons.append(
                f"noise or sampling changed between releases ({len(settings)} settings), and "
                "nobody declared that this was planned"
            )
        return tuple(reasons)

    def epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """Returns ε at δ for all releases recorded; ∞ if one of them is non-private.

        A reading takes less than 0.1 ms after the first, except for "pld".

        Args:
          delta: δ in (0, 1).
          accountant: one of `ACCOUNTANTS`.

        Raises:
          ValueError: δ out of range; history was lost (`mark_unknown`); the sampling of an entry
            is unknown; entries use different units or neighbouring relations; the accountant is
            unknown or cannot analyse an event.

        Warns:
          PrivacyWarning: δ ≥ 1/N for a law's number N of records or users; a law was declared by
            the user.
        """
        delta = check_delta(delta)
        check_accountant(accountant)
        return self._analyse(self.entries, delta).epsilon(delta, accountant)

    def delta(self, epsilon: float, accountant: str = "rdp") -> float:
        """Returns δ at a finite ε ≥ 0; 1 if a release is non-private. Raises as `epsilon`."""
        epsilon = check_epsilon(epsilon)
        check_accountant(accountant)
        return self._analyse(self.entries).delta(epsilon, accountant)

    def check_adds_up(self, event: dp_accounting.DpEvent, law: SamplingLaw) -> None:
        """Refuses a release that no ε could be reported for together with those recorded here.

        Raises:
          ValueError: their units, or neighbouring relations, differ, and ε is neither infinite nor
            refused anyway, for a sampling that nobody knows.
        """
        entries = (*self.entries, _probe(event, 1, law, None))
        if any(is_non_private_key(entry.key) for entry in entries):
            return
        if not any(entry.law and entry.law.unknown_reason for entry in entries):
            _check_one_statement(entries)

    def preview(
        self,
        extra_event: dp_accounting.DpEvent,
        count: int,
        delta: float,
        accountant: str = "rdp",
        law: SamplingLaw | None = None,
        neighboring_relation: dp_accounting.NeighboringRelation | None = None,
    ) -> float:
        """Returns ε at δ as it would be after `count` more releases, and records nothing.

        Args:
          extra_event, count, law, neighboring_relation: as `add`.
          delta, accountant: as `epsilon`.

        Raises:
          ValueError: as `add` and `epsilon`.
        """
        delta = check_delta(delta)
        check_accountant(accountant)
        probe = _probe(extra_event, count, law, neighboring_relation)
        return self._analyse((*self.entries, probe), delta).epsilon(delta, accountant)

    def remaining(
        self,
        event: dp_accounting.DpEvent,
        target_epsilon: float,
        delta: float,
        accountant: str = "rdp",
        law: SamplingLaw | None = None,
        neighboring_relation: dp_accounting.NeighboringRelation | None = None,
    ) -> int:
        """Returns how many more releases of `event` keep ε at δ within target_epsilon.

        0 if the budget is spent; at most 2^53, which is also the answer for a free event. Takes
        a few ms, longer for "pld"; ask once and count down rather than at every step.

        Args:
          event, law, neighboring_relation: as `add`.
          target_epsilon: ε > 0 not to be exceeded.
          delta, accountant: as `epsilon`.

        Raises:
          ValueError: as `add` and `epsilon`.
        """
        target_epsilon = check_target_epsilon(target_epsilon)
        delta = check_delta(delta)
        check_accountant(accountant)
        probe = _probe(event, 1, law, neighboring_relation)
        spent, one = self._spent_and(probe, delta), self._composition((probe,))
        return largest_count(spent, one, target_epsilon, delta, accountant)

    def calibrate_noise_multiplier(
        self,
        target_epsilon: float,
        delta: float,
        law: SamplingLaw,
        steps: int,
        accountant: str = "rdp",
    ) -> float:
        """Returns the least σ* for which `steps` more steps keep ε at δ within target_epsilon.

        What is recorded is counted, nothing is recorded. To 1e-3 of the target on the sound side,
        as `accounting.calibrate_noise_multiplier`, which this is for an empty ledger and Poisson
        lots.

        Args:
          target_epsilon: ε > 0 for everything together.
          delta, accountant: as `epsilon`.
          law: how the lots of these steps are sampled; one step is `law.event(σ*)`.
          steps: how many, ≥ 1.

        Raises:
          ValueError: as `add` and `epsilon`; the budget is already spent; no noise is enough.
        """
        target_epsilon = check_target_epsilon(target_epsilon)
        delta = check_delta(delta)
        steps = check_integer("steps", steps, at_least=1)
        check_instance("law", law, SamplingLaw, "a sampling law", wrong_type=ValueError)
        spent = self._spent_and(_probe(law.event(1.0), steps, law, None), delta)
        return least_noise_multiplier(spent, law.event, steps, target_epsilon, delta, accountant)

    def compare(self, delta: float) -> Comparison:
        """Returns ε of all releases recorded by every bound, see `accounting.compare`.

        Raises and warns as `epsilon`.
        """
        delta = check_delta(delta)
        entries = self.entries
        composition = self._analyse(entries, delta)
        charges = [(entry.key, entry.count) for entry in entries]
        return compare_releases(composition, charges, delta)

    def budget_for(
        self,
        event: dp_accounting.DpEvent,
        target_epsilon: float,
        delta: float,
        law: SamplingLaw | None = None,
        neighboring_relation: dp_accounting.NeighboringRelation | None = None,
    ) -> RenyiFilter:
        """Returns the filter to hold coming releases of `event` to: see `begin_budget`.

        The running budget, where it is one of this ε and δ; else one of the order that suits these
        releases. Arguments and errors as for `remaining`.
        """
        spent = self._spent_and(_probe(event, 1, law, neighboring_relation), delta)
        for running in self._budgets[-1:]:
            filter = running.filter
            promised = filter.epsilon, filter.delta, filter.neighboring_relation
            if promised == (target_epsilon, delta, spent.relation):
                return filter
        return RenyiFilter.for_event(event, target_epsilon, delta, spent)

    def remaining_under(self, budget: RenyiFilter, event: dp_accounting.DpEvent) -> int:
        """Returns how many more releases of `event` a filter lets pass; 0 if history was lost."""
        try:
            spent = self._composition(self.entries, budget.neighboring_relation)
        except ValueError:
            return 0
        return budget.remaining(spent, event)

    def statement(self, delta: float, accountant: str = "rdp") -> str:
        """Returns a plain-text privacy statement for people, several lines.

        It names unit, neighbouring relation, sampling, accountant, ε, δ, whether ε is a guarantee
        or an odometer reading, budgets, the number of releases and what is not covered. Where no ε
        can be reported it says so, and why.

        Raises:
          ValueError: δ out of range or unknown accountant.
        """
        delta = check_delta(delta)
        check_accountant(accountant)
        try:
            epsilon, refusal = self.epsilon(delta, accountant), None
        except ValueError as error:
            epsilon, refusal = None, str(error)
        return privacy_statement(self, epsilon, delta, accountant, refusal)

    def _data(self) -> tuple[set[str], set[tuple[str, int]]]:
        """The names, and numbers of records or users, that the ledger is about."""
        entries = self.entries
        names = {self.dataset, *(entry.dataset for entry in entries)} - {None}
        laws = {entry.law for entry in entries} - {None}
        return names, {(law.unit, law.num_units) for law in laws if law.num_units is not None}

    def _fits(self, budget: LedgerBudget) -> bool:
        """Whether everything recorded is within the budget."""
        try:
            spent = self._composition(self.entries, budget.filter.neighboring_relation)
            if spent.relation is not budget.filter.neighboring_relation:
                return False
            return budget.filter.epsilon_of(spent) <= budget.filter.epsilon
        except ValueError:  # history was lost, or an event that no Rényi accountant knows
            return False

    def _spent_and(self, probe: LedgerEntry, delta: float) -> Composition:
        """What was spent, once it is clear that the probe can be added to it."""
        entries = self.entries
        both = self._analyse((*entries, probe), delta)  # refuses what does not add up
        return self._composition(entries, both.relation)

    def _composition(
        self,
        entries: tuple[LedgerEntry, ...],
        default: dp_accounting.NeighboringRelation = _Relation.ADD_OR_REMOVE_ONE,
    ) -> Composition:
        """The releases as one composition, or a ValueError saying why there is none.

        Without entries, which would bring their relation, it is that of `default`.
        """
        if self._unknown:
            raise ValueError(
                "no privacy guarantee can be reported, the history of releases is incomplete: "
                + "; ".join(self._unknown)
            )
        if any(is_non_private_key(entry.key) for entry in entries):
            return Composition.of([(dp_accounting.NonPrivateDpEvent(), 1)])
        for entry in entries:
            if entry.law and entry.law.unknown_reason:
                raise ValueError(
                    "no privacy guarantee can be reported, nobody knows how the batches were "
                    f"sampled ({entry.law.unknown_reason}). Declare how the batches were sampled "
                    "before training, with PoissonSampling(num_examples, expected_size, "
                    "declared=True) or FixedSizeSampling(num_examples, size, declared=True), if "
                    "one of them is true."
                )
        _check_one_statement(entries)
        relation = entries[0].neighboring_relation if entries else default
        return Composition((), relation).plus((entry.key, entry.count) for entry in entries)

    def _analyse(self, entries: tuple[LedgerEntry, ...], delta: float | None = None) -> Composition:
        """The composition, with a warning, once each, for what a reader should know about it."""
        composition = self._composition(entries)
        cautions = {}
        for law in (entry.law for entry in entries if entry.law is not None):
            if law.declared:
                cautions["declared"] = (
                    "epsilon relies on a sampling law declared by the user, which nothing "
                    f"enforced: {law.describe()}."
                )
            size = law.num_units
            if delta is not None and size is not None and delta >= 1 / size:
                cautions[delta] = (
                    f"delta={delta:g} is not below 1/{size}, one over the number of {law.unit}s: "
                    f"publishing a random {law.unit} whole would meet it. Choose a smaller delta."
                )
        for key, message in cautions.items():
            if key not in self._warned:
                warnings.warn(message, PrivacyWarning, stacklevel=3)
                self._warned.add(key)
        return composition

    # Storing

    def to_json(self) -> str:
        """Returns the ledger as human-readable, versioned JSON with a checksum."""
        with self._lock:
            content = {
                "dataset": self.dataset,
                "history_lost": list(self._unknown),
                "readings": list(self._readings),
                "plan": self._plan,
                "budgets": [budget.to_config() for budget in self._budgets],
                "entries": [entry.to_config() for entry in self._entries.values()],
            }
            if self._not_covered:
                content["not_covered"] = list(self._not_covered)
        return format_document(content)

    @classmethod
    def from_json(cls, text: str) -> "PrivacyLedger":
        """Builds a ledger from `to_json`'s text. New releases go into new entries.

        Raises:
          ValueError: the text is truncated, edited, of a newer version, or no ledger at all.
        """
        content = parse_document(text)
        ledger = cls()
        for config in content["entries"]:
            entry = LedgerEntry.from_config(config)
            if entry.id in ledger._entries:
                raise ValueError(f"entry {entry.id} occurs twice.")
            ledger._entries[entry.id] = entry
        for reason in content["history_lost"]:
            ledger.mark_unknown(reason)
        for reason in content.get("readings", ()):
            ledger.mark_odometer(reason)
        for reason in content.get("not_covered", ()):
            ledger.mark_not_covered(reason)
        ledger._budgets = [LedgerBudget.from_config(b) for b in content.get("budgets", ())]
        ledger.dataset = content.get("dataset")
        if content.get("plan") is not None:
            ledger.declare_plan(content["plan"])
        return ledger

    def save(self, path: str | os.PathLike, *, replace: bool = False) -> None:
        """Writes the ledger to `path`, at once and durably: readers see the old file or the new.

        Args:
          path: the file. One that is there is replaced if all its releases are in this ledger.
          replace: True to replace it whatever it holds.

        Raises:
          ValueError: the file records what this ledger does not, or is no usable ledger; nothing
            is overwritten. `merge` the loaded file first to continue its history.
          BlockingIOError: a running training writes the file.
          OSError: the file cannot be written.
        """
        with lock_if_possible(path):
            if not replace and os.path.lexists(path) and not self.covers(type(self).load(path)):
                raise ValueError(
                    f"{os.fspath(path)} records releases that this ledger does not know of, and "
                    "was not overwritten. Merge it first, ledger.merge(PrivacyLedger.load(path)); "
                    "or choose another path."
                )
            write_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "PrivacyLedger":
        """Reads a ledger written by `save`. New releases go into new entries.

        Raises:
          ValueError: the file is truncated, edited, of a newer version, or no ledger; the message
            names the file and the reason.
          OSError: the file cannot be read.
        """
        try:
            return cls.from_json(pathlib.Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)} is no usable privacy ledger: {error}") from error

    def __reduce__(self):
        # Copies and pickles too must begin new entries, or both would count up the same one.
        return PrivacyLedger.from_json, (self.to_json(),)

    def __repr__(self):
        note = "; ε is an odometer reading" if self.odometer_reasons else ""
        return f"<PrivacyLedger: {self.steps} releases in {len(self.entries)} entries{note}>"


def _check_one_statement(entries: tuple[LedgerEntry, ...]) -> None:
    """Raises ValueError where no one statement covers all entries."""
    units = {entry.unit for entry in entries}
    if len(units) > 1:
        raise ValueError(
            "no privacy guarantee can be reported: some releases protect one "
            f"{' and others one '.join(sorted(units))}, and those do not add up. A release "
            "that protects single records promises less for all records of a user: sample "
            "users in every release (UserLots), or keep one ledger, and one model, for each."
        )
    relations = {entry.neighboring_relation for entry in entries}
    if len(relations) > 1:
        names = " and ".join(sorted(r.name for r in relations))
        raise ValueError(
            f"entries are stated for different neighbouring relations ({names}), which do not "
            "add up. Draw all lots by laws of one relation (arrays, PoissonLots and "
            "TruncatedPoissonLots are ADD_OR_REMOVE_ONE, FixedSizeLots and ShuffledLots "
            "REPLACE_ONE), or keep one ledger, and one model, for each."
        )


def _probe(event, count, law, neighboring_relation) -> LedgerEntry:
    """An entry that is never recorded, to validate and charge a release that is only considered."""
    return LedgerEntry("probe", event, count, law, neighboring_relation, None, False)


def _surplus(theirs: dict[str, LedgerEntry], mine: dict[str, LedgerEntry]) -> int:
    """How many of `theirs` releases are not in `mine`."""
    return sum(
        max(0, entry.count - (mine[id].count if id in mine else 0)) for id, entry in theirs.items()
    )


def _merged_budgets(ours: PrivacyLedger, other: PrivacyLedger) -> list[LedgerBudget]:
    """The budgets of both ledgers, ours last; `outside` grows by releases made beside them."""
    mine = {entry.id: entry for entry in ours.entries}
    theirs = {entry.id: entry for entry in other.entries}
    only_mine, only_theirs = _surplus(mine, theirs), _surplus(theirs, mine)
    held = {budget.filter: budget for budget in ours.budgets}
    others = {budget.filter: budget for budget in other.budgets}
    merged = []
    for filter in [*(f for f in others if f not in held), *held]:
        if filter not in others:
            merged.append(held[filter].plus(only_theirs))
        elif filter not in held:
            merged.append(others[filter].plus(only_mine))
        else:
            # Either one ledger continues the other; or two branches used what room there was, each
            # without knowing of the other.
            outside = max(held[filter].outside, others[filter].outside)
            merged.append(LedgerBudget(filter, outside + min(only_mine, only_theirs)))
    return merged


def _listed(values) -> str:
    return " or ".join(map(repr, sorted(values)))
