"""Stateless, keyed Gaussian noise, and the holder that keeps its key out of every file.

The noise of one variable at one step is a function of (key, step, variable index) and the shapes of
the variables only: all replicas of a distributed run draw the same, once per lot however many
physical batches it has.
Whoever has the key can subtract the noise: it comes from the operating system's entropy and never
leaves memory, but for the private state file that a user asks for (`DPModel.save_private_state`).

**What the bits of a release tell.** Which floats x + n can become, for a float32 sum x and float32
noise n, depends on the low bits of x, however good the generator of n. Where the noise is of a
coarser binade than the sum and cancels some of it, the release ends in the last bit of x (Mironov
2012, "On significance of the least significant bits for differential privacy"; Haney et al. 2022,
"Precision-based attacks and interval refining"; against training, Jin et al. 2022, "Are we there
yet?"). And a number made of few random bits can be searched for those that led to it.
`add_gaussian(secure=True)`, the argument `secure_noise` of every optimizer, meets both:

- *One grid.* Sum and noise are rounded, each by itself, to multiples of a power of two between 2⁻²⁵
  and 2⁻²⁴ of the noise's standard deviation, and added as integers, exactly. With x' the rounded
  sum and N Gaussian, x' + round(N) = round(x' + N): the release is a function of the Gaussian
  mechanism on x'. So events and accountants stay what they are, for subsampled lots too. (For a
  discrete Gaussian, Canonne, Kamath and Steinke 2020, subsampled bounds would have to be proved
  anew, and to draw it exactly on so fine a grid takes integers of more than 64 bits.)
- *Sensitivity.* Rounding moves the difference of two neighbouring sums by up to one grid step in
  each of D coordinates, in units of the noise by up to 2⁻²⁴·√D. The noise is made larger by the
  factor 1 + σ*·2⁻²⁴·√D (1.0002 for σ* = 4 and 795,010 weights), which brings it back to 1/σ*.
- *Finer noise.* 64 random bits each for radius and angle, in float64: thousands of pairs of bits
  lead to every grid point, and the tails end at 9.4 standard deviations in place of 6.7 (the ideal
  noise puts less than 10⁻¹³ beyond that in 10⁶ coordinates). The mean of four float draws (Holohan
  and Braghin 2021, "Secure random sampling in differential privacy"), as other toolkits have it,
  would make the search hopeless too, cost as much, and still show the last bits of x.

**What it does not defend against.** An attack on the generator: Philox-4x32-10 is a fast one and no
cipher; whoever knows many of the noise's numbers and can work out its key has all the others. The
rounding of the float32 sum over the examples before it comes here, which may differ between
neighbours by more than the sensitivity (Casacuberta et al. 2022, "Widespread underestimation of
sensitivity"). Logarithm, root and cosine are float64 functions, and nobody has proved that the
grid's probabilities are the Gaussian's to the last digit. Time: the operations depend on shapes
alone, but some take longer for some floats. Choices by noisy comparison (AGD's step length,
SADPSGD's acceptance) publish no bits of their noise, and are as they are.
"""

import math

import tensorflow as tf

from tf_adadp.utils.flat_groups import FlatGroups

_GRID_BITS = 24
_LARGEST_MULTIPLE = 2.0**52  # with the noise still an exact float64


def stream(key, step, index):
    """The generator's seed for (step, index) under a key, int64 [2]: never twice the same.

    key + (index, step), word by word and modulo 2⁶⁴: distinct for distinct (step, index), with all
    128 bits of the key in it. TensorFlow sends a seed through ten Philox rounds, a bijection,
    before use, so neighbouring seeds give unrelated streams. (Its `stateless_fold_in` would first
    shrink the key to 64 bits, and may collide.)

    Args:
        key: int64 [2], secret.
        step: int64 scalar, the number of the release: never twice under one key.
        index: what is drawn in that release, a Python int ≥ 0.
    """
    return key + tf.stack([tf.constant(index, tf.int64), tf.cast(step, tf.int64)])


def gaussian(key, step, index, shape, stddev, dtype=tf.float32):
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


def gaussians(key, step, shapes, stddevs, dtype=tf.float32, *, index=0):
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


def add_gaussian(values, stddevs, key, step, *, noise_multiplier, secure=False, index=0):
    """Releases values: adds N(0, diag(stddev²)) to each of a list of tensors.

    The one place where noise meets sums. Guarantee: where neighbouring data move `values` by u with
    ‖u/stddevs‖₂ ≤ 1/σ*, this is a Gaussian mechanism of multiplier σ* in exact arithmetic. With
    `secure` that holds for the rounding of `values` too, and for what the bits of the result tell;
    see the module for how, and for what is not defended.

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
    """The largest power of two that is no larger, of float64 ≥ 0; 0 for 0 (and below 2⁻¹⁰²²)."""
    exponent = tf.bitcast(stddev, tf.int64) & tf.constant(0x7FF0000000000000, tf.int64)
    return tf.bitcast(exponent, tf.float64)
