"""Variables of any rank as matrices."""

import math
from collections.abc import Iterable, Sequence

import tensorflow as tf


class MatrixLayout:
    """Reshapes a variable of any rank to a matrix [i, o] and back.

    Args:
        shape: the variable's shape.
        row_axes: its axes that make up i, in order; the others, in order, make up o.
    """

    def __init__(self, shape: Sequence[int], row_axes: Iterable[int]):
        self.shape = tuple(shape)
        self._rows = tuple(row_axes)
        self._columns = tuple(a for a in range(len(self.shape)) if a not in self._rows)
        self.num_rows = math.prod(self.shape[a] for a in self._rows)
        self.num_columns = math.prod(self.shape[a] for a in self._columns)
        self._order = self._rows + self._columns
        self._is_plain = self._order == tuple(range(len(self.shape)))

    def to_matrix(self, values: tf.Tensor) -> tf.Tensor:
        """Reshapes values that broadcast to the variable: [i, o], or 1 for an axis they lack."""
        missing = len(self.shape) - values.shape.rank
        values = tf.reshape(values, [1] * missing + values.shape.as_list())
        sides = []
        for axes in (self._rows, self._columns):
            ones = all(values.shape[a] == 1 for a in axes)
            sides.append([1 if ones else self.shape[a] for a in axes])
        shape = [0] * len(self.shape)
        for axes, sizes in zip((self._rows, self._columns), sides, strict=True):
            for axis, size in zip(axes, sizes, strict=True):
                shape[axis] = size
        values = tf.broadcast_to(values, shape)
        if not self._is_plain:
            values = tf.transpose(values, self._order)
        return tf.reshape(values, [math.prod(sides[0]), math.prod(sides[1])])

    def from_matrix(self, matrix: tf.Tensor) -> tf.Tensor:
        """Reshapes [..., i, o] to [..., *shape]."""
        lead = matrix.shape.rank - 2
        head = tf.shape(matrix)[:lead]
        ordered = [self.shape[a] for a in self._order]
        values = tf.reshape(matrix, tf.concat([head, ordered], 0))
        if not self._is_plain:
            inverse = [self._order.index(a) for a in range(len(self.shape))]
            values = tf.transpose(values, [*range(lead), *(lead + a for a in inverse)])
        return tf.ensure_shape(values, [*matrix.shape[:lead], *self.shape])
