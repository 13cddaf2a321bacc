"""The central-limit figure: its formula, its limit, and that nothing accepts it as a guarantee."""

import math

import dp_accounting
import mpmath
import pytest

from tf_adadp import accounting
from tf_adadp.accounting import clt_epsilon, clt_mu
from tf_adadp.accounting.bounds.gaussian_dp import clt_mu_of_events, clt_sampling_probability


def test_formula():
    assert clt_mu(0.9, 0.01, 1800) == pytest.approx(
        0.01 * math.sqrt(1800 * (math.exp(1 / 0.81) - 1)), rel=1e-12
    )
    # δ(ε; μ) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2): Dong, Roth and Su 2019, Corollary 2.13.
    for mu in (0.1, 1.0, 6.0):
        epsilon = clt_epsilon(1 / mu, 1.0, 1, 1e-6)
        with mpmath.workdps(40):
            delta = mpmath.ncdf(-epsilon / mu + mu / 2)
            delta -= mpmath.exp(epsilon) * mpmath.ncdf(-epsilon / mu - mu / 2)
        assert float(delta) == pytest.approx(1e-6, rel=1e-6)


def test_many_steps_of_small_lots_approach_it():
    # μ = 1 in both; the distance to the exact figure falls as 1/√steps.
    gaps = []
    for steps in (100, 2500):
        q = 1 / math.sqrt(steps * math.expm1(1 / 4))
        exact = accounting.epsilon(2.0, q, steps, 1e-5, "pld")
        gaps.append(1 - clt_epsilon(2.0, q, steps, 1e-5) / exact)
    assert 0 < gaps[1] < gaps[0] / 3
    assert gaps[1] < 0.02


def test_it_undercounts_so_it_is_no_bound():
    assert clt_epsilon(0.9, 0.01, 1800, 1e-5) < 0.95 * accounting.epsilon(
        0.9, 0.01, 1800, 1e-5, "pld"
    )


@pytest.mark.parametrize("name", ["gdp_clt", "gdp", "clt"])
def test_no_ledger_accepts_it(name):
    ledger = accounting.PrivacyLedger()
    ledger.add(dp_accounting.GaussianDpEvent(1.0))
    for call in (
        lambda: ledger.epsilon(1e-5, name),
        lambda: ledger.delta(1.0, name),
        lambda: ledger.statement(1e-5, name),
        lambda: accounting.epsilon(1.0, 0.1, 1, 1e-5, name),
        lambda: accounting.calibrate_noise_multiplier(1.0, 1e-5, 0.1, 1, name),
        lambda: accounting.calibrate_sampling_probability(1.0, 1e-5, 1.0, 1, name),
        lambda: accounting.split_budget(1.0, 1e-5, 0.1, 1, share=0.5, accountant=name),
    ):
        with pytest.raises(ValueError, match="accountant=.*: give one of"):
            call()
    assert not any("clt" in known or "gdp" in known for known in accounting.ACCOUNTANTS)


def test_composition():
    poisson = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))
    gaussian, nothing = dp_accounting.GaussianDpEvent(5.0), dp_accounting.NoOpDpEvent()
    expected = math.sqrt(clt_mu(2.0, 0.1, 30) ** 2 + 4 / 25)
    assert clt_mu_of_events([(poisson, 30), (gaussian, 4), (nothing, 2)]) == pytest.approx(expected)
    assert clt_mu_of_events([(dp_accounting.ZCDpEvent(0.1), 1)]) is None


def test_edges():
    assert clt_epsilon(1.0, 0.0, 5, 1e-5) == clt_epsilon(1.0, 0.1, 0, 1e-5) == 0
    assert clt_epsilon(0, 0.1, 1, 1e-5) == math.inf
    assert clt_epsilon(1e-3, 0.1, 1, 1e-5) == math.inf  # e^{10^6}
    assert clt_epsilon(0.2, 0.1, 10_000, 1e-5) > 1e10
    assert clt_epsilon(1e6, 0.1, 10, 1e-5) < 1e-3
    with pytest.raises(ValueError, match="delta=.*: give"):
        clt_epsilon(1.0, 0.1, 1, 0)
    with pytest.raises(ValueError, match="steps=.*: give"):
        clt_mu(1.0, 0.1, -1)


def test_where_a_search_begins():
    for epsilon in (0.1, 2.0, 20.0):
        q = clt_sampling_probability(epsilon, 1e-5, 1.5, 100_000)
        assert epsilon / 2 < clt_epsilon(1.5, q, 100_000, 1e-5) < 2 * epsilon
    assert clt_sampling_probability(2.0, 1e-5, 1e-3, 10) == 0.0
