"""Validates arguments. Each check returns the value in its declared type.

Errors have one form: the argument's name, the value received, and what to give instead, as in
`steps=-1: give an integer ≥ 0.` It is a ValueError; where a function documents TypeError for a
wrong type, pass `wrong_type=TypeError`.
"""

import math
import numbers
from collections.abc import Collection
from typing import Any, TypeVar

T = TypeVar("T")


def check_number(
    name: str,
    value: Any,
    wanted: str | None = None,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
) -> float:
    """Returns a finite real number, a scalar array included, as a float.

    Args:
      name: the argument's name.
      value: the value given.
      wanted: the expected value, in words; the range if left out.
      above, at_least, below, at_most: the range.

    Raises:
      ValueError: value is not a finite number (a bool is not a number here) or out of range.
    """
    fits = isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()
    try:
        is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == "bool"
        fits = fits and not is_bool and math.isfinite(value)
        fits = fits and above < value < below and at_least <= value <= at_most
    except (TypeError, OverflowError):
        fits = False
    if not fits:
        raise _error(name, value, wanted or _range("a number", above, at_least, below, at_most))
    return float(value)


def check_integer(
    name: str,
    value: Any,
    wanted: str | None = None,
    *,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    wrong_type: type[Exception] = ValueError,
) -> int:
    """Returns an integer, NumPy's included, as an int.

    Args:
      name, value, wanted, at_least, at_most: as `check_number`.
      wrong_type: the error for a value that is not an integer (a bool is not one).

    Raises:
      ValueError: value is out of range.
      wrong_type: value is not an integer.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not at_least <= value <= at_most:
        wanted = wanted or _range("an integer", -math.inf, at_least, math.inf, at_most)
        raise _error(name, value, wanted, ValueError if is_integer else wrong_type)
    return int(value)


def check_choice(name: str, value: Any, known: Collection[str]) -> str:
    """Returns a string that is one of `known`; raises ValueError for anything else."""
    if not isinstance(value, str) or value not in known:
        raise _error(name, value, f"one of {', '.join(map(repr, known))}")
    return value


def check_bool(name: str, value: Any, *, wrong_type: type[Exception] = ValueError) -> bool:
    """Returns True or False; raises `wrong_type` for anything else, 0 and 1 included."""
    if not isinstance(value, bool):
        raise _error(name, value, "True or False", wrong_type)
    return value


def check_text(name: str, value: Any, wanted: str = "a non-empty string") -> str:
    """Returns a string that is not blank; raises ValueError for anything else."""
    if not isinstance(value, str) or not value.strip():
        raise _error(name, value, wanted)
    return value


def check_instance(
    name: str,
    value: T,
    kinds: type | tuple[type, ...],
    wanted: str,
    *,
    wrong_type: type[Exception] = TypeError,
) -> T:
    """Returns an object of one of `kinds`; raises `wrong_type` for anything else."""
    if not isinstance(value, kinds):
        raise _error(name, value, wanted, wrong_type)
    return value


def check_delta(value: Any) -> float:
    """Returns δ, strictly between 0 and 1."""
    wanted = "a number in (0, 1), usually far below one over the number of records"
    return check_number("delta", value, wanted, above=0, below=1)


def check_epsilon(value: Any, name: str = "epsilon") -> float:
    """Returns a finite ε ≥ 0."""
    return check_number(name, value, at_least=0)


def check_target_epsilon(value: Any) -> float:
    """Returns a finite ε > 0, a budget."""
    return check_number("target_epsilon", value, above=0)


def check_noise_multiplier(value: Any) -> float:
    """Returns a noise standard deviation over a sensitivity: finite and ≥ 0."""
    wanted = "a finite number ≥ 0 (0 adds no noise and costs ε = ∞)"
    return check_number("noise_multiplier", value, wanted, at_least=0)


def check_sampling_probability(value: Any) -> float:
    """Returns a probability in [0, 1]."""
    wanted = "a number in [0, 1] (expected lot size over number of records)"
    return check_number("sampling_probability", value, wanted, at_least=0, at_most=1)


def _range(kind: str, above: float, at_least: float, below: float, at_most: float) -> str:
    """Returns a range in words, such as "a finite number > 0" or "a number in (0, 1]"."""
    lower = f" > {above}" if above > at_least else f" ≥ {at_least}"
    upper = f" < {below}" if below < at_most else f" ≤ {at_most}"
    low, high = max(above, at_least), min(below, at_most)
    if low > -math.inf and high < math.inf:
        return (
            f"{kind} in {'(' if low == above else '['}{low}, {high}{')' if high == below else ']'}"
        )
    kind = kind.replace("a number", "a finite number")
    return kind + (lower if low > -math.inf else "") + (upper if high < math.inf else "")


def _error(name: str, value: Any, wanted: str, kind: type[Exception] = ValueError) -> Exception:
    return kind(f"{name}={value!r}: give {wanted}.")
