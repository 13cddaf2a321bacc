"""Per-example gradients known as products, with norms and sums that never form them.

A layer that multiplies its inputs by a matrix has, for one example with inputs a [T, i] and output
gradients d [T, o] (T = 1 for a dense layer on vectors; positions of a sequence or an image
otherwise), the gradient g = Σ_t a_t ⊗ d_t. Then

- T = 1: ‖g‖ = ‖a‖·‖d‖; in the metric of an ellipsoid Σ (g/b)² = rowsum((a² · b⁻²) ∘ d²);
- T > 1: ‖g‖² = Σ_ts (a_t·a_s)(d_t·d_s), the Gram form;

and Σ_x w_x·g_x is one matrix product with weighted rows. (Goodfellow 2015, "Efficient per-example
gradient computations"; Li et al. 2021, "Large language models can be strong differentially private
learners", for sequences. The forms for ellipsoids with centres are this library's.)

Every norm is an upper bound, see `row_gradients`. Rows are scaled so that no square underflows:
an example with tiny inputs and huge output gradients must not look small.
"""

import math

import tensorflow as tf

from tf_adadp.clipping.row_gradients import (
    ROUNDOFF,
    SMALLEST_SQUARE,
    RowGradients,
    Rows,
    grouped,
    raised_sum,
    row_norms,
    sum_of_squares,
)

# What forming, measuring and summing one entry of a materialised gradient costs, and what an entry
# of a Gram matrix does, in multiplications of a large matrix product; from
# `benchmarks/ghost_forms.py`.
MATERIALIZED_ENTRY_COST = 16.0
GRAM_ENTRY_COST = 256.0
_ROWS_PER_SUM = 12  # of outer products: XLA's CPU compiler unrolls and vectorises that many


class MatrixLayout:
    """How a variable of any rank is a matrix [i, o]: which of its axes make the rows.

    Args:
        shape: the variable's shape.
        row_axes: its axes that make up i, in order; the others, in order, make up o.
    """

    def __init__(self, shape, row_axes):
        self.shape = tuple(shape)
        self._rows = tuple(row_axes)
        self._columns = tuple(a for a in range(len(self.shape)) if a not in self._rows)
        self.num_rows = math.prod(self.shape[a] for a in self._rows)
        self.num_columns = math.prod(self.shape[a] for a in self._columns)
        self._order = self._rows + self._columns
        self._is_plain = self._order == tuple(range(len(self.shape)))

    def to_matrix(self, values):
        """Values that broadcast to the variable as [i or 1, o or 1]; [i, o] if of its shape."""
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

    def from_matrix(self, matrix):
        """[..., i, o] as [..., *shape]."""
        lead = matrix.shape.rank - 2
        head = tf.shape(matrix)[:lead]
        ordered = [self.shape[a] for a in self._order]
        values = tf.reshape(matrix, tf.concat([head, ordered], 0))
        if not self._is_plain:
            inverse = [self._order.index(a) for a in range(len(self.shape))]
            values = tf.transpose(values, [*range(lead), *(lead + a for a in inverse)])
        return tf.ensure_shape(values, [*matrix.shape[:lead], *self.shape])


