"""Makes out-of-range indices yield NaN instead of raising.

An exception that depends on a record reveals that record. On a CPU TensorFlow raises at an index
beyond a table and at a label beyond the classes. Here the index gives NaN, as `keras.ops.take` does
on the JAX backend, and the label a loss of NaN. Their gradients are not finite, so these examples
contribute nothing, and no other example is affected.

Not covered are other operations that refuse values: scattering by computed indices, a division of
integers by 0, and inverses, solutions and Cholesky factors of matrices.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tf_adadp.gradients.patching import PATCHING, replaced
from tf_adadp.utils.keras_compat import gen_array_ops, gen_math_ops, gen_nn_ops

_raw_gather, _raw_gather_nd = gen_array_ops.gather_v2, gen_array_ops.gather_nd
_raw_bincount = gen_math_ops.dense_bincount
_raw_cross_entropy = gen_nn_ops.sparse_softmax_cross_entropy_with_logits


@contextlib.contextmanager
def no_index_stops() -> Iterator[None]:
    """Makes out-of-range indices yield NaN in all that is traced inside of this context.

    It replaces four operations themselves, so it holds for every caller that gathers rows by
    computed indices (an `Embedding`, `keras.ops.take` in a user's layer or loss), counts numbers
    or takes a cross-entropy of class labels. Gathered values that cannot be NaN, such as integers,
    are 0; numbers that cannot be counted are left out.
    """
    with (
        PATCHING,
        replaced(gen_array_ops, gather_v2=_gather_v2, gather_nd=_gather_nd),
        replaced(gen_math_ops, dense_bincount=_dense_bincount),
        replaced(gen_nn_ops, sparse_softmax_cross_entropy_with_logits=_cross_entropy),
    ):
        yield


def _gather_v2(params, indices, axis, batch_dims=0, name=None):
    """Replaces `tf.gather`: [*params[:axis], *indices[batch_dims:], *params[axis + 1:]]."""
    params, indices = tf.convert_to_tensor(params), tf.convert_to_tensor(indices)
    if _cannot_stop(params, indices):
        return _raw_gather(params, indices, axis, batch_dims=batch_dims, name=name)
    axis = tf.convert_to_tensor(axis)
    at = tf.where(axis < 0, axis + tf.cast(tf.rank(params), axis.dtype), axis)
    batch = batch_dims if batch_dims >= 0 else tf.rank(indices) + batch_dims
    size, sizes = tf.shape(params), tf.shape(indices)
    valid = (indices >= 0) & (indices < tf.cast(size[at], indices.dtype))
    rows = _raw_gather(params, _or_0(valid, indices), axis, batch_dims=batch_dims, name=name)
    before, after = tf.ones_like(size[batch:at]), tf.ones_like(size[at + 1 :])
    return _or_nan(tf.concat([sizes[:batch], before, sizes[batch:], after], 0), valid, rows)


def _gather_nd(params, indices, bad_indices_policy="", name=None):
    """Replaces `tf.gather_nd`: [*indices[:-1], *params[indices.shape[-1]:]]."""
    params, indices = tf.convert_to_tensor(params), tf.convert_to_tensor(indices)
    if _cannot_stop(params, indices):
        return _raw_gather_nd(params, indices, bad_indices_policy, name=name)
    width, size = tf.shape(indices)[-1], tf.shape(params)
    limits = tf.cast(size[:width], indices.dtype)
    valid = tf.reduce_all((indices >= 0) & (indices < limits), -1)
    rows = _raw_gather_nd(params, _or_0(valid[..., None], indices), bad_indices_policy, name=name)
    return _or_nan(tf.concat([tf.shape(valid), tf.ones_like(size[width:])], 0), valid, rows)


def _cannot_stop(params, indices):
    """Tells whether indices are constants, or params have a type without a 0 for missing values."""
    numbers = params.dtype.is_floating or params.dtype.is_integer or params.dtype.is_bool
    return tf.get_static_value(indices) is not None or not numbers


def _or_0(valid, indices):
    return tf.where(valid, indices, tf.zeros_like(indices))


def _or_nan(shape, valid, rows):
    missing = float("nan") if rows.dtype.is_floating else 0
    total = tf.where(tf.reshape(valid, shape), rows, tf.cast(missing, rows.dtype))
    total.set_shape(rows.shape)
    return total


def _dense_bincount(input, size, weights, binary_output=False, name=None):
    """Replaces `dense_bincount`, which a negative number stops, or on a GPU may not."""
    input = tf.convert_to_tensor(input)
    # A number from `size` on is left out.
    counted = tf.where(input < 0, tf.cast(size, input.dtype), input)
    return _raw_bincount(counted, size, weights, binary_output=binary_output, name=name)


def _cross_entropy(features, labels, name=None):
    """Replaces `sparse_softmax_cross_entropy_with_logits`, whose error prints a batch's labels."""
    valid = (labels >= 0) & (labels < tf.cast(tf.shape(features)[-1], labels.dtype))
    values, gradient = _raw_cross_entropy(features, _or_0(valid, labels), name=name)
    return tf.where(valid, values, tf.cast(float("nan"), values.dtype)), gradient
