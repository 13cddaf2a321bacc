"""Random graphs of a batch: chains of operations with drawn attributes, axes and operands.

What an operation is drawn with may mix examples, or not fit. The graphs are for two questions:
whether what the package calls rows are rows, and whether a model of such operations trains soundly
(`operations.py`).
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.gradients.dilation import batch_to_space, space_to_batch

SHAPES = ((4,), (2, 3))  # of two inputs, per example
LARGEST = 2000  # entries per example
FITS = (ValueError, TypeError, IndexError, tf.errors.InvalidArgumentError)
_UNARY = (tf.tanh, tf.abs, tf.nn.relu, tf.sigmoid, tf.square, tf.nn.softplus, tf.zeros_like,
          tf.ones_like, tf.identity, tf.stop_gradient, tf.math.sin)  # fmt: skip
_BINARY = (tf.add, tf.subtract, tf.multiply, tf.maximum, tf.math.divide_no_nan,
           tf.math.squared_difference)  # fmt: skip
_REDUCTIONS = (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_prod, tf.math.reduce_std)


@dataclasses.dataclass
class Drawing:
    """Holds what a graph is drawn from.

    Attributes:
        generator: of the choices.
        pool: the tensors so far, float32.
        key: a secret key.
        is_random: whether random numbers are drawn in the graph.
    """

    generator: np.random.Generator
    pool: list
    key: tf.Tensor
    is_random: bool = False

    def chance(self, probability):
        return self.generator.random() < probability

    def one_of(self, choices):
        return choices[self.generator.integers(len(choices))]

    def tensor(self):
        # The last ones more often, so that there are chains.
        back = min(int(self.generator.geometric(0.4)), len(self.pool))
        return self.pool[-back]

    def axis(self, tensor, extra=0):
        rank = tensor.shape.rank + extra
        if rank == 0:
            raise ValueError("no axis")
        return int(self.generator.integers(-rank, rank))

    def batch_size(self):
        return tf.shape(self.pool[0])[0]

    def constant(self, *shape):
        return tf.constant(self.generator.normal(size=shape), tf.float32)

    def size(self, dim):
        """A dimension of a constant that goes with one of a tensor."""
        usual = 1 if dim is None else dim
        return int(self.one_of([usual] * 8 + [1, 2, 3]))

    def extend(self):
        """Draws an operation, and adds its outputs to the pool; tells whether it fits."""
        operation = self.one_of(_OPERATIONS)
        try:
            found = operation(self, self.tensor())
        except FITS:
            return False
        for tensor in found if isinstance(found, (list, tuple)) else [found]:
            entries = [n or 1 for n in tensor.shape.as_list()] if tensor.shape.rank else []
            if np.prod(entries, dtype=int) <= LARGEST and tensor.shape.rank is not None:
                self.pool.append(tf.cast(tensor, tf.float32))
        return True


def grow(generator: np.random.Generator, key: tf.Tensor, *inputs: tf.Tensor) -> Drawing:
    """Draws 3 to 8 operations that fit, with the gradients of one of them."""
    drawing = Drawing(generator, list(inputs), key)
    wanted = len(inputs) + int(generator.integers(3, 9))
    for _ in range(60):
        if len(drawing.pool) >= wanted:
            break
        drawing.extend()
    tensor = drawing.tensor()
    try:
        back = tf.gradients(tensor, list(inputs), tf.tanh(tensor))
    except (*FITS, LookupError):  # shapes that do not fit are found out here
        back = []
    drawing.pool += [tf.convert_to_tensor(g) for g in back if g is not None]
    return drawing


# --- operations -----------------------------------------------------------------------------------


def _unary(d, x):
    return d.one_of(_UNARY)(x)


def _binary(d, x):
    return d.one_of(_BINARY)(x, d.tensor())


def _with_constant(d, x):
    shape = [d.size(n) for n in x.shape]
    drop = int(d.generator.integers(0, len(shape) + 1)) if d.chance(0.5) else 0
    pair = [x, d.constant(*shape[drop:])]
    return d.one_of(_BINARY)(*(pair if d.chance(0.5) else pair[::-1]))


def _with_size(d, x):
    size = tf.cast(d.batch_size(), tf.float32)
    return x * d.one_of([size, 1.0 / size, size * 0.5, size + 0.5, tf.floor(size / 3.0)])


def _bounded_by_size(d, x):
    size = d.batch_size()
    number = d.one_of([tf.maximum(size, 1), tf.minimum(size, 1), size // 2, -size, size % 2])
    return x + tf.cast(d.one_of([number, number > 0, number // size]), tf.float32)


def _with_coin(d, x):
    d.is_random = True
    shape = d.one_of([tf.shape(x), tf.shape(x)[:1], tf.shape(x)[1:], [1], []])
    return x * tf.random.stateless_uniform(shape, d.key)


def _where(d, x):
    return tf.where(d.tensor() > 0, x, d.one_of([d.tensor(), tf.constant(0.5)]))


def _reduce(d, x):
    axes = sorted({d.axis(x) % x.shape.rank for _ in range(int(d.generator.integers(1, 3)))})
    return d.one_of(_REDUCTIONS)(x, axes, keepdims=d.chance(0.5))


def _along(d, x):
    axis = d.axis(x)
    return d.one_of([
        lambda: tf.cumsum(x, axis, exclusive=d.chance(0.5), reverse=d.chance(0.5)),
        lambda: tf.nn.softmax(x, axis),
        lambda: tf.reverse(x, [axis]),
        lambda: tf.roll(x, int(d.generator.integers(-2, 3)), axis),
        lambda: tf.sort(x, axis),
        lambda: tf.argmax(x, axis),
        lambda: tf.math.top_k(x, 1),
        lambda: tf.math.l2_normalize(x, axis),
    ])()  # fmt: skip


def _transpose(d, x):
    return tf.transpose(x, d.generator.permutation(x.shape.rank).tolist())


def _axes(d, x):
    return d.one_of([
        lambda: tf.expand_dims(x, d.axis(x, 1)),
        lambda: tf.squeeze(x, [d.axis(x)]),
        lambda: tf.squeeze(x),
        lambda: tf.stack([x, d.tensor()], d.axis(x, 1)),
        lambda: tf.concat([x, d.tensor()], d.axis(x)),
        lambda: tf.unstack(x, axis=d.axis(x)),
        lambda: tf.split(x, 2, d.axis(x)),
        lambda: tf.split(x, [1, -1], d.axis(x), num=2),
    ])()  # fmt: skip


def _reshape(d, x):
    size, shape = d.batch_size(), tf.shape(x)
    k = int(d.one_of([1, 2, 3, 4, 6]))
    new = d.one_of([
        [-1], [-1, k], [k, -1], [size, -1], [-1, size], [size * k, -1], [size, k, -1],
        [k, size, -1], [-1, k, size], [k, -1, size], [size // k, -1],
        tf.concat([shape[:1], [-1]], 0), tf.concat([[-1], shape[1:]], 0),
        tf.concat([shape[:-1], [k, -1]], 0), tf.concat([[-1], shape[2:]], 0),
        tf.reverse(shape, [0]),
    ])  # fmt: skip
    return tf.reshape(x, new if tf.is_tensor(new) else tf.stack(new))


def _slice(d, x):
    index, size = [], d.batch_size()
    for _ in range(int(d.generator.integers(1, x.shape.rank + 2))):
        bound = int(d.generator.integers(-3, 4))
        index.append(d.one_of([
            slice(None), slice(None), slice(bound, None), slice(None, bound), slice(0, size),
            slice(None, size), slice(size, None), bound, slice(None, None, -1),
            slice(None, None, 2), tf.newaxis, ..., slice(0, None), slice(None, 3),
        ]))  # fmt: skip
    if sum(i is ... for i in index) > 1:
        raise ValueError("several ellipses")
    return x[tuple(index)]


def _look_up(d, x):
    count = int(d.one_of([2, 3, 4]))
    places = tf.cast(tf.math.floormod(d.tensor(), float(count)), tf.int32)
    batch_dims = int(d.generator.integers(0, 3))
    return d.one_of([
        lambda: tf.gather(d.constant(count, 2), places),
        lambda: tf.gather(d.constant(2, count), places, axis=1),
        lambda: tf.gather(x, places, axis=d.axis(x), batch_dims=batch_dims),
        lambda: tf.gather(x, [0, 1], axis=d.axis(x)),
        lambda: tf.gather(x, tf.range(d.batch_size()), axis=d.axis(x)),
        lambda: tf.gather_nd(x, places, batch_dims=min(batch_dims, 1)),
        lambda: tf.one_hot(places, count, axis=d.axis(x)),
        lambda: tf.math.unsorted_segment_sum(x, tf.range(x.shape[0] or 2), 3),
        lambda: tf.math.unsorted_segment_max(x, places, count),
    ])()  # fmt: skip


def _product(d, x):
    y = d.tensor()
    if d.chance(0.6):
        inner = x.shape[d.one_of([-1, -2])]
        y = d.constant(*[d.size(n) for n in x.shape[: d.one_of([0, -2])]], d.size(inner), 2)
        if d.chance(0.3):
            y = tf.linalg.matrix_transpose(y)
    pair = (x, y) if d.chance(0.7) else (y, x)
    return tf.matmul(*pair, transpose_a=d.chance(0.4), transpose_b=d.chance(0.4))


def _einsum(d, x):
    y = d.tensor() if d.chance(0.5) else d.constant(*[d.size(n) for n in x.shape])
    names = [str(d.one_of(list("abcd"))) for _ in range(x.shape.rank + y.shape.rank)]
    left, right = "".join(names[: x.shape.rank]), "".join(names[x.shape.rank :])
    if d.chance(0.4):
        left, right = "..." + left[1:], "..." + right[1:]
    letters = sorted({n for n in left + right if n != "."})
    out = "".join(n for n in d.generator.permutation(letters) if d.chance(0.6))
    dots = "..." if "..." in left else ""
    return tf.einsum(f"{left},{right}->{dots}{out}", x, y)


def _repeat(d, x):
    rank = x.shape.rank
    multiples = [int(d.one_of([1, 1, 1, 2])) for _ in range(rank)]
    widths = [[int(d.one_of([0, 0, 0, 1])) for _ in range(2)] for _ in range(rank)]
    shape = [d.batch_size() if n is None else d.size(n) for n in x.shape]
    return d.one_of([
        lambda: tf.tile(x, multiples),
        lambda: tf.pad(x, widths, d.one_of(["CONSTANT", "SYMMETRIC"])),
        lambda: tf.broadcast_to(x, [*[2] * d.chance(0.5), *shape]),
        lambda: tf.repeat(x, 2, d.axis(x)),
        lambda: x + tf.tile(d.constant(*[1] * rank), tf.stack(shape)),
        lambda: x + tf.reshape(tf.tile(d.constant(2), [d.batch_size()]), [-1, 1]),
        lambda: x + tf.fill(tf.shape(x)[: d.axis(x)], 0.5),
        lambda: x + tf.cast(tf.range(d.batch_size()), tf.float32),
    ])()  # fmt: skip


def _images(d, x):
    if x.shape.rank != 4:
        x = tf.reshape(x, tf.stack(d.one_of([
            [-1, 2, 2, 1], [d.batch_size(), -1, 2, 1], [-1, 2, 1, 1], [1, d.batch_size(), -1, 1],
        ])))  # fmt: skip
    channels = x.shape[-1] or 1
    return d.one_of([
        lambda: tf.nn.conv2d(x, d.constant(2, 2, channels, 2), 1, "SAME"),
        lambda: tf.nn.depthwise_conv2d(x, d.constant(2, 1, channels, 1), [1] * 4, "SAME"),
        lambda: tf.nn.max_pool2d(x, 2, 1, "SAME"),
        lambda: tf.nn.avg_pool2d(x, 2, 1, "SAME"),
        lambda: tf.image.resize(x, [3, 3]),
        lambda: tf.nn.space_to_depth(x, 2),
        lambda: tf.space_to_batch_nd(x, [2], [[0, 0]]),
        lambda: space_to_batch(x, [2, 1], [[0, 0], [0, 1]]),
        lambda: batch_to_space(x, [1, 2], [[0, 0], [0, 1]]),
        lambda: tf.nn.convolution(x, d.constant(2, 2, channels, 2), 1, "SAME", dilations=2),
        lambda: tf.nn.pool(x, [2, 2], "MAX", dilations=[2, 1]),
        lambda: tf.nn.local_response_normalization(x),
        lambda: tf.image.extract_patches(x, [1, 2, 2, 1], [1] * 4, [1] * 4, "SAME"),
        lambda: tf.compat.v1.nn.fused_batch_norm(
            x, tf.ones(channels), tf.zeros(channels), tf.ones(channels), tf.ones(channels),
            is_training=d.chance(0.5))[0],
        lambda: tf.image.adjust_contrast(x, 0.5),
        lambda: tf.nn.bias_add(x, d.constant(channels)),
    ])()  # fmt: skip


def _backwards(d, x):
    """Keeps examples apart, but for its gradient."""
    axis = d.axis(x)

    @tf.custom_gradient
    def same(x):
        return tf.identity(x), lambda g: g - tf.reduce_mean(g, axis, keepdims=True)

    return same(x)


def _matrices(d, x):
    return d.one_of([
        lambda: tf.linalg.band_part(x, 1, 0),
        lambda: tf.math.real(tf.signal.fft(tf.cast(x, tf.complex64))),
        lambda: tf.abs(tf.signal.rfft2d(x)),
    ])()  # fmt: skip


def _keras(d, x):
    axis, ops = d.axis(x), keras.ops
    return d.one_of([
        lambda: ops.take(x, [0, -1], axis),
        lambda: ops.take_along_axis(x, ops.argsort(x, axis), axis),
        lambda: ops.moveaxis(x, axis, d.axis(x)),
        lambda: ops.swapaxes(x, axis, d.axis(x)),
        lambda: ops.normalize(x, axis),
        lambda: ops.logsumexp(x, axis, keepdims=d.chance(0.5)),
        lambda: ops.average(x, axis),
        lambda: ops.var(x, axis),
        lambda: ops.diff(x, axis=axis),
        lambda: ops.repeat(x, 2, axis),
        lambda: ops.concatenate([x, d.tensor()], axis),
        lambda: ops.tensordot(x, d.tensor(), 1),
        lambda: ops.outer(x, d.tensor()),
        lambda: ops.tril(x),
        lambda: ops.add(x, d.constant(d.size(x.shape[-1]))),
        lambda: ops.reshape(x, (-1, *x.shape[2:])),
        lambda: ops.split(x, 2, axis),
        lambda: ops.where(x > 0, x, d.tensor()),
    ])()  # fmt: skip


_OPERATIONS = [
    _unary, _binary, _binary, _with_constant, _with_constant, _with_size, _bounded_by_size,
    _with_coin, _where, _reduce, _reduce, _along, _along, _transpose, _transpose, _axes, _axes,
    _reshape, _reshape, _reshape, _slice, _slice, _slice, _look_up, _look_up, _product, _product,
    _einsum, _einsum, _repeat, _repeat, _images, _backwards, _matrices, _keras, _keras,
]  # fmt: skip
