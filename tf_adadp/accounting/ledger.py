"""Keeps the privacy ledger: releases, their sampling, and their ε together."""

import contextlib
import os
import pathlib
import threading
import warnings
from collections.abc import Iterable, Iterator

import dp_accounting

from tf_adadp.accounting import merging
from tf_adadp.accounting.accountants import Composition, check_accountant
from tf_adadp.accounting.bounds.comparison import Comparison, compare_releases
from tf_adadp.accounting.composing import cautions, compose, is_within, odometer_reasons
from tf_adadp.accounting.entry import LedgerEntry, check_dataset_name
from tf_adadp.accounting.files.atomic import write_atomically
from tf_adadp.accounting.files.document import format_document, parse_document
from tf_adadp.accounting.files.lock import lock_if_possible
from tf_adadp.accounting.filters import LedgerBudget, RenyiFilter
from tf_adadp.accounting.history import History, add_reasons
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.accounting.outlook import Outlook
from tf_adadp.accounting.privacy_warning import PrivacyWarning
from tf_adadp.accounting.statement import privacy_statement
from tf_adadp.utils.checks import check_delta, check_epsilon, check_instance, check_text

_UNITING = threading.Lock()


class PrivacyLedger(Outlook):
    """Records the releases on one data set, append-only, and adds up their ε.

    Guarantee: with every release recorded BEFORE it is made, `epsilon(delta)` is an upper bound on
    the privacy loss of all of them together, for one unit (a record; a user under `UserSampling`)
    under the neighbouring relation of their sampling laws. Saving, loading and merging never remove
    or lower entries. A release that cannot be analysed raises an error.

    Equal consecutive releases share one entry. Each entry has a random id, and a ledger that was
    loaded, merged or copied starts new entries. So `merge` can unite two continuations of one
    checkpoint without losing or double-counting a release.

    ε is a guarantee if the plan was fixed before the first release. `odometer_reasons` lists known
    decisions during training; `budgets` lists budgets that hold in spite of them. Adding is
    thread-safe.

    Args:
      dataset: a public name for the data set, written into every release from now on; `merge`
        refuses other names. Never a hash of the records, a statistic without noise. None for none.

    Raises:
      ValueError: dataset is neither None nor a non-empty string.

    Example:
        >>> law, ledger = accounting.PoissonSampling(60000, 600), dp.PrivacyLedger()
        >>> ledger.add(law.event(noise_multiplier=1.1), 1000, law=law)
        >>> round(ledger.epsilon(delta=1e-5), 3)
        1.712
    """

    def __init__(self, dataset: str | None = None):
        self._own = History()
        self.dataset = dataset

    @property
    def _history(self) -> History:
        """Returns the history that this ledger shares with the ledgers it was united with."""
        while self._own.united_into is not None:
            self._own = self._own.united_into
        return self._own

    @contextlib.contextmanager
    def _writing(self) -> Iterator[History]:
        """Yields the shared history, locked."""
        while True:
            history = self._history
            with history.lock:
                if history.united_into is None:  # else it was united before it was locked
                    yield history
                    return

    # Adding

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
        with self._writing() as history:
            history.leave_parent()
            entry = LedgerEntry(
                history.next_id,
                event,
                count,
                law,
                neighboring_relation,
                origin,
                reproducible_noise,
                adaptive,
                history.dataset,
            )
            history.append(entry)
            # Also of replaced budgets, whose guarantee covers only the releases made under them.
            history.budgets = [
                b if is_within(b, history) else b.plus(count) for b in history.budgets
            ]

    def announced(self) -> "PrivacyLedger":
        """Returns a copy for releases that this ledger is about to record.

        Unlike any other copy it continues the same entries. If an announcement outlives its
        process, a checkpoint that holds some of the announced releases merges with it without
        counting them twice. Add only the releases to it that this ledger adds next.
        """
        with self._writing() as history:
            history.leave_parent()
            copy = PrivacyLedger.from_json(self.to_json())
            copy._own.open_id, copy._own.next_id = history.open_id, history.next_id
            return copy

    def begin_budget(self, budget: RenyiFilter) -> None:
        """Begins a budget for the following releases, and replaces an earlier one.

        Check before each release that the budget has room (`remaining`, `RenyiFilter.has_room`).
        The ledger counts releases that the budget does not cover: those before it began, and those
        that exceeded it. If the same budget runs already, nothing changes.

        Raises:
          ValueError: budget is not a `RenyiFilter`.
        """
        with self._writing() as history:
            if history.budgets and history.budgets[-1].filter == budget:
                return
            begun = LedgerBudget(budget, self.steps)
            history.budgets = [b for b in history.budgets if b.filter != budget] + [begun]

    def mark_odometer(self, reason: str) -> None:
        """Records that results decided the number of releases or their settings.

        ε is then an odometer reading: it measures what was spent, but it is not a guarantee.

        Raises:
          ValueError: reason is not a non-empty string.
        """
        with self._writing() as history:
            add_reasons(history.readings, (reason,))

    def declare_plan(self, plan: str) -> None:
        """Records your declaration that noise, sampling and steps were planned in advance.

        Without it a change of noise or sampling makes ε an odometer reading. Reasons recorded by
        `mark_odometer` stay. Every statement quotes the plan as your declaration.

        Args:
          plan: what was fixed, e.g. "noise multiplier 4 for 500 steps, then 2 for 100".

        Raises:
          ValueError: plan is not a non-empty string.
        """
        check_text("plan", plan)
        with self._writing() as history:
            history.plan = plan

    def mark_unknown(self, reason: str) -> None:
        """Records that history was lost: from now on no ε or δ is reported. This is final.

        Raises:
          ValueError: reason is not a non-empty string.
        """
        with self._writing() as history:
            add_reasons(history.unknown, (reason,))

    def mark_not_covered(self, reason: str) -> None:
        """Records a change of the weights that no entry describes.

        ε still covers the recorded releases; every statement names the change.

        Raises:
          ValueError: reason is not a non-empty string.
        """
        with self._writing() as history:
            add_reasons(history.not_covered, (reason,))

    # Merging

    def merge(self, other: "PrivacyLedger", *, same_data: bool = False) -> None:
        """Takes over the other ledger's entries: the union by id, the larger count for each.

        Checkpoints of one run, in any order and however often, give the releases of that run;
        separate runs on the same data those of both, whose lots must have been drawn separately.

        Args:
          other: the ledger to take over; it stays as it is.
          same_data: True to add up ledgers of different names, or with no number of records in
            common, for example for a part of the same records or a table that grew. This never
            lowers ε.

        Raises:
          ValueError: the ledgers are about different data sets, or one id stands for different
            releases. Then nothing is changed.
        """
        check_instance("other", other, PrivacyLedger, "a PrivacyLedger", wrong_type=ValueError)
        theirs = other._history.snapshot()
        if not same_data:
            self.check_data(*merging.data_of(theirs), whose="the other ledger")
        with self._writing() as history:
            merging.merge(history, theirs)

    def unite(self, other: "PrivacyLedger") -> None:
        """Unites two ledgers: from now on both objects are the union.

        Use it for two ledgers that turn out to be about the same weights. Ledgers that were united
        with either of them before are united too.
        """
        with _UNITING:  # which alone holds the locks of two histories
            if self.is_one_with(other):
                return
            with other._writing() as theirs, self._writing() as mine:
                merging.merge(mine, theirs)
                theirs.united_into = mine

    def is_one_with(self, other: "PrivacyLedger") -> bool:
        """Tells whether the two are the same ledger, or were united."""
        return self._history is other._history

    def check_data(
        self,
        names: Iterable[str],
        sizes: Iterable[tuple[str, int]],
        whose: str = "the run",
    ) -> None:
        """Raises an error for data that names or sizes show not to be those of this ledger.

        Args:
          names: data set names; empty if none was given.
          sizes: pairs (unit, number of units), e.g. ("record", 60000); empty if unknown.
          whose: the owner of these names and sizes, for the message.

        Raises:
          ValueError: both sides have names, or numbers of the same unit, and none in common.
        """
        merging.check_same_data(self._history.snapshot(), names, sizes, whose)

    def covers(self, other: "PrivacyLedger") -> bool:
        """Tells whether this ledger contains the other one: releases, gaps, endings."""
        return merging.covers(self._history.snapshot(), other._history.snapshot())

    # Reading

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """Returns the entries in the order they were begun."""
        history = self._history
        with history.lock:
            return tuple(history.entries.values())

    @property
    def steps(self) -> int:
        """Returns the number of releases recorded, training steps and others alike."""
        return sum(entry.count for entry in self.entries)

    @property
    def unknown_reasons(self) -> tuple[str, ...]:
        """Returns the reasons why history is incomplete; empty if it is complete."""
        return tuple(self._history.unknown)

    @property
    def not_covered_reasons(self) -> tuple[str, ...]:
        """Returns the known changes of the weights that are in no entry."""
        return tuple(self._history.not_covered)

    @property
    def dataset(self) -> str | None:
        """Returns the data set's name, for releases from now on; None for none."""
        return self._history.dataset

    @dataset.setter
    def dataset(self, name: str | None) -> None:
        check_dataset_name(name)
        with self._writing() as history:
            history.dataset = name

    @property
    def budgets(self) -> tuple[LedgerBudget, ...]:
        """Returns the budgets that releases were held to, the running one last."""
        return tuple(self._history.budgets)

    @property
    def plan(self) -> str | None:
        """Returns the plan that the user declared beforehand, or None."""
        return self._history.plan

    @property
    def odometer_reasons(self) -> tuple[str, ...]:
        """Returns the known reasons why ε is an odometer reading; empty if none is known.

        They come from `mark_odometer` and `adaptive`, and from changes of noise or sampling. The
        ledger cannot know why you continued training, stopped, or began again.
        """
        return odometer_reasons(self._history.snapshot())

    def epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """Returns ε at δ for all releases recorded; ∞ if one of them is non-private.

        A later reading takes some 0.1 ms with a few entries, 0.7 ms with 100; "pld" takes longer.

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

    def compare(self, delta: float) -> Comparison:
        """Returns ε of all releases recorded by every bound, see `accounting.compare`.

        Raises and warns as `epsilon`.
        """
        delta = check_delta(delta)
        entries = self.entries
        composition = self._analyse(entries, delta)
        charges = [(entry.key, entry.count) for entry in entries]
        return compare_releases(composition, charges, delta)

    def statement(self, delta: float, accountant: str = "rdp") -> str:
        """Returns a plain-text privacy statement for people, several lines.

        It names the unit, the neighbouring relation, the sampling, the accountant, ε and δ, budgets
        and the number of releases. It states whether ε is a guarantee or an odometer reading, and
        what ε does not cover. If no ε can be reported, it gives the reason.

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

    def _analyse(self, entries: tuple[LedgerEntry, ...], delta: float | None = None) -> Composition:
        """Returns the composition; gives each warning about it once."""
        history = self._history
        composition = compose(entries, history.unknown)
        for key, message in cautions(entries, delta).items():
            if key not in history.warned:
                warnings.warn(message, PrivacyWarning, stacklevel=3)
                history.warned.add(key)
        return composition

    # Storing

    def to_json(self) -> str:
        """Returns the ledger as human-readable, versioned JSON with a checksum."""
        return format_document(self._history.to_config())

    @classmethod
    def from_json(cls, text: str) -> "PrivacyLedger":
        """Builds a ledger from `to_json`'s text. New releases go into new entries.

        Raises:
          ValueError: the text is truncated, edited, of a newer version, or not a ledger.
        """
        ledger = cls()
        ledger._own = History.from_config(parse_document(text))
        return ledger

    def save(self, path: str | os.PathLike, *, replace: bool = False) -> None:
        """Writes the ledger to `path`, atomically and durably.

        Args:
          path: the file. An existing file is replaced if all its releases are in this ledger.
          replace: True to replace any existing file.

        Raises:
          ValueError: the file records releases that this ledger lacks, or is not a usable ledger;
            it is not overwritten. `merge` the loaded file first to continue its history.
          BlockingIOError: a running training writes to the file.
          OSError: the file cannot be written.
        """
        with lock_if_possible(path):
            if not replace and os.path.lexists(path) and not self.covers(type(self).load(path)):
                raise ValueError(
                    f"{os.fspath(path)} records releases that this ledger does not have, and "
                    "was not overwritten. Merge it first, ledger.merge(PrivacyLedger.load(path)); "
                    "or choose another path."
                )
            write_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "PrivacyLedger":
        """Reads a ledger written by `save`. New releases go into new entries.

        Raises:
          ValueError: the file is truncated, edited, of a newer version, or not a ledger; the
            message names the file and the reason.
          OSError: the file cannot be read.
        """
        try:
            return cls.from_json(pathlib.Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: not a usable privacy ledger: {error}") from error

    def __reduce__(self):
        # Copies and pickles must begin new entries too, so that two ledgers never share one.
        return PrivacyLedger.from_json, (self.to_json(),)

    def __repr__(self):
        note = "; ε is an odometer reading" if self.odometer_reasons else ""
        return f"<PrivacyLedger: {self.steps} releases in {len(self.entries)} entries{note}>"
