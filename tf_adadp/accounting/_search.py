"""Searches for the last argument whose cost still meets a target; the cost is monotone."""

import math
from collections.abc import Callable

# Beyond 2^53 consecutive whole numbers are no longer distinct doubles.
MAX_COUNT = 2**53
_NOISE_MULTIPLIER_RANGE = (2.0**-10, 2.0**30)


def largest_count(cost: Callable[[int], float], target: float, guess: int = 1) -> int:
    """Returns the largest n ≥ 0 with cost(n) ≤ target, for a non-decreasing cost; at most 2^53.

    The answer was itself evaluated, so it is on the right side of the target. `guess` is where to
    look first: a good one saves evaluations, a bad one costs some.
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

    Where cost jumps over that window, the answer is the least σ found with cost(σ) ≤ target.

    Raises:
      ValueError: no σ up to 2^30 meets the target.
    """
    least, greatest = _NOISE_MULTIPLIER_RANGE
    low = high = min(max(guess, least), greatest)
    high_cost = cost(high)
    factor = 1.25
    if high_cost <= target:
        while (low_cost := cost(low := max(low / factor, least))) <= target:
            high, high_cost = low, low_cost
            if low == least:
                return least
            factor *= factor
    while high_cost > target:
        if high == greatest:
            raise ValueError(
                f"target_epsilon={target} is out of reach: even noise_multiplier={greatest:.4g} "
                f"costs epsilon={high_cost:.6g}. Raise target_epsilon or delta, or choose another "
                'accountant (the conversion of "theorem1" alone costs log(1/delta)/63).'
            )
        low, low_cost, high = high, high_cost, min(high * factor, greatest)
        high_cost = cost(high)
        factor *= factor
    probes = 0
    while high_cost < (1 - tolerance) * target and high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        # log ε is nearly straight in log σ: two probes of three follow the chord to the middle of
        # the window, the third bisects.
        if probes % 3 < 2 and 0 < high_cost < low_cost < math.inf:
            aim = target * (1 - tolerance / 2)
            share = math.log(low_cost / aim) / math.log(low_cost / high_cost)
            middle = low * (high / low) ** share
        probes += 1
        middle_cost = cost(middle)
        if middle_cost <= target:
            high, high_cost = middle, middle_cost
        else:
            low, low_cost = middle, middle_cost
    return high
