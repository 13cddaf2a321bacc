"""Theorems 9 and 27 of Wang et al. against multiprecision, true divergences and dp_accounting."""

import functools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import rdp

from tf_adadp import accounting
from tf_adadp.accounting import rdp_theorem1, rdp_wang_theorem9, rdp_wang_theorem27
from tf_adadp.accounting.bounds.wang import WANG_ORDERS

REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


def gaussian(sigma):
    return lambda j: j / (2 * sigma**2)


@functools.cache
def exponentials(sigma, order):
    """e^{i(i−1)/(2σ²)} for i up to order, and B(l) by its alternating sum for even l."""
    powers = [
        mpmath.exp(mpmath.mpf(i * (i - 1)) / (2 * mpmath.mpf(sigma) ** 2)) for i in range(order + 2)
    ]
    b = {
        degree: mpmath.fsum((-1) ** i * math.comb(degree, i) * powers[i] for i in range(degree + 1))
        for degree in range(2, order + 2, 2)
    }
    return powers, b


def reference(sigma, q, order, theorem):
    """Both theorems as printed in their docstrings, at 1,000 digits."""
    with mpmath.workdps(1000):
        powers, b = exponentials(sigma, order)
        q = mpmath.mpf(q)
        total = q**2 * math.comb(order, 2) * min(4 * (powers[2] - 1), 2 * powers[2])
        for j in range(3, order + 1):
            term = 2 * powers[j]
            if theorem == 27:
                term = min(term, 4 * mpmath.sqrt(b[j - j % 2] * b[j + j % 2]))
            total += q**j * math.comb(order, j) * term
        return float(mpmath.log1p(total) / (order - 1))


@pytest.mark.parametrize("sigma", [0.3, 0.9, 4.0, 50.0, 1000.0])
@pytest.mark.parametrize("q", [1e-6, 0.01, 0.9])
def test_matches_1000_digits(sigma, q):
    orders = [2, 3, 4, 17, 64]
    for theorem, got in (
        (9, rdp_wang_theorem9(gaussian(sigma), q, orders)),
        (27, rdp_wang_theorem27(sigma, q, orders)),
    ):
        expected = [reference(sigma, q, order, theorem) for order in orders]
        np.testing.assert_allclose(got, expected, rtol=2e-12)


@pytest.mark.parametrize(("sigma", "q"), [(0.3, 0.9), (60.0, 0.5)])
def test_order_512_does_not_overflow(sigma, q):
    assert rdp_wang_theorem27(sigma, q, 512) == pytest.approx(
        reference(sigma, q, 512, 27), rel=1e-11
    )


def ternary_divergence(p, p_prime, r, sigma, q, order):
    """Rényi divergence of (1−q)r + qp from (1−q)r + qp', means given, by the trapezoid rule.

    Its error for analytic integrands falls as e^{−2π²σ²/h²}; h = σ/40.
    """
    x = np.arange(-40 * sigma, order + 40 * sigma, sigma / 40)

    def log_mixture(mean):
        def log_density(centre):
            return -((x - centre) ** 2) / (2 * sigma**2)

        return np.logaddexp(math.log1p(-q) + log_density(r), math.log(q) + log_density(mean))

    log_integrand = order * log_mixture(p) - (order - 1) * log_mixture(p_prime)
    total = np.logaddexp.reduce(log_integrand) + math.log(sigma / 40)
    return (total - math.log(sigma * math.sqrt(2 * math.pi))) / (order - 1)


@pytest.mark.parametrize("means", [(1, 0, 0), (0, 1, 0), (0.5, -0.5, 0), (1, 0, 0.5), (1, 1, 0)])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("q", [0.001, 0.1, 0.6])
def test_no_neighbours_diverge_by_more(means, sigma, q):
    """Outputs with the record, its replacement, and neither: pairwise one sensitivity apart."""
    for order in (2, 3, 7, 32):
        true = ternary_divergence(*means, sigma, q, order)
        slack = 1e-9 * true + 1e-12  # of the sum over 10^4 points
        assert true <= rdp_wang_theorem27(sigma, q, order) + slack
        assert true <= rdp_wang_theorem9(gaussian(sigma), q, order) + slack


def test_order_of_the_bounds():
    orders = range(2, 65)
    for sigma in (0.4, 1.0, 6.0, 200.0):
        for q in (1e-4, 0.03, 0.7):
            nine = rdp_wang_theorem9(gaussian(sigma), q, orders)
            capped = rdp_wang_theorem27(sigma, q, orders)
            assert np.all(capped <= nine * (1 + 1e-12))
            assert np.all(capped <= rdp_theorem1(sigma, q, orders) * (1 + 1e-12))
            poisson = rdp.RdpAccountant(list(orders)).compose(
                dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
            )
            assert np.all(capped >= poisson.rdp * (1 - 1e-9))


def dp_accounting_fixed_size(sigma, q, orders):
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        1000, round(1000 * q), dp_accounting.GaussianDpEvent(sigma)
    )
    return rdp.RdpAccountant(list(orders), REPLACE_ONE).compose(event).rdp


