"""Holds shared parts of the forms: shapes, weights, scales, margins for rounding."""

from collections.abc import Sequence

import tensorflow as tf

from tf_adadp.clipping.row_gradients import ROUNDOFF, AxisScales, product


def with_shape(tensor: tf.Tensor, shape: Sequence[int | None]) -> tf.Tensor:
    """Returns a tensor with at least this static shape; see `tf.ensure_shape`.

    Adds no operation where it does so already: a graph of thousands takes long to prepare.
    """
    known = tensor.shape
    if known.rank is not None and known.merge_with(shape).as_list() == known.as_list():
        return tensor
    return tf.ensure_shape(tensor, shape)


def rows_of(tensor: tf.Tensor, dims: Sequence[int]) -> tf.Tensor:
    """Reshapes to [B, *dims]; adds no operation where it has that shape."""
    known = tensor.shape.rank is not None and tensor.shape.as_list() == [None, *dims]
    return tensor if known else tf.reshape(tensor, [-1, *dims])


def scaled_rows(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Divides rows by their largest entry; returns both."""
    # In [2⁻¹²⁶, 2¹²⁶], so that no reciprocal is 0.
    largest = tf.clip_by_value(tf.reduce_max(tf.abs(rows), axis=-1), 2.0**-126, 2.0**126)
    return rows * tf.math.reciprocal_no_nan(largest)[..., None], largest


def absorbed(
    inverse_factors: Sequence[tf.Tensor], a: tf.Tensor, d: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Multiplies the factors of a metric into a ([i, 1]) and d ([1, o]); None where one is neither.

    Adds up to 3k − 1 roundings to every product a_i·d_o, of k factors: of their reciprocals, of the
    multiplications, and of the product of the factors that the noise follows.
    """
    if any(1 not in inverse.shape for inverse in inverse_factors):
        return None
    # Those of one side first: a product with `a` may be lost to underflow, of theirs none is.
    rows = [inverse[:, 0] for inverse in inverse_factors if inverse.shape[1] == 1]
    columns = [inverse[0] for inverse in inverse_factors if inverse.shape[1] != 1]
    return product([*rows, a]), product([*columns, d])


def weighted(rows: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Weighs rows [B, ...] in one pass; exactly 0 for weight 0 even where the row holds NaN."""
    weights = tf.reshape(weights, [-1] + [1] * (rows.shape.rank - 1))
    return tf.math.multiply_no_nan(rows, weights)


def zeroed(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Sets the rows of weight 0, which may hold NaN, to exact zeros."""
    return weighted(values, tf.cast(weights > 0.0, values.dtype))


def less_center(total: tf.Tensor, axis_scales: AxisScales | None, weights: tf.Tensor) -> tf.Tensor:
    """Turns a sum of gradients into the sum of their differences to the centre, where b > 0."""
    if axis_scales is None:
        return total
    if axis_scales.center is not None:
        total -= tf.reduce_sum(weights) * axis_scales.center
    return tf.where(axis_scales.scale > 0.0, total, 0.0)


def end_to_end(values: tf.Tensor, size: int) -> tf.Tensor:
    """Reshapes [B·size, T, ...] to [B, size·T, ...]."""
    length = values.shape[1] and size * values.shape[1]
    head = tf.stack([tf.shape(values)[0] // size, size * tf.shape(values)[1]])
    joined = tf.reshape(values, tf.concat([head, tf.shape(values)[2:]], 0))
    return with_shape(joined, [None, length, *values.shape[2:]])


def margin(roundings: int) -> float:
    """Returns 1 + the relative error of that many roundings and of the product that sums rows."""
    return 1.0 + roundings * ROUNDOFF + _input_rounding()


def product_margin(terms: int) -> float:
    """Returns 1 + the relative error of a matrix product of non-negative terms, in any order."""
    return 1.0 + (terms + 4) * ROUNDOFF + _input_rounding()


def _input_rounding():
    """Returns the relative error of a squared norm from rounded inputs of products.

    GPUs may keep 10 bits of them (TensorFloat-32).
    """
    return 2.0**-8 if tf.config.list_physical_devices("GPU") else 0.0
