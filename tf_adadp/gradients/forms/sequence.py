"""Gradients that are a sum of outer products over positions, one sum per example."""

import tensorflow as tf

from tf_adadp.clipping.row_gradients import (
    AxisScales,
    Rows,
    WeightedSum,
    row_norms,
)
from tf_adadp.gradients.forms import common
from tf_adadp.gradients.forms.factored import Factored

# What forming, measuring and summing one entry of a materialised gradient costs, and what an entry
# of a Gram matrix does, in multiplications of a large matrix product; from
# `benchmarks/ghost_forms.py`.
MATERIALIZED_ENTRY_COST = 16.0
GRAM_ENTRY_COST = 256.0


class SequenceProducts(Factored):
    """g_x = Σ_t a_xt ⊗ d_xt.

    Args:
        inputs: a, float [B, T, i].
        outputs: d, float [B, T, o].
        layout: the `MatrixLayout` of the variable.
    """

    terms = (None,)

    @property
    def form(self) -> str:
        """Returns how norms are found where the metric allows it: "gram" or "materialized"."""
        length = self._a.shape[1] or self._d.shape[1]
        return sequence_form(length, self.layout.num_rows, self.layout.num_columns)

    def cost(self) -> tuple[int, int]:
        """See `RowGradients.cost`; a length that is not known counts as 1."""
        rows, columns = self.layout.num_rows, self.layout.num_columns
        length = self._a.shape[1] or self._d.shape[1] or 1
        product, inputs = length * rows * columns, length * (rows + columns)
        if self.form == "gram":
            return product + length * inputs, inputs + 2 * length**2
        return product + 3 * rows * columns, inputs + 2 * rows * columns

    def measure(self, axis_scales: AxisScales | None = None) -> tuple[tf.Tensor, WeightedSum]:
        """See `RowGradients.measure`."""
        factors = [] if axis_scales is None else axis_scales.checked(self.shape).inverse_factors
        absorbed = common.absorbed([self.layout.to_matrix(f) for f in factors], self._a, self._d)
        centred = axis_scales is not None and axis_scales.center is not None
        if absorbed is None or centred or self.form == "materialized":
            return self._rows().measure(axis_scales)

        def weighted_sum(weights):
            rows, columns = self.layout.num_rows, self.layout.num_columns
            a = tf.reshape(common.zeroed(self._a, weights), [-1, rows])
            d = tf.reshape(common.weighted(self._d, weights), [-1, columns])
            total = tf.matmul(a, d, transpose_a=True)
            return common.less_center(self.layout.from_matrix(total), axis_scales, weights)

        return _gram_squares(*absorbed) * common.margin(6 + 6 * len(factors)), weighted_sum

    def clipped_sum(self, bounds: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """See `RowGradients.clipped_sum`."""
        return self._rows().clipped_sum(bounds, weights)

    def materialize(self) -> tf.Tensor:
        """Returns Σ_t a_t ⊗ d_t, [B, *shape]."""
        return self.layout.from_matrix(tf.matmul(self._a, self._d, transpose_a=True))

    def group_means(self, size: int) -> "SequenceProducts":
        """See `RowGradients.group_means`: the sequences of a group are put end to end."""
        a, d = common.end_to_end(self._a, size), common.end_to_end(self._d, size) / size
        return SequenceProducts(a, d, self.layout)

    def _rows(self):
        return _Formed(self.materialize())


class _Formed(Rows):
    """Weighs gradients in one pass, which is faster outside of XLA."""

    def _weighted(self, rows, weights):
        return common.weighted(rows, weights)


def sequence_form(length: int | None, num_rows: int, num_columns: int) -> str:
    """Returns "gram" or "materialized", whichever costs less per example.

    Args:
        length: T, or None where it is not known when the graph is made.
        num_rows, num_columns: i and o.
    """
    if length is None:
        return "materialized"
    entries = num_rows * num_columns
    # Both need T·i·o multiplications: the one for the sum, the other for the gradient.
    gram = length**2 * (num_rows + num_columns + GRAM_ENTRY_COST)
    return "gram" if gram < MATERIALIZED_ENTRY_COST * entries else "materialized"


def _gram_squares(a, d):
    """Returns upper bounds [B] of Σ_ts (a_t·a_s)(d_t·d_s).

    The length of a_t goes into d_t, so that only the relative sizes of examples' positions are
    left to underflow. The terms have both signs: what rounding can do is bounded by its error on
    the result and, position by position, on Σ_t ‖a_t‖²‖d_t‖².
    """
    lengths = row_norms(a)
    a = a * tf.math.reciprocal_no_nan(lengths)[..., None]
    d = d * lengths[..., None]
    largest = tf.reduce_max(tf.abs(d), axis=[1, 2])
    d = d * tf.math.reciprocal_no_nan(largest)[:, None, None]
    grams = tf.matmul(a, a, transpose_b=True) * tf.matmul(d, d, transpose_b=True)
    total = tf.reduce_sum(grams, axis=[1, 2])
    apart = tf.reduce_sum(tf.square(d), axis=[1, 2])
    slack = common.product_margin(a.shape[-1] + d.shape[-1] + 64) - 1.0
    raised = tf.maximum(total, 0.0) * (1.0 + slack) + 4.0 * slack * apart
    raised = tf.where(tf.math.is_finite(total), raised, total * float("nan"))
    return raised * tf.square(largest)
