"""Implements a privacy filter: a budget for mechanisms whose noise depends on earlier results."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import dp_accounting
import numpy as np

from tf_adadp.accounting import _search
from tf_adadp.accounting.accountants import Composition, _event_rdp
from tf_adadp.accounting.events import event_key
from tf_adadp.utils.checks import check_delta, check_instance, check_integer, check_target_epsilon

# Bound on the rounding error of sums of floats, relative to the budget.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class RenyiFilter:
    """Allows releases while their Rényi bounds at ONE order add up to at most a budget.

        Σ_t rdp_t(α) ≤ B,    B = ε − log(1 − 1/α) + (log δ + log α)/(α − 1)

    Guarantee: if `has_room` is called before every release, and no release is made after False,
    then all releases together are (ε, δ)-differentially private under `neighboring_relation`. The
    outcomes of earlier releases may decide the noise and sampling of the next one, and the number
    of releases (Feldman and Zrnic 2021, "Individual Privacy Accounting via a
    Rényi Filter", Theorem 3.1; conversion of Canonne, Kamath and Steinke 2020, Proposition 12).

    Choose α and B before the first release. The proof does not hold for a filter that takes the
    best of several orders at the end. For the same reason only (ε, δ) is a guarantee for such a
    run, and not the ε that a ledger computes for it at its own best order.

    Args:
      order: α > 1, one of the orders of dp_accounting's RdpAccountant.
      epsilon, delta: the budget, ε > 0 and δ in (0, 1).
      neighboring_relation: that of every release.

    Raises:
      ValueError: an argument is out of range, or the budget is below 0: at this order δ alone
        costs more than ε.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> ledger = dp.PrivacyLedger()
        >>> filter = ledger.budget_for(law.event(1.1), 2.0, 1e-5, law=law)
        >>> ledger.begin_budget(filter)
        >>> ledger.remaining_under(filter, law.event(1.1))
        1404
    """

    order: float
    epsilon: float
    delta: float
    neighboring_relation: dp_accounting.NeighboringRelation

    def __post_init__(self):
        object.__setattr__(self, "epsilon", check_target_epsilon(self.epsilon))
        object.__setattr__(self, "delta", check_delta(self.delta))
        if self.order not in _rdp(dp_accounting.NoOpDpEvent(), self.neighboring_relation)[0]:
            raise ValueError(f"order={self.order!r}: give one of RdpAccountant's orders.")
        if not self.budget > 0:
            raise ValueError(
                f"epsilon={self.epsilon} leaves no Rényi budget at order {self.order} and "
                f"delta={self.delta}."
            )

    @property
    def budget(self) -> float:
        """Returns B, the bound on the sum of Rényi divergences of this order."""
        return (self.epsilon - _epsilon_of_nothing(self.order, self.delta)) * (1 - _ROUNDING)

    def cost(self, event: dp_accounting.DpEvent) -> float:
        """Returns rdp(α) of one event; ∞ for one without privacy.

        Raises:
          ValueError: an event that the Rényi accountant cannot analyse.
        """
        return self._at_order(*_rdp(event, self.neighboring_relation))

    def cost_of(self, releases: Composition) -> float:
        """Returns the budget that a composition uses, Σ rdp(α) of its events; 0 for nothing.

        Raises:
          ValueError: an event that the Rényi accountant cannot analyse.
        """
        if not releases.charges:
            return 0.0
        return self._at_order(*releases._rdp("rdp"))

    def _at_order(self, orders, bound):
        return float(bound[list(orders).index(self.order)])

    def epsilon_of(self, releases: Composition) -> float:
        """Returns ε at δ of a composition by this order; above `epsilon` it exceeds the budget."""
        return releases.epsilon_at_order(self.order, self.delta)

    def remaining(self, spent: Composition, event: dp_accounting.DpEvent) -> int:
        """Returns how many more releases of `event` pass after `spent`; at most 2^53."""
        if self.epsilon_of(spent) > self.epsilon:
            return 0
        key = event_key(event)
        return _search.largest_count(
            lambda count: self.epsilon_of(spent.plus([(key, count)])), self.epsilon
        )

    def has_room(self, spent: float, events: Sequence[dp_accounting.DpEvent]) -> bool:
        """Tells whether `events`, one of each, fit after `spent`. False where spent is NaN."""
        for event in events:
            spent += self.cost(event)
        return spent <= self.budget

    @classmethod
    def for_event(
        cls, event: dp_accounting.DpEvent, epsilon: float, delta: float, spent: Composition
    ) -> "RenyiFilter":
        """Returns the filter whose order lets the most releases of one event pass after `spent`.

        If only releases of this event follow, it stops at the same number of releases as the best
        order of all, because it is the best order for that number.

        Raises:
          ValueError: epsilon or delta is out of range; no order has a budget.
        """
        orders, cost = _rdp(event, spent.relation)
        before = spent._rdp("rdp")[1] if spent.charges else np.zeros(len(orders))
        candidates = []
        for i, candidate in cls._at_every_order(orders, epsilon, delta, spent.relation):
            room = candidate.budget - before[i]
            if cost[i] == math.inf:  # of no use; ∞/∞ would be NaN, which max cannot order
                fits = -math.inf
            else:
                fits = room / cost[i] if cost[i] > 0 else math.copysign(math.inf, room)
            candidates.append((fits, candidate))
        if not candidates:
            least = min(_epsilon_of_nothing(order, delta) for order in orders)
            raise ValueError(
                f"epsilon={epsilon} at delta={delta} is too small for Rényi accounting, which has "
                f"no budget below {least:.3g} at this delta: give a larger epsilon, or "
                'accountant="pld".'
            )
        return max(candidates, key=lambda pair: pair[0])[1]

    @classmethod
    def calibrate(
        cls,
        charges_at: Callable[[float], Iterable[tuple[dp_accounting.DpEvent, int]]],
        epsilon: float,
        delta: float,
        neighboring_relation: dp_accounting.NeighboringRelation,
    ) -> tuple[float, "RenyiFilter"]:
        """Finds the least noise with which a planned run fits the budget, and its filter.

        Args:
          charges_at: noise multiplier ↦ pairs (event, how often) of the planned run; its ε falls
            with the multiplier.
          epsilon, delta, neighboring_relation: see the class.

        Returns:
          (noise multiplier, the filter of the order at which this run costs least).

        Raises:
          ValueError: no noise is enough.
        """

        def planned(sigma: float) -> Composition:
            return Composition.of(charges_at(sigma), neighboring_relation)

        epsilon, delta = check_target_epsilon(epsilon), check_delta(delta)
        sigma = _search.smallest_noise_multiplier(
            lambda sigma: planned(sigma).epsilon(delta, "rdp"), epsilon
        )
        orders, spent = planned(sigma)._rdp("rdp")
        candidates = [
            (candidate.budget - spent[i], candidate)
            for i, candidate in cls._at_every_order(orders, epsilon, delta, neighboring_relation)
        ]
        left, best = max(candidates, key=lambda pair: pair[0], default=(-math.inf, None))
        if left < -1e-6 * epsilon:
            raise ValueError(
                f"epsilon={epsilon} at delta={delta} is too small for a Rényi filter: no order "
                "has a budget for the planned releases. Give a larger epsilon."
            )
        return sigma, best

    @classmethod
    def _at_every_order(cls, orders, epsilon, delta, relation):
        """Yields (place of the order, filter) for every order that has a budget."""
        epsilon, delta = check_target_epsilon(epsilon), check_delta(delta)
        for i, order in enumerate(orders):
            try:
                yield i, cls(float(order), epsilon, delta, relation)
            except ValueError:  # no budget at this order
                continue


def _epsilon_of_nothing(order, delta):
    """Returns ε of a Rényi divergence of 0: what the conversion from RDP costs by itself."""
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


@dataclasses.dataclass(frozen=True)
class LedgerBudget:
    """Holds a budget in a ledger.

    Attributes:
      filter: the `RenyiFilter`, fixed when the budget began.
      outside: the number of releases that the filter does not cover: made before it was fixed,
        under another budget, or although it had no room. If 0, the budget is a guarantee.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> ledger = dp.PrivacyLedger()
        >>> ledger.begin_budget(ledger.budget_for(law.event(1.1), 2.0, 1e-5, law=law))
        >>> ledger.budgets[0].filter.epsilon
        2.0
    """

    filter: RenyiFilter
    outside: int

    def __post_init__(self):
        check_instance("filter", self.filter, RenyiFilter, "a RenyiFilter", wrong_type=ValueError)
        object.__setattr__(self, "outside", check_integer("outside", self.outside, at_least=0))

    def plus(self, outside: int) -> "LedgerBudget":
        """Returns this budget with more releases that it does not cover."""
        return dataclasses.replace(self, outside=self.outside + outside)

    def to_config(self) -> dict[str, Any]:
        """Returns a JSON-able dict."""
        relation = self.filter.neighboring_relation.name
        return {
            "filter": {**dataclasses.asdict(self.filter), "neighboring_relation": relation},
            "outside": self.outside,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "LedgerBudget":
        """Builds the budget that `to_config` wrote; ValueError for anything else."""
        try:
            fields = dict(config["filter"])
            relation = dp_accounting.NeighboringRelation[fields.pop("neighboring_relation")]
            rest = {name: value for name, value in config.items() if name != "filter"}
            return cls(RenyiFilter(neighboring_relation=relation, **fields), **rest)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a budget has wrong fields: {error!r}.") from error


def _rdp(event, relation):
    return _event_rdp(event_key(event), relation, "rdp")
