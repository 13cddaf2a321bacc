"""Lower bounds: never above the truth more often than they say, and near it where they can be."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tf_adadp import accounting, audit
from tf_adadp.audit import bounds

# Seeds are fixed, so these tests pass or fail for good. Over random seeds each assertion on a
# frequency would raise a false alarm once in a million.
FALSE_ALARM = 1e-6


def too_many(count, trials, probability):
    """Tells whether so many events of at most this probability are no coincidence."""
    return stats.binom.sf(count - 1, trials, probability) < FALSE_ALARM


@settings(derandomize=True)
@given(draws=st.integers(1, 5000), share=st.floats(0, 1), level=st.floats(1e-6, 0.4))
def test_clopper_pearson_is_scipys(draws, share, level):
    count = round(share * draws)
    low, high = bounds.clopper_pearson(count, draws, level)
    for alternative, value in (("greater", low), ("less", high)):
        interval = stats.binomtest(count, draws, alternative=alternative).proportion_ci(1 - level)
        expected = interval.low if alternative == "greater" else interval.high
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-12)


def gaussian_pair(rng, sigma, draws):
    return rng.normal(0, sigma, draws), rng.normal(1, sigma, draws)


def test_the_bound_exceeds_the_truth_no_more_often_than_it_says():
    """Gaussian of known ε: at 80 % confidence no more than a fifth of 150 bounds are wrong."""
    rng = np.random.default_rng(1)
    truth = accounting.epsilon(1.0, 1.0, 1, 0.05, "pld")
    found = [
        audit.epsilon_lower_bound(*gaussian_pair(rng, 1.0, 400), 0.05, 0.8).epsilon
        for _ in range(150)
    ]
    assert not too_many(sum(e > truth for e in found), 150, 0.2)
    assert too_many(sum(e > truth / 4 for e in found), 150, 0.2)  # so that this test can fail


def test_choosing_and_testing_on_the_same_draws_would_be_wrong():
    """Shows the use of the split: identical laws, ε = 0, the best of many events on few draws."""
    rng = np.random.default_rng(2)

    def unsplit(scores, others):
        return audit.epsilon_lower_bound(np.tile(scores, 2), np.tile(others, 2), 0.0, 0.8).epsilon

    pairs = [(rng.normal(size=60), rng.normal(size=60)) for _ in range(100)]
    assert too_many(sum(unsplit(a, b) > 0 for a, b in pairs), 100, 0.2)
    sound = [audit.epsilon_lower_bound(a, b, 0.0, 0.8).epsilon for a, b in pairs]
    assert not too_many(sum(e > 0 for e in sound), 100, 0.2)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize("flipped", [False, True])
def test_randomized_response_is_found(epsilon, flipped):
    """Scores of two values, either way around: within a tenth below the truth."""
    rng = np.random.default_rng(3)
    draws = rng.random((2, 200_000)) < 1 / (1 + math.exp(-epsilon))
    pair = (draws[0], ~draws[1])[:: -1 if flipped else 1]
    found = audit.epsilon_lower_bound(*pair, 0.0, 0.999)
    assert 0.9 * epsilon < found.epsilon <= epsilon


def test_delta_is_granted():
    """A leak of probability δ is none at this δ, and endless at δ = 0."""
    rng = np.random.default_rng(4)
    leaks = rng.random(100_000) < 0.01
    pair = np.where(leaks, 5.0, 0.0), np.zeros(100_000)
    assert audit.epsilon_lower_bound(*pair, 0.02).epsilon == 0.0
    assert audit.epsilon_lower_bound(*pair, 0.0).epsilon > 4.0


def test_nothing_likelier_than_delta():
    rng = np.random.default_rng(5)
    assert audit.epsilon_lower_bound(rng.normal(size=20), rng.normal(size=20), 0.99).epsilon == 0


def test_atoms_and_infinities_are_events():
    pair = np.full(2000, -math.inf), np.random.default_rng(6).normal(size=2000)
    found = audit.epsilon_lower_bound(*pair, 1e-5)
    assert found.epsilon > 5
    assert found.frequent == (1000, 1000)
    assert found.rare == (0, 1000)


def test_the_gaussian_estimate():
    rng = np.random.default_rng(7)
    truth = accounting.epsilon(1.5, 1.0, 1, 1e-5, "pld")
    estimate = audit.gaussian_epsilon_estimate(*gaussian_pair(rng, 1.5, 100_000), 1e-5)
    assert estimate == pytest.approx(truth, rel=0.03)  # 5 standard errors: 6e-7
    same = np.arange(9.0)
    assert audit.gaussian_epsilon_estimate(same, same, 1e-5) == 0.0
    assert audit.gaussian_epsilon_estimate(np.zeros(9), np.ones(9), 1e-5) == math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2, 3], [1.0] * 9, 0.1), "scores has shape"),
        (([1.0] * 9, [[1.0] * 9], 0.1), "neighbor_scores has shape"),
        (([1.0, 2, 3, math.nan], [1.0] * 9, 0.1), "scores hold NaN"),
        (([1.0] * 9, [1.0] * 9, 1.0), "delta=1.0"),
        (([1.0] * 9, [1.0] * 9, 0.1, 1.0), "confidence=1.0"),
    ],
)
def test_what_the_bound_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        audit.epsilon_lower_bound(*arguments)


# One run.


def slow_p_value(m, r, v, epsilon, delta):
    """Theorem 5.2 of Steinke et al., term by term."""
    law = stats.binom(r, 1 / (1 + math.exp(-epsilon)))

    def tail(i):  # P(B ≥ v − i)
        return math.fsum(law.pmf(k) for k in range(max(0, v - i), r + 1))

    excess = max([(tail(i) - tail(0)) / i for i in range(1, v + 1)], default=0.0)
    return min(1.0, tail(0) + 2 * m * delta * excess)


@settings(derandomize=True)
@given(data=st.data())
def test_the_p_value_is_the_theorem(data):
    m = data.draw(st.integers(1, 60))
    r = data.draw(st.integers(0, m))
    v = data.draw(st.integers(0, r))
    epsilon = data.draw(st.floats(0, 5))
    delta = data.draw(st.sampled_from([0.0, 1e-6, 1e-3, 0.1]))
    fast = audit.one_run_p_value(m, r, v, epsilon, delta)
    assert fast == pytest.approx(slow_p_value(m, r, v, epsilon, delta), rel=1e-9, abs=1e-14)


def test_the_papers_example():
    """75 of 100 guesses right at ε = log 3 is what randomised response gives: p = 0.553."""
    assert audit.one_run_p_value(100, 100, 75, math.log(3), 0.0) == pytest.approx(0.553, abs=5e-4)


def test_the_one_run_bound_inverts_the_p_value():
    epsilon = audit.one_run_epsilon_lower_bound(1000, 200, 190, 1e-5)
    assert 1.5 < epsilon < math.log(190 / 10)
    assert audit.one_run_p_value(1000, 200, 190, epsilon, 1e-5) <= 0.05
    assert audit.one_run_p_value(1000, 200, 190, epsilon + 1e-4, 1e-5) > 0.05
    assert audit.one_run_epsilon_lower_bound(1000, 200, 100, 1e-5) == 0.0
    assert audit.one_run_epsilon_lower_bound(10, 0, 0, 1e-5) == 0.0
    # Where δ alone explains the guesses, nothing is left for ε.
    assert audit.one_run_epsilon_lower_bound(1000, 200, 190, 0.5) == 0.0


@pytest.mark.parametrize("abstain", [False, True])
def test_randomized_response_in_one_run(abstain):
    """Canaries reported by randomised response: 200 bounds at 80 % confidence."""
    rng, epsilon, m = np.random.default_rng(8), 1.5, 200
    found = []
    for _ in range(200):
        coins = rng.random(m) < 0.5
        says_in = np.where(rng.random(m) < 1 / (1 + math.exp(-epsilon)), coins, ~coins)
        scores = says_in + 0.1 * rng.random(m)
        guesses = m // 4 if abstain else m
        found.append(audit.one_run_bound(scores, coins, 0.0, 0.8, guesses).epsilon)
    assert not too_many(sum(e > epsilon for e in found), 200, 0.2)
    assert np.mean(found) > 0.7 * epsilon


def test_several_numbers_of_guesses_share_the_level():
    coins = np.arange(64) % 2 == 0
    one = audit.one_run_bound(coins * 1.0, coins, 0.0, 0.95, 16)
    three = audit.one_run_bound(coins * 1.0, coins, 0.0, 1 - 0.05 / 3, 16)
    shared = audit.one_run_bound(coins * 1.0, coins, 0.0, 0.95, (4, 8, 16))
    assert shared.epsilon == pytest.approx(three.epsilon)
    assert shared.epsilon < one.epsilon
    assert (shared.guesses, shared.correct) == (16, 16)


def test_guesses_are_of_the_extremes():
    scores, coins = np.array([5.0, 1, 4, 2, 3]), np.array([True, True, True, False, False])
    assert audit.best_guesses(scores, coins, 2) == 1  # 5 in: right; 1 out: wrong
    assert audit.best_guesses(scores, coins, 3) == 2
    assert audit.best_guesses(scores, coins, 0) == 0
    assert audit.best_guesses(np.zeros(5), coins, 5) == 1  # ties by position: 2 out, 3 in


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: audit.one_run_p_value(10, 11, 3, 1.0, 0.0), "guesses=11"),
        (lambda: audit.one_run_p_value(10, 5, 6, 1.0, 0.0), "correct=6"),
        (lambda: audit.one_run_p_value(10, 5, 5, math.inf, 0.0), "epsilon=inf"),
        (lambda: audit.one_run_epsilon_lower_bound(10, 5, 5, 0.0, 0), "confidence=0"),
        (lambda: audit.best_guesses([1.0, 2.0], [1, 0], 1), "coins of bool"),
        (lambda: audit.best_guesses([1.0, math.nan], [True, False], 1), "NaN"),
        (lambda: audit.best_guesses([1.0, 2.0], [True, False], 3), "num_guesses=3"),
    ],
)
def test_what_one_run_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
