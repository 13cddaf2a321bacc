"""Draws stateless, keyed Gaussian noise; the package's docstring has the argument."""

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_adadp.utils.flat_groups import FlatGroups

_GRID_BITS = 24
_LARGEST_MULTIPLE = 2.0**52  # with the noise still an exact float64


def stream(key: tf.Tensor, step: int | tf.Tensor, index: int) -> tf.Tensor:
    """Returns the generator's seed for (step, index) under a key, int64 [2]: never twice the same.

    key + (index, step), word by word and modulo 2⁶⁴: distinct for distinct (step, index), with all
    128 bits of the key in it. TensorFlow sends a seed through ten Philox rounds, a bijection,
    before use, so neighbouring seeds give unrelated streams. (Its `stateless_fold_in` would first
    shrink the key to 64 bits, and may collide.)

    Args:
        key: int64 [2], secret.
        step: int64 scalar, the number of the release: never twice under one key.
        index: the number of the draw in that release, a Python int ≥ 0.
    """
    return key + tf.stack([tf.constant(index, tf.int64), tf.cast(step, tf.int64)])


def gaussian(
    key: tf.Tensor,
    step: int | tf.Tensor,
    index: int,
    shape: Sequence[int],
    stddev: float | tf.Tensor,
    dtype: tf.DType = tf.float32,
) -> tf.Tensor:
    """Draws N(0, diag(stddev²)), the same for the same (key, step, index).

    Eager and graph execution draw equal numbers (up to the last bit, as compilers round); under
    `jit_compile=True` the same seed gives another stream, of the same law.

    Args:
        key, step, index: see `stream`; index is the variable's number.
        shape: static shape of the variable.
        stddev: standard deviation, a float or a tensor that broadcasts to `shape`.
        dtype: float32, from 32 random bits a number; or float64, from 64.

    Returns:
        tensor of shape `shape`.
    """
    shape = tf.TensorShape(shape)
    size = shape.num_elements()
    pairs = -(-size // 2)
    word, signed = {
        tf.float32: (tf.uint32, tf.int32),
        tf.float64: (tf.uint64, tf.int64),
    }[tf.as_dtype(dtype)]
    width = 8 * word.size
    bits = tf.random.stateless_uniform(
        [2 * pairs],
        seed=stream(key, step, index),
        minval=None,
        maxval=None,
        dtype=word,
        # Named, because the automatic choice is eight to thirty times slower under XLA on a CPU.
        alg="philox",
    )
    # Box and Muller (1958). TensorFlow's own normals are the same numbers one at a time; these are
    # vectorised, and cost two thirds of the time.
    first, second = tf.split(bits, 2)
    uniform = (tf.cast(first, dtype) + 0.5) * 2.0**-width  # in [2^(-width - 1), 1]
    angle = tf.cast(tf.bitcast(second, signed), dtype) * (math.pi * 2.0 ** (1 - width))
    radius = tf.sqrt(-2.0 * tf.math.log(uniform))
    stddev = tf.cast(stddev, dtype)
    if stddev.shape.rank == 0:
        radius *= stddev
    normal = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=0)
    normal = tf.reshape(normal if size % 2 == 0 else normal[:size], shape)
    return normal if stddev.shape.rank == 0 else normal * stddev


def gaussians(
    key: tf.Tensor,
    step: int | tf.Tensor,
    shapes: Sequence[Sequence[int]],
    stddevs: Sequence[float | tf.Tensor],
    dtype: tf.DType = tf.float32,
    *,
    index: int = 0,
) -> list[tf.Tensor]:
    """Draws `gaussian` for a list of shapes. Small variables that follow each other share a stream.

    A deep network has hundreds of them, and a draw of its own takes eighty operations of a graph
    for each. The streams of the shapes given are `index` to `index` + their number − 1.

    Args:
        key, step: see `stream`.
        shapes, stddevs: for each draw, see `gaussian`.
        dtype: as for `gaussian`.
        index: of the first shape.

    Returns:
        list of tensors of these shapes.
    """
    groups, drawn = FlatGroups(shapes), []
    for members, length in zip(groups.ranges, groups.lengths(), strict=True):
        first = members.start
        if len(members) == 1:
            drawn.append(gaussian(key, step, index + first, shapes[first], stddevs[first], dtype))
            continue
        flat = gaussian(key, step, index + first, [length], 1.0, dtype)
        for i, part in zip(
            members, tf.split(flat, [groups.sizes[i] for i in members]), strict=True
        ):
            drawn.append(tf.reshape(part, groups.shapes[i]) * tf.cast(stddevs[i], dtype))
    return drawn


