"""Convolutions: products of unfolded inputs and output gradients, position by position."""

import itertools
import math

import keras
import tensorflow as tf

from tf_adadp.clipping.row_gradients import Rows
from tf_adadp.gradients.forms import MatrixLayout, products
from tf_adadp.gradients.ghost.dense import bias_gradient, call_with_tapped_activation
from tf_adadp.gradients.ghost.independence import activate
from tf_adadp.gradients.ghost.registry import register
from tf_adadp.utils.keras_compat import raw_kernel

# How a CPU unfolds images fastest, measured beside `tf.image.extract_patches`: by a convolution
# with the identity where windows are small (0.7 ns an entry against 1.1 to 4.9), by slices where
# strides are 1 and there are channels enough to copy (0.6 against 1.2).
_LARGEST_IDENTITY = 100
_FEWEST_CHANNELS = 16


@register(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
def convolution(layer, call, tap, inputs, **kwargs):
    """z_p = Σ over the window at p of x·W + c: dW = Σ_p window_p ⊗ dz_p."""
    if getattr(layer, "quantization_mode", None) or layer.lora_enabled:
        return NotImplemented
    if layer.rank == 3 and max(layer.dilation_rate) > 1:
        return NotImplemented  # TensorFlow unfolds no dilated volumes
    kernel = raw_kernel(layer)

    def gradients(outputs):
        x, z = _channels_last(layer, inputs), _channels_last(layer, outputs)
        windows = unfold(layer, x)
        if layer.groups == 1:
            layout = MatrixLayout(kernel.shape, range(layer.rank + 1))
            yield kernel, products(_joined(windows), z, layout)
        else:
            yield kernel, Rows(_grouped(windows, z, layer.groups))
        if layer.use_bias:
            yield layer.bias, bias_gradient(z)

    return call_with_tapped_activation(layer, call, tap, gradients, inputs, **kwargs)


@register(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose)
def transposed_convolution(layer, call, tap, inputs, **kwargs):
    """The gradient of a convolution, so x and dz change places: dW = Σ_p window_p(dz) ⊗ x_p."""
    if not _unfolds_to(layer, inputs) or max(layer.dilation_rate) > 1:
        return NotImplemented

    def gradients(outputs):
        x, z = _channels_last(layer, inputs), _channels_last(layer, outputs)
        layout = MatrixLayout(layer.kernel.shape, range(layer.rank + 1))
        yield layer.kernel, products(_joined(unfold(layer, z)), x, layout)
        if layer.use_bias:
            yield layer.bias, bias_gradient(z)

    return call_with_tapped_activation(layer, call, tap, gradients, inputs, **kwargs)


@register(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
def depthwise_convolution(layer, call, tap, inputs, **kwargs):
    """z_pck = Σ over the window at p of x_c·W_ck + c."""

    def gradients(outputs):
        x, z = _channels_last(layer, inputs), _channels_last(layer, outputs)
        yield layer.kernel, Rows(_depthwise(unfold(layer, x), z, layer.kernel.shape))
        if layer.use_bias:
            yield layer.bias, bias_gradient(z)

    return call_with_tapped_activation(layer, call, tap, gradients, inputs, **kwargs)


@register(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
def separable_convolution(layer, call, tap, inputs, **kwargs):
    """A depthwise convolution y of x, tapped, and a pointwise one of y."""
    y = keras.ops.depthwise_conv(
        inputs,
        layer.depthwise_kernel,
        strides=layer.strides,
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )
    z = keras.ops.conv(
        tap(y, lambda outputs: _depthwise_part(layer, inputs, outputs)),
        layer.pointwise_kernel,
        strides=1,
        padding="valid",
        dilation_rate=1,
        data_format=layer.data_format,
    )
    if layer.use_bias:
        channels_last = layer.data_format == "channels_last"
        ones = [1] * layer.rank
        shape = [1, *ones, layer.filters] if channels_last else [1, layer.filters, *ones]
        z += keras.ops.reshape(layer.bias, shape)

    def gradients(outputs):
        inner, z = _channels_last(layer, y), _channels_last(layer, outputs)
        layout = MatrixLayout(layer.pointwise_kernel.shape, range(layer.rank + 1))
        yield layer.pointwise_kernel, products(inner, z, layout)
        if layer.use_bias:
            yield layer.bias, bias_gradient(z)

    return activate(layer.activation, tap(z, gradients))


def _depthwise_part(layer, inputs, outputs):
    x, z = _channels_last(layer, inputs), _channels_last(layer, outputs)
    kernel = layer.depthwise_kernel
    yield kernel, Rows(_depthwise(unfold(layer, x), z, kernel.shape))


def _unfolds_to(layer, inputs):
    """Whether the windows of a transposed convolution's outputs are at its inputs' positions."""

    def space(shape):
        return shape[1:-1] if layer.data_format == "channels_last" else shape[2:]

    before = space(tuple(inputs.shape))
    after = space(tuple(layer.compute_output_shape(tuple(inputs.shape))))
    if None in before:
        return False
    if layer.padding == "same":
        found = [-(-n // s) for n, s in zip(after, layer.strides, strict=True)]
    else:
        found = [
            (n - k) // s + 1
            for n, k, s in zip(after, layer.kernel_size, layer.strides, strict=True)
        ]
    return found == list(before)


def unfold(layer, x):
    """The windows of a convolution over x [B, *space, c]: [B, *positions, *kernel_size, c]."""
    size, strides = layer.kernel_size, layer.strides
    dilation, padding = layer.dilation_rate, layer.padding
    if padding == "causal":
        x = tf.pad(x, [[0, 0], [dilation[0] * (size[0] - 1), 0], [0, 0]])
        padding = "valid"
    padding, channels = padding.upper(), x.shape[-1]
    if layer.rank == 3:
        windows = tf.raw_ops.ExtractVolumePatches(
            input=x, ksizes=[1, *size, 1], strides=[1, *strides, 1], padding=padding
        )
        positions = windows.shape[1:-1]
    else:
        if layer.rank == 1:
            x = x[:, None]
            size, strides, dilation = ([1, *side] for side in (size, strides, dilation))
        windows = _patches(x, size, strides, dilation, padding)
        positions = windows.shape[2:-1] if layer.rank == 1 else windows.shape[1:-1]
    if positions.is_fully_defined():
        head = [tf.shape(x)[0], *positions]
    else:
        first = 2 if layer.rank == 1 else 1
        head = tf.unstack(tf.concat([tf.shape(x)[:1], tf.shape(windows)[first:-1]], 0))
    windows = tf.reshape(windows, tf.stack([*head, *layer.kernel_size, channels]))
    return tf.ensure_shape(windows, [None, *positions, *layer.kernel_size, channels])


def _patches(x, size, strides, dilation, padding):
    """The windows of images [B, h, w, c], flat: [B, rows, columns, size·c]."""
    channels = x.shape[-1]
    entries = math.prod(size) * channels
    on_cpu = not tf.config.list_physical_devices("GPU")  # which may round inputs of convolutions
    if on_cpu and entries <= _LARGEST_IDENTITY:
        identity = tf.reshape(tf.eye(entries, dtype=x.dtype), [*size, channels, entries])
        return tf.nn.conv2d(x, identity, list(strides), padding, dilations=list(dilation))
    if on_cpu and max(strides) == 1 and channels >= _FEWEST_CHANNELS:
        reach = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
        if padding == "SAME":
            x = tf.pad(x, [[0, 0], *([r // 2, r - r // 2] for r in reach), [0, 0]])
        rows, columns = ((x.shape[i + 1] or tf.shape(x)[i + 1]) - reach[i] for i in range(2))
        offsets = [range(0, r + 1, d) for r, d in zip(reach, dilation, strict=True)]
        starts = itertools.product(*offsets)
        return tf.concat([x[:, i : i + rows, j : j + columns] for i, j in starts], axis=-1)
    return tf.image.extract_patches(x, [1, *size, 1], [1, *strides, 1], [1, *dilation, 1], padding)


def _channels_last(layer, values):
    if layer.data_format == "channels_last":
        return values
    return tf.transpose(values, [0, *range(2, values.shape.rank), 1])


def _joined(windows):
    """[B, *positions, *kernel_size, c] as [B, *positions, i]."""
    space = (windows.shape.rank - 2) // 2
    count = windows.shape[1 + space :].num_elements()
    head = windows.shape[1 : 1 + space]
    joined = tf.reshape(windows, tf.concat([tf.shape(windows)[: 1 + space], [count]], 0))
    return tf.ensure_shape(joined, [None, *head, count])


def _flat_positions(windows, outputs):
    """[B, T, window entries, c] and [B, T, o], float32."""
    space = (windows.shape.rank - 2) // 2
    size = math.prod(windows.shape[1 + space : -1])
    batch, channels = tf.shape(outputs)[0], windows.shape[-1]
    length = windows.shape[1 : 1 + space].num_elements()
    length = tf.reduce_prod(tf.shape(windows)[1 : 1 + space]) if length is None else length
    windows = tf.reshape(tf.cast(windows, tf.float32), [batch, length, size, channels])
    return windows, tf.reshape(outputs, [batch, length, outputs.shape[-1]])


def _grouped(windows, outputs, groups):
    """dW [B, *kernel_size, c/groups, o] of a grouped convolution."""
    size = windows.shape[(windows.shape.rank - 2) // 2 + 1 : -1]
    windows, outputs = _flat_positions(windows, outputs)
    batch, length = tf.shape(windows)[0], tf.shape(windows)[1]
    channels, filters = windows.shape[-1] // groups, outputs.shape[-1] // groups
    windows = tf.reshape(windows, [batch, length, windows.shape[2], groups, channels])
    outputs = tf.reshape(outputs, [batch, length, groups, filters])
    kernel = tf.einsum("btkgc,btgo->bkcgo", windows, outputs)
    return tf.reshape(kernel, [batch, *size, channels, groups * filters])


def _depthwise(windows, outputs, shape):
    """dW [B, *kernel_size, c, multiplier] of a depthwise convolution."""
    windows, outputs = _flat_positions(windows, outputs)
    batch, length = tf.shape(windows)[0], tf.shape(windows)[1]
    outputs = tf.reshape(outputs, [batch, length, shape[-2], shape[-1]])
    kernel = tf.einsum("btkc,btcm->bkcm", windows, outputs)
    return tf.reshape(kernel, [batch, *shape])
