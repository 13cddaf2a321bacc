"""epsilon, delta, calibrate_noise_multiplier and max_steps."""

import math
import os
import pathlib
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from hypothesis import example, given
from hypothesis import strategies as st

from tf_adadp import accounting
from tf_adadp.accounting import ACCOUNTANTS

RENYI = ("rdp", "theorem1", "wang_theorem9", "wang_theorem27")
EXAMPLE = (0.9, 0.01, 1800)  # the ADADP paper's: L = 600, N = 60000


def test_importing_accounting_leaves_tensorflow_alone():
    root = pathlib.Path(accounting.__file__).parents[2]
    code = (
        "import sys, tf_adadp.accounting as a; a.epsilon(1.0, 0.01, 10, 1e-5);"
        "found = {'tensorflow', 'keras', 'jax', 'torch'} & set(sys.modules);"
        "sys.exit(str(found) if found else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_works_beside_an_older_keras_that_is_there_already():
    # tensorflow-privacy's environment, in `make parity`, has a real Keras 2.
    root = pathlib.Path(accounting.__file__).parents[2]
    code = (
        "import sys, types; sys.modules['keras'] = types.ModuleType('keras');"
        "sys.modules['keras'].__dict__.update(__version__='2.15.0', Model=object);"
        "from tf_adadp import accounting as a; print(a.epsilon(1.0, 0.0, 10, 1e-5))"
    )
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "0.0\n", done.stderr


def test_everything_public_is_exported():
    for name in accounting.__all__:
        assert getattr(accounting, name).__doc__


@pytest.mark.parametrize(
    ("accountant", "expected"),
    [("theorem1", 6.92), ("wang_theorem27", 5.77), ("rdp", 3.45), ("pld", 3.06)],
)
def test_the_papers_example(accountant, expected):
    assert accounting.epsilon(*EXAMPLE, 1e-5, accountant) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("delta", [1e-7, 1e-3])
@pytest.mark.parametrize(("sigma", "q", "steps"), [EXAMPLE, (4.0, 0.05, 333), (2.0, 1.0, 3)])
def test_agrees_with_dp_accounting(sigma, q, steps, delta):
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    reference = rdp.RdpAccountant().compose(event, steps)
    epsilon = accounting.epsilon(sigma, q, steps, delta)
    assert epsilon == pytest.approx(reference.get_epsilon(delta), rel=1e-12)
    assert accounting.delta(sigma, q, steps, 1.5) == pytest.approx(
        reference.get_delta(1.5), rel=1e-9
    )
    reference = pld.PLDAccountant().compose(event, steps)
    # At q = 1 the accountant takes all Gaussians in closed form, a little tighter.
    loose = 1e-12 if q < 1 else 1e-3
    epsilon = accounting.epsilon(sigma, q, steps, delta, "pld")
    assert epsilon == pytest.approx(reference.get_epsilon(delta), rel=loose)


def test_gaussian_pld_against_the_closed_form():
    # Balle and Wang 2018, Theorem 8: δ of one Gaussian mechanism.
    sigma, epsilon = 2.0, 1.0

    def cdf(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    a, b = 1 / (2 * sigma), epsilon * sigma
    exact = cdf(a - b) - math.exp(epsilon) * cdf(-a - b)
    assert accounting.delta(sigma, 1.0, 1, epsilon, "pld") == pytest.approx(exact, rel=1e-3)
    assert accounting.delta(sigma, 1.0, 1, epsilon, "pld") >= exact


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_free_and_unbounded_cases(accountant):
    assert accounting.epsilon(1.0, 0.01, 0, 1e-5, accountant) == 0
    assert accounting.delta(1.0, 0.01, 0, 1.0, accountant) == 0
    assert accounting.epsilon(1.0, 0.0, 5, 1e-5, accountant) == 0
    assert accounting.epsilon(0, 0.01, 1, 1e-5, accountant) == math.inf
    assert accounting.delta(0, 0.01, 1, 1.0, accountant) == 1
    assert accounting.max_steps(0, 0.01, 1.0, 1e-5, accountant) == 0
    assert accounting.max_steps(1.0, 0.0, 1.0, 1e-5, accountant) == 2**53


@pytest.mark.parametrize("sigma", [1e-5, 1e-7, 1e-155, 1e-200])
@pytest.mark.parametrize("accountant", RENYI)
def test_vanishing_noise_fails_closed(sigma, accountant):
    # Squares of the last two underflow, to NaN in some accountants; that must not become ε = 0.
    assert accounting.epsilon(sigma, 0.01, 1, 1e-5, accountant) > 1e8


def test_excluded_orders_are_not_logged(caplog):
    with caplog.at_level("WARNING"):
        accounting.epsilon(0.4711, 0.02, 1000, 1e-5)
    assert not caplog.records


def test_pld_refuses_a_grid_that_would_not_fit():
    with pytest.raises(ValueError, match='accountant="pld" would need a grid'):
        accounting.epsilon(0.01, 0.5, 100, 1e-5, "pld")


sigmas = st.floats(0.3, 50)
probabilities = st.floats(1e-4, 1.0)
step_counts = st.integers(1, 10_000)
deltas = st.floats(1e-12, 0.1)


def excluded_orders(sigma, q):
    """The Rényi orders at which dp_accounting finds no finite cost."""
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    accountant = rdp.RdpAccountant().compose(event)
    return set(accountant.orders[~np.isfinite(accountant.rdp)])


def test_at_little_noise_orders_are_excluded_one_by_one():
    """So ε rises with the noise there, by 0.07 %: the other order is the better one."""
    fewer, more = excluded_orders(0.3046875, 0.25), excluded_orders(0.3046875 * 1.0625, 0.25)
    assert more - fewer == {1.4}


@given(sigmas, probabilities, step_counts, deltas, st.floats(1.05, 3), st.sampled_from(RENYI))
@example(0.3046875, 0.25, 20, 0.0625, 1.0625, "rdp")
def test_epsilon_is_monotone(sigma, q, steps, delta, factor, accountant):
    def eps(sigma=sigma, q=q, steps=steps, delta=delta):
        return accounting.epsilon(sigma, q, steps, delta, accountant)

    def keeps_orders(sigma, q):
        return accountant != "rdp" or excluded_orders(sigma, q) <= allowed

    base, slack = eps(), 1e-6  # fractional orders are series, good to about 1e-8
    allowed = excluded_orders(sigma, q)
    assert base >= 0
    # dp_accounting leaves out orders whose series fails, at little noise: then ε is a least over
    # fewer of them.
    if keeps_orders(sigma * factor, q):
        assert eps(sigma=sigma * factor) <= base * (1 + slack)
    # At q = 1 the full Gaussian replaces the other bounds, which exceed it for q just below.
    if (accountant == "rdp" or q < 1) and keeps_orders(sigma, q / factor):
        assert eps(q=q / factor) <= base * (1 + slack)
    assert eps(steps=steps + 1) >= base * (1 - slack)
    assert eps(delta=delta / factor) >= base * (1 - slack)


@given(sigmas, probabilities, step_counts, step_counts, deltas, st.sampled_from(RENYI))
def test_epsilon_is_concave_in_steps(sigma, q, first, second, delta, accountant):
    """ε is a least over orders of functions linear in the steps, or cut off at 0 below one."""

    def eps(steps):
        return accounting.epsilon(sigma, q, steps, delta, accountant)

    low, high = sorted((first, second))
    middle = (low + high) // 2
    if eps(low) > 0 and high > low:
        share = (middle - low) / (high - low)
        chord = (1 - share) * eps(low) + share * eps(high)
        assert eps(middle) >= chord * (1 - 1e-9)


@given(sigmas, step_counts, deltas)
def test_gaussian_composition_in_closed_form(sigma, steps, delta):
    # k Gaussians of multiplier σ are one Gaussian of σ/√k.
    together = accounting.epsilon(sigma, 1.0, steps, delta)
    single = accounting.epsilon(sigma / math.sqrt(steps), 1.0, 1, delta)
    assert together == pytest.approx(single, rel=1e-9)


@given(sigmas, probabilities, step_counts, deltas, st.sampled_from(RENYI))
def test_delta_inverts_epsilon(sigma, q, steps, delta, accountant):
    epsilon = accounting.epsilon(sigma, q, steps, delta, accountant)
    back = accounting.delta(sigma, q, steps, epsilon, accountant)
    if epsilon > 0:
        assert back <= delta * (1 + 1e-6)


@pytest.mark.representative(1)
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(
    ("target", "delta", "q", "steps"), [(4.0, 1e-5, 0.01, 1800), (1.0, 1e-6, 0.05, 400)]
)
def test_calibration_meets_the_target_from_below(target, delta, q, steps, accountant):
    sigma = accounting.calibrate_noise_multiplier(target, delta, q, steps, accountant)
    reached = accounting.epsilon(sigma, q, steps, delta, accountant)
    if accountant == "wang_theorem9" and target == 1.0:  # no noise takes its ε below 1, but to 0
        assert reached == 0
        assert accounting.epsilon(sigma / 1.01, q, steps, delta, accountant) > target
    else:
        assert 0.999 * target <= reached <= target


@pytest.mark.parametrize("target", [0.01, 0.2, 30.0, 3000.0])
def test_calibration_over_a_wide_range(target):
    sigma = accounting.calibrate_noise_multiplier(target, 1e-5, 0.02, 1000)
    assert 0.999 * target <= accounting.epsilon(sigma, 0.02, 1000, 1e-5) <= target


def test_calibration_out_of_reach():
    with pytest.raises(ValueError, match="out of reach"):
        accounting.calibrate_noise_multiplier(0.1, 1e-5, 0.01, 100, "theorem1")
    sigma = accounting.calibrate_noise_multiplier(1e12, 1e-5, 0.5, 1)
    assert sigma == 2**-10


@pytest.mark.parametrize(
    ("accountant", "target", "sigma", "steps"),
    [
        ("pld", 1.0, 4.0, 2000),
        *((name, 1.0, 4.0, 2000) for name in RENYI),
        *((name, 8.0, 1.0, 500) for name in RENYI),
        *((name, 4.0, 0.7, 5) for name in RENYI),
    ],
)
def test_largest_sampling_probability_meets_the_target_from_below(target, sigma, steps, accountant):
    q = accounting.calibrate_sampling_probability(target, 1e-5, sigma, steps, accountant)
    reached = accounting.epsilon(sigma, q, steps, 1e-5, accountant)
    assert 0 < q < 1
    assert reached <= target
    if reached < 0.999 * target:  # the accountant's ε jumps here
        assert accounting.epsilon(sigma, q * (1 + 1e-6), steps, 1e-5, accountant) > target


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_full_lots_where_they_meet_the_target(accountant):
    assert accounting.calibrate_sampling_probability(5.0, 1e-5, 20.0, 10, accountant) == 1.0


def test_sampling_probability_out_of_reach():
    with pytest.raises(ValueError, match="out of reach.*sampling_probability"):
        accounting.calibrate_sampling_probability(0.1, 1e-5, 1.0, 10, "theorem1")
    with pytest.raises(ValueError, match="noise_multiplier=.*: give a finite number > 0"):
        accounting.calibrate_sampling_probability(1.0, 1e-5, 0.0, 10)
    with pytest.raises(ValueError, match="steps=.*: give an integer ≥ 1"):
        accounting.calibrate_sampling_probability(1.0, 1e-5, 1.0, 0)


def joint_epsilon(split, q, steps, delta, accountant):
    ledger = accounting.PrivacyLedger()
    ledger.add(dp_accounting.GaussianDpEvent(split.release_noise_multiplier))
    law = accounting.PoissonSampling(1000, 1000 * q)
    ledger.add(law.event(split.noise_multiplier), steps, law=law)
    return ledger.epsilon(delta, accountant)


@pytest.mark.parametrize("accountant", ["rdp", "pld", "wang_theorem27"])
def test_a_split_budget_is_spent_together(accountant):
    split = accounting.split_budget(1.0, 1e-5, 0.1, 300, share=0.3, accountant=accountant)
    alone = accounting.epsilon(split.release_noise_multiplier, 1.0, 1, 1e-5, accountant)
    assert 0.999 * 0.3 <= alone <= 0.3
    assert 0.999 <= joint_epsilon(split, 0.1, 300, 1e-5, accountant) <= 1
    # Composition is better than subtraction.
    rest = accounting.epsilon(split.noise_multiplier, 0.1, 300, 1e-5, accountant)
    assert 0.7 < rest < 1


def test_a_budget_split_for_given_noise():
    split = accounting.split_budget(1.0, 1e-5, 0.01, 300, release_noise_multiplier=10.0)
    assert split.release_noise_multiplier == 10.0
    assert 0.999 <= joint_epsilon(split, 0.01, 300, 1e-5, "rdp") <= 1
    alone = accounting.calibrate_noise_multiplier(1.0, 1e-5, 0.01, 300)
    assert split.noise_multiplier > alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(), "give exactly one of share"),
        (dict(share=0.5, release_noise_multiplier=4.0), "give exactly one of share"),
        (dict(share=1.0), r"share=1.0: give a number in \(0, 1\)"),
        (dict(release_noise_multiplier=0), "release_noise_multiplier=0: give a finite number > 0"),
        (dict(release_noise_multiplier=1.0), "target_epsilon=1.0 is spent.*cost epsilon=4"),
    ],
)
def test_budgets_that_cannot_be_split(arguments, message):
    with pytest.raises(ValueError, match=message):
        accounting.split_budget(1.0, 1e-5, 0.01, 300, **arguments)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(("sigma", "q", "target"), [(2.0, 0.02, 2.0), (4.0, 0.1, 0.9)])
