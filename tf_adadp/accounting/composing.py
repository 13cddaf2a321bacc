"""Composes ledger entries into one composition, or raises an error with the reason."""

from collections.abc import Sequence

import dp_accounting

from tf_adadp.accounting.accountants import Composition, is_non_private_key
from tf_adadp.accounting.entry import LedgerEntry
from tf_adadp.accounting.filters import LedgerBudget
from tf_adadp.accounting.history import History
from tf_adadp.accounting.laws import SamplingLaw

_Relation = dp_accounting.NeighboringRelation


def compose(
    entries: Sequence[LedgerEntry],
    unknown_reasons: Sequence[str] = (),
    default: dp_accounting.NeighboringRelation = _Relation.ADD_OR_REMOVE_ONE,
) -> Composition:
    """Returns the releases as one composition; without entries its relation is `default`.

    Raises:
      ValueError: releases may be missing (`unknown_reasons`); the sampling of an entry is unknown;
        entries use different units or neighbouring relations.
    """
    if unknown_reasons:
        raise ValueError(
            "no privacy guarantee can be reported, the history of releases is incomplete: "
            + "; ".join(unknown_reasons)
        )
    if any(is_non_private_key(entry.key) for entry in entries):
        return Composition.of([(dp_accounting.NonPrivateDpEvent(), 1)])
    for entry in entries:
        if entry.law and entry.law.unknown_reason:
            raise ValueError(
                "no privacy guarantee can be reported, the sampling of the batches is unknown "
                f"({entry.law.unknown_reason}). Declare how the batches were sampled "
                "before training, with PoissonSampling(num_examples, expected_size, "
                "declared=True) or FixedSizeSampling(num_examples, size, declared=True), if "
                "one of them is true."
            )
    check_one_statement(entries)
    relation = entries[0].neighboring_relation if entries else default
    return Composition((), relation).plus((entry.key, entry.count) for entry in entries)


def check_one_statement(entries: Sequence[LedgerEntry]) -> None:
    """Raises ValueError if no single privacy statement covers all entries."""
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


def considered(
    event: dp_accounting.DpEvent,
    count: int,
    law: SamplingLaw | None,
    neighboring_relation: dp_accounting.NeighboringRelation | None = None,
) -> LedgerEntry:
    """Returns an entry for releases that are only considered: validated, never recorded."""
    return LedgerEntry("considered", event, count, law, neighboring_relation, None, False)


def is_within(budget: LedgerBudget, history: History) -> bool:
    """Tells whether everything that a history records is within a budget."""
    relation = budget.filter.neighboring_relation
    try:
        spent = compose(tuple(history.entries.values()), history.unknown, relation)
        return spent.relation is relation and (
            budget.filter.epsilon_of(spent) <= budget.filter.epsilon
        )
    except ValueError:  # history was lost, or an event that no Rényi accountant knows
        return False


def cautions(entries: Sequence[LedgerEntry], delta: float | None) -> dict[str | float, str]:
    """Returns warnings for a reader of ε at δ, each under a key so that it is given once."""
    found: dict[str | float, str] = {}
    for law in (entry.law for entry in entries if entry.law is not None):
        if law.declared:
            found["declared"] = (
                "epsilon relies on a sampling law declared by the user, which nothing "
                f"enforced: {law.describe()}."
            )
        size = law.num_units
        if delta is not None and size is not None and delta >= 1 / size:
            found[delta] = (
                f"delta={delta:g} is not below 1/{size}, one over the number of {law.unit}s: "
                f"publishing a random {law.unit} whole would meet it. Choose a smaller delta."
            )
    return found


def odometer_reasons(history: History) -> tuple[str, ...]:
    """Returns why ε is an odometer reading, see `PrivacyLedger.odometer_reasons`."""
    entries = list(history.entries.values())
    reasons = list(history.readings)
    origins = dict.fromkeys(e.origin or "a mechanism" for e in entries if e.adaptive)
    reasons += [f"{origin} chose its noise by earlier outcomes" for origin in origins]
    settings = {
        (e.key, e.law)
        for e in entries
        if e.law is not None
        and not e.adaptive
        # A lot that its pass has paid for.
        and not isinstance(e.event, dp_accounting.NoOpDpEvent)
    }
    if len(settings) > 1 and history.plan is None:
        reasons.append(
            f"noise or sampling changed between releases ({len(settings)} settings), and "
            "no plan was declared beforehand"
        )
    return tuple(reasons)
