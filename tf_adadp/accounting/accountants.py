"""Computes ε and δ of a composition of events, by one of several accountants.

"rdp" and "pld" are `dp_accounting`'s RdpAccountant and PLDAccountant, "theorem1",
"wang_theorem9" and "wang_theorem27" are `BoundAccountant`s of this package. Rényi bounds add up
over releases, so all but "pld" are read from a cached vector per distinct event: a reading takes
microseconds however many releases there were.
"""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Iterable

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

from tf_adadp.accounting.bounds.conversion import improved_delta, improved_epsilon
from tf_adadp.accounting.bounds.log_space import LEAST_NOISE_MULTIPLIER
from tf_adadp.accounting.bounds.theorem1 import Theorem1Accountant
from tf_adadp.accounting.bounds.wang import WangTheorem9Accountant, WangTheorem27Accountant
from tf_adadp.accounting.events import event_from_key, event_key, is_non_private, walk
from tf_adadp.utils.checks import check_choice

ACCOUNTANTS = ("rdp", "pld", "theorem1", "wang_theorem9", "wang_theorem27")
_Relation = dp_accounting.NeighboringRelation
_BOUNDS = {
    "theorem1": Theorem1Accountant,
    "wang_theorem9": WangTheorem9Accountant,
    "wang_theorem27": WangTheorem27Accountant,
}
# name: (accountant class, conversion to ε, conversion to δ)
_RENYI = {
    "rdp": (rdp.RdpAccountant, improved_epsilon, improved_delta),
    **{name: (bound, bound.to_epsilon, bound.to_delta) for name, bound in _BOUNDS.items()},
}

# A privacy loss distribution is a grid of step 1e-4 from about −ε to ε. Past this ε the grid's
# memory and time get out of hand, and no such ε means anything.
_MAX_PLD_EPSILON = 2000.0

# Relative difference of two sums of the same bounds, added in another order.
_ROUNDING = 1e-12


def check_accountant(name: str) -> str:
    """Returns `name` if it is a known accountant, else raises a ValueError that lists them."""
    return check_choice("accountant", name, ACCOUNTANTS)


