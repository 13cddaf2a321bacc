"""Describes the proven facts about a tensor while a batch is followed through a graph.

A tensor is `Public` (no example reaches it), `Rows` (entry b along one axis depends on example b
alone) or `Mixed`.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from tf_adadp.gradients.proof.sizes import Size, depends_on_batch

Dim = int | Size | None
Dims = tuple[Dim, ...] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Public:
    """A tensor that no example reaches: constants, weights, shapes, keys of random numbers.

    Attributes:
        dims: its shape; None for an unknown rank.
        value: its numbers, where they are followed (`sizes`).
        weights: the trainable weights that it is computed from, by number.
        secret: whether it is computed from a key of random numbers.
        sized: whether it depends on the number of examples.
    """

    dims: Dims
    value: np.ndarray | None = None
    weights: frozenset[int] = frozenset()
    secret: bool = False
    sized: bool = False

    @property
    def rank(self) -> int | None:
        """Returns the number of axes."""
        return None if self.dims is None else len(self.dims)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """A tensor whose entries along one axis are those of one example after the other.

    Attributes:
        axis: the axis.
        stride: the number m of entries of each example: example b has b·m to b·m + m − 1.
        dims: the shape, B·m along the axis.
    """

    axis: int
    stride: int
    dims: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        """Returns the number of axes."""
        return len(self.dims)

    @property
    def from_end(self) -> int:
        """Returns the axis, counted from the last one: −1 and below."""
        return self.axis - len(self.dims)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """A tensor of which nothing is known, or in which examples meet.

    Attributes:
        op: the operation that made it so.
        reason: why.
    """

    op: tf.Operation
    reason: str


Value = Public | Rows | Mixed


class Mixes(Exception):
    """Raised by a rule if an operation mixes examples; the message gives the reason."""


def public(tensor: tf.Tensor, value=None, *, weights=frozenset(), secret=False, sized=False):
    """Describes a public tensor by its static shape, or by its numbers."""
    if value is not None:
        sized = sized or depends_on_batch(value)
    dims = None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
    return Public(dims, value, weights, secret, sized)


def rows(tensor: tf.Tensor, axis: int, stride: int, dims: Dims = None) -> Rows:
    """Describes a tensor of rows by its static shape, completed by `dims`."""
    if tensor.shape.rank is None:
        if dims is None:
            raise Mixes("has an unknown rank")
        static = (None,) * len(dims)
    else:
        static = tuple(tensor.shape.as_list())
    hints = dims if dims is not None and len(dims) == len(static) else (None,) * len(static)
    full = [h if n is None else n for n, h in zip(static, hints, strict=True)]
    axis %= len(full)
    if isinstance(full[axis], int):
        raise Mixes("has a fixed number of entries along the axis of examples")
    if any(isinstance(n, Size) for a, n in enumerate(full) if a != axis):
        raise Mixes("has the number of examples in its shape more than once")
    full[axis] = Size(stride)
    return Rows(axis, stride, tuple(full))
