"""Computes the cost of further releases after those of a ledger."""

from collections.abc import Callable

import dp_accounting

from tf_adadp.accounting.accountants import Composition, check_accountant, is_non_private_key
from tf_adadp.accounting.composing import check_one_statement, compose, considered
from tf_adadp.accounting.entry import LedgerEntry
from tf_adadp.accounting.filters import LedgerBudget, RenyiFilter
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.accounting.planning import largest_count, least_noise_multiplier
from tf_adadp.utils.checks import check_delta, check_instance, check_integer, check_target_epsilon


class Outlook:
    """Plans on top of a ledger; the part of `PrivacyLedger` that records nothing.

    Attributes:
      entries, unknown_reasons, budgets: see `PrivacyLedger`, which defines them.
    """

    entries: tuple[LedgerEntry, ...]
    unknown_reasons: tuple[str, ...]
    budgets: tuple[LedgerBudget, ...]

    def check_adds_up(self, event: dp_accounting.DpEvent, law: SamplingLaw) -> None:
        """Refuses a release that no ε could be reported for together with those recorded here.

        Raises:
          ValueError: their units, or neighbouring relations, differ, and ε is neither infinite nor
            refused anyway, for an unknown sampling law.
        """
        entries = (*self.entries, considered(event, 1, law))
        if any(is_non_private_key(entry.key) for entry in entries):
            return
        if not any(entry.law and entry.law.unknown_reason for entry in entries):
            check_one_statement(entries)

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
        release = considered(extra_event, count, law, neighboring_relation)
        return self._analyse((*self.entries, release), delta).epsilon(delta, accountant)

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
        release = considered(event, 1, law, neighboring_relation)
        spent, one = self._spent_and(release, delta), compose((release,), self.unknown_reasons)
        return largest_count(spent, one, target_epsilon, delta, accountant)

    def calibrate_noise_multiplier(
        self,
        target_epsilon: float,
        delta: float,
        law: SamplingLaw,
        steps: int,
        accountant: str = "rdp",
        step: Callable[[float], dp_accounting.DpEvent] | None = None,
    ) -> float:
        """Returns the least σ* for which `steps` more steps keep ε at δ within target_epsilon.

        Recorded releases are counted. The result is conservative, within 1e-3 of the target,
        as `accounting.calibrate_noise_multiplier`, which this is for an empty ledger and Poisson
        lots.

        Args:
          target_epsilon: ε > 0 for everything together.
          delta, accountant: as `epsilon`.
          law: how the lots of these steps are sampled.
          steps: how many, ≥ 1.
          step: σ* ↦ the event of one step; None: `law.event`.

        Raises:
          ValueError: as `add` and `epsilon`; the budget is already spent; no noise is enough.
        """
        target_epsilon = check_target_epsilon(target_epsilon)
        delta = check_delta(delta)
        steps = check_integer("steps", steps, at_least=1)
        check_instance("law", law, SamplingLaw, "a sampling law", wrong_type=ValueError)
        step = step or law.event
        spent = self._spent_and(considered(step(1.0), steps, law), delta)
        return least_noise_multiplier(spent, step, steps, target_epsilon, delta, accountant)

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
        spent = self._spent_and(considered(event, 1, law, neighboring_relation), delta)
        for running in self.budgets[-1:]:
            filter = running.filter
            promised = filter.epsilon, filter.delta, filter.neighboring_relation
            if promised == (target_epsilon, delta, spent.relation):
                return filter
        return RenyiFilter.for_event(event, target_epsilon, delta, spent)

    def remaining_under(self, budget: RenyiFilter, event: dp_accounting.DpEvent) -> int:
        """Returns how many more releases of `event` a filter lets pass; 0 if history was lost."""
        try:
            spent = compose(self.entries, self.unknown_reasons, budget.neighboring_relation)
        except ValueError:
            return 0
        return budget.remaining(spent, event)

    def _analyse(self, entries: tuple[LedgerEntry, ...], delta: float | None = None) -> Composition:
        raise NotImplementedError

    def _spent_and(self, release: LedgerEntry, delta: float) -> Composition:
        """Returns the releases so far, after checking that the release can be added to them."""
        entries = self.entries
        both = self._analyse((*entries, release), delta)  # raises if they do not add up
        return compose(entries, self.unknown_reasons, both.relation)
