"""Numbers that are followed through a graph are those that TensorFlow computes, for every B."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gradients.proof.experiments import follow
from tf_adadp.gradients.proof import sizes
from tf_adadp.gradients.proof.sizes import Size

R = tf.raw_ops
BATCHES = (1, 2, 3, 7)
SPEC = tf.TensorSpec([None, 4, 6])
few = settings(deadline=None, derandomize=True, database=None)


def followed(function):
    """Follows `function(B, shape [B, 4, 6])`: its outputs' numbers, and a function of B."""

    def of_batch(key, x):
        # Not folded when it is traced.
        shape = R.Shape(input=x)
        return function(shape[0], shape)

    found = follow(of_batch, SPEC)

    def run(count):
        return found.run(np.zeros((count, 4, 6), np.float32))

    return [getattr(v, "value", None) for v in found.values], run, found


def at(value, count):
    """The numbers for a batch of B examples."""

    def number(n):
        return n.factor * count**n.power if isinstance(n, Size) else n

    return np.array([number(n) for n in value.flat]).reshape(value.shape)


def check(function, known=True):
    """Checks the numbers for several B, and whether they are known; None is for either."""
    values, run, found = followed(function)
    if known is not None:
        assert [v is not None for v in values] == [known] * len(values)
    for count in BATCHES:
        try:
            expected = run(count)
        except tf.errors.OpError:
            continue
        for value, array in zip(values, expected, strict=True):
            if value is not None:
                np.testing.assert_array_equal(at(value, count), array)
    return found


