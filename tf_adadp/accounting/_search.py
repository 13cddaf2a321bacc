"""Searches for the last argument whose cost still meets a target; the cost is monotone."""

import math
from collections.abc import Callable

# Beyond 2^53 consecutive whole numbers are no longer distinct doubles.
MAX_COUNT = 2**53
_NOISE_MULTIPLIER_RANGE = (2.0**-10, 2.0**30)
_LEAST_PROBABILITY = 2.0**-50


def largest_count(cost: Callable[[int], float], target: float, guess: int = 1) -> int:
    """Returns the largest n ≥ 0 with cost(n) ≤ target, for a non-decreasing cost; at most 2^53.

    The answer was itself evaluated, so its cost is at most the target. The search begins at
    `guess`: a good guess saves evaluations, a bad one costs some.
    """
    low, low_cost = 0, 0.0
    high = min(max(1, guess), MAX_COUNT)
    while (high_cost := cost(high)) <= target:
        if high == MAX_COUNT:
            return MAX_COUNT
        low, low_cost = high, high_cost
        high = min(2 * high, MAX_COUNT)
    interpolate = True
    while high - low > 1:
        middle = (low + high) // 2
        # Costs are smooth between their ends, so every other probe follows the chord. Bisecting in
        # between keeps the worst case at 2·log2(n) probes.
        if interpolate and high_cost < math.inf:
            share = (target - low_cost) / (high_cost - low_cost)
            middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        interpolate = not interpolate
        middle_cost = cost(middle)
        if middle_cost <= target:
            low, low_cost = middle, middle_cost
        else:
            high, high_cost = middle, middle_cost
    return low


def smallest_noise_multiplier(
    cost: Callable[[float], float], target: float, guess: float = 1.0, tolerance: float = 1e-3
) -> float:
    """Returns σ with target·(1 − tolerance) ≤ cost(σ) ≤ target, for a cost falling with σ.

    If the cost jumps over that window, the answer is the least σ found with cost(σ) ≤ target.

    Raises:
      ValueError: no σ up to 2^30 meets the target.
    """
    least, greatest = _NOISE_MULTIPLIER_RANGE
    least_cost, sigma = _last_within(
        cost, target, start=guess, stop=least, first=greatest, tolerance=tolerance
    )
    if sigma is None:
        raise ValueError(
            f"target_epsilon={target} is out of reach: even noise_multiplier={greatest:.4g} "
            f"costs epsilon={least_cost:.6g}. Raise target_epsilon or delta, or choose another "
            'accountant (the conversion of "theorem1" alone costs log(1/delta)/63).'
        )
    return sigma


def largest_sampling_probability(
    cost: Callable[[float], float], target: float, guess: float, tolerance: float = 1e-3
) -> float:
    """Returns q with target·(1 − tolerance) ≤ cost(q) ≤ target, for a cost rising with q.

    Returns 1 if the cost never exceeds the target. If the cost jumps over the window, the answer is
    the largest q found with cost(q) ≤ target.

    Raises:
      ValueError: no q down to 2^-50 meets the target.
    """
    least_cost, q = _last_within(
        cost, target, start=guess, stop=1.0, first=_LEAST_PROBABILITY, tolerance=tolerance
    )
    if q is None:
        raise ValueError(
            f"target_epsilon={target} is out of reach: even sampling_probability="
            f"{_LEAST_PROBABILITY:.4g} costs epsilon={least_cost:.6g}. Raise target_epsilon, delta "
            "or the noise multiplier, or take fewer steps."
        )
    return q


def _last_within(
    cost: Callable[[float], float],
    target: float,
    *,
    start: float,
    stop: float,
    first: float,
    tolerance: float,
) -> tuple[float, float | None]:
    """Returns (cost(x), x) with cost(x) in the window [target·(1 − tolerance), target].

    x runs from `first`, where the cost is least, to `stop`, both positive; the cost rises on the
    way. The answer was itself evaluated. Returns (cost(first), None) if that is above the target,
    `stop` if the cost stays within it, and the last x found within if the cost jumps over the
    window.
    """
    least, greatest = min(first, stop), max(first, stop)

    def towards(end: float, x: float, factor: float) -> float:
        return min(x * factor, end) if end > x else max(x / factor, end)

    inside = outside = min(max(start, least), greatest)
    inside_cost = outside_cost = cost(inside)
    factor = 1.25
    if inside_cost <= target:
        while True:
            before, before_cost = inside, inside_cost
            outside = towards(stop, inside, factor)
            outside_cost = cost(outside)
            if outside_cost > target:
                break
            inside, inside_cost = outside, outside_cost
            if outside == stop:
                return inside_cost, stop
            factor = _step_to(target, before, before_cost, inside, inside_cost) or factor * factor
    while inside_cost > target:
        if inside == first:
            return inside_cost, None
        before, before_cost = outside, outside_cost
        outside, outside_cost = inside, inside_cost
        if before != outside:
            step = _step_to(target, before, before_cost, outside, outside_cost)
            factor = step or factor * factor
        inside = towards(first, inside, factor)
        inside_cost = cost(inside)
    probes = 0
    while inside_cost < (1 - tolerance) * target and _ratio(inside, outside) > 1 + 1e-9:
        middle = (inside * outside) ** 0.5
        # log ε is nearly straight in log x: two probes of three follow the chord to the middle of
        # the window, the third bisects.
        if probes % 3 < 2 and 0 < inside_cost < outside_cost < math.inf:
            aim = target * (1 - tolerance / 2)
            share = math.log(outside_cost / aim) / math.log(outside_cost / inside_cost)
            middle = outside * (inside / outside) ** share
        probes += 1
        middle_cost = cost(middle)
        if middle_cost <= target:
            inside, inside_cost = middle, middle_cost
        else:
            outside, outside_cost = middle, middle_cost
    return inside_cost, inside


def _step_to(target: float, x: float, x_cost: float, y: float, y_cost: float) -> float | None:
    """Returns the factor from y a little beyond the target, on the chord of log ε over log x.

    Returns None if there is no such chord, or if following it saves no evaluation.
    """
    if not (0 < x_cost < math.inf and 0 < y_cost < math.inf) or x_cost == y_cost:
        return None
    share = math.log(target / y_cost) / math.log(y_cost / x_cost)
    if not 0 < share < 20:
        return None
    return 1.05 * _ratio(y, x) ** share


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)
