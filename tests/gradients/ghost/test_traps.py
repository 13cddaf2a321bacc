"""Models that look harmless: each is refused, or its gradients are those of a loop.

What no rule of one operation shows: what is off the path of the loss, custom gradients, the number
of examples, weights that are read past Keras, and losses that layers add.
"""

import keras
import pytest
import tensorflow as tf

from tests.gradients.ghost.loops import ROWS, CannotFollow, compare, probe, traced

L = keras.layers


def _size(x):
    return tf.shape(x)[0]


def _floating(number):
    return tf.cast(number, tf.float32)


# --- custom gradients -----------------------------------------------------------------------------


def _mixes_backwards(layer, x):
    @tf.custom_gradient
    def same(x):
        return tf.identity(x), lambda d: d - tf.reduce_mean(d, 0)

    return same(x)


def _own_gradient_of_weight(layer, x):
    @tf.custom_gradient
    def product(x, w):
        return x @ w, lambda d: (d @ tf.transpose(w), 3.0 * tf.transpose(x) @ d)

    return product(x, tf.convert_to_tensor(layer.w[0]))


def _own_gradient_reverses(layer, x):
    @tf.custom_gradient
    def product(x, w):
        return x @ w, lambda d: (d @ tf.transpose(w), tf.transpose(x) @ tf.reverse(d, [0]))

    return product(x, tf.convert_to_tensor(layer.w[0]))


@tf.RegisterGradient("TrapsThatOverride")
def _seven(op, d):
    return d @ tf.transpose(op.inputs[1]), 7.0 * tf.transpose(op.inputs[0]) @ d


def _overridden(layer, x):
    w = tf.convert_to_tensor(layer.w[0])
    if tf.executing_eagerly():
        return x @ w
    graph = tf.compat.v1.get_default_graph()
    with graph.gradient_override_map({"MatMul": "TrapsThatOverride"}):
        return tf.matmul(x, w)


def _recomputed(layer, x):
    w = tf.convert_to_tensor(layer.w[0])
    return tf.recompute_grad(lambda x, w: tf.tanh(x @ w))(x, w)


def _own_gradient_before(layer, x):
    @tf.custom_gradient
    def doubled(w):
        return 2.0 * w, lambda d: 5.0 * d

    return x @ doubled(tf.convert_to_tensor(layer.w[0]))


def _own_gradient_of_examples(layer, x):
    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), lambda d: tf.clip_by_value(d, -0.01, 0.01)

    return clipped(x) @ layer.w[0]


# --- off the path ---------------------------------------------------------------------------------

_KEPT = tf.Variable(tf.zeros([3]), trainable=False)


def _after(effect):
    def call(layer, x):
        effect(x)
        return x

    return call


def _position(layer, x):
    return x + _floating(tf.range(_size(x)))[:, None]


def _added(function):
    def call(layer, x):
        layer.add_loss(function(layer, x))
        return x

    return call