C = tf.constant
KNOWN = {
    "Identity": [lambda b, s: R.Identity(input=s)],
    "StopGradient": [lambda b, s: R.StopGradient(input=s)],
    "PreventGradient": [lambda b, s: R.PreventGradient(input=s)],
    "EnsureShape": [lambda b, s: R.EnsureShape(input=s, shape=[3])],
    "Cast": [
        lambda b, s: tf.cast(s, tf.int64),
        lambda b, s: tf.cast(tf.cast(s, tf.float32), tf.int32),
        lambda b, s: tf.cast(tf.cast(s, tf.bool), tf.int32),
        lambda b, s: tf.cast(tf.cast(s[1:] - 4, tf.bool), tf.int32),
        lambda b, s: tf.cast(tf.cast(R.Identity(input=C([2.0, -3.0])), tf.int32), tf.int64),
    ],
    "Mul": [lambda b, s: b * b * -2, lambda b, s: s * [[1], [0], [-3]]],
    "AddV2": [lambda b, s: b + 2 * b, lambda b, s: b + 0, lambda b, s: s[1:] + [-9, 1]],
    "Add": [lambda b, s: R.Add(x=b, y=b)],
    "Sub": [lambda b, s: 3 * b - b, lambda b, s: b - b, lambda b, s: s - [0, 9, 9]],
    "Neg": [lambda b, s: -s],
    "FloorDiv": [
        lambda b, s: 12 * b // 4,
        lambda b, s: -12 * b // 4,
        lambda b, s: 12 * b // -4,
        lambda b, s: b * b * 6 // (2 * b),
        lambda b, s: s[1:] // [-3, 4],
        lambda b, s: (6 * b) // (2 * b),
    ],
    "FloorMod": [lambda b, s: 12 * b % 4, lambda b, s: s[1:] % [-3, 4],
                 lambda b, s: -10 * b % 5],
    "Maximum": [
        lambda b, s: tf.maximum(b, 1),
        lambda b, s: tf.maximum(b, -4),
        lambda b, s: tf.maximum(3, 3 * b),
        lambda b, s: tf.maximum(b, 2 * b),
        lambda b, s: tf.maximum(-b, -2 * b),
        lambda b, s: tf.maximum(-b, -1),
        lambda b, s: tf.maximum(-2 * b, 0),
        lambda b, s: tf.maximum(s[1:], [5, 5]),
    ],
    "Equal": [lambda b, s: tf.equal(b, b), lambda b, s: tf.equal(b, 0),
              lambda b, s: tf.equal(s[1], 4)],
    "NotEqual": [lambda b, s: tf.not_equal(b, -1), lambda b, s: tf.not_equal(s[1], 4)],
    "Less": [lambda b, s: tf.less(b, 0), lambda b, s: tf.less(0, b), lambda b, s: s[1:] < 5],
    "LessEqual": [lambda b, s: tf.less_equal(b, 0), lambda b, s: tf.less_equal(b, b)],
    "Greater": [lambda b, s: b > 0, lambda b, s: b > -2, lambda b, s: tf.greater(0, b)],
    "GreaterEqual": [lambda b, s: b >= 0, lambda b, s: b >= b, lambda b, s: s[1:] >= 6],
    "SelectV2": [lambda b, s: tf.where(b > 0, s, 2 * s), lambda b, s: tf.where(b < 0, b, 7),
                 lambda b, s: tf.where([True, False, True], s, -s)],
    "LogicalAnd": [lambda b, s: tf.logical_and(b > 0, s > 0)],
    "LogicalOr": [lambda b, s: tf.logical_or(b < 0, s > 0)],
    "LogicalNot": [lambda b, s: tf.logical_not(b < 0)],
    "Pack": [lambda b, s: tf.stack([b, 2 * b, C(3)]), lambda b, s: tf.stack([s, s], -1)],
    "Unpack": [lambda b, s: tf.unstack(s, 3), lambda b, s: tf.unstack(tf.stack([s, s]), 3, -1)],
    "ConcatV2": [lambda b, s: tf.concat([s, [1], s[1:]], 0),
                 lambda b, s: tf.concat([s[None], s[None]], -2)],
    "ConcatOffset": [
        lambda b, s: R.ConcatOffset(concat_dim=1, shape=[s, s, s + [0, 1, 0]]),
        lambda b, s: R.ConcatOffset(concat_dim=0, shape=[s, s, s]),
    ],
    "StridedSlice": [
        lambda b, s: s[1:], lambda b, s: s[::-1], lambda b, s: s[-1], lambda b, s: s[None, ..., :2],
        lambda b, s: tf.stack([s, s])[..., 0], lambda b, s: tf.stack([s, s])[:, None, -2:],
    ],
    "Slice": [lambda b, s: R.Slice(input=s, begin=[1], size=[-1]),
              lambda b, s: R.Slice(input=s, begin=[0], size=[2])],
    "Split": [lambda b, s: R.Split(axis=0, value=s, num_split=3)],
    "GatherV2": [lambda b, s: tf.gather(s, [2, 0]), lambda b, s: tf.gather(s, [[1], [0]]),
                 lambda b, s: tf.gather(tf.stack([s, s]), 0, axis=1)],
    "Reshape": [lambda b, s: tf.reshape(s, [1, -1]), lambda b, s: tf.reshape(s, [3, 1])],
    "ExpandDims": [lambda b, s: R.ExpandDims(input=s, axis=-1)],
    "Squeeze": [lambda b, s: R.Squeeze(input=s[None, :, None]),
                lambda b, s: R.Squeeze(input=s[None, :, None], axis=[-1])],
    "Prod": [lambda b, s: tf.reduce_prod(s), lambda b, s: tf.reduce_prod(s[1:], keepdims=True),
             lambda b, s: tf.reduce_prod(tf.stack([s, s]), 0),
             lambda b, s: R.Prod(input=s[:0], axis=[0])],
    "Sum": [lambda b, s: tf.reduce_sum(s[1:]), lambda b, s: tf.reduce_sum(tf.stack([s, s]), 0),
            lambda b, s: R.Sum(input=s[:0], axis=[0])],
    "All": [lambda b, s: tf.reduce_all(tf.equal(s, [b, 4, 6])),
            lambda b, s: tf.reduce_all(s[1:] < 5),
            lambda b, s: tf.reduce_all(tf.equal(s[1:], [[4, 6], [4, 5]]), 1, keepdims=True),
            lambda b, s: R.All(input=tf.equal(s[:0], 1), axis=[0])],
    "Any": [lambda b, s: tf.reduce_any(tf.equal(s, [b, 5, 5])),
            lambda b, s: tf.reduce_any(s < 0, 0),
            lambda b, s: R.Any(input=tf.equal(s[:0], 1), axis=[0])],
    "Range": [lambda b, s: tf.range(s[1]), lambda b, s: tf.range(s[2], 0, -2),
              lambda b, s: tf.range(0.0, 3.0, 1.0)],
    "Fill": [lambda b, s: R.Fill(dims=[2, 2], value=s[1]),
             lambda b, s: R.Fill(dims=[], value=s[1])],
    "Tile": [lambda b, s: tf.tile(s[1:], [2]), lambda b, s: tf.tile(s[None, 1:], [2, 1])],
    "ReverseV2": [lambda b, s: tf.reverse(s, [0]), lambda b, s: tf.reverse(s[None], [0, -1])],
    "DynamicStitch": [lambda b, s: tf.dynamic_stitch([[0, 2, 1], [1]], [s, [9]])],
    "InvertPermutation": [lambda b, s: R.InvertPermutation(x=C([2, 0, 1]) + 0 * s[1])],
    "Transpose": [lambda b, s: tf.transpose(tf.stack([s, 2 * s])),
                  lambda b, s: tf.transpose(tf.stack([s, s])[None], [2, 0, 1])],
    "BroadcastGradientArgs": [lambda b, s: R.BroadcastGradientArgs(s0=s[1:], s1=[1, 6])],
    "BroadcastArgs": [lambda b, s: R.BroadcastArgs(s0=s, s1=[6]),
                      lambda b, s: R.BroadcastArgs(s0=[1, 1, 6], s1=s)],
    "ZerosLike": [lambda b, s: R.ZerosLike(x=s)],
    "OnesLike": [lambda b, s: R.OnesLike(x=s)],
}  # fmt: skip
UNKNOWN = [
    lambda b, s: b + 1,
    lambda b, s: b - 1,
    lambda b, s: b * b + b,
    lambda b, s: b // 2,
    lambda b, s: 3 * b // 2,
    lambda b, s: -b // 2,
    lambda b, s: 6 // b,
    lambda b, s: b // (2 * b),
    lambda b, s: b // (b * b),
    lambda b, s: b // 0,
    lambda b, s: s[1] // 0,
    lambda b, s: b % 2,
    lambda b, s: 6 % b,
    lambda b, s: b % 0,
    lambda b, s: b % b,
    lambda b, s: tf.maximum(b, 2),
    lambda b, s: tf.maximum(-b, -2),
    lambda b, s: tf.maximum(b * b, b),
    lambda b, s: tf.minimum(b, 2),
    lambda b, s: b < 2,
    lambda b, s: b <= 1,
    lambda b, s: tf.equal(b, 1),
    lambda b, s: tf.equal(b, 2 * b),
    lambda b, s: b < b * b,
    lambda b, s: tf.where(b > 1, 1, 2),
    lambda b, s: tf.cast(b, tf.float32) * 0.5,
    lambda b, s: tf.cast(b, tf.float32) * 2.5,
    lambda b, s: tf.cast(b, tf.float32) / 2.0,
    lambda b, s: tf.cast(b, tf.float32) // 2.5,
    lambda b, s: tf.cast(b, tf.float32) + 0.5,
    lambda b, s: tf.cast(b, tf.int8),
    lambda b, s: tf.cast(b, tf.float16),
    lambda b, s: tf.cast(s[1] * 100, tf.int8),
    lambda b, s: s[1] * 65536 * 65536,
    lambda b, s: b * 65536 * 65536,
    lambda b, s: tf.cast(tf.cast(s[1] * 5000003, tf.float32), tf.int32),
    lambda b, s: tf.cast(R.Identity(input=C(2.7)), tf.int32),
    lambda b, s: R.Identity(input=C(0.1)) * 3.0,
    lambda b, s: tf.maximum(R.Identity(input=C(0.3)), 0.7),
    lambda b, s: tf.range(b),
    lambda b, s: tf.range(0.0, 1.5, 0.5),
    lambda b, s: tf.range(0.5, 3.5),
    lambda b, s: tf.gather(s, b - b + 1 * b),
    lambda b, s: s[: b],
    lambda b, s: s[b - 1],
    lambda b, s: tf.reduce_sum(s),
    lambda b, s: tf.reduce_all(tf.equal(s, [2, 4, 6])),
    lambda b, s: tf.reduce_any(tf.equal(s, [2, 5, 5])),
    lambda b, s: R.BroadcastArgs(s0=s, s1=[2, 1, 1]),
    lambda b, s: R.ConcatOffset(concat_dim=0, shape=[s, [5, 4, 6], s]),
    lambda b, s: R.InvertPermutation(x=s),
]  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_numbers_are_tensorflows(name):
    for function in KNOWN[name]:
        graph = check(function).outputs[0].graph
        assert name in {op.type for op in graph.get_operations()}


