"""The Rényi bound of Theorem 1 of the ADADP paper, and an accountant that composes it.

Theorem 1 of Xu, Shi, Liu, Zhao and Chen, "An Adaptive and Fast Convergent Approach to
Differentially Private Deep Learning" (INFOCOM 2020), applies the bound of Wang, Balle and
Kasiviswanathan, "Subsampled Rényi Differential Privacy and Analytical Moments Accountant"
(arXiv:1808.00087, Theorem 27), to the Gaussian mechanism on a random subset. It is printed with
three different B's and a bracket that closes too early; the form below is the one that holds.
"""

import decimal
import functools
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal

import dp_accounting
import numpy as np

from tf_adadp.accounting import _checks

_Relation = dp_accounting.NeighboringRelation
THEOREM1_ORDERS = tuple(range(2, 65))

# Below this, exponents leave the decimal range and squares soon underflow. ε per step is beyond
# 1e13 there: infinite will do.
LEAST_NOISE_MULTIPLIER = 1e-7

# Digits kept after cancellation. The result is a double (16 digits); the rest is margin.
_DIGITS = 40


def _context(digits: int) -> decimal.Context:
    # The widest exponent range: e^{i(i-1)/(2σ²)} has thousands of digits before the point.
    return decimal.Context(prec=digits, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)


@functools.lru_cache(maxsize=256)
def _alternating_sums(noise_multiplier: float) -> dict[int, Decimal]:
    """B(l) = Σ_i (−1)^i C(l, i) e^{i(i−1)/(2σ²)} for even l in 2..64, to about `_DIGITS` digits.

    B(l) = E[(p/q − 1)^l] > 0 for the densities p of N(1, σ²) and q of N(0, σ²): near σ^{-l} for
    large σ, where single terms reach 10^18. At σ = 50 the sum for l = 64 loses about a hundred
    digits. So the sum is done in decimal arithmetic, and the precision raised until the result
    stands clear of the largest term's rounding error.
    """
    digits = 2 * _DIGITS
    while True:
        with decimal.localcontext(_context(digits)):
            base = (1 / Decimal(noise_multiplier) ** 2).exp()
            exponentials, power = [Decimal(1)], Decimal(1)  # e^{i(i−1)/(2σ²)} and e^{i/σ²}
            for _ in range(max(THEOREM1_ORDERS)):
                exponentials.append(exponentials[-1] * power)
                power *= base
            sums, resolved = {}, True
            for order in range(2, max(THEOREM1_ORDERS) + 1, 2):
                terms = [math.comb(order, i) * exponentials[i] for i in range(order + 1)]
                total = sum(term if i % 2 == 0 else -term for i, term in enumerate(terms))
                # Each term carries at most a few thousand roundings of its last digit.
                resolved &= total > max(terms) * Decimal(10) ** (_DIGITS - digits)
                sums[order] = total
        if resolved:
            return sums
        digits *= 2


def _log1p(total: Decimal) -> float:
    """log(1 + total) in double precision for total ≥ 0 of any size."""
    if total < Decimal("1e300"):
        return math.log1p(float(total))
    return float(total.ln())


