"""Attacks by state: raw statistics that a layer, loss or preprocessing carries to later lots."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, crossentropy, data, plain_model, private_model

L = keras.layers


class RunningLoss(keras.losses.Loss):
    """Divides by a running sum of the losses, kept in a variable of the given kind."""

    def __init__(self, make_variable):
        super().__init__()
        self.total = make_variable(1.0, trainable=False)

    def call(self, y_true, y_pred):
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        self.total.assign(self.total + tf.reduce_sum(losses))
        return losses / tf.convert_to_tensor(self.total)


class RunningLayer(L.Layer):
    """Divides by a running sum of the inputs, kept in a variable of the given kind."""

    def __init__(self, make_variable):
        super().__init__()
        self.total = make_variable(1.0, trainable=False)

    def call(self, x):
        self.total.assign(self.total + tf.reduce_sum(tf.abs(x)))
        return x / tf.convert_to_tensor(self.total)


class PythonLayer(L.Layer):
    """Sees every example in Python."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.seen = []

    def call(self, x):
        def see(value):
            self.seen.append(np.asarray(value))
            return value

        return x + 0.0 * tf.reshape(self.function(see, [x], tf.float32), tf.shape(x))


def refused(private, match):
    before = private.get_weights()
    x, y = data()
    with pytest.raises(ValueError, match=match):
        private.fit(x, y, batch_size=30, verbose=0)
    for a, b in zip(before, private.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert private.ledger.steps == 0


def lot(x, y):
    return dp.make_lot(x, y, physical_batch_size=len(x))


def built(model, **arguments):
    optimizer = dp.DPSGD(**{"noise_multiplier": 1.0, **arguments})
    optimizer.build(model.trainable_variables)
    return optimizer


def squared_distance(a, b):
    return sum(float(tf.reduce_sum((v - w) ** 2)) for v, w in zip(a, b, strict=True))


# State of losses and layers.


def test_the_sum_of_a_lot_does_not_depend_on_earlier_lots():
    """Keras variables of layers: what they are told inside of the map over examples is dropped."""
    x, y = data()
    sums = []
    for scale in (1.0, 1e3):
        keras.utils.set_random_seed(0)
        model = plain_model(RunningLayer(keras.Variable), L.Dense(4))
        optimizer = built(model)
        for rows, factor in ((slice(0, 60), scale), (slice(60, None), 1.0)):
            rows = lot(x[rows] * factor, y[rows])
            sums.append(dp.clipped_sum(model, crossentropy(), rows, optimizer, jit_compile=False))
    first, second, other_first, again = sums
    assert squared_distance(first, other_first) > 0
    for a, b in zip(second, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("how", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_losses_with_state_are_refused(how):
    """Inside the map its updates would be dropped; a metric or an evaluation would still write."""
    loss = RunningLoss(keras.Variable)
    refused(private_model(loss=loss, **how), "not the model's")
    assert float(loss.total.numpy()) == 1.0


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_losses_with_state_are_refused_for_several_outputs(run_eagerly):
    inputs = keras.Input((6,))
    outputs = {name: L.Dense(3, name=name)(inputs) for name in "ab"}
    losses = {name: RunningLoss(keras.Variable) for name in "ab"}
    private = private_model(
        model=keras.Model(inputs, outputs), loss=losses, metrics=None, run_eagerly=run_eagerly
    )
    x, y = data()
    with pytest.raises(ValueError, match="not the model's"):
        private.fit(x, {"a": y, "b": y}, batch_size=30, verbose=0)
    assert [float(loss.total.numpy()) for loss in losses.values()] == [1.0, 1.0]


@pytest.mark.parametrize("how", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_tensorflow_variables_in_losses_are_refused(how):
    loss = RunningLoss(tf.Variable)
    refused(private_model(loss=loss, **how), "keeps state")
    assert float(loss.total.numpy()) == 1.0


@pytest.mark.parametrize("how", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_tensorflow_variables_in_layers_are_refused(how):
    layer = RunningLayer(tf.Variable)
    refused(private_model(model=plain_model(layer), **how), "keeps state")
    assert float(layer.total.numpy()) == 1.0


@pytest.mark.parametrize("function", [tf.py_function, tf.numpy_function])
def test_python_functions_are_refused(function):
    layer = PythonLayer(function)
    refused(private_model(model=plain_model(layer, L.Reshape((6,)))), "calls Python")
    assert layer.seen == []


def test_custom_loops_refuse_them_too():
    x, y = data()
    model = plain_model()
    with pytest.raises(ValueError, match="keeps state"):
        dp.clipped_sum(model, RunningLoss(tf.Variable), lot(x, y), built(model), jit_compile=False)


def test_tables_that_are_written_are_refused():
    class Counts(L.Layer):
        def __init__(self):
            super().__init__()
            self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

        def call(self, x):
            self.table.insert(tf.zeros([1], tf.int64), tf.reduce_sum(x)[None])
            return x + tf.reshape(self.table.lookup(tf.zeros([1], tf.int64)), [1, 1])

    refused(private_model(model=plain_model(Counts())), "keeps state")


# Statistics of raw data inside of the model.


def adapted(layer, values):
    layer.adapt(values)
    return layer


WORDS = np.array(["a", "b", "a"])
LEARNT = {
    "Normalization": lambda: adapted(L.Normalization(), data()[0]),
    "Discretization": lambda: adapted(L.Discretization(num_bins=4), data()[0]),
    "StringLookup": lambda: adapted(L.StringLookup(), WORDS),
    "IntegerLookup": lambda: adapted(L.IntegerLookup(), np.array([3, 5])),
    "TextVectorization": lambda: adapted(L.TextVectorization(), WORDS),
}
GIVEN = {
    "Normalization": lambda: L.Normalization(mean=0.5, variance=2.0),
    "Discretization": lambda: L.Discretization(bin_boundaries=[-1.0, 0.0, 1.0]),
    "StringLookup": lambda: L.StringLookup(vocabulary=["a", "b"]),
    "IntegerLookup": lambda: L.IntegerLookup(vocabulary=[3, 5]),
    "TextVectorization": lambda: L.TextVectorization(vocabulary=["a", "b"]),
}


class Holds(keras.Model):
    """A model that holds a preprocessing layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x)


@pytest.mark.parametrize("name", LEARNT)
def test_adapted_preprocessing_is_refused(name):
    with pytest.raises(ValueError, match=f"is a {name} without given"):
        dp.DPModel(Holds(LEARNT[name]()))


@pytest.mark.parametrize("name", GIVEN)
def test_preprocessing_by_given_constants_is_accepted(name):
    assert isinstance(dp.DPModel(Holds(GIVEN[name]())), dp.DPModel)


def test_given_normalization_trains():
    x, y = data()
    private = private_model(model=plain_model(GIVEN["Normalization"](), L.Dense(4)))
    private.fit(x, y, batch_size=30, verbose=0)
    assert private.ledger.steps == 4


# Randomness of the examples.


@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_public_seeds_do_not_repeat_dropout_or_slots(microbatch_size):
    """Drawn by row: whoever could repeat them would see one record shift all others."""
    x, y = data()
    layers = [L.Dense(8), L.Dropout(0.5)] if microbatch_size == 1 else [L.Dense(8)]
    model = plain_model(*layers)
    optimizer = built(model, microbatch_size=microbatch_size, l2_norm_clip=0.1)

    def draw():
        keras.utils.set_random_seed(5)
        return dp.clipped_sum(
            model, crossentropy(), lot(x, y), optimizer,
            expected_lot_size=ROWS, jit_compile=False,
        )  # fmt: skip

    assert squared_distance(draw(), draw()) > 0


def test_two_optimizers_draw_different_dropout_under_one_public_seed():
    draws = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        draws.append(built(plain_model()).example_seed().numpy())
    assert (draws[0] != draws[1]).any()
