"""Gradients of a table of which every example looks up a few rows."""

from collections.abc import Sequence

import tensorflow as tf

from tf_adadp.clipping.row_gradients import (
    ROUNDOFF,
    AxisScales,
    RowGradients,
    WeightedSum,
    sum_of_squares,
)
from tf_adadp.gradients.forms import common


class Lookups(RowGradients):
    """Gradients of a table [V, o]: row index_xt of it gets d_xt, and all others 0.

    Args:
        indices: int [B, T], in 0..V−1, or in −V..−1 to count from the end. Other indices look up
            nothing.
        outputs: d, float [B, T, o].
        shape: (V, o).

    Norms are those of the distinct rows: gradients of a repeated index are added first. No one-hot
    matrix is formed; memory is that of d and of T² comparisons.
    """

    form = "lookups"

    def __init__(self, indices: tf.Tensor, outputs: tf.Tensor, shape: Sequence[int]):
        self._shape = tuple(shape)
        indices = tf.where(indices < 0, indices + shape[0], indices)
        valid = (indices >= 0) & (indices < shape[0])
        # An index out of range would land in another example's part of `materialize`.
        self._indices = tf.cast(tf.where(valid, indices, 0), tf.int32)
        outputs = common.with_shape(tf.cast(outputs, tf.float32), [None, None, shape[1]])
        self._d = tf.where(valid[:, :, None], outputs, 0.0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the table's shape."""
        return self._shape

    def cost(self) -> tuple[int, int]:
        """See `RowGradients.cost`; a length that is not known counts as 1."""
        length = self._indices.shape[1] or 1
        return 2 * length * self._shape[1] + length**2, length * self._shape[1] + length**2

    def _distinct(self):
        """Adds rows up per index [B, T, o], at its first place; also returns where those are."""
        length = tf.shape(self._indices)[1]
        if self._indices.shape[1] == 1:
            return self._d, tf.ones_like(self._indices, tf.bool)
        same = self._indices[:, :, None] == self._indices[:, None, :]
        first = tf.argmax(tf.cast(same, tf.uint8), axis=2, output_type=tf.int32)
        places = first + length * tf.range(tf.shape(first)[0])[:, None]
        added = tf.math.unsorted_segment_sum(
            tf.reshape(self._d, [-1, self._shape[1]]),
            tf.reshape(places, [-1]),
            tf.size(places),
        )
        return tf.reshape(added, tf.shape(self._d)), first == tf.range(length)[None, :]

    def measure(self, axis_scales: AxisScales | None = None) -> tuple[tf.Tensor, WeightedSum]:
        """See `RowGradients.measure`."""
        differences, first = self._distinct()
        center = None if axis_scales is None else axis_scales.center
        rows, untouched = differences, 0.0
        if axis_scales is not None:
            axis_scales.checked(self._shape)
            inverse = self._gathered(axis_scales.inverse)
            if center is not None:
                at_places = self._gathered(center)
                differences = tf.where(first[:, :, None], differences - at_places, 0.0)
                ratios = tf.broadcast_to(at_places * inverse, tf.shape(differences))
                untouched = self._untouched_squares(axis_scales, ratios, first)
            rows = differences * inverse
        squares = sum_of_squares(tf.reshape(rows, [-1, self._shape[1]]))
        squares = tf.reshape(squares, tf.shape(self._indices))
        # One number per place; a plain sum of them is off by at most their number.
        places = tf.cast(tf.shape(squares)[1], tf.float32)
        squares = tf.reduce_sum(squares, axis=1) * (1.0 + (places + 4.0) * ROUNDOFF)

        def weighted_sum(weights):
            # Not of d and the centre: their difference is rounded once, as in the norm.
            total = self._scattered(common.weighted(differences, weights))
            if center is not None:
                used = self._scattered(tf.where(first, weights[:, None], 0.0)[:, :, None])
                total -= (tf.reduce_sum(weights) - used) * center
            return total if axis_scales is None else tf.where(axis_scales.scale > 0.0, total, 0.0)

        return squares + untouched, weighted_sum

    def _untouched_squares(self, axis_scales, ratios, first):
        """Returns upper bounds [B] of Σ (a/b)² over the table rows that an example does not use."""
        ratio = tf.broadcast_to(axis_scales.center * axis_scales.inverse, self._shape)
        everywhere = sum_of_squares(ratio[None])[0]
        used = tf.where(first[:, :, None], tf.square(ratios), 0.0)
        used = tf.reduce_sum(used, axis=[1, 2])
        terms = tf.cast(tf.reduce_prod(tf.shape(ratios)[1:]), tf.float32) + 64.0
        return tf.maximum(everywhere - used * (1.0 - terms * ROUNDOFF), 0.0)

    def _gathered(self, values):
        """Gathers values of the table's shape at the indices: broadcastable to [B, T, o]."""
        if values.shape.rank < 2 or values.shape[0] == 1:
            return values
        return tf.gather(values, self._indices)

    def clipped_sum(self, bounds: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """See `RowGradients.clipped_sum`."""
        rows, _ = self._distinct()
        bounds = self._gathered(bounds)
        rows = common.weighted(tf.clip_by_value(rows, -bounds, bounds), weights)
        return self._scattered(rows)

    def _scattered(self, rows):
        """Adds up rows [B, T, n] per index: [V, n]."""
        indices = tf.reshape(self._indices, [-1])
        rows = tf.reshape(rows, [-1, rows.shape[-1]])
        return tf.math.unsorted_segment_sum(rows, indices, self._shape[0])

    def materialize(self) -> tf.Tensor:
        """Returns the gradients of the whole table, [B, V, o]."""
        batch = tf.shape(self._indices)[0]
        places = self._indices + self._shape[0] * tf.range(batch)[:, None]
        rows = tf.math.unsorted_segment_sum(
            tf.reshape(self._d, [-1, self._shape[1]]),
            tf.reshape(places, [-1]),
            batch * self._shape[0],
        )
        return tf.reshape(rows, [batch, *self._shape])

    def group_means(self, size: int) -> "Lookups":
        """See `RowGradients.group_means`: the lookups of a group are put end to end."""
        d = common.end_to_end(self._d, size) / size
        return Lookups(common.end_to_end(self._indices, size), d, self._shape)
