"""Checks of arguments that all parts share."""

import math
import numbers

import numpy as np


def check_number(
    name,
    value,
    wanted,
    *,
    above=-math.inf,
    at_least=-math.inf,
    below=math.inf,
    at_most=math.inf,
):
    """`value` as a float, or ValueError: `wanted` says in words what was asked for."""
    try:
        fits = not isinstance(value, (bool, np.bool_)) and math.isfinite(value)
        fits = fits and above < value < below and at_least <= value <= at_most
    except (TypeError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f"{name}={value!r}: give {wanted}.")
    return float(value)


def check_integer(name, value, wanted, *, at_least):
    """`value` as an int, or ValueError: `wanted` says in words what was asked for."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        raise ValueError(f"{name}={value!r}: give {wanted}.")
    return int(value)


def check_choice(name, value, known):
    """`value`, or ValueError where it is no string of `known`."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r}: give one of {', '.join(map(repr, known))}.")
    return value


def check_bool(name, value):
    """`value`, or ValueError where it is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: give True or False.")
    return value
