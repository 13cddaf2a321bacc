"""Compares the ghost pass with one tape per example."""

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

from tf_adadp.gradients import ghost
from tf_adadp.gradients.example_loss import ExampleLoss

L = keras.layers
ROWS, TOLERANCE = 3, 1e-4
# Keras adds a bias, and multiplies by a kernel, by one or the other operation. Which one depends on
# its version and on ranks.
ONE_NAME = {"AddV2": "BiasAdd", "BatchMatMulV2": "MatMul"}


def inputs(shape, vocabulary=None):
    rng = np.random.default_rng(0)
    if vocabulary:
        return rng.integers(0, vocabulary, (ROWS, *shape)).astype(np.int32)
    return rng.normal(size=(ROWS, *shape)).astype(np.float32)


def stack(*layers, shape=(4,)):
    return keras.Sequential([keras.Input(shape), *layers])


def around(layer, shape, vocabulary=None):
    """A model of one layer, behind weights that need the gradient of its inputs, and inputs."""
    x = keras.Input(shape, dtype="int32" if vocabulary else "float32")
    h = x if vocabulary else L.Dense(shape[-1], use_bias=False, name="front")(x)
    return keras.Model(x, layer(h)), inputs(shape, vocabulary)


def prepared(model, x, y, loss):
    """The `ExampleLoss` of a model, and the TensorSpecs of a batch."""
    compiled = None
    if loss is not None:
        compiled = CompileLoss(loss)
        compiled.build(y, model(x))
    specs = tf.nest.map_structure(lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), (x, y))
    return ExampleLoss(model, compiled), (*specs, None)


def traced(model, x, y):
    """The `Trace` of a model with a squared error, and its `ExampleLoss`."""
    example_loss, spec = prepared(model, x, y, keras.losses.MeanSquaredError())
    return ghost.trace_model(example_loss, spec), example_loss


def per_example_gradients(model, x):
    """Gradients [B, *shape] by the ghost pass and by a tape per example; the `Trace`."""
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(0.5 * rng.normal(size=variable.shape))
    y_pred = model(x, training=True)
    y = rng.normal(size=y_pred.shape).astype(np.float32)
    trace, example_loss = traced(model, x, y)
    seeds = tf.ones([example_loss.num_seed_generators, 2], tf.uint32)
    arguments = example_loss.trainable_values(), tf.constant(x), tf.constant(y), None, seeds
    losses, predictions, gradients = trace(*arguments)
    np.testing.assert_allclose(predictions, y_pred, rtol=1e-4, atol=1e-4)
    expected = []
    for i in range(ROWS):
        with tf.GradientTape() as tape:
            z = model(x[i : i + 1], training=True)
            value = tf.reduce_mean(tf.square(z - y[i : i + 1]))
        np.testing.assert_allclose(losses[i], value, rtol=1e-4)
        variables = [v.value for v in model.trainable_variables]
        grads = tape.gradient(value, variables, unconnected_gradients="zero")
        expected.append([np.asarray(tf.convert_to_tensor(g)) for g in grads])
    expected = [np.stack(rows) for rows in zip(*expected, strict=True)]
    if np.any(y_pred):  # not of dead ReLUs alone
        assert max(np.abs(e).max() for e in expected) > 1e-4
    return [g.materialize().numpy() for g in gradients], expected, trace


def operations_of(trace):
    """The operations in which weights meet examples, but for the layer in front (`around`).

    Additions are called BiasAdd and products MatMul (`ONE_NAME`).
    """
    found = [part.operation for part in trace.parts if part.layer.name != "front"]
    return sorted(ONE_NAME.get(name, name) for name in found)


def check(model, x, operations=None):
    """Compares the gradients, and the operations; returns the `Trace`."""
    found, expected, trace = per_example_gradients(model, x)
    if operations is not None:
        assert operations_of(trace) == sorted(operations), trace.obstacles
    assert len(found) == len(model.trainable_variables) > 0
    scale = max(np.abs(e).max() for e in expected)
    for variable, f, e in zip(model.trainable_variables, found, expected, strict=True):
        assert f.shape == e.shape, variable.path
        assert np.abs(f - e).max() <= TOLERANCE * scale, variable.path
    return trace
