"""The windows of convolutions, and the gradients of filters as products of windows."""

import dataclasses
import itertools
import math

import tensorflow as tf

from tf_adadp.gradients.forms.common import with_shape

# How a CPU unfolds images fastest, measured beside `tf.image.extract_patches`: by a convolution
# with the identity where windows are small (0.7 ns an entry against 1.1 to 4.9), by slices where
# strides are 1 and there are channels enough to copy (0.6 against 1.2).
_LARGEST_IDENTITY = 100
_FEWEST_CHANNELS = 16


@dataclasses.dataclass(frozen=True)
class Window:
    """The window of a convolution over 2 or 3 axes.

    Attributes:
        size, strides, dilation: per axis of space.
        padding: "SAME" or "VALID".
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: str


def unfold(window: Window, x: tf.Tensor) -> tf.Tensor:
    """Returns the windows over x [B, *space, c]: [B, *positions, *size, c]."""
    channels = x.shape[-1]
    if len(window.size) == 3:
        windows = tf.raw_ops.ExtractVolumePatches(
            input=x,
            ksizes=[1, *window.size, 1],
            strides=[1, *window.strides, 1],
            padding=window.padding,
        )
    else:
        windows = _patches(x, window.size, window.strides, window.dilation, window.padding)
    positions = windows.shape[1:-1]
    if positions.is_fully_defined():
        head = [tf.shape(x)[0], *positions]
    else:
        head = tf.unstack(tf.shape(windows)[:-1], num=windows.shape.rank - 1)
    windows = tf.reshape(windows, tf.stack([*head, *window.size, channels]))
    return with_shape(windows, [None, *positions, *window.size, channels])


def _patches(x, size, strides, dilation, padding):
    """Returns the windows of images [B, h, w, c], flat: [B, rows, columns, size·c]."""
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


def joined(windows):
    """Reshapes [B, *positions, *kernel_size, c] to [B, *positions, i]."""
    space = (windows.shape.rank - 2) // 2
    count = windows.shape[1 + space :].num_elements()
    head = windows.shape[1 : 1 + space]
    flat = tf.reshape(windows, tf.concat([tf.shape(windows)[: 1 + space], [count]], 0))
    return with_shape(flat, [None, *head, count])


def _flat_positions(windows, outputs, stride):
    """Returns float32 [B, T, window entries, c] and [B, T, o]; T: positions in all images."""
    space = (windows.shape.rank - 2) // 2
    size = math.prod(windows.shape[1 + space : -1])
    batch, channels = tf.shape(outputs)[0] // stride, windows.shape[-1]
    length = windows.shape[1 : 1 + space].num_elements()
    length = tf.reduce_prod(tf.shape(windows)[1 : 1 + space]) if length is None else length
    length *= stride
    windows = tf.reshape(tf.cast(windows, tf.float32), [batch, length, size, channels])
    return windows, tf.reshape(outputs, [batch, length, outputs.shape[-1]])


def grouped(windows, outputs, groups, stride):
    """Returns dW [B, *kernel_size, c/groups, o] of a grouped convolution."""
    size = windows.shape[(windows.shape.rank - 2) // 2 + 1 : -1]
    windows, outputs = _flat_positions(windows, outputs, stride)
    batch, length = tf.shape(windows)[0], tf.shape(windows)[1]
    channels, filters = windows.shape[-1] // groups, outputs.shape[-1] // groups
    windows = tf.reshape(windows, [batch, length, windows.shape[2], groups, channels])
    outputs = tf.reshape(outputs, [batch, length, groups, filters])
    kernel = tf.einsum("btkgc,btgo->bkcgo", windows, outputs)
    return tf.reshape(kernel, [batch, *size, channels, groups * filters])


def depthwise(windows, outputs, shape, stride):
    """Returns dW [B, *kernel_size, c, multiplier] of a depthwise convolution, likewise."""
    windows, outputs = _flat_positions(windows, outputs, stride)
    batch, length = tf.shape(windows)[0], tf.shape(windows)[1]
    outputs = tf.reshape(outputs, [batch, length, shape[-2], shape[-1]])
    kernel = tf.einsum("btkc,btcm->bkcm", windows, outputs)
    return tf.reshape(kernel, [batch, *shape])