class OuterProducts(RowGradients):
    """g_x = a_x ⊗ d_x.

    Args:
        inputs: a, float [B, i].
        outputs: d, float [B, o].
        layout: the `MatrixLayout` of the variable.
    """

    form = "outer"

    def __init__(self, inputs, outputs, layout):
        self._a = tf.ensure_shape(tf.cast(inputs, tf.float32), [None, layout.num_rows])
        self._d = tf.ensure_shape(tf.cast(outputs, tf.float32), [None, layout.num_columns])
        self._layout = layout

    @property
    def shape(self):
        """The variable's shape."""
        return self._layout.shape

    def cost(self):
        """See `RowGradients.cost`."""
        rows, columns = self._layout.num_rows, self._layout.num_columns
        return rows * columns + rows + columns, rows + columns

    def measure(self, axis_scales=None):
        """See `RowGradients.measure`."""

        def weighted_sum(weights):
            a, d = weighted(self._a, weights), _zeroed(self._d, weights)
            total = tf.matmul(a, d, transpose_a=True)
            return _less_center(self._layout.from_matrix(total), axis_scales, weights)

        if axis_scales is not None and axis_scales.center is not None:
            return self._measure_centred(axis_scales.checked(self.shape), weighted_sum)
        return self._squares(axis_scales), weighted_sum

    def _squares(self, axis_scales):
        a, d = self._a, self._d
        if axis_scales is None:
            return tf.square(row_norms(a) * row_norms(d)) * _margin(4)
        axis_scales.checked(self.shape)
        inverse = self._layout.to_matrix(axis_scales.inverse)
        if 1 in inverse.shape:  # b is constant along rows or columns of the matrix
            a, d = _absorbed(inverse, a, d)
            return tf.square(row_norms(a) * row_norms(d)) * _margin(8)
        return self._full_squares(axis_scales) * _margin(4)

    def _full_squares(self, axis_scales):
        """Upper bounds of Σ (a ⊗ d / b)².

        Σ_io a_i²·μ_io·d_o² with μ = (smallest/b)² ≥ 1e-24 and both rows scaled to a largest entry
        of 1: no term that matters underflows, and no term is negative, so nothing cancels. Scales
        are divided before they are squared: squares of both may underflow.
        """
        metric = self._layout.to_matrix(axis_scales.metric)
        metric = tf.broadcast_to(metric, [self._layout.num_rows, self._layout.num_columns])
        a, a_scale = _scaled_rows(self._a)
        d, d_scale = _scaled_rows(self._d)
        # The product over the shorter side has the smaller error; the other is a tree of sums.
        if self._layout.num_rows <= self._layout.num_columns:
            inner = self._layout.num_rows
            terms = tf.matmul(tf.square(a), metric) * tf.square(d)
        else:
            inner = self._layout.num_columns
            terms = tf.matmul(tf.square(d), metric, transpose_b=True) * tf.square(a)
        scale = tf.square(a_scale * d_scale / axis_scales.smallest)
        # Where the largest entries of a and d meet scales of 0, all that counts may underflow: up
        # to four roundings to 0 per term, of numbers that are at most 4 (a row over 2¹²⁶).
        lost = 256.0 * math.prod(self._layout.shape) * SMALLEST_SQUARE
        return (raised_sum(terms) + lost) * scale * _product_margin(inner)

    def _measure_centred(self, axis_scales, sum_of_factors):
        """`measure` for a centre c, with upper bounds of Σ ((a ⊗ d − c)/b)².

        Multiplied out, T₁ − 2·T₂ + T₃ cancels, by at most the rounding of (√T₁ + √T₃)², which is
        added. That costs accuracy only where T₃ = Σ (c/b)² is large, and T₃ is public: beyond 1
        the differences are formed instead, for the norms and for the sum, which cancels as well.
        All terms have the metric μ of `_full_squares`: with another in one of them, they would
        not add up to the square of a difference.
        """
        layout = self._layout
        center = tf.broadcast_to(axis_scales.center, self.shape)
        root = tf.sqrt(axis_scales.metric)
        ratio = center * (root / axis_scales.smallest)
        far = tf.reduce_sum(tf.square(ratio))

        def from_factors():
            first, third = self._full_squares(axis_scales), far
            a, a_scale = _scaled_rows(self._a)
            d, d_scale = _scaled_rows(self._d)
            mixed = layout.to_matrix(ratio * root)
            mixed = tf.broadcast_to(mixed, [layout.num_rows, layout.num_columns])
            second = tf.reduce_sum(tf.matmul(a, mixed) * d, axis=1)
            second *= a_scale * d_scale / axis_scales.smallest
            terms = layout.num_rows + layout.num_columns + 64
            slack = (_product_margin(terms) - 1.0) * 4.0
            apart = tf.square(tf.sqrt(first) + tf.sqrt(third))
            raised = tf.maximum(first - 2.0 * second + third, 0.0) + slack * apart
            # 0·∞ and ∞ − ∞: a row that is not finite must stay so.
            return tf.where(tf.math.is_finite(first + second), raised, first * float("nan"))

        def rows():
            return Rows(self.materialize()).measure(axis_scales)

        def weighted_sum(weights):
            return tf.cond(far <= 1.0, lambda: sum_of_factors(weights), lambda: rows()[1](weights))

        return tf.cond(far <= 1.0, from_factors, lambda: rows()[0]), weighted_sum

    def clipped_sum(self, bounds, weights):
        """See `RowGradients.clipped_sum`: outer products are formed inside of the sum.

        Compiled by XLA in blocks of 12 rows, so that no product is ever stored.
        """
        bounds = tf.broadcast_to(
            self._layout.to_matrix(bounds), [self._layout.num_rows, self._layout.num_columns]
        )
        # A weight in [0, 1] of a clipped product is no clipped product of weighted rows.
        a, d = _zeroed(self._a, weights), _zeroed(self._d, weights)
        count = -(-tf.shape(a)[0] // _ROWS_PER_SUM)
        padding = count * _ROWS_PER_SUM - tf.shape(a)[0]

        def blocks(values, width):
            values = tf.pad(values, [[0, padding], [0, 0]])
            return tf.reshape(values, [count, _ROWS_PER_SUM, width])

        a, d = blocks(a, self._layout.num_rows), blocks(d, self._layout.num_columns)
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
            (tf.constant(0), tf.zeros([self._layout.num_rows, self._layout.num_columns])),
            parallel_iterations=1,
        )
        return self._layout.from_matrix(total)

    def materialize(self):
        """a ⊗ d, [B, *shape]."""
        return self._layout.from_matrix(self._a[:, :, None] * self._d[:, None, :])

    def group_means(self, size):
        """See `RowGradients.group_means`: a group is a sequence."""
        return SequenceProducts(grouped(self._a, size), grouped(self._d, size) / size, self._layout)