@dataclasses.dataclass(frozen=True)
class Composition:
    """Holds counts of events on one data set under one neighbouring relation.

    Attributes:
      charges: pairs (canonical event, see `event_key`; how often it happened, ≥ 1), distinct.
      relation: the neighbouring relation. The multiplier in every event is noise over the
        sensitivity under THIS relation.
    """

    charges: tuple[tuple[str, int], ...]
    relation: dp_accounting.NeighboringRelation = _Relation.ADD_OR_REMOVE_ONE

    @classmethod
    def of(
        cls,
        counted_events: Iterable[tuple[dp_accounting.DpEvent, int]],
        relation: dp_accounting.NeighboringRelation = _Relation.ADD_OR_REMOVE_ONE,
    ) -> "Composition":
        """Builds a composition, adding up equal events and dropping zero counts."""
        return cls((), relation).plus((event_key(event), count) for event, count in counted_events)

    def plus(self, charges: Iterable[tuple[str, int]]) -> "Composition":
        """Returns this composition with further (canonical event, count) pairs."""
        counts = dict(self.charges)
        for key, count in charges:
            if count:
                counts[key] = counts.get(key, 0) + count
        return Composition(tuple(counts.items()), self.relation)

    def epsilon(self, delta: float, accountant: str) -> float:
        """Returns ε at δ in (0, 1); 0 for nothing, ∞ for anything non-private.

        Raises:
          ValueError: unknown accountant, or one that cannot analyse an event of this composition.
        """
        check_accountant(accountant)
        if not self.charges:
            return 0.0
        if self._is_non_private():
            return math.inf
        if accountant == "pld":
            return float(_pld_accountant(self).get_epsilon(delta))
        return float(_RENYI[accountant][1](*self._rdp(accountant), delta))

    def epsilon_at_order(self, order: float, delta: float) -> float:
        """Returns ε at δ by the Rényi bound of one order alone, as "rdp" converts it.

        Raises:
          ValueError: an order that the accountant does not know, or an event it cannot analyse.
        """
        if not self.charges:
            return 0.0
        if self._is_non_private():
            return math.inf
        orders, bound = self._rdp("rdp")
        chosen = orders == order
        if not chosen.any():
            raise ValueError(f"order={order!r}: give one of RdpAccountant's orders.")
        return float(_RENYI["rdp"][1](orders[chosen], bound[chosen], delta))

    def delta(self, epsilon: float, accountant: str) -> float:
        """Returns δ at a finite ε ≥ 0; 0 for nothing, 1 for anything non-private.

        Raises:
          ValueError: as `epsilon`.
        """
        check_accountant(accountant)
        if not self.charges:
            return 0.0
        if self._is_non_private():
            return 1.0
        if accountant == "pld":
            return float(_pld_accountant(self).get_delta(epsilon))
        return float(_RENYI[accountant][2](*self._rdp(accountant), epsilon))

    def costs_at_most(self, other: "Composition") -> bool:
        """Tells whether the "rdp" bound is at most that of the other composition, at every order.

        Everything that the accountant derives from a bound increases with it. So the other one may
        then be charged instead of this one, also inside an event that repeats it.

        Raises:
          ValueError: an event that the Rényi accountant cannot analyse.
        """
        if not self.charges or other._is_non_private():
            return True
        if not other.charges or self.relation is not other.relation or self._is_non_private():
            return False
        mine, theirs = self._rdp("rdp")[1], other._rdp("rdp")[1]
        return bool(np.all(mine <= theirs * (1 + _ROUNDING)))

    def _is_non_private(self) -> bool:
        return any(is_non_private_key(key) for key, _ in self.charges)

    def _rdp(self, accountant: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the orders and the composed Rényi bound at each."""
        vectors = [_event_rdp(key, self.relation, accountant) for key, _ in self.charges]
        counts = [count for _, count in self.charges]
        orders = vectors[0][0]
        return orders, sum(count * step for count, (_, step) in zip(counts, vectors, strict=True))


@functools.lru_cache(maxsize=1024)
def is_non_private_key(key: str) -> bool:
    """Applies `is_non_private` to an event in canonical form."""
    return is_non_private(event_from_key(key))


@contextlib.contextmanager
def _without_excluded_order_warnings():
    """Silences dp_accounting's log line for every order it leaves out: that order is charged ∞."""

    def keep(record: logging.LogRecord) -> bool:
        return "Excluding this order" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@functools.lru_cache(maxsize=1024)
def _event_rdp(
    key: str, relation: dp_accounting.NeighboringRelation, accountant: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the orders and the Rényi bound of one event, in about 20 ms."""
    event = event_from_key(key)
    renyi_accountant = _RENYI[accountant][0](neighboring_relation=relation)
    orders = renyi_accountant.orders
    if any(
        getattr(part, "noise_multiplier", 1.0) < LEAST_NOISE_MULTIPLIER for part in walk(event)
    ):  # squares that underflow: dp_accounting returns NaN, or never returns
        step = np.full(len(orders), np.inf)
    else:
        with np.errstate(over="ignore"), _without_excluded_order_warnings():
            step = _compose(renyi_accountant, event, 1, accountant).rdp
    # NaN or a negative bound is a failure of floating point, which the conversion would read as
    # ε = 0. An order that failed is left out.
    step = np.where(step >= 0, step, np.inf)
    step.flags.writeable = orders.flags.writeable = False
    return orders, step


@functools.lru_cache(maxsize=8)
def _pld_accountant(composition: Composition) -> pld.PLDAccountant:
    """Returns the PLD accountant of a composition; from a hundredth of a second to many seconds."""
    counted_events = [(event_from_key(key), count) for key, count in composition.charges]
    relation = composition.relation
    if relation is _Relation.REPLACE_ONE:
        # Some versions of the PLD accountant double the sensitivity under REPLACE_ONE. Our events
        # already state noise over the replace-one sensitivity, and a Gaussian of that multiplier
        # has one privacy loss distribution whatever the relation.
        for event, _ in counted_events:
            _require_unsampled_gaussian(event)
        relation = _Relation.ADD_OR_REMOVE_ONE
    _refuse_huge_grid(composition)
    accountant = pld.PLDAccountant(relation)
    for event, count in counted_events:
        _compose(accountant, event, count, "pld")
    return accountant


def _require_unsampled_gaussian(event: dp_accounting.DpEvent) -> None:
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        _require_unsampled_gaussian(event.event)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            _require_unsampled_gaussian(part)
    elif not isinstance(event, dp_accounting.GaussianDpEvent | dp_accounting.NoOpDpEvent):
        why = "under REPLACE_ONE only plain Gaussians are known."
        raise _cannot_analyse("pld", event, _Relation.REPLACE_ONE, why)


def exceeds_pld_grid(composition: Composition) -> bool:
    """Tells whether the PLD accountant's grid for these releases would be too large."""
    try:
        return composition.epsilon(1e-5, "rdp") > _MAX_PLD_EPSILON
    except ValueError:  # an event that only the PLD accountant knows
        return False


def _refuse_huge_grid(composition: Composition) -> None:
    if exceeds_pld_grid(composition):
        raise ValueError(
            f'accountant="pld" would need a grid up to epsilon beyond {_MAX_PLD_EPSILON:g}. Use '
            'accountant="rdp", or more noise.'
        )


def _compose(accountant, event: dp_accounting.DpEvent, count: int, name: str):
    try:
        return accountant.compose(event, count)
    except dp_accounting.UnsupportedEventError as error:
        raise _cannot_analyse(name, event, accountant.neighboring_relation, str(error)) from error


def _cannot_analyse(accountant: str, event: dp_accounting.DpEvent, relation, why: str):
    """Returns the error; it names accountants that can analyse the event."""
    kinds = {name: kind for name, (kind, *_) in _RENYI.items()}
    if relation is not _Relation.REPLACE_ONE:  # there it knows Gaussians, which the others do too
        kinds["pld"] = pld.PLDAccountant
    able = [
        f'"{name}"'
        for name, kind in kinds.items()
        if name != accountant and kind(neighboring_relation=relation).supports(event)
    ]
    advice = f"Use accountant={' or '.join(able)}" if able else "No accountant here can"
    return ValueError(f'accountant="{accountant}" cannot analyse {event}. {advice}. ({why})')