REFUSED = {
    "mixes backwards": (_mixes_backwards, 3, "Mean"),
    "own gradient of a weight": (_own_gradient_of_weight, 3, "gradient of its own", (3, 4)),
    "own gradient of a weight that mixes": (_own_gradient_reverses, 3, "its own", (3, 4)),
    "overridden gradient of a weight": (_overridden, 3, "gradient of its own", (3, 4)),
    "recomputed gradient of a weight": (_recomputed, 3, "gradient of its own", (3, 4)),
    "cumsum": (lambda k, x: tf.cumsum(x, 0), 3, "Cumsum"),
    "roll": (lambda k, x: tf.roll(x, 1, 0), 3, "Roll"),
    "sort": (lambda k, x: tf.sort(x, 0), 3, "TopKV2"),
    "argsort": (lambda k, x: tf.gather(x, tf.argsort(x[:, 0])), 3, "TopKV2"),
    "top k": (lambda k, x: x + tf.math.top_k(tf.transpose(x), 1)[0][:, 0], 3, "TopKV2"),
    "softmax": (lambda k, x: tf.nn.softmax(x, 0), 3, "Softmax"),
    "maximum over the batch": (lambda k, x: x / tf.reduce_max(x), 3, "Max"),
    "mixing mask": (lambda k, x: tf.where(x > tf.reduce_mean(x, 0), x, 0.0), 3, "Mean"),
    "products of pairs": (lambda k, x: tf.matmul(x, x, transpose_b=True) @ x, 3, "MatMul"),
    "reversed": (lambda k, x: x[::-1], 3, "StridedSlice"),
    "first example": (lambda k, x: x - x[:1], 3, "StridedSlice"),
    "reshape": (lambda k, x: tf.reduce_sum(tf.reshape(x, [-1, 2])) * x, 3, "Reshape"),
    "batch is minor": (
        lambda k, x: tf.reshape(tf.reshape(tf.transpose(x), [-1]), [-1, 3]), 3, "Reshape"),
    "space to batch": (lambda k, x: tf.space_to_batch_nd(x, [2], [[0, 0]])[..., 0], (4, 3),
                       "SpaceToBatchND"),
    "mixed between space and batch": (
        lambda k, x: tf.nn.with_space_to_batch(
            x, [2, 2], "VALID", lambda z, *_: z - tf.reduce_mean(z, 0)), (4, 4, 3), "Mean"),
    "images as TensorFlow orders them": (
        lambda k, x: tf.nn.with_space_to_batch(
            x, [2, 2], "VALID", lambda z, *_: tf.reshape(
                tf.reshape(z, [4, -1, 2, 2, 3]) * k.w[0], [-1, 2, 2, 3])), (4, 4, 3), "Reshape",
        (4, 1, 1, 1, 1)),
    "constant of a batch": (lambda k, x: x + tf.ones([ROWS, 3]), 3, "every place"),
    "position": (_position, 3, "Range"),
    "size": (lambda k, x: x * _floating(_size(x)), 3, "number of examples"),
    "part of the size": (lambda k, x: x * (0.1 * _floating(_size(x))), 3, "number of examples"),
    "size below": (lambda k, x: x / _floating(_size(x)), 3, "number of examples"),
    "size of a slice": (lambda k, x: x * tf.reduce_sum(x[:, : _size(x)], 1, True), 3, "number"),
    "size in a one-hot": (
        lambda k, x: x + tf.one_hot(tf.zeros_like(x[:, 0], tf.int32), 3, _floating(_size(x))), 3,
        "number of examples"),
    "size of a weight": (lambda k, x: x @ (k.w[0] * _floating(_size(x))), 3, "number", (3, 4)),
    "branch": (lambda k, x: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x), 3, "Sum"),
    "loop": (lambda k, x: tf.map_fn(tf.tanh, x), 3, "no rule"),
    "assign": (_after(lambda x: _KEPT.assign(tf.reduce_sum(x, 0))), 3, "keeps state"),
    "assert": (_after(lambda x: tf.debugging.assert_less(x, 9.0)), 3, "raises"),
    "check of numbers": (_after(lambda x: tf.debugging.check_numerics(x, "")), 3, "raises"),
    "Python": (_after(lambda x: tf.py_function(lambda a: None, [x], [])), 3, "keeps state"),
    "NumPy": (lambda k, x: tf.ensure_shape(tf.numpy_function(lambda a: a, [x], tf.float32),
                                           [None, 3]), 3, "keeps state"),
    "own random numbers": (lambda k, x: x * tf.random.uniform(tf.shape(x)), 3, "random numbers"),
    "public random numbers": (
        lambda k, x: x * tf.random.stateless_uniform(tf.shape(x), [1, 2]), 3, "every batch"),
    "past Keras": (lambda k, x: x @ k.w[0]._value, 3, "past Keras", (3, 4)),
    "loss: product of means": (_added(lambda k, x: tf.reduce_mean(x) * tf.reduce_sum(x)), 3, "add"),
    "loss: square of a mean": (_added(lambda k, x: tf.square(tf.reduce_mean(x))), 3, "add_loss"),
    "loss: variance": (_added(lambda k, x: tf.math.reduce_variance(x)), 3, "add_loss"),
    "loss: maximum": (_added(lambda k, x: tf.reduce_max(x)), 3, "add_loss"),
    "loss: integer": (_added(
        lambda k, x: tf.cast(tf.cast(tf.reduce_sum(x), tf.int32), tf.float32)), 3, "add_loss"),
    "loss: size": (_added(lambda k, x: tf.reduce_sum(x) / (1.0 + _floating(_size(x)))), 3, "size"),
    "loss: of a weight, by size": (
        _added(lambda k, x: tf.reduce_sum(k.w[0] ** 2) * _floating(_size(x))), 3, "add", (3,)),
}  # fmt: skip

