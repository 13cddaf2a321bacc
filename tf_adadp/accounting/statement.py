"""The privacy statement: a ledger's guarantee in words a data-protection officer can use."""

import collections
import math
import textwrap
from collections.abc import Sequence

import dp_accounting

_Relation = dp_accounting.NeighboringRelation
_RELATIONS = {
    _Relation.ADD_OR_REMOVE_ONE: "data sets that differ by adding or removing one {unit}",
    _Relation.REPLACE_ONE: "data sets that differ by replacing one {unit}",
    _Relation.REPLACE_SPECIAL: "data sets that differ by replacing one {unit} by a null {unit}",
}
_UNITS = {
    "record": "one record of the training data",
    "user": "one user: all records of the training data with that user's id, however many",
}
_ACCOUNTANTS = {
    "rdp": "Rényi differential privacy (dp_accounting RdpAccountant)",
    "pld": "privacy loss distributions (dp_accounting PLDAccountant)",
    "theorem1": "Theorem 1 of the ADADP paper with the classical conversion",
    "wang_theorem9": "Rényi bound of Wang, Balle and Kasiviswanathan (2019), Theorem 9",
    "wang_theorem27": "Rényi bound of Wang, Balle and Kasiviswanathan (2019), Theorem 27",
}
_NOT_COVERED = (
    "training metrics (loss and accuracy computed on the training records) unless released "
    "with noise; validation and test records; model selection and early stopping; "
    "hyper-parameter search; other uses of the same records not recorded here; attacks on the "
    "floating-point arithmetic of the noise."
)


def privacy_statement(
    entries: Sequence, epsilon: float | None, delta: float, accountant: str, refusal: str | None
) -> str:
    """Returns the statement for ledger entries, several lines ending in a newline.

    Args:
      entries: `LedgerEntry` objects.
      epsilon: the guarantee at `delta` by `accountant`; None if it is refused.
      delta: δ.
      accountant: the accountant's name.
      refusal: why epsilon is None.
    """
    if refusal is not None:
        guarantee = f"NOT AVAILABLE: {refusal}"
    elif math.isinf(epsilon):
        guarantee = "epsilon = infinity: NO privacy guarantee, something was released without noise"
    else:
        guarantee = f"epsilon = {epsilon:.6g} at delta = {delta:g}"
    relations = dict.fromkeys(
        _RELATIONS.get(entry.neighboring_relation, "unknown").format(unit=entry.unit)
        for entry in entries
    )
    units = dict.fromkeys(_UNITS[entry.unit] for entry in entries)
    laws = dict.fromkeys(
        entry.law.describe() if entry.law else "no sampling (or as the event states)"
        for entry in entries
    )
    lines = [
        ("Guarantee", guarantee),
        ("Unit of privacy", "; ".join(units) or _UNITS["record"]),
        ("Neighbouring relation", "; ".join(relations) or "none, nothing was released"),
        ("Sampling", "; ".join(laws) or "none, nothing was released"),
        ("Accountant", _ACCOUNTANTS[accountant]),
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
    lines.append(("Not covered", _NOT_COVERED))
    body = "\n".join(
        textwrap.fill(f"{name}: {text}", width=88, subsequent_indent="    ") for name, text in lines
    )
    return f"Differential privacy statement\n{body}\n"
