"""Holds the table of rules, and their shared code."""

from collections.abc import Callable

import tensorflow as tf

from tf_adadp.gradients.proof import sizes
from tf_adadp.gradients.proof.values import Mixes, Public, Rows, Value

RULES: dict[str, Callable] = {}


def rule(*operations: str) -> Callable:
    """Registers a rule for operations, by TensorFlow's names."""

    def decorate(function):
        for name in operations:
            RULES[name] = function
        return function

    return decorate


def constants(value: Value, what: str) -> list[int]:
    """Returns the numbers of an operand that must be known."""
    if not isinstance(value, Public):
        raise Mixes(f"has {what} that depend on examples")
    try:
        return sizes.integers(value.value)
    except sizes.NotFollowed:
        raise Mixes(f"has {what} that are not known or depend on the batch size") from None


def plain(value: Value) -> Public:
    """Checks that an operand is public and the same for every batch and example."""
    if not isinstance(value, Public):
        raise Mixes("has an operand that depends on examples")
    if value.secret:
        raise Mixes("uses one random draw for all examples")
    if value.sized:
        raise Mixes("uses the number of examples")
    return value


def one_place(values: list[Value]) -> Rows:
    """Returns the first operand of rows; checks that all have their examples at the same axis."""
    found = [v for v in values if isinstance(v, Rows)]
    first = found[0]
    if any((v.axis, v.stride) != (first.axis, first.stride) for v in found):
        raise Mixes("has operands with examples along different axes")
    return first


def normal_axis(axis: int, rank: int) -> int:
    """Counts an axis from the front."""
    return axis + rank if axis < 0 else axis


def static_rank(tensor: tf.Tensor) -> int:
    """Returns a tensor's rank, which must be known."""
    if tensor.shape.rank is None:
        raise Mixes("has an unknown rank")
    return tensor.shape.rank
