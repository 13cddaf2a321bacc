"""Compares traced per-example gradients with a Python loop over single examples."""

import keras
import numpy as np
import tensorflow as tf

from tests.gradients.ghost.one_by_one import prepared
from tf_adadp.gradients.ghost import CannotFollow, Trace

ROWS = 6


def numbers(*shape, seed=0):
    """Draws a batch."""
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype(np.float32)


def traced(model, x, y, loss="mse", alone=()):
    """Returns the `Trace` of a model."""
    example_loss, spec = prepared(model, x, y, loss)
    return Trace(example_loss, spec, alone=alone)


def compare(model, x, y, loss="mse", alone=(), trace=None):
    """Checks losses and gradients against a tape per example.

    Args:
        model, x, y, loss, alone: of `traced`.
        trace: a `Trace` of them, to be used again.

    Raises:
        CannotFollow: the model cannot be followed.
    """
    trace = traced(model, x, y, loss, alone) if trace is None else trace
    example_loss = trace.example_loss
    seeds = tf.zeros([example_loss.num_seed_generators, 2], tf.uint32)
    trainable = example_loss.trainable_values()
    losses, _, gradients = trace(trainable, tf.constant(x), tf.constant(y), None, seeds)
    found = [g.materialize().numpy() for g in gradients]
    expected_losses, expected = [], []

    @tf.function(autograph=False)
    def alone(x, y):
        with tf.GradientTape() as tape:
            tape.watch(trainable)
            value, _ = example_loss(trainable, x, y, None, seeds)
        back = tape.gradient(value, trainable, unconnected_gradients="zero")
        return value, [tf.convert_to_tensor(g) for g in back]

    for i in range(len(x)):
        value, back = alone(tf.constant(x[i]), tf.constant(y[i]))
        expected_losses.append(value)
        expected.append(back)
    expected = [np.stack(g) for g in zip(*expected, strict=True)]
    assert [g.shape for g in found] == [g.shape for g in expected]
    scale = max(np.abs(g).max() for g in expected)
    assert scale > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a / scale, b / scale, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(losses, np.stack(expected_losses), rtol=1e-4, atol=1e-5)


class Probe(keras.Layer):
    """A layer that is a function.

    Args:
        function: `function(layer, x)`.
        shapes: of its weights, `layer.w`.
        parts: {name: layer}.
    """

    def __init__(self, function, shapes=(), parts=None):
        super().__init__(name="probe")
        self.function = function
        self.shapes = shapes
        for name, part in (parts or {}).items():
            setattr(self, name, part)

    def build(self, input_shape):
        self.w = [self.add_weight(shape=s, initializer="random_normal") for s in self.shapes]
        # Away from zero, so that they can be divided by.
        generator = np.random.default_rng(3)
        for weight in self.w:
            weight.assign(generator.uniform(0.5, 1.5, weight.shape))

    def call(self, x):
        return self.function(self, x)


def probe(function, *shape, shapes=(), parts=None, units=2):
    """A model of a `Probe` between dense layers, with x and y; units=0 leaves the last one out."""
    inputs = keras.Input(shape)
    h = Probe(function, shapes, parts)(keras.layers.Dense(shape[-1], "tanh")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(units)(h) if units else h)
    x = numbers(*shape)
    return model, x, numbers(*model.output_shape[1:], seed=1)


__all__ = ["ROWS", "CannotFollow", "Probe", "compare", "numbers", "probe", "traced"]
