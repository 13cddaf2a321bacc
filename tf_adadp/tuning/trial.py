"""Bounds the cost of one trial of a search, and checks it."""

import dataclasses

import dp_accounting

from tf_adadp.accounting import LedgerEntry, PrivacyLedger
from tf_adadp.accounting.accountants import Composition
from tf_adadp.accounting.composing import compose
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.accounting.trials import best_of_trials
from tf_adadp.distribution import workers
from tf_adadp.model import DPModel
from tf_adadp.utils.checks import check_instance

_DELTA = 1e-5  # of figures in messages


@dataclasses.dataclass(frozen=True)
class TrialCost:
    """Holds the largest cost of a trial, for any hyper-parameters.

    Attributes:
        law: how the lots of the planned releases are sampled.
        releases: the planned releases as one composition.
        event: the same as one event.
    """

    law: SamplingLaw
    releases: Composition
    event: dp_accounting.DpEvent

    @classmethod
    def of(cls, planned: PrivacyLedger) -> "TrialCost":
        """Reads the plan.

        Raises:
            TypeError: it is not a ledger.
            ValueError: it is empty or incomplete, has releases by several laws or by none, or
                releases whose cost depends on outcomes.
        """
        wanted = "a tf_adadp.PrivacyLedger with what one trial releases at most"
        check_instance("planned", planned, PrivacyLedger, wanted)
        laws = {entry.law for entry in planned.entries}
        if len(laws) != 1 or None in laws:
            raise ValueError(
                f"planned has releases by {len(laws)} sampling laws ({planned!r}): give the steps "
                "of one trial, all by one law, e.g. optimizer.charge(planned, law, steps). What "
                "is released once for all trials, as DPPCA, belongs into `ledger`."
            )
        if any(entry.adaptive for entry in planned.entries):
            raise ValueError(_ADAPTIVE.format("planned"))
        releases = compose(planned.entries, planned.unknown_reasons)
        releases.epsilon(_DELTA, "rdp")  # raises if there is no Rényi bound
        parts = [
            dp_accounting.SelfComposedDpEvent(entry.event, entry.count) for entry in planned.entries
        ]
        event = parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)
        return cls(laws.pop(), releases, event)

    def search_event(self, mean_trials: float) -> dp_accounting.DpEvent:
        """Returns the event of a search over such trials."""
        return best_of_trials(self.event, mean_trials)


_ADAPTIVE = (
    "{} has steps whose cost depends on earlier outcomes (AGD), and a search needs trials of one "
    "cost that is known beforehand. Take an optimizer of fixed noise."
)


class TrialCheck:
    """Checks every trial of one search before anything of it is used.

    Args:
        cost: the largest cost of a trial.
        ledger: the releases before the search.
        seeded: whether the search is seeded, so that its trials may be too.
    """

    def __init__(self, cost: TrialCost, ledger: PrivacyLedger, seeded: bool):
        self._cost, self._ledger, self._seeded = cost, ledger, seeded
        self._before = {entry.id: entry.count for entry in ledger.entries}
        self._seen: set[str] = set()

    def __call__(self, model: DPModel) -> tuple[str, ...]:
        """Refuses a trial that is not as planned.

        Returns:
            What its ledger says that is in no entry, see `PrivacyLedger.not_covered_reasons`.

        Raises:
            ValueError: it released more, by another law or on other data than planned, goes on
                from another trial, or is not an independent one.
        """
        if workers.num_workers(model.distribute_strategy) > 1:
            raise ValueError(
                "search on several hosts: each would draw a number of trials of its own. Search "
                "on one host."
            )
        found = model._history.checked()
        if found.is_one_with(self._ledger):
            raise ValueError(
                "a trial charged `ledger` itself, which the search has charged for all of them. "
                "Make the model of every trial anew; load weights of a common history from a file."
            )
        new = self._releases_of(found)
        if not compose(new, found.unknown_reasons, self._cost.releases.relation).costs_at_most(
            self._cost.releases
        ):
            mine, planned = (c.epsilon(_DELTA, "rdp") for c in (compose(new), self._cost.releases))
            raise ValueError(
                f"a trial released more than planned: epsilon={mine:.5g} at delta={_DELTA:g}, and "
                f"{planned:.5g} is planned (bounds are compared at every Rényi order). Plan the "
                "most that any hyper-parameters cost, or let none of them change noise, lots or "
                "the number of steps."
            )
        known = self._ledger.not_covered_reasons
        return tuple(reason for reason in found.not_covered_reasons if reason not in known)

    def _releases_of(self, found: PrivacyLedger) -> list[LedgerEntry]:
        """Returns the entries of a trial that were not there before the search, checked."""
        new = []
        for entry in found.entries:
            count = entry.count - self._before.get(entry.id, 0)
            if count > 0:
                new.append(dataclasses.replace(entry, count=count))
        for entry in new:
            self._check(entry)
        ids = {entry.id for entry in new}
        if ids & self._seen:
            raise ValueError(
                "a trial goes on from an earlier one, or shares weights with it, and trials of a "
                "search are independent. Let `train` build and compile a new model; what was "
                "released before the search belongs into `ledger`."
            )
        self._seen |= ids
        return new

    def _check(self, entry: LedgerEntry) -> None:
        if entry.adaptive:
            raise ValueError(_ADAPTIVE.format("a trial"))
        if entry.reproducible_noise and not self._seeded:
            raise ValueError(
                "a trial draws noise or lots from a given seed, so that trials are not "
                "independent. Leave seed out of optimizer and lots."
            )
        law, planned = entry.law, self._cost.law
        mine, wanted = (
            None if law is None else (law.neighboring_relation, law.unit, law.num_units)
            for law in (law, planned)
        )
        if mine != wanted:
            stated = "no law" if law is None else law.describe()
            raise ValueError(
                f"a trial has a release by {stated}, and planned are releases by "
                f"{planned.describe()}: relation, unit and number of records have to agree. What "
                "is released once for all trials, as DPPCA, belongs into `ledger`."
            )
