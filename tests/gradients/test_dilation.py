"""The rows of an example stay together in dilated convolutions, and what mixes them is found."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.proof.experiments import follow, influence, specs, usual, with_gradient
from tf_adadp.gradients.dilation import batch_to_space, rows_together, space_to_batch
from tf_adadp.gradients.proof import Mixed, Rows

R = tf.raw_ops
# name: (shape of an image, block, paddings)
USES = {
    "a sequence": ((5, 2), [2], [[0, 1]]),
    "an image": ((4, 3, 2), [2, 3], [[1, 1], [0, 3]]),
    "a volume": ((3, 4, 2, 1), [2, 2, 2], [[0, 1], [2, 0], [0, 0]]),
    "a volume of one channel less": ((3, 4, 2), [3, 1, 2], [[0, 0], [0, 0], [1, 1]]),
    "channels first": ((2, 4, 3), [1, 2, 2], [[0, 0], [0, 0], [0, 1]]),
    "no padding": ((4, 6, 3), [2, 2], [[0, 0], [0, 0]]),
    "one axis of two": ((5, 4, 2), [1, 4], [[0, 0], [0, 0]]),
}
IMAGE, SQUARE, NONE = USES["no padding"][0], [2, 2], [[0, 0], [0, 0]]
M = 4  # images that an image becomes


def apart(x, block=SQUARE, paddings=NONE):
    return space_to_batch(x, block, paddings)


def joined(x, block=SQUARE, crops=NONE):
    return batch_to_space(x, block, crops)


def followed(function, *shapes):
    return follow(lambda key, *x: function(*x), *specs(*shapes))


def types(graph):
    return {op.type for op in graph.outputs[0].graph.get_operations()}


@pytest.mark.parametrize("name", USES)
def test_both_operations_are_tensorflows_in_another_order(name):
    shape, block, paddings = USES[name]
    count = math.prod(block)
    x = tf.random.stateless_normal([3, *shape], [1, 2])
    theirs, ours = tf.space_to_batch(x, block, paddings), apart(x, block, paddings)
    order = np.arange(3 * count).reshape(count, 3).T.ravel()
    np.testing.assert_array_equal(ours, theirs.numpy()[order])
    np.testing.assert_array_equal(joined(ours, block, paddings), x)


@pytest.mark.parametrize("name", USES)
def test_each_operation_is_followed(name):
    shape, block, paddings = USES[name]
    function = with_gradient(lambda key, x: apart(x, block, paddings))
    found = followed(lambda x: function(None, x), shape)
    first, back = found.values
    assert isinstance(first, Rows)
    assert (first.axis, first.stride) == (0, math.prod(block))
    assert isinstance(back, Rows)
    assert (back.axis, back.stride) == (0, 1)
    assert "SpaceToBatchND" not in types(found)
    assert influence(found, usual(shape)) is None


@pytest.mark.parametrize("name", USES)
def test_both_are_followed(name):
    shape, block, paddings = USES[name]
    function = with_gradient(
        lambda key, x: joined(tf.sin(apart(x, block, paddings)), block, paddings)
    )
    found = followed(lambda x: function(None, x), shape)
    assert all(isinstance(v, Rows) and v.stride == 1 for v in found.values), found.values
    assert "BatchToSpaceND" not in types(found)
    assert influence(found, usual(shape)) is None


BETWEEN = {
    "convolution": lambda z: tf.nn.conv2d(z, tf.ones([2, 2, 3, 3]), 1, "SAME"),
    "largest": lambda z: tf.nn.max_pool2d(z, 2, 1, "SAME"),
    "images of an example": lambda z: tf.reshape(
        tf.cumsum(tf.reshape(z, [-1, M, 2, 3, 3]), 1), [-1, 2, 3, 3]
    ),
    "mean of an example": lambda z: tf.reshape(
        tf.reshape(z, [-1, M, 2, 3, 3])
        - tf.reduce_mean(tf.reshape(z, [-1, M, 2, 3, 3]), 1, keepdims=True),
        [-1, 2, 3, 3],
    ),
    "a weight for each image": lambda z: tf.reshape(
        tf.reshape(z, [-1, M, 2, 3, 3]) * tf.reshape(tf.range(4.0), [M, 1, 1, 1]), [-1, 2, 3, 3]
    ),
}
MIXING = {
    "images as TensorFlow orders them": lambda z: tf.reshape(z, [M, -1, 2, 3, 3])[0],
    "mean of the batch": lambda z: z - tf.reduce_mean(z, 0),
    "neighbours": lambda z: tf.reshape(z, [-1, 3, 2, 3, 3]),
    "pairs": lambda z: tf.reshape(z, [-1, 2, 2, 3, 3])[::2],
    "first images": lambda z: z - z[:1],
    "some images": lambda z: z[::M],
    "all but one": lambda z: z[1:],
    "reversed": lambda z: tf.reverse(z, [0]),
    "rolled": lambda z: tf.roll(z, 1, 0),
    "batch is minor": lambda z: tf.reshape(tf.transpose(z, [1, 2, 3, 0]), [-1, 2, 3, 3]),
    "cumulated": lambda z: tf.cumsum(z, 0),
    "a constant for every image": lambda z: z * tf.reshape(tf.range(8.0), [8, 1, 1, 1]),
    "looked up": lambda z: tf.gather(z, [0, 1]),
    "product of images": lambda z: tf.einsum("bijk,cijk->bc", z, z),
    "joined by TensorFlow": lambda z: R.BatchToSpaceND(input=z, block_shape=SQUARE, crops=NONE),
    "joined by more": lambda z: joined(z, [4, 2]),
    "joined by TensorFlow's function": lambda z: tf.batch_to_space(z, SQUARE, NONE),
    "cut by TensorFlow": lambda z: R.SpaceToBatchND(
        input=z, block_shape=[2, 1], paddings=NONE
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_what_keeps_examples_apart_is_followed(name):
    function = with_gradient(lambda key, x: joined(BETWEEN[name](apart(x))))
    found = followed(lambda x: function(None, x), IMAGE)
    assert all(isinstance(v, Rows) for v in found.values), found.values
    assert influence(found, usual(IMAGE)) is None


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_is_mixed(name):
    found = followed(lambda x: MIXING[name](apart(x)), IMAGE)
    assert all(isinstance(v, Mixed) for v in found.values), found.values


def test_a_batch_is_not_taken_for_the_images_of_one_example():
    (value,) = followed(joined, IMAGE).values
    assert isinstance(value, Mixed)


def test_tensorflows_own_operations_have_no_rule():
    for function in (
        lambda x: R.SpaceToBatchND(input=x, block_shape=SQUARE, paddings=NONE),
        lambda x: tf.space_to_batch_nd(x, SQUARE, NONE),
    ):
        (value,) = followed(function, IMAGE).values
        assert isinstance(value, Mixed)
        assert value.reason == "has no rule"


UNKNOWN = {
    "block": lambda x: (x, [2, tf.shape(x)[1] - 2], NONE),
    "paddings": lambda x: (x, SQUARE, tf.zeros([2, 2], tf.int32) + tf.shape(x)[3] - 3),
    "space": lambda x: (tf.boolean_mask(x, [True] * 4, axis=1), SQUARE, NONE),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_tensorflows_in_our_order(name):
    found = followed(lambda x: apart(*UNKNOWN[name](x)), IMAGE)
    assert isinstance(found.values[0], Mixed)
    x = usual(IMAGE)(np.random.default_rng(3), 3, False)[0]
    np.testing.assert_allclose(found.run(x)[0], apart(x), 1e-5, 1e-5)
    back = followed(lambda x: joined(apart(x), *UNKNOWN[name](x)[1:]), IMAGE)
    np.testing.assert_allclose(back.run(x)[0], x)


@pytest.mark.parametrize(
    "function",
    [lambda x: apart(x, [3, 2]), lambda x: joined(apart(x), SQUARE, [[2, 3], [0, 0]])],
)
def test_what_does_not_fit_is_tensorflows_error(function):
    with pytest.raises(ValueError, match="(?i)divi|crop|negative"):
        followed(function, IMAGE)


DILATED = {
    "convolution": lambda x: tf.nn.convolution(x, tf.ones([2, 2, 3, 2]), dilations=[2, 3]),
    "same": lambda x: tf.nn.convolution(x, tf.ones([2, 3, 3, 2]), padding="SAME", dilations=2),
    "by depth": lambda x: tf.nn.depthwise_conv2d(
        x, tf.ones([2, 2, 3, 2]), [1] * 4, "SAME", dilations=[2, 2]
    ),
    "separable": lambda x: tf.nn.separable_conv2d(
        x, tf.ones([2, 2, 3, 1]), tf.ones([1, 1, 3, 2]), [1] * 4, "SAME", dilations=[2, 2]
    ),
    "pooling": lambda x: tf.nn.pool(x, [2, 2], "MAX", dilations=[2, 3]),
    "several images of an example": lambda x: tf.reshape(
        tf.nn.convolution(
            tf.reshape(tf.stack([x, 2 * x], 1), [-1, 4, 6, 3]), tf.ones([2, 2, 3, 2]), dilations=2
        ),
        [-1, 2, 2, 4, 2],
    ),
}


@pytest.mark.parametrize("name", DILATED)
def test_dilated_operations_are_followed(name):
    def together(key, x):
        with rows_together():
            return DILATED[name](x)

    found = followed(lambda x: with_gradient(together)(None, x), IMAGE)
    assert all(isinstance(v, Rows) and v.stride == 1 for v in found.values), found.values
    assert influence(found, usual(IMAGE)) is None
    x = usual(IMAGE)(np.random.default_rng(3), 3, False)[0]
    np.testing.assert_allclose(found.run(x)[0], DILATED[name](tf.constant(x)), 1e-5, 1e-5)


def test_only_dilated_operations_are_replaced():
    x = tf.reshape(tf.range(8.0), [2, 2, 2, 1])
    before = tf.space_to_batch(x, SQUARE, NONE)
    with rows_together():
        np.testing.assert_array_equal(tf.space_to_batch(x, SQUARE, NONE), before)
        found = follow(lambda key, x: tf.space_to_batch(x, SQUARE, NONE), *specs(IMAGE))
    assert isinstance(found.values[0], Mixed)
    found = follow(lambda key, x: DILATED["same"](x), *specs(IMAGE))
    assert isinstance(found.values[0], Mixed)
