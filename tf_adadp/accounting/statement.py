"""Writes the privacy statement: a ledger's guarantee in words for a data-protection officer."""

import collections
import math
import textwrap
from typing import Protocol

import dp_accounting

from tf_adadp.accounting.entry import LedgerEntry
from tf_adadp.accounting.filters import LedgerBudget
from tf_adadp.accounting.laws.base import ONE_RECORD
from tf_adadp.accounting.trials import is_search

_Relation = dp_accounting.NeighboringRelation
_RELATIONS = {
    _Relation.ADD_OR_REMOVE_ONE: "data sets that differ by adding or removing one {unit}",
    _Relation.REPLACE_ONE: "data sets that differ by replacing one {unit}",
    _Relation.REPLACE_SPECIAL: "data sets that differ by replacing one {unit} by a null {unit}",
}
_ACCOUNTANTS = {
    "rdp": "Rényi differential privacy (dp_accounting RdpAccountant)",
    "pld": "privacy loss distributions (dp_accounting PLDAccountant)",
    "theorem1": "Theorem 1 of the ADADP paper with the classical conversion",
    "wang_theorem9": "Rényi bound of Wang, Balle and Kasiviswanathan (2019), Theorem 9",
    "wang_theorem27": "Rényi bound of Wang, Balle and Kasiviswanathan (2019), Theorem 27",
}
_ASSUMPTIONS = (
    "lots were drawn as stated, and which records were in them stays secret; noise keys stay "
    "secret; every release on these records is in this ledger; the number of {units} is public"
)
_NOT_COVERED = (
    "training metrics (loss and accuracy computed on the training records) unless released "
    "with noise; validation and test records, also where they choose a model or end the training; "
    "hyper-parameter search{but}; preprocessing, and other uses of the same records, not recorded "
    "here; running times; attacks on the floating-point arithmetic of the noise, unless every "
    "optimizer had secure_noise=True."
)
_SEARCH = (
    "a random number of independent trials (geometric, {mean:g} in the mean) was trained, and the "
    "best one alone released; that number, running times, and all of the other trials stay secret. "
    "Trials were compared by the score that the release names below: epsilon does not protect the "
    "records that it read"
)
_FIXED = (
    "a guarantee, provided that noise, sampling and the number of steps were fixed before the "
    "first release; nothing recorded here says otherwise, but a ledger cannot know why training "
    "ended or went on"
)


class Recorded(Protocol):
    """A ledger, as far as a statement reads it; see `PrivacyLedger`."""

    entries: tuple[LedgerEntry, ...]
    budgets: tuple[LedgerBudget, ...]
    plan: str | None
    unknown_reasons: tuple[str, ...]
    odometer_reasons: tuple[str, ...]
    not_covered_reasons: tuple[str, ...]


