"""Every rule against one tape per example, over random configurations of its layers."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.src.trainers.compile_utils import CompileLoss

from tf_adadp.gradients import ghost
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.gradients.ghost import independence, registry

L = keras.layers
ROWS, TOLERANCE = 3, 1e-4
few = settings(deadline=None, derandomize=True, max_examples=5, database=None)


def _inputs(shape, vocabulary=None):
    rng = np.random.default_rng(0)
    if vocabulary:
        return rng.integers(0, vocabulary, (ROWS, *shape)).astype(np.int32)
    return rng.normal(size=(ROWS, *shape)).astype(np.float32)


def per_example_gradients(model, x):
    """Gradients [B, *shape] by the ghost pass and by a tape per example; the pass's records."""
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(0.5 * rng.normal(size=variable.shape))
    y_pred = model(x, training=True)
    y = rng.normal(size=y_pred.shape).astype(np.float32)
    loss = CompileLoss(keras.losses.MeanSquaredError())
    loss.build(y, y_pred)
    example_loss = ExampleLoss(model, loss)
    ghost_pass = ghost.GhostPass(example_loss)
    seeds = tf.ones([example_loss.num_seed_generators, 2], tf.uint32)
    arguments = example_loss.trainable_values(), tf.constant(x), tf.constant(y), None, seeds
    losses, predictions, gradients, records = ghost_pass(*arguments)
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
    return [g.materialize().numpy() for g in gradients], expected, records


def check(model, x, rules):
    """Compares the gradients, and that exactly the named rules were used."""
    found, expected, records = per_example_gradients(model, x)
    assert [r.form for r in records] == list(rules)
    assert len(found) == len(model.trainable_variables) > 0
    scale = max(np.abs(e).max() for e in expected)
    assert scale > 1e-4
    for variable, f, e in zip(model.trainable_variables, found, expected, strict=True):
        assert f.shape == e.shape, variable.path
        assert np.abs(f - e).max() <= TOLERANCE * scale, variable.path


def around(layer, shape, vocabulary=None):
    """A model of one layer, and inputs for it."""
    inputs = keras.Input(shape, dtype="int32" if vocabulary else "float32")
    return keras.Model(inputs, layer(inputs)), _inputs(shape, vocabulary)


# --- the layers, each with random settings --------------------------------------------------------


def _activation(draw):
    return draw(st.sampled_from([None, "relu", "tanh", L.LeakyReLU(0.3)]))


def _common(draw):
    return {"use_bias": draw(st.booleans()), "activation": _activation(draw)}


def dense(draw):
    middle = draw(st.sampled_from([(), (3,), (2, 3), (1,), (1, 1)]))
    return L.Dense(draw(st.integers(1, 6)), **_common(draw)), (*middle, 4)


EQUATIONS = [
    ("ab,bc->ac", (4,), (5,), [None, "c"]),
    ("abc,cd->abd", (3, 4), (3, 5), [None, "d", "bd"]),
    ("abc,cde->abde", (3, 4), (3, 2, 5), [None, "e", "de", "bde"]),
    ("abcd,cde->abe", (3, 2, 4), (3, 5), [None, "e"]),
    ("abcd,dce->abe", (3, 2, 4), (3, 5), [None, "be"]),
    ("abc,dc->abd", (3, 4), (3, 5), [None, "d"]),
    ("abc,cd->adb", (3, 4), (5, 3), [None, "d", "db"]),
    ("abc,bcd->ad", (3, 4), (5,), [None, "d"]),
    ("...x,xy->...y", (3, 4), (3, 5), [None, "y"]),
]


def einsum_dense(draw):
    equation, shape, output_shape, biases = draw(st.sampled_from(EQUATIONS))
    bias_axes, activation = draw(st.sampled_from(biases)), _activation(draw)
    return L.EinsumDense(equation, output_shape, activation, bias_axes), shape


