"""Row forms: the per-example gradients of one variable, in the form that an engine holds.

A clipping set needs three quantities of the gradients of a batch: upper bounds of the rows' norms,
Σ weight·row, and for a box Σ weight·clip(row). Where a gradient is known as a product of two small
tensors (a dense layer's input and output gradient), all but the last come without forming it.
`Rows` is the plain form, one tensor; the factored forms are in `gradients.forms`.

**Norms are upper bounds.** A norm of n float32 terms is off by up to n·2⁻²⁴ when they are added in
a row, as a compiled inner product does: 1 % was seen at 784,000 terms, and a "clipped" vector is
then 1 % too long. So every form returns squares that are raised by a bound of their own error, and
a set clips by them.
"""

import abc
import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

ROUNDOFF = 2.0**-24
SMALLEST_SQUARE = 2.0**-126
# More terms in one block, and XLA's CPU compiler splits the loop again and runs four times slower.
_LARGEST_BLOCK = 32
# Scales below this count as zero: their reciprocals would overflow.
SMALLEST_SCALE = 2.0**-100
# Scales above this count as this one, in norm and noise: a reciprocal below 2⁻¹²⁶ would be 0. The
# rest, a factor of 2, is for the rounding of products.
LARGEST_SCALE = 2.0**125
# The least 1/(scale relative to the smallest)² that norms from factors use: far above underflow,
# so that lost terms cannot matter; coordinates beyond are bounded too strictly, which is safe.
_LEAST_METRIC = 1e-24

WeightedSum = Callable[[tf.Tensor], tf.Tensor]


