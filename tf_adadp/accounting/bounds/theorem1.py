"""Computes the Rényi bound of Theorem 1 of the ADADP paper, and composes it.

Theorem 1 of Xu, Shi, Liu, Zhao and Chen, "An Adaptive and Fast Convergent Approach to
Differentially Private Deep Learning" (INFOCOM 2020), applies the bound of Wang, Balle and
Kasiviswanathan (`rdp_wang_theorem27`) to the Gaussian mechanism on a random
subset, without the caps of the single terms. It is printed with three different B's and a bracket
that closes too early; the form below is the one that holds.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tf_adadp.accounting.bounds.base import BoundAccountant
from tf_adadp.accounting.bounds.log_space import (
    LEAST_NOISE_MULTIPLIER,
    log_absolute_moments,
    log_second_factor,
    rdp_of_expansion,
    whole_orders,
)
from tf_adadp.utils.checks import check_delta, check_number, check_sampling_probability

THEOREM1_ORDERS = tuple(range(2, 65))


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
      ValueError: an argument is out of range, or an order is not a whole number in 2..64.

    Source: module docstring.

    Example:
        >>> rdp = accounting.rdp_theorem1(1.1, sampling_probability=0.01, orders=[2, 4])
        >>> rdp.round(5).tolist()
        [0.00046, 0.00098]
    """
    sigma = check_number("noise_multiplier", noise_multiplier, above=0)
    q = check_sampling_probability(sampling_probability)
    alphas, is_scalar = whole_orders(orders, THEOREM1_ORDERS[-1])
    if sigma < LEAST_NOISE_MULTIPLIER:
        rdp = np.full(len(alphas), np.inf)
    elif q == 0 or not len(alphas):
        rdp = np.zeros(len(alphas))
    else:
        moments = log_absolute_moments(sigma, THEOREM1_ORDERS[-1])
        rdp = rdp_of_expansion(alphas, np.append(log_second_factor(sigma**-2), moments), q)
    return float(rdp[0]) if is_scalar else rdp


def classical_epsilon(orders: Sequence[float], rdp: Sequence[float], delta: float) -> float:
    """Returns ε = min_α rdp(α) + log(1/δ)/(α−1): Mironov 2017, Proposition 3.

    All-zero rdp, where nothing was released, gives 0.
    """
    orders, rdp = np.asarray(orders), np.asarray(rdp)
    if not rdp.any():
        return 0.0
    return float(np.min(rdp - math.log(delta) / (orders - 1)))


def classical_delta(orders: Sequence[float], rdp: Sequence[float], epsilon: float) -> float:
    """Returns δ = min_α e^{(α−1)(rdp(α) − ε)}, at most 1: the same conversion solved for δ."""
    orders, rdp = np.asarray(orders), np.asarray(rdp)
    if not rdp.any():
        return 0.0
    return math.exp(min(0.0, float(np.min((orders - 1) * (rdp - epsilon)))))


class Theorem1Accountant(BoundAccountant):
    """A `dp_accounting` accountant with the paper's bound, orders and conversion to (ε, δ).

    `BoundAccountant` lists the supported events and their multipliers. Full samples (q = 1)
    cost as much as the Gaussian, which is less than Theorem 1 gives for q just below 1.

    It is looser than `dp_accounting.rdp.RdpAccountant`; it is here to state the paper's figures.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> accountant = accounting.Theorem1Accountant().compose(law.event(1.1), 1000)
        >>> round(accountant.get_epsilon(1e-5), 3)
        3.812
    """

    ORDERS = THEOREM1_ORDERS
    to_epsilon = staticmethod(classical_epsilon)
    to_delta = staticmethod(classical_delta)

    def sampled_rdp(self, noise_multiplier: float, sampling_probability: float) -> np.ndarray:
        """Returns Theorem 1 at the orders 2..64."""
        return rdp_theorem1(noise_multiplier, sampling_probability, self.ORDERS)

    def get_epsilon_and_optimal_order(self, target_delta: float) -> tuple[float, float]:
        """Returns ε at δ = target_delta and the order α at which it is reached."""
        orders = self.orders
        best = np.argmin(self.rdp - math.log(check_delta(target_delta)) / (orders - 1))
        return self.get_epsilon(target_delta), float(orders[best])