def rdp_theorem1(
    noise_multiplier: float,
    sampling_probability: float,
    orders: int | Iterable[int],
) -> float | np.ndarray:
    """Returns Theorem 1's bound on the Rényi divergence of one step, exact to double precision.

        ε(α) = 1/(α−1) · log(1 + q² C(α,2) min{4(e^{1/σ²} − 1), 2 e^{1/σ²}}
                               + 4 Σ_{j=3..α} q^j C(α,j) √(B(2⌈j/2⌉) B(2⌊j/2⌋)))
        B(l) = Σ_{i=0..l} (−1)^i C(l,i) e^{i(i−1)/(2σ²)}

    Guarantee: an upper bound on the step's Rényi divergence of order α for
      * lots of fixed size drawn without replacement, replace-one neighbours, where σ is the noise
        over the replace-one sensitivity: half the noise multiplier σ* of a clipped sum; and
      * Poisson lots, add-or-remove-one neighbours, σ = σ*: every term of the Poisson expansion
        Σ_j C(α,j) q^j E[(p/q−1)^j] is at most the matching term here, by Cauchy–Schwarz.

    Args:
      noise_multiplier: σ > 0.
      sampling_probability: q in [0, 1].
      orders: one order α or several, each a whole number in 2..64 (the paper's grid).

    Returns:
      A float for a single order, else a float64 array [len(orders)] in the order given. Infinite
      for σ < 1e-7.

    Raises:
      ValueError: an argument is out of range, or an order is no whole number in 2..64.

    Source: module docstring.
    """
    sigma = _checks.real("noise_multiplier", noise_multiplier, "positive", lambda x: x > 0)
    q = _checks.sampling_probability(sampling_probability)
    is_scalar = np.ndim(orders) == 0
    alphas = [_order(order) for order in ([orders] if is_scalar else orders)]
    if not alphas:
        return np.zeros(0)
    if sigma < LEAST_NOISE_MULTIPLIER:
        return math.inf if is_scalar else np.full(len(alphas), np.inf)

    sums = _alternating_sums(sigma)
    with decimal.localcontext(_context(_DIGITS)):
        exact_q = Decimal(q)
        growth = (1 / Decimal(sigma) ** 2).exp()
        # The factor of C(α, j), for j = 2 upwards; the same for every order α.
        factors = [exact_q**2 * min(4 * (growth - 1), 2 * growth)]
        for j in range(3, max(alphas) + 1):
            root = (sums[2 * ((j + 1) // 2)] * sums[2 * (j // 2)]).sqrt()
            factors.append(4 * exact_q**j * root)
        rdp = [
            _log1p(sum(math.comb(alpha, j) * factors[j - 2] for j in range(2, alpha + 1)))
            / (alpha - 1)
            for alpha in alphas
        ]
    return rdp[0] if is_scalar else np.array(rdp)


def _order(value) -> int:
    """One order as an int; an integral float such as 2.0 passes."""
    order = int(value) if isinstance(value, float | np.floating) and value == value // 1 else value
    return _checks.integer("orders", order, "whole numbers from 2 to 64", lambda x: 2 <= x <= 64)


def classical_epsilon(orders: Sequence[float], rdp: Sequence[float], delta: float) -> float:
    """ε = min_α rdp(α) + log(1/δ)/(α−1): Mironov, "Rényi Differential Privacy", Proposition 3.

    All-zero rdp, where nothing was released, gives 0.
    """
    orders, rdp = np.asarray(orders), np.asarray(rdp)
    if not rdp.any():
        return 0.0
    return float(np.min(rdp - math.log(delta) / (orders - 1)))


def classical_delta(orders: Sequence[float], rdp: Sequence[float], epsilon: float) -> float:
    """δ = min_α e^{(α−1)(rdp(α) − ε)}, at most 1: the same conversion solved for δ."""
    orders, rdp = np.asarray(orders), np.asarray(rdp)
    if not rdp.any():
        return 0.0
    return math.exp(min(0.0, float(np.min((orders - 1) * (rdp - epsilon)))))


class Theorem1Accountant(dp_accounting.PrivacyAccountant):
    """A `dp_accounting` accountant with the paper's bound, orders and conversion to (ε, δ).

    Supported: PoissonSampled(Gaussian) under ADD_OR_REMOVE_ONE,
    SampledWithoutReplacement(Gaussian) under REPLACE_ONE, both at the multiplier the Gaussian
    event states (noise over the sensitivity under that relation); Gaussian (rdp = α/(2σ²)),
    (xi, rho)-zCDP (xi + rho·α), NoOp, NonPrivate, and compositions of these. Full samples (q = 1)
    cost what the Gaussian costs, which is less than Theorem 1 says of q just below 1.

    It is looser than `dp_accounting.rdp.RdpAccountant`; it is here to state the paper's figures.
    """

    def __init__(self, neighboring_relation: _Relation = _Relation.ADD_OR_REMOVE_ONE):
        super().__init__(neighboring_relation)
        self._orders = np.array(THEOREM1_ORDERS, dtype=np.float64)
        self._rdp = np.zeros_like(self._orders)

    @property
    def orders(self) -> np.ndarray:
        """The orders 2..64, float64 [63]."""
        return self._orders.copy()

    @property
    def rdp(self) -> np.ndarray:
        """The Rényi bound composed so far, float64 [63], one value per order."""
        return self._rdp.copy()

    def get_epsilon(self, target_delta: float) -> float:
        """Returns ε at δ = target_delta in (0, 1) by the classical conversion."""
        return classical_epsilon(self._orders, self._rdp, _checks.delta(target_delta))

    def get_epsilon_and_optimal_order(self, target_delta: float) -> tuple[float, float]:
        """Returns ε at δ = target_delta and the order α at which it is reached."""
        best = np.argmin(self._rdp - math.log(_checks.delta(target_delta)) / (self._orders - 1))
        return self.get_epsilon(target_delta), float(self._orders[best])

    def get_delta(self, target_epsilon: float) -> float:
        """Returns δ at ε = target_epsilon ≥ 0 by the classical conversion."""
        return classical_delta(self._orders, self._rdp, _checks.epsilon(target_epsilon))

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
        sampled = {
            "PoissonSampledDpEvent": _Relation.ADD_OR_REMOVE_ONE,
            "SampledWithoutReplacementDpEvent": _Relation.REPLACE_ONE,
        }
        name = type(event).__name__
        if name in sampled:
            if self._neighboring_relation is not sampled[name]:
                return (
                    f"neighboring_relation must be {sampled[name].name} for {name}, "
                    f"found {self._neighboring_relation.name}."
                )
            if not isinstance(event.event, dp_accounting.GaussianDpEvent):
                return f"the event inside {name} must be a GaussianDpEvent, found {event.event}."
        elif name not in ("NoOpDpEvent", "NonPrivateDpEvent", "GaussianDpEvent", "ZCDpEvent"):
            return f"Theorem 1 says nothing about {name}."
        return None

    def _step_rdp(self, event) -> np.ndarray:
        """The bound of one supported event at every order."""
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
        return rdp_theorem1(sigma, q, THEOREM1_ORDERS)