def add_gaussian(
    values: Sequence[tf.Tensor],
    stddevs: Sequence[float | tf.Tensor],
    key: tf.Tensor,
    step: int | tf.Tensor,
    *,
    noise_multiplier: float | tf.Tensor,
    secure: bool = False,
    index: int = 0,
) -> tuple[list[tf.Tensor], list[float | tf.Tensor]]:
    """Releases values: adds N(0, diag(stddev²)) to each of a list of tensors.

    The one place where noise meets sums. Guarantee: where neighbouring data move `values` by u with
    ‖u/stddevs‖₂ ≤ 1/σ*, this is a Gaussian mechanism of multiplier σ* in exact arithmetic. With
    `secure` that holds for the rounding of `values` and for the bits of the result too; the
    docstring of `tf_adadp.noise` describes the method and its limits.

    Args:
        values: list of float32 or float64 tensors of static shapes, released together.
        stddevs: for each a float or a tensor that broadcasts to its shape.
        key, step: see `stream`.
        noise_multiplier: σ* > 0, a float or scalar tensor; the largest that any charge relies on.
        secure: whether everything is rounded to a grid. A coordinate whose stddev is 0 becomes 0.
        index: of the first tensor; the others follow.

    Returns:
        (released, stddevs): tensors of the types and shapes of `values`; the standard deviations of
        the noise in them.
    """
    shapes = [v.shape for v in values]
    # Noise depends on no value: a graph would draw it first, and hold it during the pass.
    with tf.control_dependencies(values):
        key = tf.identity(key)
    if not secure:
        drawn = gaussians(key, step, shapes, stddevs, index=index)
        released = [v + tf.cast(n, v.dtype) for v, n in zip(values, drawn, strict=True)]
        return released, list(stddevs)
    scalars = sum(v.shape.num_elements() for v in values)
    rounding = 2.0**-_GRID_BITS * math.sqrt(scalars)
    factor = 1.0 + rounding * tf.cast(noise_multiplier, tf.float64)
    stddevs = [tf.cast(s, tf.float64) for s in stddevs]
    step_sizes = [_power_of_two(s) * 2.0**-_GRID_BITS for s in stddevs]
    usable = [tf.where(size > 0, size, 1.0) for size in step_sizes]
    in_steps = [s * factor / unit for s, unit in zip(stddevs, usable, strict=True)]
    drawn = gaussians(key, step, shapes, in_steps, tf.float64, index=index)
    released = []
    for value, noise, unit, step_size in zip(values, drawn, usable, step_sizes, strict=True):
        multiple = tf.cast(value, tf.float64) / unit
        multiple = tf.round(tf.clip_by_value(multiple, -_LARGEST_MULTIPLE, _LARGEST_MULTIPLE))
        released.append(tf.cast((multiple + tf.round(noise)) * step_size, value.dtype))
    return released, [tf.cast(s * factor, v.dtype) for s, v in zip(stddevs, values, strict=True)]


def _power_of_two(stddev):
    """Returns the largest power of two up to a float64 ≥ 0; 0 for 0 (and below 2⁻¹⁰²²)."""
    exponent = tf.bitcast(stddev, tf.int64) & tf.constant(0x7FF0000000000000, tf.int64)
    return tf.bitcast(exponent, tf.float64)
