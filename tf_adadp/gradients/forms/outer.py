"""Gradients that are one outer product per example."""

import math

import tensorflow as tf

from tf_adadp.clipping.row_gradients import (
    SMALLEST_SQUARE,
    AxisScales,
    Rows,
    WeightedSum,
    grouped,
    raised_sum,
    row_norms,
)
from tf_adadp.gradients.forms import common
from tf_adadp.gradients.forms.factored import Factored
from tf_adadp.gradients.forms.sequence import SequenceProducts

_ROWS_PER_SUM = 12  # XLA's CPU compiler unrolls and vectorises that many


class OuterProducts(Factored):
    """g_x = a_x ⊗ d_x.

    Args:
        inputs: a, float [B, i].
        outputs: d, float [B, o].
        layout: the `MatrixLayout` of the variable.
    """

    form = "outer"

    terms = ()

    def cost(self) -> tuple[int, int]:
        """See `RowGradients.cost`."""
        rows, columns = self.layout.num_rows, self.layout.num_columns
        return rows * columns + rows + columns, rows + columns

    def measure(self, axis_scales: AxisScales | None = None) -> tuple[tf.Tensor, WeightedSum]:
        """See `RowGradients.measure`."""

        def weighted_sum(weights):
            a, d = common.weighted(self._a, weights), common.zeroed(self._d, weights)
            total = tf.matmul(a, d, transpose_a=True)
            return common.less_center(self.layout.from_matrix(total), axis_scales, weights)

        if axis_scales is not None and axis_scales.center is not None:
            return self._measure_centred(axis_scales.checked(self.shape), weighted_sum)
        return self._squares(axis_scales), weighted_sum

    def _squares(self, axis_scales):
        a, d = self._a, self._d
        if axis_scales is None:
            return tf.square(row_norms(a) * row_norms(d)) * common.margin(4)
        axis_scales.checked(self.shape)
        factors = [self.layout.to_matrix(f) for f in axis_scales.inverse_factors]
        absorbed = common.absorbed(factors, a, d)
        if absorbed is not None:
            a, d = absorbed
            return tf.square(row_norms(a) * row_norms(d)) * common.margin(2 + 6 * len(factors))
        return self._full_squares(axis_scales) * common.margin(4)

    def _full_squares(self, axis_scales):
        """Returns upper bounds of Σ (a ⊗ d / b)².

        Σ_io a_i²·μ_io·d_o² with μ = (smallest/b)² ≥ 1e-24 and both rows scaled to a largest entry
        of 1: no term that matters underflows, and no term is negative, so nothing cancels. Scales
        are divided before they are squared: squares of both may underflow.
        """
        metric = self.layout.to_matrix(axis_scales.metric)
        metric = tf.broadcast_to(metric, [self.layout.num_rows, self.layout.num_columns])
        a, a_scale = common.scaled_rows(self._a)
        d, d_scale = common.scaled_rows(self._d)
        # The product over the shorter side has the smaller error; the other is a tree of sums.
        if self.layout.num_rows <= self.layout.num_columns:
            inner = self.layout.num_rows
            terms = tf.matmul(tf.square(a), metric) * tf.square(d)
        else:
            inner = self.layout.num_columns
            terms = tf.matmul(tf.square(d), metric, transpose_b=True) * tf.square(a)
        scale = tf.square(a_scale * d_scale / axis_scales.smallest)
        # Where the largest entries of a and d meet scales of 0, all that counts may underflow: up
        # to four roundings to 0 per term, of numbers that are at most 4 (a row over 2¹²⁶).
        lost = 256.0 * math.prod(self.layout.shape) * SMALLEST_SQUARE
        return (raised_sum(terms) + lost) * scale * common.product_margin(inner)

    def _measure_centred(self, axis_scales, sum_of_factors):
        """Measures around a centre c: upper bounds of Σ ((a ⊗ d − c)/b)².

        Multiplied out, T₁ − 2·T₂ + T₃ cancels, by at most the rounding of (√T₁ + √T₃)², which is
        added. That costs accuracy only where T₃ = Σ (c/b)² is large, and T₃ is public: beyond 1
        the differences are formed instead, for the norms and for the sum, which cancels as well.
        All terms have the metric μ of `_full_squares`: with another in one of them, they would
        not add up to the square of a difference.
        """
        layout = self.layout
        center = tf.broadcast_to(axis_scales.center, self.shape)
        root = tf.sqrt(axis_scales.metric)
        ratio = center * (root / axis_scales.smallest)
        far = tf.reduce_sum(tf.square(ratio))

        def from_factors():
            first, third = self._full_squares(axis_scales), far
            a, a_scale = common.scaled_rows(self._a)
            d, d_scale = common.scaled_rows(self._d)
            mixed = layout.to_matrix(ratio * root)
            mixed = tf.broadcast_to(mixed, [layout.num_rows, layout.num_columns])
            second = tf.reduce_sum(tf.matmul(a, mixed) * d, axis=1)
            second *= a_scale * d_scale / axis_scales.smallest
            terms = layout.num_rows + layout.num_columns + 64
            slack = (common.product_margin(terms) - 1.0) * 4.0
            apart = tf.square(tf.sqrt(first) + tf.sqrt(third))
            raised = tf.maximum(first - 2.0 * second + third, 0.0) + slack * apart
            # 0·∞ and ∞ − ∞: a row that is not finite must stay so.
            return tf.where(tf.math.is_finite(first + second), raised, first * float("nan"))

        def rows():
            return Rows(self.materialize()).measure(axis_scales)

        def weighted_sum(weights):
            return tf.cond(far <= 1.0, lambda: sum_of_factors(weights), lambda: rows()[1](weights))

        return tf.cond(far <= 1.0, from_factors, lambda: rows()[0]), weighted_sum

    def clipped_sum(self, bounds: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """See `RowGradients.clipped_sum`: outer products are formed inside of the sum.

        Compiled by XLA in blocks of 12 rows, so that no product is ever stored.
        """
        bounds = tf.broadcast_to(
            self.layout.to_matrix(bounds), [self.layout.num_rows, self.layout.num_columns]
        )
        # A weight in [0, 1] of a clipped product is not a clipped product of weighted rows.
        a, d = common.zeroed(self._a, weights), common.zeroed(self._d, weights)
        count = -(-tf.shape(a)[0] // _ROWS_PER_SUM)
        padding = count * _ROWS_PER_SUM - tf.shape(a)[0]

        def blocks(values, width):
            values = tf.pad(values, [[0, padding], [0, 0]])
            return tf.reshape(values, [count, _ROWS_PER_SUM, width])

        a, d = blocks(a, self.layout.num_rows), blocks(d, self.layout.num_columns)
        weights = blocks(weights[:, None], 1)

        @tf.function(jit_compile=True, autograph=False)
        def add_block(total, a, d, weights, bounds):
            terms = [
                tf.clip_by_value(a[j][:, None] * d[j][None, :], -bounds, bounds) * weights[j]
                for j in range(_ROWS_PER_SUM)
            ]
            return total + tf.add_n(terms)

        _, total = tf.while_loop(
            lambda i, _: i < count,
            lambda i, total: (i + 1, add_block(total, a[i], d[i], weights[i], bounds)),
            (tf.constant(0), tf.zeros([self.layout.num_rows, self.layout.num_columns])),
            parallel_iterations=1,
        )
        return self.layout.from_matrix(total)

    def materialize(self) -> tf.Tensor:
        """Returns a ⊗ d, [B, *shape]."""
        return self.layout.from_matrix(self._a[:, :, None] * self._d[:, None, :])

    def group_means(self, size: int) -> SequenceProducts:
        """See `RowGradients.group_means`: a group is a sequence."""
        return SequenceProducts(grouped(self._a, size), grouped(self._d, size) / size, self.layout)
