"""Variables of any rank as matrices."""

import math
from collections.abc import Iterable, Sequence

import tensorflow as tf

from tf_adadp.gradients.forms.common import with_shape


class MatrixLayout:
    """Reshapes a variable of any rank to a matrix [i, o] and back.

    Args:
        shape: the variable's shape.
        row_axes: its axes that make up i, in order.
        column_axes: those that make up o, in order; by default the others, ascending.
    """

    def __init__(
        self,
        shape: Sequence[int],
        row_axes: Iterable[int],
        column_axes: Iterable[int] | None = None,
    ):
        self.shape = tuple(shape)
        self._rows = tuple(row_axes)
        others = (a for a in range(len(self.shape)) if a not in self._rows)
        self._columns = tuple(others if column_axes is None else column_axes)
        self.num_rows = math.prod(self.shape[a] for a in self._rows)
        self.num_columns = math.prod(self.shape[a] for a in self._columns)
        self._order = self._rows + self._columns
        self.is_plain = self._order == tuple(range(len(self.shape)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MatrixLayout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self):
        return self.shape, self._rows, self._columns

    @property
    def swapped(self) -> "MatrixLayout":
        """Returns the layout with rows and columns exchanged."""
        return MatrixLayout(self.shape, self._columns, self._rows)

    def transposed(self, order: Sequence[int]) -> "MatrixLayout":
        """Returns the layout of a variable of which this is the one of tf.transpose(it, order)."""
        shape = [0] * len(self.shape)
        for axis, size in zip(order, self.shape, strict=True):
            shape[axis] = size
        return MatrixLayout(
            shape, [order[a] for a in self._rows], [order[a] for a in self._columns]
        )

    def reshaped(self, shape: Sequence[int]) -> "MatrixLayout | None":
        """Returns the layout of a variable of which this is the one of tf.reshape(it, ...).

        None where its axes do not divide into rows and columns.
        """
        places = range(len(shape) + 1)
        if self.is_plain:
            first = next((j for j in places if math.prod(shape[:j]) == self.num_rows), None)
            return None if first is None else MatrixLayout(shape, range(first))
        if self._columns + self._rows == tuple(range(len(self.shape))):
            first = next((j for j in places if math.prod(shape[:j]) == self.num_columns), None)
            return None if first is None else MatrixLayout(shape, range(first, len(shape)))
        return None

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
        if not self.is_plain:
            values = tf.transpose(values, self._order)
        return tf.reshape(values, [math.prod(sides[0]), math.prod(sides[1])])

    def from_matrix(self, matrix: tf.Tensor) -> tf.Tensor:
        """Reshapes [..., i, o] to [..., *shape]."""
        lead = matrix.shape.rank - 2
        head = tf.shape(matrix)[:lead]
        ordered = [self.shape[a] for a in self._order]
        values = tf.reshape(matrix, tf.concat([head, ordered], 0))
        if not self.is_plain:
            inverse = [self._order.index(a) for a in range(len(self.shape))]
            values = tf.transpose(values, [*range(lead), *(lead + a for a in inverse)])
        return with_shape(values, [*matrix.shape[:lead], *self.shape])
