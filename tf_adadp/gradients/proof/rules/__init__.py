"""One rule per operation: where the examples of its operands are in its outputs.

A rule is a function `rule(op, values)` of an operation and the `Value`s of its inputs, at least one
of them `Rows` and none `Mixed`. It returns the `Rows` of its output (a list where there are
several), or raises `Mixes`.
"""

from tf_adadp.gradients.proof.rules import (  # noqa: F401
    along_axes,
    elementwise,
    images,
    products,
    shapes,
    slices,
)
from tf_adadp.gradients.proof.rules.registry import RULES

__all__ = ["RULES"]
