"""Checks of arguments that optimizers and their parts share."""

import math


def check_number(name, value, wanted, *, above=-math.inf, at_least=-math.inf, below=math.inf):
    """`value` as a float, or ValueError: `wanted` says in words what was asked for."""
    try:
        fits = math.isfinite(value) and value > above and at_least <= value < below
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}={value!r}: give {wanted}.")
    return float(value)


def check_choice(name, value, known):
    """`value`, or ValueError where it is none of `known`."""
    if value not in known:
        raise ValueError(f"{name}={value!r}: give one of {', '.join(map(repr, known))}.")
    return value
