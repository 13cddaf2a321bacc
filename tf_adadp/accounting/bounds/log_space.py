"""Serves the Rényi bounds of subsampled mechanisms, in log space, so that no term overflows."""

import decimal
import functools
import math
from collections.abc import Iterable
from decimal import Decimal

import numpy as np
from scipy.special import gammaln, logsumexp

from tf_adadp.utils.checks import check_integer

# Below this, exponents leave the decimal range and squares soon underflow. ε per step is beyond
# 1e13 there: infinite will do.
LEAST_NOISE_MULTIPLIER = 1e-7

# Digits kept after cancellation. The result is a double (16 digits); the rest is margin.
_DIGITS = 40


def whole_orders(orders: int | Iterable[int], greatest: int) -> tuple[np.ndarray, bool]:
    """Returns orders as an int array [k], and whether one was given. Integral floats are allowed.

    Raises:
      ValueError: an order is not a whole number in 2..greatest.
    """

    def order(value) -> int:
        if isinstance(value, float | np.floating) and value == value // 1:
            value = int(value)
        wanted = f"whole numbers from 2 to {greatest}"
        return check_integer("orders", value, wanted, at_least=2, at_most=greatest)

    is_scalar = np.ndim(orders) == 0
    alphas = [order(value) for value in ([orders] if is_scalar else orders)]
    return np.array(alphas, dtype=np.int64), is_scalar


def log_expm1(x: float) -> float:
    """Returns log(e^x − 1) for x ≥ 0, without overflow; −∞ at 0, ∞ at ∞."""
    with np.errstate(divide="ignore"):
        return float(x + np.log(-np.expm1(-x)))


def log_second_factor(rdp2: float) -> float:
    """Returns log min{4(e^{ε(2)} − 1), 2e^{ε(2)}}, the j = 2 factor of all bounds; rdp2 = ε(2)."""
    return min(math.log(4) + log_expm1(rdp2), math.log(2) + rdp2)


def rdp_of_expansion(orders: np.ndarray, log_factors: np.ndarray, q: float) -> np.ndarray:
    """Returns 1/(α−1)·log(1 + Σ_{j=2..α} C(α,j) q^j e^{log_factors[j−2]}), float64 [len(orders)].

    Relative error near 1e-12 for orders up to 512; q > 0.
    """
    j = np.arange(2, len(log_factors) + 2)
    alphas = orders[:, None]
    log_choose = gammaln(alphas + 1) - gammaln(j + 1) - gammaln(np.maximum(alphas - j, 0) + 1)
    terms = np.where(j <= alphas, log_choose + (j * math.log(q) + log_factors), -np.inf)
    log_sum = logsumexp(terms, axis=1)
    return np.logaddexp(0.0, log_sum) / (orders - 1)


@functools.lru_cache(maxsize=256)
def log_even_differences(noise_multiplier: float, greatest: int) -> np.ndarray:
    """Returns log B(l) for even l = 2, 4, …, the last ≥ greatest; float64, entry l//2 − 1.

        B(l) = Σ_{i=0..l} (−1)^i C(l, i) e^{i(i−1)/(2σ²)} = E[(p/q − 1)^l] > 0

    for the densities p of N(1, σ²) and q of N(0, σ²): the l-th forward difference at 0 of
    i ↦ e^{i(i−1)/(2σ²)}. It is near l!!·σ^{−l} for large σ, where single terms reach 10^150: at
    σ = 50 the sum for l = 64 loses about a hundred digits, for l = 512 five hundred. So the
    table of differences is made in decimal arithmetic, and the precision raised until every
    result stands clear of its rounding error. Takes about 0.1 s for 512.
    """
    greatest += greatest % 2
    digits = 2 * _DIGITS + greatest
    while True:
        # The widest exponent range: e^{i(i−1)/(2σ²)} has thousands of digits before the point.
        context = decimal.Context(prec=digits, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
        with decimal.localcontext(context):
            base = (1 / Decimal(noise_multiplier) ** 2).exp()
            exponentials, power = [Decimal(1)], Decimal(1)  # e^{i(i−1)/(2σ²)} and e^{i/σ²}
            for _ in range(greatest):
                exponentials.append(exponentials[-1] * power)
                power *= base
            row, logs = exponentials, []
            for order in range(1, greatest + 1):
                row = [upper - lower for lower, upper in zip(row, row[1:], strict=False)]
                if order % 2:
                    continue
                # 2^l terms, the largest e^{l(l−1)/(2σ²)}, each with a few hundred roundings.
                error = 2**order * exponentials[order] * Decimal(10) ** (_DIGITS - digits)
                if not row[0] > error:
                    break
                logs.append(row[0])
            else:
                with decimal.localcontext(decimal.Context(prec=_DIGITS, Emax=decimal.MAX_EMAX)):
                    result = np.array([float(value.ln()) for value in logs])
                result.flags.writeable = False
                return result
        digits *= 2


def log_absolute_moments(noise_multiplier: float, greatest: int) -> np.ndarray:
    """Returns log 4√(B(2⌊j/2⌋) B(2⌈j/2⌉)) for j = 3..greatest, float64 [greatest − 2].

    By Cauchy–Schwarz e^{…} is at least 4 E|p/q − 1|^j, p and q as in `log_even_differences`.
    """
    logs = log_even_differences(noise_multiplier, greatest)
    j = np.arange(3, greatest + 1)
    return math.log(4) + (logs[j // 2 - 1] + logs[(j + 1) // 2 - 1]) / 2
