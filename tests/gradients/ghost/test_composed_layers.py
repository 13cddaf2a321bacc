"""Compares composed and custom layers with one tape per example."""

import collections
import inspect
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.ghost.one_by_one import around, check, inputs, operations_of, stack, traced
from tf_adadp.gradients import ghost

L = keras.layers
DENSE = ["BiasAdd", "MatMul"]
PROJECTIONS = ["MatMul"] * 4  # of attention
BIASES = ["BiasAdd"] * 4


@pytest.mark.representative(1)
@pytest.mark.parametrize("use_bias", [True, False])
def test_multi_head_attention(use_bias):
    layer = L.MultiHeadAttention(2, 3, value_dim=2, use_bias=use_bias, output_shape=5)
    x = keras.Input((3, 4))
    check(keras.Model(x, layer(x, x)), inputs((3, 4)), PROJECTIONS + BIASES * use_bias)


@pytest.mark.extended
def test_grouped_query_attention():
    layer = L.GroupQueryAttention(3, 4, 2)
    x = keras.Input((3, 4))
    check(keras.Model(x, layer(x, x)), inputs((3, 4)), PROJECTIONS + BIASES)


@pytest.mark.extended
def test_attention_between_sequences_of_two_lengths():
    layer = L.MultiHeadAttention(2, 3)
    x = keras.Input((6, 4))
    model = keras.Model(x, layer(x[:, :2], x[:, 2:], use_causal_mask=True))
    check(model, inputs((6, 4)), PROJECTIONS + BIASES)


@pytest.mark.representative(1)
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_lora(shape, bias):
    layer = L.Dense(5, "tanh", use_bias=bias)
    model, x = around(layer, shape)
    alpha = {"lora_alpha": 3} if "lora_alpha" in inspect.signature(L.Dense).parameters else {}
    layer.enable_lora(2, **alpha)
    assert len(model.trainable_variables) == 3 + bias  # one of them in front
    check(model, x, ["MatMul"] * 2 + ["BiasAdd"] * bias)


def test_frozen_layers_and_weights():
    frozen = L.Dense(4, trainable=False)
    bias_only, kernel_only = L.Dense(5), L.Dense(3)
    normalization = L.BatchNormalization(trainable=False)
    model = stack(frozen, normalization, bias_only, kernel_only)
    bias_only._kernel.trainable = False
    kernel_only.bias.trainable = False
    assert [v.name for v in model.trainable_variables] == ["bias", "kernel"]
    check(model, inputs((4,)), ["BiasAdd", "MatMul"])


@pytest.mark.representative(1)
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_layers_used_twice(shape):
    shared = L.Dense(4, "tanh")
    x = keras.Input(shape)
    check(keras.Model(x, L.Dense(2)(shared(shared(x)))), inputs(shape), DENSE * 3)


def test_a_table_used_twice():
    shared = L.Embedding(5, 3)
    x = keras.Input((4,), dtype="int32")
    model = keras.Model(x, L.Concatenate()([shared(x), shared(4 - x)]))
    check(model, inputs((4,), 5), ["GatherV2"] * 2)


def test_a_layer_used_on_vectors_and_on_sequences():
    shared = L.Dense(3)
    x = keras.Input((2, 4))
    check(keras.Model(x, shared(x) + shared(x[:, 0])[:, None]), inputs((2, 4)), DENSE * 2)


class NamedDense(L.Dense):
    """A subclass that leaves `call` alone."""


class DoubledDense(L.Dense):
    """A subclass with a `call` of its own."""

    def call(self, inputs):
        return 2.0 * super().call(inputs)


def test_subclasses_are_followed():
    check(stack(NamedDense(3), DoubledDense(2)), inputs((4,)), DENSE * 2)


class Block(L.Layer):
    """Calls other layers."""

    def __init__(self):
        super().__init__()
        self.inner = L.Dense(4, "tanh")
        self.norm = L.LayerNormalization()

    def call(self, x):
        return x + self.inner(self.norm(x))


def test_layers_inside_of_models_and_composite_layers():
    model = stack(stack(L.Dense(4)), Block(), L.Dense(2))
    check(model, inputs((4,)), [*DENSE, "Mul", "BiasAdd", *DENSE, *DENSE])