def privacy_statement(
    ledger: Recorded,
    epsilon: float | None,
    delta: float,
    accountant: str,
    refusal: str | None,
) -> str:
    """Returns the statement for a ledger, several lines ending in a newline.

    Args:
      ledger: the ledger of the releases.
      epsilon: ε at `delta` by `accountant`; None if it cannot be reported.
      delta: δ.
      accountant: the accountant's name.
      refusal: the reason if epsilon is None.
    """
    entries = ledger.entries
    laws = list(dict.fromkeys(entry.law for entry in entries if entry.law is not None))
    bounded = bool(entries) and refusal is None and not math.isinf(epsilon)
    name = "Spent" if bounded and ledger.odometer_reasons else "Guarantee"
    lines = [(name, _figure(entries, epsilon, delta, refusal))]
    if bounded:
        lines.append(("Kind of figure", _kind(ledger)))
        if ledger.plan is not None:
            lines.append(("Plan, declared by the user", ledger.plan))
    lines += [("Budget", _budget(budget, ledger)) for budget in ledger.budgets]
    relations = dict.fromkeys(
        _RELATIONS.get(entry.neighboring_relation, "unknown").format(unit=entry.unit)
        for entry in entries
    )
    units = dict.fromkeys(entry.protects for entry in entries)
    counted = dict.fromkeys(f"{entry.unit}s" for entry in entries)
    searches = [entry.event for entry in entries if is_search(entry.event)]
    lines += [("Search", _SEARCH.format(mean=event.mean)) for event in searches]
    sampling = dict.fromkeys(
        entry.law.describe() if entry.law else "no sampling (or as the event states)"
        for entry in entries
    )
    lines += [
        ("Unit of privacy", "; ".join(units) or ONE_RECORD),
        ("Data set", _data_set(entries, laws, delta)),
        ("Neighbouring relation", "; ".join(relations) or "none, nothing was released"),
        ("Sampling", "; ".join(sampling) or "none, nothing was released"),
        ("Accountant", _ACCOUNTANTS[accountant]),
        ("Assumptions", _ASSUMPTIONS.format(units=" and of ".join(counted) or "records")),
        ("Releases", f"{sum(entry.count for entry in entries)}"),
    ]
    kinds = collections.Counter()
    for entry in entries:
        kinds[f"{entry.event}" + (f" by {entry.origin}" if entry.origin else "")] += entry.count
    lines += [("  of these", f"{count} × {kind}") for kind, count in kinds.items()]
    seeded = sum(entry.count for entry in entries if entry.reproducible_noise)
    if seeded:
        lines.append(
            (
                "Reproducible noise",
                f"{seeded} releases drew reproducible noise from a given seed; the guarantee does "
                "not hold against anyone who knows the seed",
            )
        )
    lines += [("NOT COVERED by epsilon", reason) for reason in ledger.not_covered_reasons]
    but = " but for the search above" if searches else ""
    lines.append(("Not covered", _NOT_COVERED.format(but=but)))
    body = "\n".join(
        textwrap.fill(f"{name}: {text}", width=88, subsequent_indent="    ") for name, text in lines
    )
    return f"Differential privacy statement\n{body}\n"


def _figure(entries, epsilon, delta, refusal):
    if refusal is not None:
        return f"NOT AVAILABLE: {refusal}"
    if not entries:
        return "none is stated: this ledger has no release"
    if math.isinf(epsilon):
        return "epsilon = infinity: NO privacy guarantee, something was released without noise"
    return f"epsilon = {epsilon:.6g} at delta = {delta:g}"


def _kind(ledger):
    reasons = ledger.odometer_reasons
    if not reasons:
        return _FIXED
    return (
        "an odometer reading, what was spent by now; not by itself a guarantee for a procedure "
        "that decides by results what it releases and when it ends: " + "; ".join(reasons)
    )


def _budget(budget, ledger):
    filter = budget.filter
    promised = f"epsilon = {filter.epsilon:.6g} at delta = {filter.delta:g}"
    how = f"by a Rényi filter of order {filter.order:g}"
    if ledger.unknown_reasons:
        return f"{promised}, {how}, is NO guarantee: the history of releases is incomplete"
    if budget.outside:
        return (
            f"{promised}, {how}, is NO guarantee for all that is recorded: {budget.outside} "
            "releases were made before it was fixed, beside it or beyond it"
        )
    return (
        f"{promised} is guaranteed, {how} that was fixed before the first release; it held every "
        "release, although earlier outcomes may have decided noise, sampling and the end"
    )


def _data_set(entries, laws, delta):
    names = dict.fromkeys(entry.dataset for entry in entries if entry.dataset is not None)
    sizes = dict.fromkeys((law.num_units, law.unit) for law in laws if law.num_units is not None)
    if not sizes:
        records = "the number of records is not recorded"
    else:
        least = min(number for number, _ in sizes)
        records = (
            " or ".join(f"{number} {unit}s" for number, unit in sizes)
            + f"; delta times their number is {delta * least:.3g}"
            + (" (it should be well below 1)" if delta * least >= 0.5 else "")
        )
    return (", ".join(f"{name!r}" for name in names) or "no name was given") + f"; {records}"