def test_max_steps_is_the_last_count_within_target(sigma, q, target, accountant):
    steps = accounting.max_steps(sigma, q, target, 1e-5, accountant)
    assert steps > 0
    assert accounting.epsilon(sigma, q, steps, 1e-5, accountant) <= target
    assert accounting.epsilon(sigma, q, steps + 1, 1e-5, accountant) > target


def test_max_steps_can_be_none_or_many():
    assert accounting.max_steps(0.5, 0.5, 0.1, 1e-5) == 0
    many = accounting.max_steps(50.0, 1e-4, 2.0, 1e-5)
    assert many > 10**9
    assert accounting.epsilon(50.0, 1e-4, many, 1e-5) <= 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(accountant="moments"), "accountant='moments'.*'rdp', 'pld', 'theorem1'"),
        (dict(delta=0), r"delta=.*: give a number in \(0, 1\)"),
        (dict(delta=1.0), "delta=.*: give"),
        (dict(delta=math.nan), "delta=.*: give"),
        (dict(steps=-1), "steps=-1: give an integer ≥ 0"),
        (dict(steps=1.5), "steps=.*: give"),
        (dict(steps=True), "steps=.*: give"),
        (dict(sampling_probability=1.01), r"sampling_probability=.*: give a number in \[0, 1\]"),
        (dict(sampling_probability=-0.01), r"sampling_probability=.*: give a number in \[0, 1\]"),
        (dict(noise_multiplier=-1), "noise_multiplier=.*: give"),
        (dict(noise_multiplier=math.nan), "noise_multiplier=.*: give"),
        (dict(noise_multiplier=np.array(True)), "noise_multiplier=.*: give"),
        (dict(noise_multiplier="1"), "noise_multiplier=.*: give"),
    ],
)
def test_bad_arguments(arguments, message):
    good = dict(noise_multiplier=1.0, sampling_probability=0.1, steps=10, delta=1e-5)
    with pytest.raises(ValueError, match=message):
        accounting.epsilon(**{**good, **arguments})
    if "delta" not in arguments:
        del good["delta"]
        with pytest.raises(ValueError, match=message):
            accounting.delta(**{**good, "epsilon": 1.0, **arguments})