@pytest.mark.representative(2)
@pytest.mark.parametrize("joined", [L.Concatenate, lambda: L.Concatenate(1), L.Add, L.Dot])
def test_several_paths_are_joined(joined):
    x = keras.Input((3, 4))
    paths = [L.Dense(4, "tanh", use_bias=False)(x) for _ in range(2)]
    layer = joined() if joined is not L.Dot else L.Dot(2)
    check(keras.Model(x, layer(paths)), inputs((3, 4)), ["MatMul"] * 2)


# --- layers of one's own, and layers that once had no rule ----------------------------------------


class Scale(L.Layer):
    """A layer with weights of its own."""

    def build(self, shape):
        self.factor = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        return tf.tanh(self.factor * x)


FOLLOWED = {
    "custom": (Scale, (4,), ["Mul"]),
    "time distributed": (lambda: L.TimeDistributed(L.Dense(3)), (3, 2), DENSE * 3),
    "axis of all three": (lambda: L.EinsumDense("abc,bcd->abd", (3, 2)), (3, 4), ["Einsum"]),
    "einsum with lora": (
        lambda: L.EinsumDense("ab,bc->ac", 3, lora_rank=1), (4,), ["MatMul"] * 2,
    ),
    "prelu": (L.PReLU, (4,), ["Mul"]),
    "dilated sequence": (
        lambda: L.Conv1D(2, 2, dilation_rate=3, padding="causal"), (7, 2), ["Conv2D", "BiasAdd"],
    ),
    "dilated image": (
        lambda: L.Conv2D(2, 2, dilation_rate=(2, 3), padding="same"), (5, 7, 2),
        ["Conv2D", "BiasAdd"],
    ),
    "dilated volume": (
        lambda: L.Conv3D(2, 2, dilation_rate=2), (4, 4, 4, 1), ["Conv3D", "BiasAdd"],
    ),
    "dilated groups": (
        lambda: L.Conv2D(4, 2, dilation_rate=2, groups=2), (5, 6, 4), ["Conv2D", "BiasAdd"],
    ),
    "dilated groups of volumes": (
        lambda: L.Conv3D(4, 2, dilation_rate=2, groups=2), (4, 3, 4, 2),
        ["Conv3D", "Conv3D", "BiasAdd"],
    ),
    "dilated by depth": (
        lambda: L.DepthwiseConv2D(3, dilation_rate=2, depth_multiplier=2), (6, 7, 2),
        ["DepthwiseConv2dNative", "BiasAdd"],
    ),
    "dilated and separable": (
        lambda: L.SeparableConv1D(3, 2, dilation_rate=2, padding="same"), (7, 2),
        ["DepthwiseConv2dNative", "Conv2D", "BiasAdd"],
    ),
}  # fmt: skip
# Their steps are written out.
RECURRENT = {
    "simple": (lambda: L.SimpleRNN(3), (3, 2), {"MatMul": 6, "BiasAdd": 3}),
    "unrolled": (lambda: L.SimpleRNN(3, unroll=True), (3, 2), {"MatMul": 6, "BiasAdd": 3}),
    "lstm": (lambda: L.LSTM(3), (4, 2), {"MatMul": 8, "BiasAdd": 4}),
    "gru": (
        lambda: L.GRU(3, return_sequences=True), (4, 2), {"MatMul": 8, "BiasAdd": 8},
    ),
    "bidirectional": (
        lambda: L.Bidirectional(L.LSTM(2)), (3, 2), {"MatMul": 12, "BiasAdd": 6},
    ),
    "convolutional": (lambda: L.ConvLSTM1D(2, 2), (3, 4, 2), {"Conv2D": 24, "BiasAdd": 12}),
}  # fmt: skip
MAPPED = {
    "many steps": (lambda: L.SimpleRNN(3), (65, 2), 3),
    "many steps of an LSTM": (lambda: L.LSTM(3), (65, 2), 3),
    "many steps both ways": (lambda: L.Bidirectional(L.GRU(2)), (65, 2), 6),
}