def test_every_operation_has_cases():
    assert set(KNOWN) == set(sizes._OPERATIONS)


@pytest.mark.parametrize("number", range(len(UNKNOWN)))
def test_what_is_no_multiple_of_a_power_is_unknown(number):
    check(UNKNOWN[number], known=False)


_BINARY = (
    tf.add, tf.subtract, tf.multiply, tf.math.floordiv, tf.math.floormod, tf.maximum,
    lambda a, b: tf.where(a < b, a, b), lambda a, b: tf.where(tf.equal(a, b), a, -b),
    lambda a, b: tf.where(a >= b, 2 * a, b), lambda a, b: tf.cast(a > b, tf.int32),
    lambda a, b: tf.reduce_prod(tf.stack([a, b])), lambda a, b: tf.reduce_sum([a, b, a]),
    lambda a, b: tf.cast(tf.cast(a, tf.float32) * tf.cast(b, tf.float32), tf.int32),
    lambda a, b: tf.cast(tf.cast(a, tf.float32) // tf.cast(b, tf.float32), tf.int32),
)  # fmt: skip
_steps = st.lists(
    st.tuples(st.integers(0, len(_BINARY) - 1), st.integers(0, 6), st.integers(0, 6)),
    min_size=1,
    max_size=5,
)


@few
@given(st.lists(st.integers(-3, 12), min_size=2, max_size=4), _steps)
def test_random_arithmetic_is_tensorflows(constants, steps):
    def function(b, shape):
        pool = [b, *(R.Identity(input=C(n)) for n in constants)]
        for which, i, j in steps:
            pool.append(_BINARY[which](pool[-1 - i % len(pool)], pool[j % len(pool)]))
        return pool

    values = followed(function)[0]
    # What is not known may not run: a division by zero.
    known = [i for i, value in enumerate(values) if value is not None]
    run = followed(lambda b, s: [function(b, s)[i] for i in known])[1]
    for count in BATCHES:
        for i, expected in zip(known, run(count), strict=True):
            np.testing.assert_array_equal(at(values[i], count), expected)


_dims = st.lists(st.sampled_from([1, 1, 3, 5, 0]), max_size=4)


@few
@given(_dims, st.data())
def test_gradients_of_broadcasts_are_summed_over_the_right_axes(dims, data):
    """0 stands for B. Axes of one entry in both shapes change nothing, wherever they are."""
    other = [d if data.draw(st.booleans()) else 1 for d in dims]
    other = other[data.draw(st.integers(0, len(other))) :]

    def shape(b, numbers):
        parts = [b if n == 0 else C(n) for n in numbers]
        return tf.stack(parts) if parts else tf.zeros([0], tf.int32)

    values, run, _ = followed(
        lambda b, s: R.BroadcastGradientArgs(s0=shape(b, dims), s1=shape(b, other))
    )
    for count in BATCHES:
        real = [[count if n == 0 else n for n in numbers] for numbers in (dims, other)]
        padded = [1] * (len(dims) - len(other)) + real[1]
        matter = {a for a, pair in enumerate(zip(real[0], padded, strict=True)) if pair != (1, 1)}
        for value, expected in zip(values, run(count), strict=True):
            assert {*value.tolist()} & matter == {*expected.tolist()} & matter
            assert {*value.tolist()} - matter <= {*range(len(dims))}
