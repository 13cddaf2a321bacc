"""Embedding: gradients of looked-up rows, no one-hot matrix."""

import keras
import tensorflow as tf

from tf_adadp.gradients.forms import Lookups
from tf_adadp.gradients.ghost.registry import register
from tf_adadp.utils.keras_compat import raw_embeddings


@register(keras.layers.Embedding)
def embedding(layer, call, tap, inputs, **kwargs):
    """z_t = W[x_t]: row v of W gets the sum of dz_t over the places t with x_t = v."""
    if layer.quantization_mode is not None or layer.lora_enabled:
        return NotImplemented

    def gradients(outputs):
        width = raw_embeddings(layer).shape[1]
        batch = tf.shape(outputs)[0]
        places = inputs.shape[1:].num_elements()
        places = -1 if places is None else places
        yield (
            raw_embeddings(layer),
            Lookups(
                tf.reshape(tf.cast(inputs, tf.int32), [batch, places]),
                tf.reshape(outputs, [batch, places, width]),
                raw_embeddings(layer).shape,
            ),
        )

    return tap(call(inputs, **kwargs), gradients)
