"""Writes the steps of recurrent layers out, since a loop cannot be followed."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tf_adadp.gradients.patching import replaced


@contextlib.contextmanager
def written_out(layer: keras.layers.RNN) -> Iterator[None]:
    """Lets a layer write its steps out inside of this context, with the outputs of its loop.

    Keras runs a layer that goes backwards with its mask backwards too. Where it zeroes outputs of
    masked steps, as a Bidirectional layer of sequences lets it, a loop zeroes those of the mask
    backwards, but written-out steps those of the mask forwards. So they are zeroed here.
    """
    if layer.unroll:  # as the user has it, Keras's outputs are the model's
        yield
        return
    patches = {"unroll": True}
    if layer.go_backwards and layer.return_sequences and layer.zero_output_for_mask:
        patches |= {"zero_output_for_mask": False, "inner_loop": _zeroed(layer.inner_loop)}
    with replaced(layer, **patches):
        yield


def _zeroed(inner_loop):
    def run(sequences, initial_state, mask, *args, **kwargs):
        last, outputs, states = inner_loop(sequences, initial_state, mask, *args, **kwargs)
        if mask is not None:
            steps = tf.reverse(keras.tree.flatten(mask)[0], [1])  # [B, T]
            steps = tf.reshape(steps, [-1, steps.shape[1], *[1] * (len(outputs.shape) - 2)])
            outputs = tf.where(steps, outputs, tf.zeros_like(outputs))
        return last, outputs, states

    return run
