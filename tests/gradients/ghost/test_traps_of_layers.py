"""Layers of Keras that look harmless, and layers that are mapped over the examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.ghost.loops import ROWS, CannotFollow, Probe, compare, numbers, probe, traced

L = keras.layers


def _sequential(shape, *layers):
    model = keras.Sequential([keras.Input(shape), *layers])
    return model, numbers(*shape), numbers(*model.output_shape[1:], seed=1)


def _in_training(part, *shape):
    return probe(lambda layer, x: layer.part(x, training=True), *shape, parts={"part": part})


@pytest.mark.parametrize("noise_shape", [(1, 4, 3), (1, 1, 3)])
def test_one_draw_for_all_examples_is_refused(noise_shape):
    model, x, y = _in_training(L.Dropout(0.5, noise_shape=noise_shape), 4, 3)
    with pytest.raises(CannotFollow, match="once for all examples"):
        traced(model, x, y)


@pytest.mark.parametrize("layer", [L.Dropout(0.5), L.SpatialDropout1D(0.5), L.GaussianNoise(1.0)])
def test_each_example_has_its_own_draw(layer):
    model, x, y = _in_training(layer, 4, 3)
    x[:], y[:] = x[0], y[0]
    trace = traced(model, x, y)
    trainable = trace.example_loss.trainable_values()
    for seed in (1, 2):
        seeds = tf.fill([trace.example_loss.num_seed_generators, 2], tf.constant(seed, tf.uint32))
        _, outputs, _ = trace(trainable, x, y, None, seeds)
        assert len(np.unique(np.asarray(outputs).reshape(ROWS, -1), axis=0)) > 2


@pytest.mark.parametrize("layer", [L.BatchNormalization(), L.BatchNormalization(axis=1)])
def test_statistics_of_the_batch_are_refused(layer):
    model, x, y = _in_training(layer, 4, 3)
    with pytest.raises(CannotFollow, match="Mean"):
        traced(model, x, y)


def test_frozen_statistics_are_followed():
    layer = L.BatchNormalization()
    layer.trainable = False
    compare(*probe(lambda outer, x: outer.part(x), 4, 3, parts={"part": layer}))


@pytest.mark.parametrize(
    "layer",
    [
        L.Dense(4),
        L.EinsumDense("abc,cd->abd", output_shape=(5, 4)),
        L.EinsumDense("abc,cde->abde", output_shape=(5, 2, 2), bias_axes="e"),
    ],
)
def test_low_rank_adapters(layer):
    model, x, _ = _sequential((5, 3), layer, L.Flatten(), L.Dense(2))
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(keras.random.normal(layer.lora_kernel_b.shape, seed=1))
    compare(model, x, numbers(2, seed=1))


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ((9, 2), lambda: L.Conv1D(3, 3, dilation_rate=2, padding="same")),
        ((7, 8, 2), lambda: L.Conv2D(3, 2, dilation_rate=(2, 3))),
        ((5, 6, 4), lambda: L.Conv2D(4, 2, dilation_rate=2, groups=2)),
        ((4, 5, 6, 2), lambda: L.Conv3D(3, 2, dilation_rate=(1, 2, 3), padding="same")),
        ((6, 7, 2), lambda: L.DepthwiseConv2D(2, dilation_rate=2, depth_multiplier=2)),
        ((6, 7, 2), lambda: L.SeparableConv2D(3, 2, dilation_rate=2, padding="same")),
    ],
)
def test_dilated_layers(shape, layer):
    model, x, y = _sequential(shape, layer(), L.Activation("tanh"), layer(), L.Flatten())
    compare(model, x, y)


def test_tied_embeddings():
    embedding = L.Embedding(9, 4)
    inputs = keras.Input((5,), dtype="int32")
    h = L.Dense(4, "tanh")(embedding(inputs))
    outputs = Probe(lambda layer, x: x @ tf.transpose(embedding.embeddings))(h)
    x = np.random.default_rng(0).integers(0, 9, (ROWS, 5)).astype(np.int32)
    compare(keras.Model(inputs, outputs), x, numbers(5, 9, seed=1))


def test_a_layer_used_twice():
    inputs = keras.Input((3,))
    dense = L.Dense(3, "tanh")
    compare(keras.Model(inputs, dense(dense(inputs))), numbers(3), numbers(3, seed=1))


# --- mapped over the examples ---------------------------------------------------------------------


def test_mapped_layers_have_the_gradients_of_a_loop():
    model, x, y = probe(lambda layer, x: tf.tanh(x @ layer.w[0]), 3, shapes=[(3, 4)])
    compare(model, x, y, alone=[model.get_layer("probe")])


def test_what_mixes_does_not_where_it_is_mapped():
    model, x, y = probe(
        lambda layer, x: x @ layer.w[0] - tf.reduce_mean(x, 0) * tf.cast(tf.shape(x)[0], x.dtype),
        3,
        shapes=[(3, 3)],
    )
    compare(model, x, y, alone=[model.get_layer("probe")])


class Scaled(L.Layer):
    """Takes a factor beside its inputs."""

    def call(self, x, factor):
        return x * factor


class Around(L.Layer):
    def __init__(self, number):
        super().__init__()
        self.inner = Scaled(name="inner")
        self.number = number

    def call(self, x):
        return self.inner(x, factor=self.number(x))

    def compute_output_shape(self, input_shape):
        return input_shape


def test_a_mapped_layer_gets_no_size_of_the_batch():
    def model_of(number):
        return _sequential((3,), L.Dense(3), Around(number))

    model, x, y = model_of(lambda x: tf.cast(tf.shape(x)[0], tf.float32))
    inner = model.layers[-1].inner
    with pytest.raises(CannotFollow, match="number of examples"):
        traced(model, x, y, alone=[inner])
    model, x, y = model_of(lambda x: tf.cast(tf.shape(x)[1], tf.float32))
    compare(model, x, y, alone=[model.layers[-1].inner])


def test_a_loss_that_mixes_does_not_where_it_is_mapped():
    def loss(y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2, -1) - keras.ops.mean(y_pred)

    model, x, y = _sequential((3,), L.Dense(3, "tanh"), L.Dense(2))
    compare(model, x, y, loss)
