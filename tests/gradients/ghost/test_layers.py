"""The layers of Keras against one tape per example, over random configurations."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gradients.ghost.one_by_one import around, check, operations_of
from tf_adadp.gradients.ghost import weights
from tf_adadp.gradients.proof.follow import Follower, inputs_of_rows
from tf_adadp.gradients.proof.values import public

L = keras.layers
few = settings(deadline=None, derandomize=True, max_examples=5, database=None)


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
        if max(strides) == 1:
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


def _by_depth(rank, layer_class, filters=()):
    def make(draw):
        own = [draw(f) for f in filters]
        strides = draw(st.integers(1, 2))
        layer = layer_class(
            *own,
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
    return _by_depth(rank, layer_class, [st.integers(1, 3)])


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


def prelu(draw):
    return L.PReLU("normal", shared_axes=draw(st.sampled_from([None, [1], [1, 2]]))), (3, 4)


# class: (the operations in which its weights may meet examples, makes a layer and a shape)
LAYERS = {
    L.Dense: ({"MatMul"}, dense),
    L.EinsumDense: ({"MatMul", "Einsum"}, einsum_dense),
    L.Conv1D: ({"Conv2D"}, _convolution(1, L.Conv1D)),
    L.Conv2D: ({"Conv2D"}, _convolution(2, L.Conv2D)),
    L.Conv3D: ({"Conv3D"}, _convolution(3, L.Conv3D)),
    L.Conv1DTranspose: ({"Conv2DBackpropInput"}, _transposed(1, L.Conv1DTranspose)),
    L.Conv2DTranspose: ({"Conv2DBackpropInput"}, _transposed(2, L.Conv2DTranspose)),
    L.Conv3DTranspose: ({"Conv3DBackpropInputV2"}, _transposed(3, L.Conv3DTranspose)),
    L.DepthwiseConv1D: ({"DepthwiseConv2dNative"}, _by_depth(1, L.DepthwiseConv1D)),
    L.DepthwiseConv2D: ({"DepthwiseConv2dNative"}, _by_depth(2, L.DepthwiseConv2D)),
    L.SeparableConv1D: ({"DepthwiseConv2dNative", "Conv2D"}, _separable(1, L.SeparableConv1D)),
    L.SeparableConv2D: ({"DepthwiseConv2dNative", "Conv2D"}, _separable(2, L.SeparableConv2D)),
    L.Embedding: ({"GatherV2"}, embedding),
    L.LayerNormalization: ({"Mul"}, layer_normalization),
    L.GroupNormalization: ({"Mul"}, group_normalization),
    L.PReLU: ({"Mul"}, prelu),
}
if hasattr(L, "RMSNormalization"):  # newer than the oldest Keras that works
    LAYERS[L.RMSNormalization] = ({"Mul"}, rms_normalization)


@pytest.mark.representative(3)
@pytest.mark.parametrize("layer_class", LAYERS, ids=lambda c: c.__name__)
@few
@given(data=st.data())
def test_layer(layer_class, data):
    operations, make = LAYERS[layer_class]
    layer, *inputs = make(data.draw)
    model, x = around(layer, *inputs)
    found = set(operations_of(check(model, x)))
    assert found <= operations | {"BiasAdd"}
    assert found & operations or not layer.weights[0].name.startswith("kernel")


# --- channels first -------------------------------------------------------------------------------


def _first(rank):
    """The order of axes that takes channels from the last place to the first."""
    return [0, rank - 1, *range(1, rank - 1)]


def _padding(format_, *space):
    pairs = [[0, 0], *space, [0, 0]]
    return pairs if format_.endswith("C") else [pairs[0], pairs[-1], *pairs[1:-1]]


def _strides(format_, *space):
    return [1, *space, 1] if format_.endswith("C") else [1, 1, *space]


def _back(x, w, format_, *space):
    """A transposed convolution, 6 x 8 from 3 x 4."""
    shape = [6, 8, 3] if format_.endswith("C") else [3, 6, 8]
    shape = tf.stack([tf.shape(x)[0], *shape])
    return tf.nn.conv2d_transpose(x, w, shape, _strides(format_, *space), data_format=format_)


# name: (operation of x, the weight and a data format; the two formats, shapes of x and the weight)
IN_BOTH_FORMATS = {
    "convolution": (
        lambda x, w, f: tf.nn.conv2d(x, w, _strides(f, 2, 2), "VALID", f),
        ("NHWC", "NCHW"), (6, 7, 2), (2, 3, 2, 3),
    ),
    "same": (
        lambda x, w, f: tf.nn.conv2d(x, w, _strides(f, 1, 2), "SAME", f),
        ("NHWC", "NCHW"), (6, 7, 2), (2, 3, 2, 3),
    ),
    "explicit": (
        lambda x, w, f: tf.nn.conv2d(x, w, 1, _padding(f, [1, 2], [0, 1]), f),
        ("NHWC", "NCHW"), (6, 7, 2), (2, 3, 2, 3),
    ),
    "grouped": (
        lambda x, w, f: tf.nn.conv2d(x, w, 1, "VALID", f),
        ("NHWC", "NCHW"), (6, 7, 4), (2, 3, 2, 6),
    ),
    "volumes": (
        lambda x, w, f: tf.nn.conv3d(x, w, _strides(f, 1, 2, 1), "SAME", f),
        ("NDHWC", "NCDHW"), (4, 5, 3, 2), (2, 3, 2, 2, 3),
    ),
    "depthwise": (
        lambda x, w, f: tf.nn.depthwise_conv2d(x, w, _strides(f, 1, 1), "SAME", f),
        ("NHWC", "NCHW"), (6, 5, 2), (3, 3, 2, 2),
    ),
    "transposed": (
        lambda x, w, f: _back(x, w, f, 2, 2), ("NHWC", "NCHW"), (3, 4, 2), (3, 3, 3, 2),
    ),
    "bias": (
        lambda x, w, f: tf.nn.bias_add(x, w, f), ("NHWC", "NCHW"), (6, 7, 2), (2,),
    ),
}  # fmt: skip


@pytest.mark.representative(4)
@pytest.mark.parametrize("name", IN_BOTH_FORMATS)
def test_channels_first(name):
    """Not every CPU runs such operations; the gradients of weights do not need their outputs."""
    function, formats, shape, weight_shape = IN_BOTH_FORMATS[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, *shape)).astype(np.float32)
    w = rng.normal(size=weight_shape).astype(np.float32)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(variable := tf.constant(w))
        z = function(x, variable, formats[0])
        d = rng.normal(size=z.shape).astype(np.float32)
        parts = [tf.reduce_sum(part) for part in tf.unstack(z * d)]
    expected = np.stack([tape.gradient(part, variable) for part in parts])
    for format_ in formats:
        order = _first(len(shape) + 1) if format_.startswith("NC") else range(len(shape) + 1)
        found = _weight_gradients(
            lambda x, w, f=format_: function(x, w, f),
            *(np.transpose(a, order) for a in (x, d)),
            w,
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def _weight_gradients(function, x, d, w):
    """The gradients of w for each example, by the form of the one operation that it is in."""

    def run(x, d, w):
        function(x, w)
        follower = Follower()
        follower.set(x, inputs_of_rows(x))
        follower.set(w, public(w, weights=frozenset([0])))
        follower.advance(tf.compat.v1.get_default_graph().get_operations())
        (use,) = follower.uses
        values = [follower.of(t) for t in use.inputs]
        found = weights.gradients_of(use, values, follower.of(use.outputs[0]), d)
        ((tensor, rows),) = found
        assert tensor is w
        return rows.materialize()

    specs = [tf.TensorSpec([None, *a.shape[1:]]) for a in (x, d)]
    return tf.function(run, autograph=False).get_concrete_function(*specs, tf.TensorSpec(w.shape))(
        *map(tf.constant, (x, d, w))
    )