@pytest.mark.representative(2)
@pytest.mark.parametrize("name", FOLLOWED)
def test_layers_of_any_kind_are_followed(name):
    make, shape, operations = FOLLOWED[name]
    check(*around(make(), shape), operations)


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_are_followed(name):
    make, shape, operations = RECURRENT[name]
    trace = check(*around(make(), shape))
    assert collections.Counter(operations_of(trace)) == operations


def masked(layer):
    """A model of sequences of tokens that a layer reads with their mask, and three of them."""
    x = keras.Input((5,), dtype="int32")
    h = keras.tree.flatten(layer(L.Embedding(7, 2, mask_zero=True)(x)))
    rows = [keras.ops.reshape(a, (-1, math.prod(a.shape[1:]))) for a in h]
    return keras.Model(x, keras.ops.concatenate(rows, axis=1)), np.array(
        [[1, 2, 3, 0, 0], [4, 0, 5, 6, 0], [6, 5, 4, 3, 2]], np.int32
    )


MASKED = {
    "lstm": lambda: L.Bidirectional(L.LSTM(3, return_sequences=True)),
    "gru, a sum": lambda: L.Bidirectional(L.GRU(3, return_sequences=True), merge_mode="sum"),
    "simple, both": lambda: L.Bidirectional(L.SimpleRNN(3, return_sequences=True), merge_mode=None),
    "the last of a loop": lambda: L.Bidirectional(L.LSTM(3)),
    "backwards": lambda: L.GRU(3, return_sequences=True, go_backwards=True),
    "backwards, zeros": lambda: L.RNN(
        L.StackedRNNCells([L.GRUCell(3), L.LSTMCell(2)]),
        return_sequences=True,
        go_backwards=True,
        zero_output_for_mask=True,
    ),
    "as the user has it": lambda: L.Bidirectional(
        L.SimpleRNN(3, return_sequences=True, unroll=True)
    ),
}


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", MASKED)
def test_masked_sequences_are_read_as_by_the_layer(name):
    """The operations of a mask are others when steps are written out."""
    check(*masked(MASKED[name]()))


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", MAPPED)
def test_what_cannot_be_followed_is_mapped(name):
    make, shape, count = MAPPED[name]
    check(*around(make(), shape), ["map"] * count)


class NoisyScale(Scale):
    """The same with random numbers, drawn for the batch or for one example."""

    def __init__(self, axes):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)
        self.axes = axes

    def call(self, x):
        noise = keras.random.normal(tf.shape(x)[self.axes], seed=self.seed_generator)
        return self.factor * x * (1.0 + noise)


@pytest.mark.parametrize(
    ("axes", "operation"), [(slice(None), "Mul"), (slice(1, None), "map")], ids=["batch", "example"]
)
def test_noise_is_the_same_forth_and_back_and_another_for_each_example(axes, operation):
    layer = NoisyScale(axes)
    model, x = stack(layer), inputs((4,))
    layer.factor.assign([1.0, 2.0, 3.0, 4.0])
    y = np.zeros(x.shape, np.float32)
    trace, example_loss = traced(model, x, y)
    assert operations_of(trace) == [operation]
    seeds = tf.constant([[5, 6]], tf.uint32)
    values = example_loss.trainable_values()
    _, z, (rows,) = trace(values, tf.constant(x), tf.constant(y), None, seeds)
    # loss = Σ z²/4 with z = factor·x·noise, so its gradient is z²/(2·factor).
    np.testing.assert_allclose(rows.materialize(), z**2 / 2 / layer.factor, rtol=1e-4)
    noise = np.asarray(z / (layer.factor * x))
    assert np.unique(np.round(noise, 5)).size == noise.size


def test_retired_names_warn_and_do_nothing():
    with pytest.warns(DeprecationWarning, match="declare_independent does nothing any more"):
        assert ghost.declare_independent(Scale) is Scale
    with pytest.warns(DeprecationWarning, match="declare_independent does nothing any more"):
        assert ghost.declare_independent(Scale, Block) is None
    with pytest.warns(DeprecationWarning, match="register does nothing any more"):
        decorate = ghost.register(Scale)
    assert decorate(len) is len
    check(*around(Scale(), (4,)), ["Mul"])