class SequenceProducts(RowGradients):
    """g_x = Σ_t a_xt ⊗ d_xt.

    Args:
        inputs: a, float [B, T, i].
        outputs: d, float [B, T, o].
        layout: the `MatrixLayout` of the variable.
    """

    def __init__(self, inputs, outputs, layout):
        self._a = tf.ensure_shape(tf.cast(inputs, tf.float32), [None, None, layout.num_rows])
        self._d = tf.ensure_shape(tf.cast(outputs, tf.float32), [None, None, layout.num_columns])
        self._layout = layout

    @property
    def shape(self):
        """The variable's shape."""
        return self._layout.shape

    @property
    def form(self):
        """How the norm is found where the metric allows it: "gram" or "materialized"."""
        length = self._a.shape[1] or self._d.shape[1]
        return sequence_form(length, self._layout.num_rows, self._layout.num_columns)

    def cost(self):
        """See `RowGradients.cost`; a length that is not known counts as 1."""
        rows, columns = self._layout.num_rows, self._layout.num_columns
        length = self._a.shape[1] or self._d.shape[1] or 1
        product, inputs = length * rows * columns, length * (rows + columns)
        if self.form == "gram":
            return product + length * inputs, inputs + 2 * length**2
        return product + 3 * rows * columns, inputs + 2 * rows * columns

    def measure(self, axis_scales=None):
        """See `RowGradients.measure`."""
        a, d = self._a, self._d
        if axis_scales is not None:
            axis_scales.checked(self.shape)
            inverse = self._layout.to_matrix(axis_scales.inverse)
            if axis_scales.center is not None or 1 not in inverse.shape:
                return self._rows().measure(axis_scales)
            a, d = _absorbed(inverse, a, d)
        if self.form == "materialized":
            return self._rows().measure(axis_scales)

        def weighted_sum(weights):
            rows, columns = self._layout.num_rows, self._layout.num_columns
            a = tf.reshape(_zeroed(self._a, weights), [-1, rows])
            d = tf.reshape(weighted(self._d, weights), [-1, columns])
            total = tf.matmul(a, d, transpose_a=True)
            return _less_center(self._layout.from_matrix(total), axis_scales, weights)

        return _gram_squares(a, d) * _margin(8), weighted_sum

    def clipped_sum(self, bounds, weights):
        """See `RowGradients.clipped_sum`."""
        return self._rows().clipped_sum(bounds, weights)

    def materialize(self):
        """Σ_t a_t ⊗ d_t, [B, *shape]."""
        return self._layout.from_matrix(tf.matmul(self._a, self._d, transpose_a=True))

    def group_means(self, size):
        """See `RowGradients.group_means`: the sequences of a group are put end to end."""
        a, d = _end_to_end(self._a, size), _end_to_end(self._d, size) / size
        return SequenceProducts(a, d, self._layout)

    def _rows(self):
        return _Formed(self.materialize())


class _Formed(Rows):
    """Gradients formed outside of XLA, where weighing them in one pass is faster."""

    def _weighted(self, rows, weights):
        return weighted(rows, weights)


