"""Operations that are more than a rule: assertions that hold for every batch and others."""

import pytest
import tensorflow as tf

from tests.gradients.proof.experiments import follow, specs


def _asserts(condition):
    def function(key, x):
        with tf.control_dependencies([tf.raw_ops.Assert(condition=condition(x), data=["no"])]):
            return tf.identity(x)

    return follow(function, *specs((4, 6))).follower.effects


@pytest.mark.parametrize(
    "condition",
    [
        lambda x: tf.reduce_all(tf.equal(tf.shape(x), tf.shape(2.0 * x))),
        lambda x: tf.reduce_any(tf.equal(tf.shape(x)[1:], 6)),
        lambda x: tf.shape(x)[0] > 0,
    ],
)
def test_an_assertion_that_holds_for_every_batch_has_no_effect(condition):
    assert _asserts(condition) == []


@pytest.mark.parametrize(
    "condition",
    [
        lambda x: tf.reduce_all(x > 0.0),
        lambda x: tf.shape(x)[0] > 1,
        lambda x: tf.equal(tf.shape(x)[1], 5),
    ],
)
def test_an_assertion_that_may_fail_has_one(condition):
    (op,) = _asserts(condition)
    assert op.type == "Assert"
