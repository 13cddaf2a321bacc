"""The search for σ* and q: on the right side of the target, within its window, in few readings."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_adadp.accounting import epsilon
from tf_adadp.accounting._search import largest_sampling_probability, smallest_noise_multiplier


def counted(cost):
    readings = []

    def reading(x):
        readings.append(x)
        return cost(x)

    return reading, readings


COSTS = {
    "power": lambda a, b: lambda s: a * s**-b,
    "sum of powers": lambda a, b: lambda s: a / s + b / s**2,
    "steep": lambda a, b: lambda s: a * (math.exp(min(b / s, 500)) - 1),
    "infinite below": lambda a, b: lambda s: math.inf if s < b / 10 else a / s,
    "zero above": lambda a, b: lambda s: 0.0 if s > 100 * b else a / s,
}


@given(
    st.sampled_from(sorted(COSTS)),
    st.floats(1e-2, 1e2),
    st.floats(0.3, 3.0),
    st.floats(1e-3, 1e3),
    st.floats(0.01, 1e3),
)
def test_the_answer_is_within_the_target_and_its_window(kind, a, b, target, guess):
    cost, readings = counted(COSTS[kind](a, b))
    sigma = smallest_noise_multiplier(cost, target, guess)
    assert sigma in readings  # it was itself evaluated
    found = cost(sigma)
    assert found <= target
    # Either in the window, or at a jump over it, or at the end of the range.
    beside = cost(sigma * (1 - 1e-6))
    assert found >= 0.999 * target or beside > target or sigma <= 2.0**-10
    assert len(readings) < 80


@given(st.floats(0.1, 10.0), st.floats(0.5, 20.0))
def test_a_cost_that_jumps_is_followed_to_the_jump(level, edge):
    """The cost is above the target on one side of the edge, and far below it on the other."""
    cost, readings = counted(lambda s: 10 * level if s < edge else 0.1 * level)
    sigma = smallest_noise_multiplier(cost, level)
    assert sigma == pytest.approx(edge, rel=1e-6)
    assert sigma >= edge
    assert len(readings) < 80


@pytest.mark.parametrize("target", [0.01, 0.1, 1.0, 2.0, 8.0, 50.0])
@pytest.mark.parametrize(("q", "steps"), [(0.01, 1000), (0.2, 50), (1.0, 10)])
def test_real_costs_take_few_readings(q, steps, target):
    cost, readings = counted(lambda sigma: epsilon(sigma, q, steps, 1e-5))
    sigma = smallest_noise_multiplier(cost, target)
    assert 0.999 * target <= epsilon(sigma, q, steps, 1e-5) <= target
    assert len(readings) <= 8


@pytest.mark.parametrize("guess", [1e-6, 0.01, 0.9])
def test_probabilities_are_found_from_any_guess(guess):
    cost, readings = counted(lambda q: epsilon(1.5, q, 500, 1e-5))
    q = largest_sampling_probability(cost, 2.0, guess)
    assert 1.998 <= epsilon(1.5, q, 500, 1e-5) <= 2.0
    assert len(readings) <= 16
