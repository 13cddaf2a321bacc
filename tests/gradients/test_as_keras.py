"""Without noise and clipping, a step on all records is the step that Keras takes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import exact_sgd
from tf_adadp.utils.keras_compat import set_keras_mask

L, K = keras.layers, keras.ops
ROWS = 5
RNG = np.random.default_rng(0)
NUMBERS = RNG.normal(size=(ROWS, 4)).astype(np.float32)
# As many steps count in each row: Keras's mean over a batch is that of its examples then.
TOKENS = np.array([[1, 2, 0, 0], [4, 0, 5, 0], [6, 0, 0, 3], [0, 1, 2, 0], [2, 6, 0, 0]], np.int32)
LABELS = np.array([0, 1, 2, 1, 0], np.int32)


class Tripled(L.Layer):
    """Does something else in training, as dropout does, and draws nothing."""

    def call(self, x, training=None):
        return 3.0 * x if training else x

    def compute_output_shape(self, shape):
        return shape


class Own(keras.Model):
    """A model that leaves it to Keras to tell inner layers whether they train."""

    def __init__(self, *layers, **arguments):
        super().__init__(**arguments)
        self.inner = list(layers)

    def call(self, x, training=None):
        for layer in self.inner:
            x = layer(x)
        return x


class Masking(Own):
    """Says by itself which steps count."""

    def compute_mask(self, x, mask=None):
        return K.not_equal(x, 0)

    def call(self, x, training=None):
        return 1.0 * super().call(x)


class Block(L.Layer):
    """A layer of layers in a loop, which is mapped over the examples, and takes no arguments."""

    def __init__(self, *layers):
        super().__init__()
        self.inner = list(layers)

    def build(self, shape):
        for layer in self.inner:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)

    def call(self, x):
        for layer in self.inner[:-1]:
            x = layer(x)
        x = K.fori_loop(0, 2, lambda _, h: K.tanh(h), x)
        return self.inner[-1](x)


class MaskMaker(Block):
    def call(self, tokens):
        x = super().call(tokens)
        set_keras_mask(x, K.not_equal(tokens, 0))
        return x


class Multiplied(keras.Model):
    """Calls a layer that is mapped with a number made of that layer's own weight."""

    def __init__(self):
        super().__init__()
        self.dense, self.block = L.Dense(3), Factor()

    def build(self, shape):
        self.dense.build(shape)
        self.block.build((None, 3))

    def call(self, x):
        return self.block(self.dense(x), 2.0 * K.convert_to_tensor(self.block.factor))


class Factor(L.Layer):
    def build(self, shape, *others):
        self.factor = self.add_weight(shape=(3,), initializer="ones")

    def call(self, x, factor):
        return K.fori_loop(0, 2, lambda _, h: K.tanh(h), x) * factor


def sequential(*layers, shape=(4,), dtype="float32"):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers])


def tokens(*layers):
    return sequential(*layers, dtype="int32")


def shared():
    x, layer = keras.Input((4,)), L.Dense(4, activity_regularizer="l2")
    return keras.Model(x, L.Dense(3)(layer(layer(x))))


CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy
CASES = {
    "training mode of inner layers": (lambda: Own(L.Dense(3), Tripled()), NUMBERS, "mse"),
    "training mode in a block": (
        lambda: sequential(L.Dense(4), Block(L.Dense(3), Tripled(), L.Dense(3))), NUMBERS, "mse",
    ),
    "softmax": (lambda: sequential(L.Dense(3, "softmax")), 40 * NUMBERS, CROSSENTROPY()),
    "softmax taken for logits": (
        lambda: sequential(L.Dense(3, "softmax")), NUMBERS, CROSSENTROPY(from_logits=True),
    ),
    "softmax in a block": (
        lambda: sequential(L.Dense(4), Block(L.Dense(3), L.Dense(3, "softmax"))),
        40 * NUMBERS, CROSSENTROPY(),
    ),
    "sigmoid": (
        lambda: sequential(L.Dense(3, "sigmoid")), 40 * NUMBERS, keras.losses.BinaryCrossentropy(),
    ),
    "TensorFlow's softmax": (
        lambda: sequential(L.Dense(3, tf.nn.softmax)), 40 * NUMBERS, CROSSENTROPY(),
    ),
    "TensorFlow's sigmoid": (
        lambda: sequential(L.Dense(3, tf.nn.sigmoid)),
        40 * NUMBERS, keras.losses.BinaryCrossentropy(),
    ),
    "a weight as an argument": (Multiplied, NUMBERS, "mse"),
    "two softmax outputs": (
        lambda: keras.Model(
            x := keras.Input((4,)), [L.Dense(3, "softmax")(x), L.Dense(3, "softmax")(x)]
        ),
        40 * NUMBERS, [CROSSENTROPY(), CROSSENTROPY()],
    ),
    "shared layer, activity regulariser": (shared, NUMBERS, "mse"),
    "activity regulariser of the model": (
        lambda: Own(L.Dense(3), activity_regularizer="l2"), NUMBERS, "mse",
    ),
    "mask of the model": (lambda: Masking(L.Embedding(7, 3)), TOKENS, "mse"),
    "mask for a block": (
        lambda: tokens(L.Embedding(7, 3, mask_zero=True), Block(L.GRU(3), L.Dense(3))),
        TOKENS, "mse",
    ),
    "mask of a block": (
        lambda: tokens(MaskMaker(L.Embedding(7, 3), L.Dense(3)), L.GRU(3)), TOKENS, "mse",
    ),
}  # fmt: skip


def labels(loss, outputs):
    if loss == "mse":
        return np.random.default_rng(1).normal(size=outputs.shape).astype(np.float32)
    if isinstance(loss, list):
        return [LABELS, LABELS]
    return np.eye(3)[LABELS] if isinstance(loss, keras.losses.BinaryCrossentropy) else LABELS


@pytest.mark.filterwarnings("ignore:.*received `from_logits=True`")
@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.filterwarnings("ignore:.*not proven to keep examples apart")
@pytest.mark.representative(2, 8)
@pytest.mark.parametrize("engine", ["ghost", "vectorized"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_keras(name, engine):
    build, x, loss = CASES[name]
    keras.utils.set_random_seed(1)
    model = build()
    outputs = model(x)
    y = labels(loss, outputs)
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(0.1), loss)
    model.train_on_batch(x, y)
    wanted = model.get_weights()
    model.set_weights(before)
    if name == "a weight as an argument" and engine == "ghost":
        engine = "auto"  # which maps the whole model
    private = dp.DPModel(model, gradient_engine=engine)
    private.compile(exact_sgd(), loss, log_raw_metrics=False)
    private.fit(x, y, batch_size=ROWS, verbose=0)
    assert engine in ("auto", private.gradient_plan().engine)
    for found, right, start in zip(model.get_weights(), wanted, before, strict=True):
        np.testing.assert_allclose(found - start, right - start, atol=2e-5, rtol=2e-4)