def test_agrees_with_dp_accounting_where_floats_suffice():
    orders = range(2, 65)
    for sigma, q in ((0.5, 0.1), (1.0, 0.01), (4.0, 0.3)):
        np.testing.assert_allclose(
            rdp_wang_theorem27(sigma, q, orders),
            dp_accounting_fixed_size(sigma, q, orders),
            rtol=1e-9,
        )


def test_is_far_tighter_than_differences_of_floats_at_much_noise():
    ours = rdp_wang_theorem27(500.0, 0.9, 64)
    assert ours == pytest.approx(reference(500.0, 0.9, 64, 27), rel=2e-12)
    assert dp_accounting_fixed_size(500.0, 0.9, [64])[0] > 500 * ours


def test_theorem9_of_a_pure_mechanism():
    # ε(j) = ε(∞): randomized response in the limit. The caps are (e^ε − 1)^j, below 2 here.
    epsilon, q, order = 0.5, 0.2, 4
    ratio = math.expm1(epsilon)
    total = q**2 * 6 * min(4 * ratio, math.exp(epsilon) * ratio**2)
    total += q**3 * 4 * math.exp(2 * epsilon) * ratio**3 + q**4 * math.exp(3 * epsilon) * ratio**4
    got = rdp_wang_theorem9(lambda j: np.full_like(j, epsilon), q, order, pure_epsilon=epsilon)
    assert got == pytest.approx(math.log1p(total) / 3, rel=1e-12)
    assert got < rdp_wang_theorem9(lambda j: np.full_like(j, epsilon), q, order)
    assert rdp_wang_theorem9(np.zeros_like, q, [2, 9], pure_epsilon=0.0).tolist() == [0.0, 0.0]


def test_theorem9_of_unbounded_orders():
    got = rdp_wang_theorem9(lambda j: np.where(j > 3, np.inf, 0.1), 0.1, [2, 3, 4, 500])
    assert np.isfinite(got[:2]).all()
    assert np.isinf(got[2:]).all()


def test_edges():
    assert rdp_wang_theorem27(1.0, 0.0, 2) == 0
    assert rdp_wang_theorem27(2.0, 1.0, 512) == 64.0
    assert rdp_wang_theorem9(gaussian(2.0), 1.0, 512) == 64.0
    assert rdp_wang_theorem27(1e-8, 0.1, 2) == math.inf
    assert isinstance(rdp_wang_theorem27(1.0, 0.1, 2.0), float)
    assert rdp_wang_theorem27(1.0, 0.1, []).shape == (0,)
    assert rdp_wang_theorem27(1e-3, 0.1, 512) < math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rdp_wang_theorem27(0, 0.1, 2), "noise_multiplier=.*: give a finite number > 0"),
        (
            lambda: rdp_wang_theorem27(1.0, 2, 2),
            r"sampling_probability=.*: give a number in \[0, 1\]",
        ),
        (lambda: rdp_wang_theorem27(1.0, 0.1, 513), "whole numbers from 2 to 512"),
        (lambda: rdp_wang_theorem9(gaussian(1), 0.1, 2.5), "whole numbers from 2 to 512"),
        (lambda: rdp_wang_theorem9(gaussian(1), 0.1, 2, -1), "pure_epsilon=.*: give"),
        (lambda: rdp_wang_theorem9(gaussian(1), 0.1, 2, math.nan), "pure_epsilon=.*: give"),
        (lambda: rdp_wang_theorem9(lambda j: -j, 0.1, 2), "one number ≥ 0"),
        (lambda: rdp_wang_theorem9(lambda j: j * math.nan, 0.1, 2), "one number ≥ 0"),
        (lambda: rdp_wang_theorem9(lambda j: 1.0, 0.1, 2), "one number ≥ 0"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["wang_theorem9", "wang_theorem27"])
def test_as_accountants_of_both_laws(name):
    law = accounting.FixedSizeSampling(1000, 50)
    ledger = accounting.PrivacyLedger()
    ledger.add(law.event(3.0), 200, law=law)  # σ*/2 = 1.5 over the replace-one sensitivity
    bound = (
        rdp_wang_theorem27(1.5, 0.05, WANG_ORDERS)
        if name == "wang_theorem27"
        else rdp_wang_theorem9(gaussian(1.5), 0.05, WANG_ORDERS)
    )
    expected = rdp.rdp_privacy_accountant.compute_epsilon(WANG_ORDERS, 200 * bound, 1e-5)[0]
    assert ledger.epsilon(1e-5, name) == pytest.approx(expected, rel=1e-12)
    assert ledger.delta(expected, name) == pytest.approx(1e-5, rel=1e-6)
    # The same bound for Poisson lots at σ* = 1.5.
    assert accounting.epsilon(1.5, 0.05, 200, 1e-5, name) == pytest.approx(expected, rel=1e-12)
