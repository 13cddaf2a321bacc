"""Computes Rényi bounds of Wang, Balle and Kasiviswanathan for lots drawn without replacement.

"Subsampled Rényi Differential Privacy and Analytical Moments Accountant" (AISTATS 2019,
arXiv:1808.00087): Theorem 9 for any mechanism, Theorem 27 for those, here the Gaussian, whose
Rényi divergences of all orders belong to one pair of distributions.

Both bound, for neighbours that differ by replacing one record and q = n/N, the divergence of
(1−q)r + qp from (1−q)r + qp', where p, p', r are the outputs with the record, with its replacement
and without either, pairwise replace-one neighbours. Its moment of order α expands into
1 + Σ_{j≥2} C(α,j) q^j E_μ[((p−p')/μ)^j], μ = (1−q)r + qp', and every E_μ is at most the largest
ternary |χ|^j-divergence E_r[(|p−p'|/r)^j], which the two theorems bound.
"""

import functools
import math
from collections.abc import Callable, Iterable

import numpy as np

from tf_adadp.accounting.bounds.base import BoundAccountant
from tf_adadp.accounting.bounds.conversion import improved_delta, improved_epsilon
from tf_adadp.accounting.bounds.log_space import (
    LEAST_NOISE_MULTIPLIER,
    log_absolute_moments,
    log_expm1,
    log_second_factor,
    rdp_of_expansion,
    whole_orders,
)
from tf_adadp.utils.checks import check_epsilon, check_number, check_sampling_probability

GREATEST_ORDER = 512

# For less noise B(l) is its last term to all digits, 4√(B·B) exceeds the cap for every j.
_CAPS_ALONE = 0.01

# Orders of the accountants: those whole ones that dp_accounting's RdpAccountant reads as well, so
# that its ε for Poisson lots, at a smaller bound, cannot be larger.
WANG_ORDERS = (*range(2, 64), 128, 256, GREATEST_ORDER)


def rdp_wang_theorem9(
    rdp: Callable[[np.ndarray], np.ndarray],
    sampling_probability: float,
    orders: int | Iterable[int],
    pure_epsilon: float = math.inf,
) -> float | np.ndarray:
    """Returns Theorem 9: the Rényi bound of ANY mechanism on lots drawn without replacement.

        ε'(α) = 1/(α−1) · log(1 + q² C(α,2) min{4(e^{ε(2)} − 1), e^{ε(2)} min{2, (e^{ε(∞)} − 1)²}}
                                + Σ_{j=3..α} q^j C(α,j) e^{(j−1)ε(j)} min{2, (e^{ε(∞)} − 1)^j})

    Guarantee: an upper bound for lots of fixed size n = qN, drawn without replacement,
    replace-one neighbours, where ε(·) bounds the mechanism's own Rényi divergence under
    replace-one. With the Gaussian's ε(j) = j/(2σ²) and ε(∞) = ∞ it also bounds Poisson lots under
    add-or-remove-one, term by term, as Theorem 1 does.

    Args:
      rdp: j ↦ ε(j) for a float64 array of whole orders ≥ 2, returning as many numbers ≥ 0, ∞
        allowed. It is called once, with every order from 2 to the largest asked for.
      sampling_probability: q in [0, 1].
      orders: one order α or several, each a whole number in 2..512.
      pure_epsilon: ε(∞), the mechanism's pure ε; ∞ for one that has none, as the Gaussian.

    Returns:
      A float for a single order, else a float64 array [len(orders)]. At q = 1, ε(α) itself.

    Raises:
      ValueError: an argument is out of range, or `rdp` returns anything but numbers ≥ 0.

    Example:
        >>> def gaussian(orders):
        ...     return orders / (2 * 1.1**2)
        ...
        >>> rdp = accounting.rdp_wang_theorem9(gaussian, sampling_probability=0.01, orders=[2, 4])
        >>> rdp.round(5).tolist()
        [0.00046, 0.00095]
    """
    q = check_sampling_probability(sampling_probability)
    alphas, is_scalar = whole_orders(orders, GREATEST_ORDER)
    if pure_epsilon != math.inf:
        pure_epsilon = check_epsilon(pure_epsilon, "pure_epsilon")
    bound = np.zeros(len(alphas))
    if q > 0 and len(alphas):
        j = np.arange(2.0, alphas.max() + 1)
        base = np.asarray(rdp(j), dtype=np.float64)
        if base.shape != j.shape or not np.all(base >= 0):
            raise ValueError("rdp must return one number ≥ 0 for every order it is given.")
        if q == 1:
            bound = base[alphas - 2]
        else:
            log_ratio = log_expm1(pure_epsilon) if pure_epsilon < math.inf else math.inf
            factors = (j - 1) * base + np.minimum(math.log(2), j * log_ratio)
            factors[0] = min(factors[0], log_second_factor(base[0]))
            bound = rdp_of_expansion(alphas, factors, q)
    return float(bound[0]) if is_scalar else bound


