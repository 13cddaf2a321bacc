"""Makes a `dp_accounting` accountant from a Rényi bound of the subsampled Gaussian mechanism."""

import abc
from collections.abc import Callable
from typing import ClassVar

import dp_accounting
import numpy as np

from tf_adadp.utils.checks import check_delta, check_epsilon

_Relation = dp_accounting.NeighboringRelation
_RELATION_OF = {
    "PoissonSampledDpEvent": _Relation.ADD_OR_REMOVE_ONE,
    "SampledWithoutReplacementDpEvent": _Relation.REPLACE_ONE,
}


class BoundAccountant(dp_accounting.PrivacyAccountant):
    """Composes a Rényi bound that a subclass gives for sampled Gaussians.

    Supported: PoissonSampled(Gaussian) under ADD_OR_REMOVE_ONE,
    SampledWithoutReplacement(Gaussian) under REPLACE_ONE, both at the multiplier the Gaussian
    event states (noise over the sensitivity under that relation); Gaussian (rdp = α/(2σ²)),
    (xi, rho)-zCDP (xi + rho·α), NoOp, NonPrivate, and compositions of these.

    A subclass gives `ORDERS` (whole numbers ≥ 2), `sampled_rdp` for 0 ≤ q < 1, and the
    conversions `to_epsilon(orders, rdp, δ)` and `to_delta(orders, rdp, ε)`.
    """

    ORDERS: ClassVar[tuple[int, ...]]
    to_epsilon: ClassVar[Callable]
    to_delta: ClassVar[Callable]

    def __init__(self, neighboring_relation: _Relation = _Relation.ADD_OR_REMOVE_ONE):
        super().__init__(neighboring_relation)
        self._orders = np.array(self.ORDERS, dtype=np.float64)
        self._rdp = np.zeros_like(self._orders)

    @abc.abstractmethod
    def sampled_rdp(self, noise_multiplier: float, sampling_probability: float) -> np.ndarray:
        """Returns the bound at `ORDERS` for one Gaussian of σ > 0 on a lot of probability q < 1."""

    @property
    def orders(self) -> np.ndarray:
        """Returns the orders, float64."""
        return self._orders.copy()

    @property
    def rdp(self) -> np.ndarray:
        """Returns the Rényi bound composed so far, float64, one value per order."""
        return self._rdp.copy()

    def get_epsilon(self, target_delta: float) -> float:
        """Returns ε at δ = target_delta in (0, 1)."""
        return type(self).to_epsilon(self._orders, self._rdp, check_delta(target_delta))

    def get_delta(self, target_epsilon: float) -> float:
        """Returns δ at ε = target_epsilon ≥ 0."""
        return type(self).to_delta(self._orders, self._rdp, check_epsilon(target_epsilon))

    def _maybe_compose(self, event, count, do_compose):
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            return self._maybe_compose(event.event, event.count * count, do_compose)
        if isinstance(event, dp_accounting.ComposedDpEvent):
            errors = (self._maybe_compose(part, count, do_compose) for part in event.events)
            return next((error for error in errors if error is not None), None)
        reason = self._unsupported_reason(event)
        if reason is not None:
            return self.CompositionErrorDetails(invalid_event=event, error_message=reason)
        if do_compose:
            self._rdp += count * self._step_rdp(event)
        return None

    def _unsupported_reason(self, event) -> str | None:
        name = type(event).__name__
        if name in _RELATION_OF:
            if self._neighboring_relation is not _RELATION_OF[name]:
                return (
                    f"neighboring_relation must be {_RELATION_OF[name].name} for {name}, "
                    f"found {self._neighboring_relation.name}."
                )
            if not isinstance(event.event, dp_accounting.GaussianDpEvent):
                return f"the event inside {name} must be a GaussianDpEvent, found {event.event}."
        elif name not in ("NoOpDpEvent", "NonPrivateDpEvent", "GaussianDpEvent", "ZCDpEvent"):
            return f"{type(self).__name__} has no bound for {name}."
        return None

    def _step_rdp(self, event) -> np.ndarray:
        """Returns the bound of one supported event at every order."""
        name = type(event).__name__
        if name == "NoOpDpEvent":
            return np.zeros_like(self._orders)
        if name == "ZCDpEvent":
            return event.xi + event.rho * self._orders
        if name == "PoissonSampledDpEvent":
            q, gaussian = event.sampling_probability, event.event
        elif name == "SampledWithoutReplacementDpEvent":
            q, gaussian = event.sample_size / event.source_dataset_size, event.event
        else:
            q, gaussian = 1.0, event
        sigma = getattr(gaussian, "noise_multiplier", 0.0)  # a NonPrivate event has no noise
        if sigma == 0:
            return np.full_like(self._orders, np.inf)
        if q == 1:
            return self._orders / (2 * np.square(np.float64(sigma)))
        return self.sampled_rdp(sigma, q)
