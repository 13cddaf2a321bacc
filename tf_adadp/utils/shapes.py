"""Static shapes."""

from collections.abc import Sequence

import tensorflow as tf


def with_shape(tensor: tf.Tensor, shape: Sequence[int | None]) -> tf.Tensor:
    """Returns a tensor whose static shape says at least this; see `tf.ensure_shape`.

    Adds no operation where it does so already: a graph of thousands takes long to prepare.
    """
    known = tensor.shape
    if known.rank is not None and known.merge_with(shape).as_list() == known.as_list():
        return tensor
    return tf.ensure_shape(tensor, shape)
