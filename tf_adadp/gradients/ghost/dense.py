"""Dense and EinsumDense: products of inputs and output gradients."""

import keras
import tensorflow as tf

from tf_adadp.clipping.row_gradients import Rows
from tf_adadp.gradients.forms import MatrixLayout, products
from tf_adadp.gradients.ghost.independence import activate
from tf_adadp.gradients.ghost.registry import register
from tf_adadp.gradients.patching import replaced
from tf_adadp.utils.keras_compat import raw_kernel


@register(keras.layers.Dense)
def dense(layer, call, tap, inputs, **kwargs):
    """z = x·W + c: dW = Σ_t x_t ⊗ dz_t, dc = Σ_t dz_t; with LoRA, W = W₀ + s·A·B, dA and dB."""
    if layer.quantization_mode is not None:
        return NotImplemented

    def gradients(outputs):
        if layer.lora_enabled:
            # Older Keras has no alpha: a scale of 1.
            scale = getattr(layer, "lora_alpha", layer.lora_rank) / layer.lora_rank
            a, b = (
                tf.cast(v.value, tf.float32) for v in (layer.lora_kernel_a, layer.lora_kernel_b)
            )
            x = tf.cast(inputs, tf.float32)
            back = scale * tf.linalg.matmul(outputs, b, transpose_b=True)
            yield layer.lora_kernel_a, products(x, back, _matrix(layer.lora_kernel_a))
            down = scale * tf.linalg.matmul(x, a)
            yield layer.lora_kernel_b, products(down, outputs, _matrix(layer.lora_kernel_b))
        else:
            yield raw_kernel(layer), products(inputs, outputs, _matrix(raw_kernel(layer)))
        if layer.bias is not None:
            yield layer.bias, bias_gradient(outputs)

    return call_with_tapped_activation(layer, call, tap, gradients, inputs, **kwargs)


@register(keras.layers.EinsumDense)
def einsum_dense(layer, call, tap, inputs, **kwargs):
    """z = einsum(equation, x, W) + c, where each axis of W meets either x or z."""
    if layer.quantization_mode is not None or layer.lora_enabled:
        return NotImplemented
    labels = _labels(layer.equation, inputs.shape.rank)
    if labels is None:
        return NotImplemented
    x_labels, w_labels, z_labels = labels
    positions = [label for label in x_labels[1:] if label in z_labels and label not in w_labels]
    rows = [label for label in w_labels if label in x_labels and label not in z_labels]
    columns = [label for label in w_labels if label in z_labels and label not in x_labels]
    known = [positions + rows, rows + columns, positions + columns]
    if any(
        sorted(side) != sorted(wanted)
        for side, wanted in zip((x_labels[1:], w_labels, z_labels[1:]), known, strict=True)
    ):
        return NotImplemented  # an axis that is in all three, or summed over in x alone
    layout = MatrixLayout(raw_kernel(layer).shape, [w_labels.index(label) for label in rows])

    def gradients(outputs):
        x = _as_sequence(inputs, x_labels, positions, rows)
        z = _as_sequence(outputs, z_labels, positions, columns)
        yield raw_kernel(layer), products(x, z, layout)
        if layer.bias is not None:
            yield layer.bias, Rows(_sum_to_shape(outputs, layer.bias.shape))

    return call_with_tapped_activation(layer, call, tap, gradients, inputs, **kwargs)


def call_with_tapped_activation(layer, call, tap, gradients, *args, **kwargs):
    """Runs a layer with z, what its activation gets, tapped."""
    activation = layer.activation

    def tapped(z):
        return activate(activation, tap(z, gradients))

    with replaced(layer, activation=tapped):
        return call(*args, **kwargs)


def bias_gradient(outputs):
    """Σ over positions of [B, ..., o]."""
    return Rows(tf.reduce_sum(outputs, axis=list(range(1, outputs.shape.rank - 1))))


def _matrix(variable):
    return MatrixLayout(variable.shape, [0])


def _labels(equation, rank):
    """The labels of x, W and z without ellipses, batch first in x and z; None if that is not so."""
    inputs, z_labels = equation.replace(" ", "").split("->")
    x_labels, w_labels = inputs.split(",")
    if "..." in x_labels:
        hidden = rank - (len(x_labels) - 3)
        if hidden < 1 or "..." in w_labels or "..." not in z_labels:
            return None
        stand_ins = "".join(chr(ord("\u0391") + n) for n in range(hidden))
        x_labels, z_labels = (part.replace("...", stand_ins) for part in (x_labels, z_labels))
    if "." in x_labels + w_labels + z_labels or x_labels[0] != z_labels[0]:
        return None
    return x_labels, w_labels, z_labels


def _as_sequence(values, labels, positions, features):
    """[B, ...] with the given labels as [B, positions..., product of features]."""
    order = [0, *(labels.index(label) for label in positions + features)]
    values = tf.transpose(values, order)
    shape = tf.shape(values)
    count = values.shape[1 + len(positions) :].num_elements()
    static = [*values.shape[: 1 + len(positions)], count]
    values = tf.reshape(values, tf.concat([shape[: 1 + len(positions)], [count]], 0))
    return tf.ensure_shape(values, static)


def _sum_to_shape(outputs, shape):
    """Sums [B, ...] over the axes that a bias of this shape is broadcast along."""
    rank = outputs.shape.rank - 1
    padded = [1] * (rank - len(shape)) + list(shape)
    axes = [1 + a for a in range(rank) if padded[a] == 1 and outputs.shape[1 + a] != 1]
    summed = tf.reduce_sum(outputs, axis=axes, keepdims=True)
    return tf.reshape(summed, [tf.shape(outputs)[0], *shape])
