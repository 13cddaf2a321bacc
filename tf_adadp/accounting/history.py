"""Holds the record of a privacy ledger: one object, shared by all ledgers that were united."""

import dataclasses
import threading
import uuid
from collections.abc import Mapping
from typing import Any

from tf_adadp.accounting.entry import LedgerEntry, check_dataset_name
from tf_adadp.accounting.filters import LedgerBudget
from tf_adadp.utils import process as _process
from tf_adadp.utils.checks import check_text


class History:
    """Holds the releases, and the entry whose count the next release may increase.

    A ledger reads and writes it through its handle; `lock` guards it. After `united_into` is set
    this history is closed: the other one holds all of its content.

    Attributes:
      entries: the entries by id, in the order they were begun.
      budgets: the budgets that releases were held to, the running one last.
      readings: the recorded reasons why ε is an odometer reading.
      not_covered: changes of the weights that are in no entry.
      unknown: reasons why releases may be missing.
      plan: the plan that the user declared, or None.
      dataset: the data set's name, for releases from now on; None for no name.
      warned: keys of the warnings that were given: "declared", or a δ.
      open_id: the id of the entry whose count may still increase; None if there is none.
      next_id: the id of the next new entry.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self.united_into: History | None = None
        self.entries: dict[str, LedgerEntry] = {}
        self.budgets: list[LedgerBudget] = []
        self.readings: list[str] = []
        self.not_covered: list[str] = []
        self.unknown: list[str] = []
        self.plan: str | None = None
        self.dataset: str | None = None
        self.warned: set[str | float] = set()
        self.open_id: str | None = None
        self.next_id: str = uuid.uuid4().hex
        self._process = _process.token()

    def append(self, entry: LedgerEntry) -> None:
        """Adds an entry of id `next_id`, or increases the last entry's count if it is the same."""
        last = self.entries.get(self.open_id)
        if last is not None and last.repeats(entry):
            entry = dataclasses.replace(last, count=last.count + entry.count)
        else:
            # A chain, so that a copy from `PrivacyLedger.announced` begins the same entries.
            self.next_id = uuid.uuid5(uuid.UUID(self.next_id), "next").hex
        self.entries[entry.id] = entry
        self.open_id = entry.id

    def begin_new_entries(self) -> None:
        """Makes the next release begin a new entry, with a new random id."""
        self.open_id, self.next_id = None, uuid.uuid4().hex

    def leave_parent(self) -> None:
        """Begins new entries in a child of `os.fork`, so that parent and child do not share one."""
        if self._process is not _process.token():
            self._process = _process.token()
            self.begin_new_entries()

    def snapshot(self) -> "History":
        """Returns an independent copy of the content."""
        with self.lock:
            copy = History()
            copy.entries, copy.budgets = dict(self.entries), list(self.budgets)
            copy.readings, copy.not_covered = list(self.readings), list(self.not_covered)
            copy.unknown, copy.plan, copy.dataset = list(self.unknown), self.plan, self.dataset
            return copy

    def to_config(self) -> dict[str, Any]:
        """Returns a JSON-able dict, the content of a ledger file."""
        with self.lock:
            content = {
                "dataset": self.dataset,
                "history_lost": list(self.unknown),
                "readings": list(self.readings),
                "plan": self.plan,
                "budgets": [budget.to_config() for budget in self.budgets],
                "entries": [entry.to_config() for entry in self.entries.values()],
            }
            if self.not_covered:
                content["not_covered"] = list(self.not_covered)
            return content

    @classmethod
    def from_config(cls, content: Mapping[str, Any]) -> "History":
        """Builds a history from `to_config`'s dict; ValueError for anything out of range."""
        history = cls()
        for config in content["entries"]:
            entry = LedgerEntry.from_config(config)
            if entry.id in history.entries:
                raise ValueError(f"entry {entry.id} occurs twice.")
            history.entries[entry.id] = entry
        for reasons, name in (
            (history.unknown, "history_lost"),
            (history.readings, "readings"),
            (history.not_covered, "not_covered"),
        ):
            add_reasons(reasons, content.get(name, ()))
        history.budgets = [LedgerBudget.from_config(b) for b in content.get("budgets", ())]
        history.dataset = check_dataset_name(content.get("dataset"))
        if content.get("plan") is not None:
            history.plan = check_text("plan", content["plan"])
        return history


def add_reasons(reasons: list[str], new: tuple[str, ...] | list[str]) -> None:
    """Appends new reasons; raises ValueError for a reason that is not a non-empty string."""
    for reason in new:
        check_text("reason", reason)
        if reason not in reasons:
            reasons.append(reason)