def _convolution(rank, layer_class):
    def make(draw):
        groups = draw(st.sampled_from([1, 1, 2]))
        paddings = ["valid", "same"] + ["causal"] * (rank == 1)
        strides = draw(st.tuples(*[st.integers(1, 2)] * rank))
        dilation = 1
        if rank < 3 and max(strides) == 1:
            dilation = draw(st.tuples(*[st.integers(1, 2)] * rank))
        layer = layer_class(
            groups * draw(st.integers(1, 2)),
            draw(st.tuples(*[st.integers(1, 3)] * rank)),
            strides=strides,
            padding=draw(st.sampled_from(paddings)),
            dilation_rate=dilation,
            groups=groups,
            **_common(draw),
        )
        return layer, (*(6, 5, 7)[:rank], 2 * groups)

    return make


def _transposed(rank, layer_class):
    def make(draw):
        layer = layer_class(
            draw(st.integers(1, 3)),
            draw(st.tuples(*[st.integers(2, 3)] * rank)),
            strides=draw(st.tuples(*[st.integers(1, 2)] * rank)),
            padding=draw(st.sampled_from(["valid", "same"])),
            **_common(draw),
        )
        return layer, (*(4, 3, 2)[:rank], 2)

    return make


def _depthwise(rank, layer_class):
    def make(draw):
        strides = draw(st.integers(1, 2))
        layer = layer_class(
            draw(st.tuples(*[st.integers(1, 3)] * rank)),
            strides=strides,
            padding=draw(st.sampled_from(["valid", "same"])),
            depth_multiplier=draw(st.integers(1, 2)),
            dilation_rate=draw(st.integers(1, 2)) if strides == 1 else 1,
            **_common(draw),
        )
        return layer, (*(6, 5)[:rank], 2)

    return make


def _separable(rank, layer_class):
    def make(draw):
        strides = draw(st.integers(1, 2))
        layer = layer_class(
            draw(st.integers(1, 3)),
            draw(st.tuples(*[st.integers(1, 3)] * rank)),
            strides=strides,
            padding=draw(st.sampled_from(["valid", "same"])),
            depth_multiplier=draw(st.integers(1, 2)),
            dilation_rate=draw(st.integers(1, 2)) if strides == 1 else 1,
            **_common(draw),
        )
        return layer, (*(6, 5)[:rank], 2)

    return make


def embedding(draw):
    return L.Embedding(5, draw(st.integers(1, 3))), draw(st.sampled_from([(4,), (2, 3), (1,)])), 5


def layer_normalization(draw):
    axis = draw(st.sampled_from([-1, 1, 2, [1, 2], [2, 3], [1, 3], [1, 2, 3]]))
    center, scale = draw(st.sampled_from([(True, True), (False, True), (True, False)]))
    return L.LayerNormalization(axis=axis, center=center, scale=scale), (2, 3, 4)


def group_normalization(draw):
    groups, axis = draw(st.sampled_from([(1, -1), (2, -1), (4, -1), (-1, -1), (2, 1)]))
    center, scale = draw(st.sampled_from([(True, True), (False, True), (True, False)]))
    return L.GroupNormalization(groups, axis=axis, center=center, scale=scale), (4, 3, 4)


def rms_normalization(draw):
    return L.RMSNormalization(), draw(st.sampled_from([(4,), (3, 4), (2, 3, 4)]))


# class: (rule, makes a layer and the shape of its input)
LAYERS = {
    L.Dense: ("dense", dense),
    L.EinsumDense: ("einsum_dense", einsum_dense),
    L.Conv1D: ("convolution", _convolution(1, L.Conv1D)),
    L.Conv2D: ("convolution", _convolution(2, L.Conv2D)),
    L.Conv3D: ("convolution", _convolution(3, L.Conv3D)),
    L.Conv1DTranspose: ("transposed_convolution", _transposed(1, L.Conv1DTranspose)),
    L.Conv2DTranspose: ("transposed_convolution", _transposed(2, L.Conv2DTranspose)),
    L.Conv3DTranspose: ("transposed_convolution", _transposed(3, L.Conv3DTranspose)),
    L.DepthwiseConv1D: ("depthwise_convolution", _depthwise(1, L.DepthwiseConv1D)),
    L.DepthwiseConv2D: ("depthwise_convolution", _depthwise(2, L.DepthwiseConv2D)),
    L.SeparableConv1D: ("separable_convolution", _separable(1, L.SeparableConv1D)),
    L.SeparableConv2D: ("separable_convolution", _separable(2, L.SeparableConv2D)),
    L.Embedding: ("embedding", embedding),
    L.LayerNormalization: ("layer_normalization", layer_normalization),
    L.GroupNormalization: ("group_normalization", group_normalization),
}
if hasattr(L, "RMSNormalization"):  # newer than the oldest Keras that works
    LAYERS[L.RMSNormalization] = ("rms_normalization", rms_normalization)