FOLLOWED = {
    "own gradient before the examples": (_own_gradient_before, 3, (3, 4)),
    "own gradient of examples": (_own_gradient_of_examples, 3, (3, 4)),
    "tf.function": (lambda k, x: tf.function(lambda x: tf.tanh(x @ k.w[0]))(x), 3, (3, 4)),
    "stopped": (lambda k, x: x @ tf.stop_gradient(k.w[0]) + x @ k.w[1], 3, (3, 4), (3, 4)),
    "integers": (lambda k, x: x @ _floating(tf.cast(3 * k.w[0], tf.int32)), 3, (3, 4)),
    "used twice": (lambda k, x: tf.tanh(x @ k.w[0]) @ k.w[0], 3, (3, 3)),
    "tied": (lambda k, x: tf.tanh(x @ k.w[0]) @ tf.transpose(k.w[0]), 3, (3, 4)),
    "reshaped": (lambda k, x: x @ tf.reshape(k.w[0], [3, 4]), 3, (2, 6)),
    "part": (lambda k, x: x @ k.w[0][:, 1:], 3, (3, 4)),
    "backwards": (lambda k, x: x @ k.w[0][::-1, 1::2], 3, (3, 4)),
    "one of several": (lambda k, x: x @ k.w[0][1] + x @ tf.unstack(k.w[0])[0], 3, (2, 3, 3)),
    "split": (lambda k, x: x @ tf.split(k.w[0], 2, 1)[1] - x @ tf.split(k.w[0], [2, 2], 1)[0], 3,
              (3, 4)),
    "joined": (lambda k, x: x @ tf.concat(k.w, 1), 3, (3, 4), (3, 2)),
    "normalised": (lambda k, x: x @ (k.w[0] / tf.norm(k.w[0], axis=0) * k.w[1]), 3, (3, 4), (4,)),
    "softmax of a weight": (lambda k, x: x @ tf.nn.softmax(k.w[0]), 3, (3, 4)),
    "square of a weight": (lambda k, x: x @ (k.w[0] * k.w[0]), 3, (3, 4)),
    "quotient of weights": (lambda k, x: x @ (k.w[0] / k.w[1]), 3, (3, 4), ()),
    "low rank": (lambda k, x: x @ (k.w[0] + 2.0 * k.w[1] @ k.w[2]), 3, (3, 4), (3, 1), (1, 4)),
    "gram": (lambda k, x: x @ tf.matmul(k.w[0], k.w[0], transpose_b=True), 3, (3, 4)),
    "scale": (lambda k, x: x * k.w[0], (4, 3), ()),
    "scale of an axis": (lambda k, x: k.w[0] * x, (4, 3), (1, 4, 1)),
    "quotient": (lambda k, x: k.w[0] / (x + 2.0) - x / k.w[1], 3, (3,), (1,)),
    "quotient by zero": (
        lambda k, x: tf.math.divide_no_nan(k.w[0], tf.nn.relu(x)), 3, (3,)),
    "from the left": (lambda k, x: tf.matmul(k.w[0], x, transpose_a=True), (4, 3), (4, 2)),
    "examples behind": (lambda k, x: tf.transpose(tf.transpose(x) * k.w[0]), 3, (3, 1)),
    "merged": (lambda k, x: tf.reshape(tf.reshape(x, [-1, 3]) @ k.w[0], [-1, 4, 5]), (4, 3),
               (3, 5)),
    "repeated for every example": (lambda k, x: tf.reshape(
        tf.reshape(x, [-1, 3]) + tf.tile(k.w[0], [_size(x), 1]), [-1, 4, 3]), (4, 3), (4, 3)),
    "a word in front": (lambda k, x: tf.concat(
        [tf.broadcast_to(k.w[0], [_size(x), 1, 3]), x], 1), (4, 3), (1, 1, 3)),
    "broadcast weight": (lambda k, x: tf.matmul(tf.reshape(x, [-1, 2, 2, 3]), k.w[0]), (4, 3),
                         (1, 3, 4)),
    "broadcast examples": (lambda k, x: tf.matmul(tf.reshape(x, [-1, 1, 4, 3]), k.w[0]), (4, 3),
                           (2, 3, 4)),
    "broadcast weight by labels": (lambda k, x: tf.einsum(
        "...ij,...jk->...ik", tf.reshape(x, [-1, 2, 2, 3]), k.w[0]), (4, 3), (1, 3, 4)),
    "broadcast examples by labels": (lambda k, x: tf.einsum(
        "...ij,...jk->...ik", tf.reshape(x, [-1, 1, 4, 3]), k.w[0]), (4, 3), (2, 3, 4)),
    "summed by labels": (lambda k, x: tf.einsum("bij,jk->bk", x, k.w[0]), (4, 3), (3, 4)),
    "outer by labels": (lambda k, x: tf.einsum("bij,kl->bijkl", x, k.w[0]), (4, 3), (2, 2)),
    "examples last, by labels": (lambda k, x: tf.transpose(
        tf.einsum("bij,jk->kib", x, k.w[0])), (4, 3), (3, 5)),
    "table": (lambda k, x: tf.gather(2.0 * k.w[0] + k.w[1], tf.cast(tf.abs(3 * x), tf.int32)), 3,
              (9, 2), (9, 2)),
    "table of matrices": (lambda k, x: tf.reduce_sum(
        tf.gather(k.w[0], tf.cast(tf.abs(3 * x), tf.int32)), -1), 3, (9, 2, 2)),
    "normalised filters": (lambda k, x: tf.nn.conv2d(
        x, k.w[0] / tf.norm(k.w[0]), 1, "SAME", dilations=2), (4, 4, 3), (2, 2, 3, 2)),
    "between space and batch": (lambda k, x: tf.nn.with_space_to_batch(
        x, [2, 2], "VALID", lambda z, *_: tf.tanh(tf.reshape(
            tf.reshape(z, [-1, 4, 2, 2, 3]) * k.w[0], [-1, 2, 2, 3])) + k.w[1]),
        (4, 4, 3), (4, 1, 1, 1), (2, 1, 3)),
    "dilated pooling": (lambda k, x: tf.nn.pool(
        x * k.w[0], [2, 2], "MAX", dilations=[2, 2]), (4, 4, 3), (3,)),
    "dilated by TensorFlow": (lambda k, x: tf.nn.atrous_conv2d(
        x, k.w[0] / tf.norm(k.w[0]), 2, "SAME"), (5, 4, 3), (2, 3, 3, 2)),
    "filters in groups": (lambda k, x: tf.nn.conv2d(x, k.w[0], 1, "SAME"), (4, 4, 4),
                          (3, 3, 2, 6)),
    "images of an example": (lambda k, x: tf.reshape(tf.nn.conv2d(tf.reshape(
        x, [-1, 4, 4, 3]), k.w[0], 1, "SAME"), [-1, 2, 4, 4, 2]), (2, 4, 4, 3), (3, 3, 3, 2)),
    "transposed filters": (lambda k, x: tf.nn.conv2d_transpose(
        x, k.w[0], tf.stack([_size(x), 8, 8, 2]), 2, "SAME"), (4, 4, 3), (3, 3, 2, 3)),
    "loss: mean": (_added(lambda k, x: 0.1 * tf.reduce_mean(x**2)), 3),
    "loss: entries": (_added(lambda k, x: tf.reduce_sum(x**2, -1)), 3),
    "loss: by size": (_added(lambda k, x: tf.reduce_sum(x**2) / _floating(_size(x))), 3),
    "loss: times size": (_added(lambda k, x: tf.reduce_mean(x**2) * _floating(2 * _size(x))), 3),
    "loss: factor": (_added(lambda k, x: tf.maximum(0.3, 0.7) * tf.reduce_mean(x**2)), 3),
    "loss: of a weight": (_added(lambda k, x: tf.reduce_sum(k.w[0] ** 2)), 3, (3,)),
    "loss: with a weight": (_added(
        lambda k, x: tf.reduce_mean(x @ k.w[0]) * tf.reduce_sum(k.w[0] ** 2)), 3, (3, 3)),
    "loss: stopped": (_added(lambda k, x: tf.stop_gradient(tf.reduce_mean(x**2))), 3),
    "loss: nothing": (_added(lambda k, x: tf.math.divide_no_nan(tf.reduce_mean(x**2), 0.0)), 3),
}  # fmt: skip


def _shape(shape):
    return shape if isinstance(shape, tuple) else (shape,)


@pytest.mark.representative(30)
@pytest.mark.parametrize("name", REFUSED)
def test_mixing_models_are_refused(name):
    function, shape, message, *shapes = REFUSED[name]
    model, x, y = probe(function, *_shape(shape), shapes=shapes)
    with pytest.raises(CannotFollow, match=message):
        traced(model, x, y)


@pytest.mark.representative(2)
@pytest.mark.parametrize("name", FOLLOWED)
def test_other_models_have_the_gradients_of_a_loop(name):
    function, shape, *shapes = FOLLOWED[name]
    model, x, y = probe(function, *_shape(shape), shapes=shapes)
    compare(model, x, y)