class Lookups(RowGradients):
    """Gradients of a table [V, o]: row index_xt of it gets d_xt, and all others 0.

    Args:
        indices: int [B, T], in 0..V−1, or in −V..−1 to count from the end. What else there is
            looks up nothing.
        outputs: d, float [B, T, o].
        shape: (V, o).

    Norms are those of the distinct rows: what an index gets twice is added first. No one-hot
    matrix is formed; memory is that of d and of T² comparisons.
    """

    form = "lookups"

    def __init__(self, indices, outputs, shape):
        self._shape = tuple(shape)
        indices = tf.where(indices < 0, indices + shape[0], indices)
        valid = (indices >= 0) & (indices < shape[0])
        # An index out of range would land in another example's part of `materialize`.
        self._indices = tf.cast(tf.where(valid, indices, 0), tf.int32)
        outputs = tf.ensure_shape(tf.cast(outputs, tf.float32), [None, None, shape[1]])
        self._d = tf.where(valid[:, :, None], outputs, 0.0)

    @property
    def shape(self):
        """The table's shape."""
        return self._shape

    def cost(self):
        """See `RowGradients.cost`; a length that is not known counts as 1."""
        length = self._indices.shape[1] or 1
        return 2 * length * self._shape[1] + length**2, length * self._shape[1] + length**2

    def _distinct(self):
        """Rows added up per index [B, T, o], at the index's first place, and where those are."""
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

    def measure(self, axis_scales=None):
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
            # Not of d and the centre: what they cancel to is rounded once, as in the norm.
            total = self._scattered(weighted(differences, weights))
            if center is not None:
                used = self._scattered(tf.where(first, weights[:, None], 0.0)[:, :, None])
                total -= (tf.reduce_sum(weights) - used) * center
            return total if axis_scales is None else tf.where(axis_scales.scale > 0.0, total, 0.0)

        return squares + untouched, weighted_sum

    def _untouched_squares(self, axis_scales, ratios, first):
        """Upper bounds [B] of Σ (a/b)² over the rows of the table that an example does not use."""
        ratio = tf.broadcast_to(axis_scales.center * axis_scales.inverse, self._shape)
        everywhere = sum_of_squares(ratio[None])[0]
        used = tf.where(first[:, :, None], tf.square(ratios), 0.0)
        used = tf.reduce_sum(used, axis=[1, 2])
        terms = tf.cast(tf.reduce_prod(tf.shape(ratios)[1:]), tf.float32) + 64.0
        return tf.maximum(everywhere - used * (1.0 - terms * ROUNDOFF), 0.0)

    def _gathered(self, values):
        """Values that broadcast to the table, at the indices: broadcastable to [B, T, o]."""
        if values.shape.rank < 2 or values.shape[0] == 1:
            return values
        return tf.gather(values, self._indices)

    def clipped_sum(self, bounds, weights):
        """See `RowGradients.clipped_sum`."""
        rows, _ = self._distinct()
        bounds = self._gathered(bounds)
        rows = weighted(tf.clip_by_value(rows, -bounds, bounds), weights)
        return self._scattered(rows)

    def _scattered(self, rows):
        """Rows [B, T, n] added up per index, [V, n]."""
        indices = tf.reshape(self._indices, [-1])
        rows = tf.reshape(rows, [-1, rows.shape[-1]])
        return tf.math.unsorted_segment_sum(rows, indices, self._shape[0])

    def materialize(self):
        """The gradients of the whole table, [B, V, o]."""
        batch = tf.shape(self._indices)[0]
        places = self._indices + self._shape[0] * tf.range(batch)[:, None]
        rows = tf.math.unsorted_segment_sum(
            tf.reshape(self._d, [-1, self._shape[1]]),
            tf.reshape(places, [-1]),
            batch * self._shape[0],
        )
        return tf.reshape(rows, [batch, *self._shape])

    def group_means(self, size):
        """See `RowGradients.group_means`: the lookups of a group are put end to end."""
        d = _end_to_end(self._d, size) / size
        return Lookups(_end_to_end(self._indices, size), d, self._shape)


