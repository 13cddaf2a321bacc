"""Amplification of pure differential privacy by sampling."""

import math


def amplified(epsilon: float, sampling_probability: float) -> float:
    """Returns ε' = log(1 + q(e^ε − 1)), without overflow."""
    if sampling_probability == 0:
        return 0.0
    if epsilon < 1:
        return math.log1p(sampling_probability * math.expm1(epsilon))
    q = sampling_probability
    return epsilon + math.log(q + (1 - q) * math.exp(-epsilon))
