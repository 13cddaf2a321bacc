"""Argument checks that give every function of this package the same clear errors."""

import math
import numbers


def real(name: str, value, requirement: str, holds) -> float:
    """`value` as a float if it is a finite real number for which `holds`, else ValueError."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not math.isfinite(value) or not holds(value):
        raise ValueError(f"{name} must be {requirement}, got {value!r}.")
    return float(value)


def integer(name: str, value, requirement: str, holds) -> int:
    """`value` as an int if it is an integer (NumPy's included) for which `holds`."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not holds(value):
        raise ValueError(f"{name} must be {requirement}, got {value!r}.")
    return int(value)


def noise_multiplier(value) -> float:
    """A noise standard deviation over a sensitivity: finite and ≥ 0."""
    return real(
        "noise_multiplier",
        value,
        "a finite number ≥ 0 (0 adds no noise and costs ε = ∞)",
        lambda x: x >= 0,
    )


def positive_noise_multiplier(value) -> float:
    """A noise multiplier > 0, where none at all has no answer."""
    return real("noise_multiplier", value, "positive", lambda x: x > 0)


def sampling_probability(value) -> float:
    """A probability in [0, 1]."""
    return real(
        "sampling_probability",
        value,
        "in [0, 1] (expected lot size over number of records)",
        lambda x: 0 <= x <= 1,
    )


def positive_probability(value) -> float:
    """A sampling probability in (0, 1], where nothing released has no answer."""
    if sampling_probability(value) == 0:
        raise ValueError(
            f"sampling_probability must be positive: at 0 nothing is released, got {value!r}."
        )
    return float(value)


def delta(value) -> float:
    """A δ strictly between 0 and 1."""
    return real(
        "delta",
        value,
        "strictly between 0 and 1 (usually far below one over the number of records)",
        lambda x: 0 < x < 1,
    )


def epsilon(value, name: str = "epsilon") -> float:
    """A finite ε ≥ 0."""
    return real(name, value, "a finite number ≥ 0", lambda x: x >= 0)


def target_epsilon(value) -> float:
    """A finite ε > 0 to aim for."""
    return real("target_epsilon", value, "a finite number > 0", lambda x: x > 0)


def steps(value) -> int:
    """A number of steps ≥ 0."""
    return integer("steps", value, "a whole number ≥ 0", lambda x: x >= 0)


def count(value, name: str = "count") -> int:
    """A number of releases ≥ 1."""
    return integer(name, value, "a whole number ≥ 1", lambda x: x >= 1)


def dataset(value) -> str | None:
    """The name that a user gave to a data set; None where none was given."""
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ValueError(
            f"dataset must be a name, such as 'census-2025', or None, got {value!r}. It is public: "
            "nothing computed from the records."
        )
    return value


def non_empty_text(name: str, value) -> str:
    """A string that says something."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a non-empty string, got {value!r}.")
    return value
