"""Indices that name nothing: a value that is no number, instead of an exception in mid-run.

An exception that depends on a record tells of it. On a CPU TensorFlow stops at an index beyond an
`Embedding`'s table and at a label beyond the classes. Here the first gives NaN, as `keras.ops.take`
does on the JAX backend, and the second a loss of NaN, so that what holds for every gradient that is
not finite holds for these: they contribute nothing, and no other example notices.
"""

import contextlib

import keras
import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops

from tf_adadp.gradients.patching import PATCHING, replaced, shallow_copy


def names_a_row(indices, size):
    """Where indices name a row of a table of `size` rows; as in Keras, −1 is its last one."""
    return (indices >= -size) & (indices < size)


def looks_up(layer):
    """Whether a layer is an `Embedding` whose inputs are indices into its table."""
    return isinstance(layer, keras.layers.Embedding) and type(layer).call.__module__.startswith(
        "keras.src.layers."  # a `call` of the user's may take anything
    )


@contextlib.contextmanager
def total_lookups(layer):
    """While it is open, every `Embedding` within a layer gives NaN for indices out of range."""
    with PATCHING, contextlib.ExitStack() as stack:
        for part in layer._flatten_layers():
            if looks_up(part):
                stack.enter_context(replaced(part, call=_total_lookup(part)))
        yield


def _total_lookup(layer):
    lookup = layer.call

    def call(inputs, *args, **kwargs):
        # A ReversibleEmbedding takes vectors for its reverse.
        reverse = args[0] if args else kwargs.get("reverse", False)
        if reverse or not isinstance(inputs, tf.Tensor):
            return lookup(inputs, *args, **kwargs)
        if inputs.dtype not in (tf.int32, tf.int64):
            inputs = tf.cast(inputs, tf.int32)  # as Keras does
        valid = names_a_row(inputs, layer.input_dim)
        outputs = lookup(tf.where(valid, inputs, 0), *args, **kwargs)
        return tf.where(valid[..., None], outputs, tf.cast(float("nan"), outputs.dtype))

    return call


@contextlib.contextmanager
def total_labels():
    """While it is open, cross-entropy of class indices is NaN for those that name no class.

    Whoever calls it: on a CPU TensorFlow stops, and prints the labels of the whole batch.
    """
    cross_entropy = gen_nn_ops.sparse_softmax_cross_entropy_with_logits

    def total(features, labels, name=None):
        valid = (labels >= 0) & (labels < tf.cast(tf.shape(features)[-1], labels.dtype))
        values, gradient = cross_entropy(features, tf.where(valid, labels, 0), name=name)
        return tf.where(valid, values, tf.cast(float("nan"), values.dtype)), gradient

    with PATCHING, replaced(gen_nn_ops, sparse_softmax_cross_entropy_with_logits=total):
        yield


def total_loss(loss):
    """A Keras loss over class labels that is NaN, for a label that names no class.

    Args:
        loss: a `keras.losses.Loss`; one that takes no class labels is returned as it is.
    """
    if getattr(loss, "fn", None) is not keras.losses.sparse_categorical_crossentropy:
        return loss
    ignored = loss._fn_kwargs.get("ignore_class")
    per_label = loss.call

    def call(y_true, y_pred):
        classes = y_pred.shape[-1]
        if len(y_true.shape) == len(y_pred.shape) and y_true.shape[-1] == 1:
            y_true = tf.squeeze(y_true, -1)
        valid = (y_true >= 0) & (y_true < classes)
        if ignored is not None:
            valid |= y_true == tf.cast(ignored, y_true.dtype)
        # Not in y_pred: Keras looks for the softmax that made it.
        losses = per_label(tf.where(valid, y_true, tf.zeros_like(y_true)), y_pred)
        total = tf.where(valid, losses, tf.cast(float("nan"), losses.dtype))
        mask = getattr(losses, "_keras_mask", None)
        if mask is not None:
            total._keras_mask = mask
        return total

    total = shallow_copy(loss)
    total.__dict__.update(call=call)
    return total
