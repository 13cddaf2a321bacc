"""The privacy budget of AGD: a Rényi filter that is asked before every release."""

from typing import Any

import dp_accounting
import keras

from tf_adadp.accounting import PrivacyLedger, SamplingLaw
from tf_adadp.accounting.accountants import Composition
from tf_adadp.accounting.filters import RenyiFilter
from tf_adadp.accounting.selection import selection_event

GRADIENT, SELECT, REMEASURE = range(3)
_RELATIONS = {  # by the number of examples in which neighbouring lots differ
    1: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    2: dp_accounting.NeighboringRelation.REPLACE_ONE,
}


class RenyiBudget:
    """Mixin of `AGD`: the events of its steps, and the budget that they are counted against.

    It runs on the host and reads released state: the phase, the budget of the next measurement and
    what was spent.
    """

    def begin(self, law: SamplingLaw, lots: Any, steps_per_execution: int) -> None:
        """Fixes the budget of a run, see `DPOptimizer.begin`."""
        if steps_per_execution != 1:
            raise ValueError(
                f"steps_per_execution={steps_per_execution}: the noise of AGD's next step follows "
                "from its last, and is charged before it is drawn. Compile with 1."
            )
        if self._exact:
            return
        self._start(law)
        if not self.can_continue(law):
            budget = self.budget_filter
            raise ValueError(
                f"total_epsilon={self.total_epsilon} at total_delta={self.total_delta:g} has no "
                "room for one more round: a budget that cannot fit one step. "
                f"{host_number(self._spent):.4g} of the Rényi budget "
                f"{budget.budget:.4g} at order {budget.order:g} is spent. Make a new optimizer "
                "with a larger total_epsilon, which counts what the ledger has."
            )

    def can_continue(self, law: SamplingLaw) -> bool:
        """Tells whether the budget has room for the rest of a round: measurement and choice."""
        if self._exact:
            return True
        events = [self._claimed_event(law)]
        if host_number(self._phase) != SELECT:
            events.append(selection_event(law, host_number(self._selection_epsilon)))
        return self.budget_filter.has_room(host_number(self._spent), events)

    def event(self, law: SamplingLaw) -> dp_accounting.DpEvent:
        """Returns the privacy event of the coming step, see `AGD`; ε = ∞ where it has no privacy.

        Raises:
            ValueError: the sampling of the lots is unknown, or another relation than at first.
        """
        selects = self.built and host_number(self._phase) == SELECT
        if self._exact or (selects and self.variant == "printed"):
            return dp_accounting.NonPrivateDpEvent()
        self._start(law)
        return self._claimed_event(law)

    def before_charge(self, ledger: PrivacyLedger, law: SamplingLaw, steps: int) -> None:
        """Counts one release against the budget, before it is charged and made.

        Earlier releases of AGD about these weights that the ledger records count as well.

        Raises:
            ValueError: steps ≠ 1; the release does not fit the budget. Nothing is charged then.
        """
        if steps != 1:
            raise ValueError(
                f"steps={steps}: the event of AGD's next step follows from this one's outcome. "
                "Charge them one by one."
            )
        if self.charges.waiting:
            raise ValueError(
                "An earlier charge waits for its release, which decides the cost of the next step. "
                "Make the release first; after an error use `with optimizer.charged(…)`, under "
                "which a charge without a release expires."
            )
        if self._exact:
            return
        event, budget = self._claimed_event(law), self.budget_filter
        spent = max(host_number(self._spent), self._recorded(ledger, budget))
        if not budget.has_room(spent, [event]):
            raise ValueError(
                f"total_epsilon={self.total_epsilon} at total_delta={self.total_delta:g} is "
                f"spent: {spent:.4g} of the Rényi budget {budget.budget:.4g} at order "
                f"{budget.order:g}, counting {len(ledger.entries)} entries of the ledger, and "
                f"the next release costs {budget.cost(event):.4g}."
            )
        ledger.begin_budget(budget)
        self._spent.assign(spent + budget.cost(event))

    def _recorded(self, ledger, budget):
        """Returns the Rényi cost of the entries that AGD has in the ledger."""
        if self.variant == "printed":  # counts claims; the ledger has ∞
            return 0.0
        mine = [e for e in ledger.entries if (e.origin or "").split(",")[0] == self.ledger_origin]
        charges = ((entry.key, entry.count) for entry in mine)
        return budget.cost_of(Composition((), budget.neighboring_relation).plus(charges))

    def _start(self, law):
        """Fixes noise, order and relation at the first law seen; refuses another relation later."""
        if not self.built:
            raise ValueError("This AGD is not built: its state is made by `build(variables)`.")
        changed = {r: n for n, r in _RELATIONS.items()}.get(law.neighboring_relation)
        if changed is None:
            raise ValueError(
                f"AGD's budget needs lots of known sampling, got: {law.describe()}. Fit on arrays "
                "or lots, or pass `law` to train_on_batch."
            )
        before = host_number(self._changed_examples)
        if before not in (0, changed):
            raise ValueError(
                f"AGD began on lots of another neighbouring relation than that of these "
                f"({law.describe()}), and budgets of the two do not add up. Make a new optimizer."
            )
        if before == changed:
            return

        def rounds(sigma):
            microbatched = self.microbatch_size > 1
            yield law.event(sigma, microbatched=microbatched), self.splits
            yield selection_event(law, 2 / sigma), self.splits

        sigma, chosen = RenyiFilter.calibrate(
            rounds, self.total_epsilon, self.total_delta, law.neighboring_relation
        )
        self._selection_epsilon.assign(2 / sigma)
        self._gradient_budget.assign(0.5 / sigma**2)
        self._measurement_budget.assign(0.5 / sigma**2)
        self._filter_order.assign(chosen.order)
        self._changed_examples.assign(changed)

    @property
    def budget_filter(self) -> RenyiFilter:
        """Returns the `accounting.RenyiFilter` of all releases; `begin` fixes it."""
        changed = host_number(self._changed_examples) if self.built else 0
        if changed == 0:
            raise ValueError("budget_filter is fixed when training begins, and it has not.")
        relation = _RELATIONS[changed]
        order = host_number(self._filter_order)
        return RenyiFilter(order, self.total_epsilon, self.total_delta, relation)

    def _claimed_event(self, law):
        if host_number(self._phase) == SELECT:
            return selection_event(law, host_number(self._selection_epsilon))
        sigma = (2 * host_number(self._measurement_budget)) ** -0.5
        return law.event(sigma, microbatched=self.microbatch_size > 1)


def host_number(variable: keras.Variable) -> int | float:
    """Returns a scalar variable as a Python number, outside of graphs."""
    return keras.ops.convert_to_numpy(variable.value).item()