@pytest.mark.parametrize("accountant", ["moments", None, 3])
def test_unknown_accountants_are_refused_everywhere(accountant):
    for call in (
        lambda: accounting.calibrate_noise_multiplier(1.0, 1e-5, 0.01, 10, accountant),
        lambda: accounting.max_steps(1.0, 0.01, 1.0, 1e-5, accountant),
        lambda: accounting.epsilon(1.0, 0.01, 0, 1e-5, accountant),
        lambda: accounting.delta(1.0, 0.01, 0, 1.0, accountant),
    ):
        with pytest.raises(ValueError, match="accountant=.*: give one of"):
            call()


@pytest.mark.parametrize("epsilon", [0, -1.0, math.inf, math.nan])
def test_bad_targets(epsilon):
    with pytest.raises(ValueError, match="target_epsilon"):
        accounting.calibrate_noise_multiplier(epsilon, 1e-5, 0.01, 10)
    with pytest.raises(ValueError, match="target_epsilon"):
        accounting.max_steps(1.0, 0.01, epsilon, 1e-5)


def test_bad_epsilon_and_nothing_to_calibrate():
    with pytest.raises(ValueError, match="epsilon=-1: give a finite number ≥ 0"):
        accounting.delta(1.0, 0.01, 10, -1)
    with pytest.raises(ValueError, match="steps=.*: give an integer ≥ 1"):
        accounting.calibrate_noise_multiplier(1.0, 1e-5, 0.01, 0)
    with pytest.raises(ValueError, match=r"sampling_probability=.*: give a number in \(0, 1\]"):
        accounting.calibrate_noise_multiplier(1.0, 1e-5, 0, 10)