class RowGradients(abc.ABC):
    """Holds the gradients of B examples with respect to one variable, [B, *shape] in some form.

    A row that is not finite has a bound that is not finite.

    Attributes:
        form: the name of the form in which norms are found, for reports.
    """

    form: str

    def cost(self) -> tuple[int, int]:
        """Returns the multiplications for norm and sum, and the floats held, per example."""
        entries = math.prod(self.shape)
        return 3 * entries, entries

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Returns the variable's shape."""

    @abc.abstractmethod
    def measure(self, axis_scales: "AxisScales | None" = None) -> tuple[tf.Tensor, WeightedSum]:
        """Bounds the norms, in a metric, and returns a function that sums weighted rows.

        Args:
            axis_scales: an `AxisScales` (b, a), or None for b = 1 and a = 0.

        Returns:
            `(squares, weighted_sum)`. squares, float32 [B]: upper bounds of Σ ((g − a)/b)² over the
            coordinates with b > 0. weighted_sum: a function of weights [B] (≥ 0) that returns
            Σ_x weight_x·(g_x − a) [*shape], 0 in coordinates with b = 0; rows of weight 0
            contribute exactly 0, whatever is in them.
        """

    @abc.abstractmethod
    def clipped_sum(self, bounds: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """Returns Σ_x weight_x · max(−c, min(c, g_x)), bounds c of the variable's shape.

        Rows of weight 0 contribute exactly 0, for any content.
        """

    @abc.abstractmethod
    def materialize(self) -> tf.Tensor:
        """Returns the gradients as one float32 tensor [B, *shape]."""

    def scaled(self, factor: float | tf.Tensor) -> "RowGradients":
        """Multiplies all rows by a number."""
        return Rows(factor * self.materialize())

    def group_means(self, size: int) -> "RowGradients":
        """Averages groups of `size` consecutive rows."""
        rows = self.materialize()
        return Rows(tf.reduce_mean(grouped(rows, size), axis=1))


class AxisScales:
    """Holds the metric of an ellipsoid in one variable, (g − a)/b, with the parts that norms need.

    Args:
        scale: b ≥ 0, a tensor that broadcasts to the variable's shape, or a tuple of such tensors
            whose product b is: norms of a ⊗ d come from a and d where each factor is constant along
            rows or columns. Coordinates where b or a factor is 0 (or below 2⁻¹⁰⁰) are left out. A
            factor of k is limited to 2^(125/k).
        center: a, likewise, or None for 0.

    Attributes:
        scale, inverse: b and 1/b, 0 where b is 0.
        inverse_factors: 1/b as a tuple of factors.
    """

    def __init__(self, scale: tf.Tensor | tuple[tf.Tensor, ...], center: tf.Tensor | None = None):
        factors = scale if isinstance(scale, tuple) else (scale,)
        factors = [tf.cast(factor, tf.float32) for factor in factors]
        most = LARGEST_SCALE ** (1 / len(factors))
        factors = [tf.where(f < SMALLEST_SCALE, 0.0, tf.minimum(f, most)) for f in factors]
        self.scale = product(factors)
        if len(factors) > 1:
            self.scale = tf.where(self.scale < SMALLEST_SCALE, 0.0, self.scale)
        self.center = None if center is None else tf.cast(center, tf.float32)
        # Here and not where they are used: a loop body would work them out again for every batch.
        self.inverse = tf.math.reciprocal_no_nan(self.scale)
        self.inverse_factors = (self.inverse,)
        if len(factors) > 1:
            self.inverse_factors = tuple(tf.math.reciprocal_no_nan(f) for f in factors)
        positive = tf.cast(self.scale, tf.bool)
        self.smallest = tf.reduce_min(tf.where(positive, self.scale, 1.0 / SMALLEST_SCALE))
        relative = tf.maximum(tf.square(self.smallest * self.inverse), _LEAST_METRIC)
        self.metric = tf.where(positive, relative, 0.0)  # (smallest/b)², in [1e-24, 1]

    def checked(self, shape: tuple[int, ...]) -> "AxisScales":
        """Returns itself, or raises ValueError if it does not broadcast to a variable's shape."""
        for name, value in (("scales", self.scale), ("center", self.center)):
            if value is None:
                continue
            try:
                fits = tf.broadcast_static_shape(value.shape, tf.TensorShape(shape)) == shape
            except ValueError:
                fits = False
            if not fits:
                raise ValueError(
                    f"{name} of shape {tuple(value.shape)} for a variable of shape "
                    f"{tuple(shape)}: give a tensor that broadcasts to it."
                )
        return self


class Rows(RowGradients):
    """Holds gradients as one tensor [B, *shape] of any float dtype; all but B static."""

    form = "materialized"

    def __init__(self, gradients: tf.Tensor):
        if not gradients.shape[1:].is_fully_defined():
            raise ValueError(
                f"grads has a tensor of shape {gradients.shape}: all but the first axis must be "
                "static."
            )
        self._gradients = tf.cast(gradients, tf.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the variable's shape."""
        return tuple(self._gradients.shape[1:])

    def measure(self, axis_scales: AxisScales | None = None) -> tuple[tf.Tensor, WeightedSum]:
        """See `RowGradients.measure`. (g − a)/b is formed before its norm: nothing cancels."""
        rows = self._gradients
        if axis_scales is not None:
            axis_scales.checked(self.shape)
            if axis_scales.center is not None:
                rows -= axis_scales.center
            # Where b = 0 the inverse is 0, and a NaN still reaches the norm and drops its row.
            rows *= axis_scales.inverse

        def weighted_sum(weights):
            # Not a matrix product with the weights: that may round its inputs on some devices.
            total = tf.reduce_sum(self._weighted(rows, weights), axis=0)
            return total if axis_scales is None else total * axis_scales.scale

        return sum_of_squares(rows), weighted_sum

    def clipped_sum(self, bounds: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """See `RowGradients.clipped_sum`."""
        clipped = tf.clip_by_value(self._gradients, -bounds, bounds)
        return tf.reduce_sum(self._weighted(clipped, weights), axis=0)

    def materialize(self) -> tf.Tensor:
        """Returns the tensor."""
        return self._gradients

    def _weighted(self, rows, weights):
        """Weighs rows; 0·NaN is NaN, so rows of weight 0 are zeroed before the product.

        (One `multiply_no_nan` would do the same; a sum over it takes XLA two to four times as
        long.)
        """
        weights = tf.reshape(weights, [-1] + [1] * (rows.shape.rank - 1))
        return tf.where(weights > 0.0, rows, 0.0) * weights


def product(factors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the product of one or more tensors; of one, itself."""
    return functools.reduce(tf.multiply, factors)


def grouped(values: tf.Tensor, size: int) -> tf.Tensor:
    """Reshapes [B·size, ...] to [B, size, ...]."""
    # Not -1 for the number of groups: it cannot be told from an empty batch.
    head = tf.stack([_batch_size(values) // size, size])
    values_in_groups = tf.reshape(values, tf.concat([head, tf.shape(values)[1:]], 0))
    return tf.ensure_shape(values_in_groups, [None, size, *values.shape[1:]])


def as_rows(gradients: tf.Tensor | RowGradients) -> RowGradients:
    """Wraps a tensor [B, *shape] in `Rows`; returns a `RowGradients` as it is."""
    return gradients if isinstance(gradients, RowGradients) else Rows(gradients)


def sum_of_squares(rows: tf.Tensor) -> tf.Tensor:
    """Returns upper bounds [B] of each row's sum of squares, see `raised_sum`.

    Squares of entries below 1e-19 are lost to underflow.
    """
    return raised_sum(tf.square(rows))


def raised_sum(terms: tf.Tensor) -> tf.Tensor:
    """Returns upper bounds [B] of the sums of non-negative terms [B, ...], trailing axes static.

    Added in a tree of blocks of at most 32 terms, so that the relative error is at most (Σ block
    sizes)·2⁻²⁴ whatever order a device adds in; by that much, and for the terms' own rounding, the
    sums are raised.
    """
    shape = tuple(terms.shape[1:])
    if len(shape) != 1:
        # Not -1 for the number of entries: it cannot be told from an empty batch.
        terms = tf.reshape(terms, [_batch_size(terms), math.prod(shape)])
    total, blocks = _tree_sum(terms, shape)
    return total * (1.0 + (blocks + 4) * ROUNDOFF)


def row_norms(rows: tf.Tensor) -> tf.Tensor:
    """Returns upper bounds of the Euclidean norms of [..., n], also where squares underflow.

    A square below the smallest float32 counts as that one: where two norms are multiplied, tiny
    entries in one factor must not hide huge ones in the other. Norms above 1.8e19 are infinite.
    """
    size = rows.shape[-1]
    flat = rows if rows.shape.rank == 2 else tf.reshape(rows, [-1, size])
    squares = sum_of_squares(flat) + size * SMALLEST_SQUARE
    norms = tf.sqrt(squares) * (1.0 + 4 * ROUNDOFF)
    return norms if rows.shape.rank == 2 else tf.reshape(norms, tf.shape(rows)[:-1])


def _tree_sum(rows, shape):
    """Sums rows of non-negative [B, n] in blocks; also returns the sum of the block sizes."""
    size, terms = rows.shape[1], 0
    while size > _LARGEST_BLOCK:
        block = _block_size(size, shape[0] if shape and not terms else 1)
        if size % block:
            rows = tf.pad(rows, [[0, 0], [0, -size % block]])
        size = -(-size // block)
        if not terms:
            # Over a middle axis, so that whole vectors are added: that is the work of the sum.
            rows = tf.reduce_sum(tf.reshape(rows, [_batch_size(rows), block, size]), axis=1)
        else:
            rows = tf.reduce_sum(tf.reshape(rows, [_batch_size(rows), size, block]), axis=2)
        # Changes nothing (NaN stays NaN), but keeps XLA from joining two levels into one long sum.
        rows = tf.abs(rows)
        terms += block
    return tf.reduce_sum(rows, axis=1), terms + (size if size > 1 else 0)


def _batch_size(rows):
    """Returns the number of rows, as an int where it is static: that saves some operations."""
    return tf.shape(rows)[0] if rows.shape[0] is None else rows.shape[0]


def _block_size(size, lead):
    """Returns a divisor of `size` up to 32, or 32 (to be padded) where the divisors are small.

    Divisors of the leading axis come first: then a block is a slice of the variable, and a compiler
    can form the gradient inside the sum without storing it.
    """
    for number in (lead, size):
        for block in range(_LARGEST_BLOCK, 7, -1):
            if number % block == 0:
                return block
    return _LARGEST_BLOCK
