"""Trainable weights that no loss depends on: they would be moved by noise alone."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import Recomputed, data, plain_model, private_model

X, Y = data()
ENGINES = pytest.mark.parametrize("engine", ["ghost", "vectorized"])


def two_heads():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    return keras.Model(inputs, {n: keras.layers.Dense(3, name=n)(hidden) for n in ("a", "b")})


def fit(model, engine, loss, y, **arguments):
    """Returns the DPModel after one step, and the warnings of unreached weights."""
    private = private_model(
        None, model, {"gradient_engine": engine}, loss=loss, metrics=None, **arguments
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        private.fit(X, y, batch_size=30, steps_per_epoch=1, verbose=0)
    return private, [str(w.message) for w in caught if "no loss depends" in str(w.message)]


@pytest.mark.extended
@ENGINES
def test_a_head_without_a_loss_is_announced(engine):
    loss, y = {"a": "sparse_categorical_crossentropy"}, {"a": Y, "b": Y}
    private, told = fit(two_heads(), engine, loss, y)
    assert private.gradient_plan().unreached == ("b/kernel", "b/bias")
    (message,) = told
    assert "Layer 'b'" in message
    assert "b/kernel, b/bias" in message
    assert "trainable = False" in message
    report = dp.validate(two_heads(), loss, X, y)
    assert [(p.where, p.severity) for p in report] == [("Layer 'b'", "warning")]


@ENGINES
def test_steps_of_a_custom_loop_announce_it_once(engine):
    loss, model = {"a": "sparse_categorical_crossentropy"}, two_heads()
    lots = dp.PoissonLots(X, {"a": Y, "b": Y}, expected_size=30)
    optimizer, ledger = dp.DPSGD(noise_multiplier=1.0), dp.PrivacyLedger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for lot in lots.take(2, physical_batch_size=30):
            dp.private_step(
                model, loss, lot, optimizer, ledger=ledger, law=lots.law, gradient_engine=engine
            )
    (warning,) = [w for w in caught if "no loss depends" in str(w.message)]
    assert "Layer 'b'" in str(warning.message)
    assert warning.filename == __file__


@ENGINES
def test_nothing_is_said_where_each_weight_has_a_part(engine):
    class Added(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x**2))
            return x

    inputs = keras.Input((6,))
    dense = keras.layers.Dense(3)
    other = keras.layers.Dense(3)
    model = keras.Model(inputs, [dense(inputs), Added()(other(inputs))])
    losses = ["sparse_categorical_crossentropy", None]
    private = private_model(None, model, {"gradient_engine": engine}, loss=losses, metrics=None)
    assert private.gradient_plan().unreached == ()  # before there are labels
    private, told = fit(model, engine, losses, [Y, Y])
    assert (private.gradient_plan().unreached, told) == ((), [])
    head = two_heads()
    head.get_layer("b").trainable = False  # frozen weights get no noise
    _, told = fit(head, engine, {"a": "sparse_categorical_crossentropy"}, {"a": Y, "b": Y})
    assert told == []


@ENGINES
def test_a_model_without_a_loss_is_refused_before_it_is_charged(engine):
    for model in (plain_model(), two_heads()):
        private = private_model(None, model, {"gradient_engine": engine}, loss=None, metrics=None)
        before = model.get_weights()
        with pytest.raises(ValueError, match="no loss that depends on its weights.*Compile with"):
            private.fit(X, batch_size=30, verbose=0)
        assert private.ledger.steps == 0
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(old, new)


@ENGINES
def test_a_loss_that_ignores_the_model_is_refused(engine):
    def constant(y, y_pred):
        return keras.ops.cast(y, "float32") ** 2

    with pytest.raises(ValueError, match="no loss that depends on its weights"):
        fit(plain_model(), "auto" if engine == "ghost" else engine, constant, Y)
    (problem,) = dp.validate(plain_model(), constant, X, Y)
    assert problem.severity == "error"


class Stopped(Recomputed):
    """A dense layer behind which no gradient is wanted."""

    def call(self, x):
        return tf.stop_gradient(self.dense(x))


@pytest.mark.representative(1)
@pytest.mark.parametrize("engine", ["auto", "vectorized"])
@pytest.mark.parametrize("block", [Recomputed, Stopped])
def test_weights_whose_gradient_is_lost_are_announced(block, engine):
    model = keras.Sequential([keras.Input((6,)), block(), keras.layers.Dense(3)])
    private, (message,) = fit(model, engine, "sparse_categorical_crossentropy", Y)
    lost = tuple(v.path for v in model.layers[0].trainable_variables)
    assert len(lost) == 2
    assert private.gradient_plan().unreached == lost
    assert "'inside'" in message
    assert ", ".join(lost) in message