def rdp_wang_theorem27(
    noise_multiplier: float,
    sampling_probability: float,
    orders: int | Iterable[int],
) -> float | np.ndarray:
    """Returns Theorem 27 for the Gaussian, each term at most that of Theorem 9.

        ε(α) = 1/(α−1) · log(1 + q² C(α,2) min{4(e^{1/σ²} − 1), 2e^{1/σ²}}
                 + Σ_{j=3..α} q^j C(α,j) min{4√(B(2⌈j/2⌉) B(2⌊j/2⌋)), 2e^{j(j−1)/(2σ²)}})

    B as in `rdp_theorem1`, which is this without the second entry of the minimum. The factor 4:
    where r lies outside of [p, p'], |p−p'| is at most |p−r| or |p'−r|; where p' < r < p,
    (p−p')^j/r^{j−1} ≤ (p−p')^j/p'^{j−1}; and the same with p and p' exchanged: four binary
    |χ|^j-divergences in all.

    The B's are exact. `dp_accounting` finds them by differences of floats, which for σ ≥ 50 are
    wrong by any factor, mostly too large, some too small; and has none above α = 256.

    Guarantee: as `rdp_theorem1`: fixed-size lots, replace-one, σ over the replace-one sensitivity
    (half of σ* of a clipped sum); and Poisson lots, add-or-remove-one, σ = σ*.

    Args:
      noise_multiplier: σ > 0.
      sampling_probability: q in [0, 1].
      orders: one order α or several, each a whole number in 2..512.

    Returns:
      A float for a single order, else a float64 array [len(orders)]. Infinite for σ < 1e-7; at
      q = 1 the Gaussian's own α/(2σ²).

    Raises:
      ValueError: an argument is out of range.

    Example:
        >>> rdp = accounting.rdp_wang_theorem27(1.1, sampling_probability=0.01, orders=[2, 4])
        >>> rdp.round(5).tolist()
        [0.00046, 0.00095]
    """
    sigma = check_number("noise_multiplier", noise_multiplier, above=0)
    q = check_sampling_probability(sampling_probability)
    alphas, is_scalar = whole_orders(orders, GREATEST_ORDER)
    if sigma < LEAST_NOISE_MULTIPLIER:
        bound = np.full(len(alphas), np.inf)
    elif q == 1:
        bound = alphas / (2 * sigma**2)
    elif q == 0 or not len(alphas):
        bound = np.zeros(len(alphas))
    else:
        bound = rdp_of_expansion(alphas, _gaussian_factors(sigma)[: alphas.max() - 1], q)
    return float(bound[0]) if is_scalar else bound


@functools.lru_cache(maxsize=64)
def _gaussian_factors(sigma: float) -> np.ndarray:
    """Returns the logarithm of the factor of C(α,j) q^j for j = 2..512."""
    j = np.arange(3.0, GREATEST_ORDER + 1)
    capped = math.log(2) + j * (j - 1) / (2 * sigma**2)
    if sigma > _CAPS_ALONE:
        capped = np.minimum(capped, log_absolute_moments(sigma, GREATEST_ORDER))
    factors = np.append(log_second_factor(sigma**-2), capped)
    factors.flags.writeable = False
    return factors


class _WangAccountant(BoundAccountant):
    """Holds orders and conversion of both theorems."""

    ORDERS = WANG_ORDERS
    to_epsilon = staticmethod(improved_epsilon)
    to_delta = staticmethod(improved_delta)


class WangTheorem9Accountant(_WangAccountant):
    """A `dp_accounting` accountant with Theorem 9 of Wang et al. for the Gaussian.

    Orders `WANG_ORDERS`; conversion as in `dp_accounting.rdp.RdpAccountant`. For the events and
    their noise multipliers see `BoundAccountant`.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> accountant = accounting.WangTheorem9Accountant().compose(law.event(1.1), 1000)
        >>> round(accountant.get_epsilon(1e-5), 3)
        3.19
    """

    def sampled_rdp(self, noise_multiplier: float, sampling_probability: float) -> np.ndarray:
        """Returns Theorem 9 with the Gaussian's own ε(j) = j/(2σ²)."""
        if noise_multiplier < LEAST_NOISE_MULTIPLIER:
            return np.full(len(self.ORDERS), np.inf)
        return rdp_wang_theorem9(
            lambda j: j / (2 * noise_multiplier**2), sampling_probability, self.ORDERS
        )


class WangTheorem27Accountant(_WangAccountant):
    """A `dp_accounting` accountant with Theorem 27: the tightest bound here for fixed-size lots.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> accountant = accounting.WangTheorem27Accountant().compose(law.event(1.1), 1000)
        >>> round(accountant.get_epsilon(1e-5), 3)
        3.19
    """

    def sampled_rdp(self, noise_multiplier: float, sampling_probability: float) -> np.ndarray:
        """Returns Theorem 27, capped."""
        return rdp_wang_theorem27(noise_multiplier, sampling_probability, self.ORDERS)