def test_every_registered_class_is_in_the_table():
    assert set(registry._RULES) == set(LAYERS)


@pytest.mark.representative(4)
@pytest.mark.parametrize("layer_class", LAYERS, ids=lambda c: c.__name__)
@few
@given(data=st.data())
def test_rule(layer_class, data):
    rule, make = LAYERS[layer_class]
    check(*around(*make(data.draw)), [rule])


# --- what is made of these layers -----------------------------------------------------------------


@pytest.mark.parametrize("use_bias", [True, False])
def test_multi_head_attention(use_bias):
    layer = L.MultiHeadAttention(2, 3, value_dim=2, use_bias=use_bias, output_shape=5)
    x = keras.Input((3, 4))
    check(keras.Model(x, layer(x, x)), _inputs((3, 4)), ["einsum_dense"] * 4)


def test_grouped_query_attention():
    layer = L.GroupQueryAttention(3, 4, 2)
    x = keras.Input((3, 4))
    check(keras.Model(x, layer(x, x)), _inputs((3, 4)), ["einsum_dense"] * 4)


def test_attention_between_sequences_of_two_lengths():
    layer = L.MultiHeadAttention(2, 3)
    x = keras.Input((6, 4))
    model = keras.Model(x, layer(x[:, :2], x[:, 2:], use_causal_mask=True))
    check(model, _inputs((6, 4)), ["einsum_dense"] * 4)


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_lora(shape, bias):
    layer = L.Dense(5, "tanh", use_bias=bias)
    model, x = around(layer, shape)
    alpha = {"lora_alpha": 3} if "lora_alpha" in inspect.signature(L.Dense).parameters else {}
    layer.enable_lora(2, **alpha)
    assert len(model.trainable_variables) == 2 + bias
    check(model, x, ["dense"])


def _stack(*layers, shape=(4,)):
    return keras.Sequential([keras.Input(shape), *layers])


def test_frozen_layers_and_weights():
    frozen = L.Dense(4, trainable=False)
    bias_only, kernel_only = L.Dense(5), L.Dense(3)
    normalization = L.BatchNormalization(trainable=False)
    model = _stack(frozen, normalization, bias_only, kernel_only)
    bias_only._kernel.trainable = False
    kernel_only.bias.trainable = False
    assert [v.name for v in model.trainable_variables] == ["bias", "kernel"]
    check(model, _inputs((4,)), ["dense", "dense"])


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_layers_used_twice(shape):
    shared = L.Dense(4, "tanh")
    x = keras.Input(shape)
    check(keras.Model(x, L.Dense(2)(shared(shared(x)))), _inputs(shape), ["dense"] * 3)


def test_a_table_used_twice():
    shared = L.Embedding(5, 3)
    x = keras.Input((4,), dtype="int32")
    model = keras.Model(x, L.Concatenate()([shared(x), shared(4 - x)]))
    check(model, _inputs((4,), 5), ["embedding"] * 2)


def test_a_layer_used_on_vectors_and_on_sequences():
    shared = L.Dense(3)
    x = keras.Input((2, 4))
    check(keras.Model(x, shared(x) + shared(x[:, 0])[:, None]), _inputs((2, 4)), ["dense"] * 2)


class NamedDense(L.Dense):
    """A subclass that leaves `call` alone."""


class DoubledDense(L.Dense):
    """A subclass with a `call` of its own."""

    def call(self, inputs):
        return 2.0 * super().call(inputs)


def test_subclasses_have_the_rule_of_a_class_whose_call_they_share():
    check(_stack(NamedDense(3), DoubledDense(2)), _inputs((4,)), ["dense", "map"])


