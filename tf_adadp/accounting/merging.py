"""Merges two histories of releases, and tests whether one contains the other."""

from collections.abc import Iterable

from tf_adadp.accounting.entry import LedgerEntry
from tf_adadp.accounting.filters import LedgerBudget
from tf_adadp.accounting.history import History, add_reasons


def merge(mine: History, theirs: History) -> None:
    """Takes over another history's entries: the union by id, the larger count for each.

    Args:
      mine: the history to change; its lock is held.
      theirs: the other one. It must not change meanwhile.

    Raises:
      ValueError: the same id stands for different releases. Then nothing is changed.
    """
    merged = dict(mine.entries)
    for entry in theirs.entries.values():
        ours = merged.setdefault(entry.id, entry)
        if not ours.repeats(entry):
            raise ValueError(
                f"entry {entry.id} stands for different releases in the two ledgers; one of them "
                "was altered."
            )
        merged[entry.id] = max(ours, entry, key=lambda e: e.count)
    budgets = _merged_budgets(mine, theirs)
    if mine.plan is None and not mine.entries:
        mine.plan = theirs.plan
    elif theirs.plan != mine.plan and _surplus(theirs.entries, mine.entries):
        mine.plan = None  # it described other releases
    mine.entries = merged
    mine.begin_new_entries()  # ids that this one announced may be among the new ones
    mine.budgets = budgets
    mine.dataset = mine.dataset or theirs.dataset
    add_reasons(mine.unknown, theirs.unknown)
    add_reasons(mine.readings, theirs.readings)
    add_reasons(mine.not_covered, theirs.not_covered)


def covers(mine: History, theirs: History) -> bool:
    """Tells whether one history contains the other: releases, gaps, endings."""
    outside = {budget.filter: budget.outside for budget in mine.budgets}
    return (
        not _surplus(theirs.entries, mine.entries)
        and all(mine.entries[id].repeats(entry) for id, entry in theirs.entries.items())
        and set(theirs.unknown) <= set(mine.unknown)
        and set(theirs.readings) <= set(mine.readings)
        and set(theirs.not_covered) <= set(mine.not_covered)
        and all(outside.get(b.filter, -1) >= b.outside for b in theirs.budgets)
    )


def data_of(history: History) -> tuple[set[str], set[tuple[str, int]]]:
    """Returns the data set names, and pairs (unit, number of them), that a history is about."""
    entries = history.entries.values()
    names = {history.dataset, *(entry.dataset for entry in entries)} - {None}
    laws = {entry.law for entry in entries} - {None}
    return names, {(law.unit, law.num_units) for law in laws if law.num_units is not None}


def check_same_data(
    history: History, names: Iterable[str], sizes: Iterable[tuple[str, int]], whose: str
) -> None:
    """Raises an error for data of another data set, see `PrivacyLedger.check_data`."""
    my_names, my_sizes = data_of(history)
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


def _surplus(theirs: dict[str, LedgerEntry], mine: dict[str, LedgerEntry]) -> int:
    """Counts those of `theirs` releases that are not in `mine`."""
    return sum(
        max(0, entry.count - (mine[id].count if id in mine else 0)) for id, entry in theirs.items()
    )


def _merged_budgets(mine: History, theirs: History) -> list[LedgerBudget]:
    """Returns the budgets of both, mine last; `outside` grows by releases made beside them."""
    only_mine = _surplus(mine.entries, theirs.entries)
    only_theirs = _surplus(theirs.entries, mine.entries)
    held = {budget.filter: budget for budget in mine.budgets}
    others = {budget.filter: budget for budget in theirs.budgets}
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


def _listed(values: set) -> str:
    return " or ".join(map(repr, sorted(values)))