def add(parts):
    """The sum of several gradients of one variable, as of a layer that is used more than once."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(p, (OuterProducts, SequenceProducts)) for p in parts):
        layout = parts[0]._layout
        pairs = [(_sequence(p._a), _sequence(p._d)) for p in parts]
        a, d = (tf.concat(side, axis=1) for side in zip(*pairs, strict=True))
        return SequenceProducts(a, d, layout)
    if all(isinstance(p, Lookups) for p in parts):
        indices = tf.concat([p._indices for p in parts], axis=1)
        return Lookups(indices, tf.concat([p._d for p in parts], axis=1), parts[0].shape)
    return Rows(tf.add_n([p.materialize() for p in parts]))


def products(inputs, outputs, layout):
    """Inputs [B, ..., i] and output gradients [B, ..., o] as the gradient of a matrix."""
    if inputs.shape.rank == 2:
        return OuterProducts(inputs, outputs, layout)
    length = inputs.shape[1:-1].num_elements()
    if length == 1:
        return OuterProducts(
            tf.reshape(inputs, [-1, layout.num_rows]),
            tf.reshape(outputs, [-1, layout.num_columns]),
            layout,
        )
    if inputs.shape.rank > 3:
        length = -1 if length is None else length
        batch = tf.shape(inputs)[0]
        inputs = tf.reshape(inputs, [batch, length, layout.num_rows])
        outputs = tf.reshape(outputs, [batch, length, layout.num_columns])
    return SequenceProducts(inputs, outputs, layout)


def sequence_form(length, num_rows, num_columns):
    """ "gram" or "materialized", whichever costs less per example.

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
    """Upper bounds of Σ_ts (a_t·a_s)(d_t·d_s), [B].

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
    slack = _product_margin(a.shape[-1] + d.shape[-1] + 64) - 1.0
    raised = tf.maximum(total, 0.0) * (1.0 + slack) + 4.0 * slack * apart
    raised = tf.where(tf.math.is_finite(total), raised, total * float("nan"))
    return raised * tf.square(largest)


def _scaled_rows(rows):
    """Rows over their largest entry, and that; in [2⁻¹²⁶, 2¹²⁶], so that no reciprocal is 0."""
    largest = tf.clip_by_value(tf.reduce_max(tf.abs(rows), axis=-1), 2.0**-126, 2.0**126)
    return rows * tf.math.reciprocal_no_nan(largest)[..., None], largest


def _absorbed(inverse, a, d):
    """a and d with a metric [i, 1] or [1, o] multiplied into the one it belongs to."""
    if inverse.shape[1] == 1:
        return a * inverse[:, 0], d
    return a, d * inverse[0]


def weighted(rows, weights):
    """weight·row [B, ...] in one pass, exactly 0 for weight 0 even where the row holds NaN."""
    weights = tf.reshape(weights, [-1] + [1] * (rows.shape.rank - 1))
    return tf.math.multiply_no_nan(rows, weights)


def _zeroed(values, weights):
    """Values [B, ...] with exact zeros in rows of weight 0, which may hold NaN."""
    return weighted(values, tf.cast(weights > 0.0, values.dtype))


def _less_center(total, axis_scales, weights):
    """A sum of gradients as the sum of their differences to the centre, where b > 0."""
    if axis_scales is None:
        return total
    if axis_scales.center is not None:
        total -= tf.reduce_sum(weights) * axis_scales.center
    return tf.where(axis_scales.scale > 0.0, total, 0.0)


def _end_to_end(values, size):
    """[B·size, T, ...] as [B, size·T, ...]."""
    length = values.shape[1] and size * values.shape[1]
    head = tf.stack([tf.shape(values)[0] // size, size * tf.shape(values)[1]])
    joined = tf.reshape(values, tf.concat([head, tf.shape(values)[2:]], 0))
    return tf.ensure_shape(joined, [None, length, *values.shape[2:]])


def _sequence(values):
    return values[:, None, :] if values.shape.rank == 2 else values


def _margin(roundings):
    """1 + the relative error of that many roundings, and of the product that sums the rows."""
    return 1.0 + roundings * ROUNDOFF + _input_rounding()


def _product_margin(terms):
    """1 + the relative error of a matrix product of non-negative terms, summed in any order."""
    return 1.0 + (terms + 4) * ROUNDOFF + _input_rounding()


def _input_rounding():
    """What rounding the inputs of products does to a squared norm: GPUs may keep 10 bits of them
    (TensorFloat-32)."""
    return 2.0**-8 if tf.config.list_physical_devices("GPU") else 0.0