def test_layers_inside_of_models_and_composite_layers():
    class Block(L.Layer):
        def __init__(self):
            super().__init__()
            self.inner = L.Dense(4, "tanh")
            self.norm = L.LayerNormalization()

        def call(self, x):
            return x + self.inner(self.norm(x))

    model = _stack(_stack(L.Dense(4)), Block(), L.Dense(2))
    check(model, _inputs((4,)), ["dense", "map", "dense"])
    known = set(independence._KNOWN)
    try:
        ghost.declare_independent(Block)
        check(model, _inputs((4,)), ["dense", "layer_normalization", "dense", "dense"])
    finally:
        independence._KNOWN.intersection_update(known)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: L.Conv2D(3, (2, 3), strides=2), (2, 6, 7)),
        (lambda: L.DepthwiseConv2D(3), (2, 6, 5)),
        (lambda: L.Conv2DTranspose(3, 3, strides=2), (2, 3, 4)),
    ],
)
def test_channels_first(layer, shape):
    """The kernels of a CPU are for channels last, so the rule gets a layer that transposes."""
    layer = layer()
    channels_last = (*shape[1:], shape[0])
    layer.build((None, *channels_last))
    x = _inputs(channels_last)
    z = layer(x)
    d = tf.constant(np.random.default_rng(2).normal(size=z.shape), tf.float32)
    found = []
    for data_format, values, outputs in [
        ("channels_last", x, d),
        ("channels_first", tf.transpose(x, [0, 3, 1, 2]), tf.transpose(d, [0, 3, 1, 2])),
    ]:
        layer.data_format = data_format
        taps = []

        def tap(z, gradients, taps=taps):
            taps.append(gradients)
            return z

        def call(inputs, outputs=outputs):
            return layer.activation(outputs)

        registry.rule_for(layer)(layer, call, tap, values)
        found.append([rows.materialize() for _, rows in taps[0](outputs)])
    for last, first in zip(*found, strict=True):
        np.testing.assert_allclose(last, first, rtol=1e-5, atol=1e-5)


# --- layers without a rule ------------------------------------------------------------------------


class Scale(L.Layer):
    """A layer with weights of its own."""

    def build(self, shape):
        self.factor = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        return tf.tanh(self.factor * x)


class NoisyScale(Scale):
    """The same with random numbers."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x):
        noise = keras.random.normal(tf.shape(x)[1:], seed=self.seed_generator)
        return self.factor * x * (1.0 + noise)


MAPPED = {
    "lstm": (lambda: L.LSTM(3), (4, 2)),
    "custom": (Scale, (4,)),
    "bidirectional": (lambda: L.Bidirectional(L.LSTM(2)), (3, 2)),
    "time distributed": (lambda: L.TimeDistributed(L.Dense(3)), (3, 2)),
    "dilated volume": (lambda: L.Conv3D(2, 2, dilation_rate=2), (4, 4, 4, 1)),
    "axis of all three": (lambda: L.EinsumDense("abc,bcd->abd", (3, 2)), (3, 4)),
    "einsum with lora": (lambda: L.EinsumDense("ab,bc->ac", 3, lora_rank=1), (4,)),
    "prelu": (L.PReLU, (4,)),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", MAPPED)
def test_layers_without_a_rule_are_mapped(name):
    make, shape = MAPPED[name]
    model, x = around(make(), shape)
    count = 2 if name == "bidirectional" else 1
    check(model, x, ["map"] * count)


def test_mapped_layers_draw_the_same_numbers_forth_and_back():
    layer = NoisyScale()
    model, x = around(layer, (4,))
    layer.factor.assign([1.0, 2.0, 3.0, 4.0])
    y = np.zeros((ROWS, 4), np.float32)
    loss = CompileLoss(keras.losses.MeanSquaredError())
    loss.build(y, model(x))
    example_loss = ExampleLoss(model, loss)
    seeds = tf.constant([[5, 6]], tf.uint32)
    values = example_loss.trainable_values()
    _, z, (rows,), records = ghost.GhostPass(example_loss)(
        values, tf.constant(x), tf.constant(y), None, seeds
    )
    assert [r.form for r in records] == ["map"]
    # loss = Σ z²/4 with z = factor·x·noise, so its gradient is z²/(2·factor).
    np.testing.assert_allclose(rows.materialize(), z**2 / 2 / layer.factor, rtol=1e-4)
    noise = np.asarray(z / (layer.factor * x))
    assert np.unique(np.round(noise, 5)).size == noise.size  # other numbers for every example
