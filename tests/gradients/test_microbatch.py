"""Microbatches by independent slots: equal to a slow reference, and twice as sensitive."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_adadp import clipping
from tf_adadp.gradients import microbatch
from tf_adadp.sampling import make_lot

SEED = tf.constant([7, 8], tf.int64)


def sums_of(grads, num_slots, batch_size, clipping_set, microbatch_size=2, seed=SEED, without=None):
    """Runs the engine's walk over one lot whose "examples" are their own gradients [n, 3].

    The record `without` is masked.
    """
    (x, _, _), mask = make_lot(grads, physical_batch_size=batch_size)
    if without is not None:
        others = tf.range(tf.size(mask)) != without
        mask = mask * tf.reshape(tf.cast(others, mask.dtype), mask.shape)
    slots, (x, mask) = microbatch.sort_by_slot(seed, num_slots, (x, mask))
    summing = microbatch.SlotSums(clipping_set, microbatch_size, num_slots)
    carry = summing.initial_carry([tf.zeros([3])])
    total = [tf.zeros([3])]
    for p in range(mask.shape[0]):
        sums, carry = summing.add([x[p]], tf.zeros_like(mask[p]), mask[p], slots[p], carry)
        total = [a + b for a, b in zip(total, sums, strict=True)]
    order = np.argsort(np.asarray(mask).reshape(-1) == 0, kind="stable")
    return summing.finish(total, carry)[0].numpy(), slots.numpy().reshape(-1)[order], x


@pytest.mark.parametrize("center", [None, 0.3])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 64])
@pytest.mark.parametrize("num_slots", [1, 2, 5, 40])
def test_equals_a_loop_over_slots(num_slots, batch_size, center):
    rng = np.random.default_rng(num_slots)
    grads = rng.normal(size=(17, 3)).astype(np.float32)
    a = None if center is None else [tf.fill([3], center)]
    clipping_set = clipping.Ellipsoid([tf.constant([0.5, 1.0, 2.0])], a)
    total, slots, x = sums_of(grads, num_slots, batch_size, clipping_set)
    rows = np.asarray(x).reshape(-1, 3)[: len(grads)]
    expected = np.zeros(3)
    for slot in set(slots[: len(grads)]):
        vector = rows[slots[: len(grads)] == slot].sum(0)[None] / 2
        expected += clipping_set.clip([tf.constant(vector)])[0].numpy()[0]
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)


def test_an_empty_lot_sums_to_zero():
    clipping_set = clipping.Ellipsoid([tf.ones([3])], [tf.ones([3])])
    total, *_ = sums_of(np.zeros((0, 3), np.float32), 4, 8, clipping_set)
    np.testing.assert_array_equal(total, np.zeros(3))


def test_a_non_finite_row_leaves_its_slot_alone():
    grads = np.ones((6, 3), np.float32)
    bad = grads.copy()
    bad[0] = np.nan
    good, *_ = sums_of(np.vstack([np.zeros((1, 3)), grads[1:]]).astype(np.float32), 1, 4, BALL)
    total, *_ = sums_of(bad, 1, 4, BALL)
    np.testing.assert_allclose(total, good, rtol=1e-6)


BALL = clipping.L2Ball(1.0)


@settings(derandomize=True)
@given(rows=st.integers(0, 40), scale=st.floats(0.1, 1e4), seed=st.integers(0, 1000))
def test_one_more_record_moves_one_slot_by_at_most_twice_the_bound(rows, scale, seed):
    """The inserted record is last, and the others keep their draws: the coupling of the proof."""
    rng = np.random.default_rng(seed)
    grads = (scale * rng.normal(size=(rows + 1, 3))).astype(np.float32)
    grads[-1] *= -1e3
    drawn = tf.constant([seed, 1], tf.int64)
    with_it, *_ = sums_of(grads, 10, 64, BALL, seed=drawn)
    without, *_ = sums_of(grads[:-1], 10, 64, BALL, seed=drawn)
    assert np.linalg.norm(with_it - without) <= 2 * (1 + 1e-5)


@pytest.mark.representative(1, 3)
@pytest.mark.parametrize("first", range(6))
def test_where_batches_are_cut_moves_no_other_slot(first):
    """Sums of 1e10, −1e10 and 3 come to 0 or 3, depending on the order that they are added in."""
    grads = np.zeros((60, 3), np.float32)
    grads[:, 0] = np.random.default_rng(0).choice([1e10, -1e10, 3.0], 60)
    whole, *_ = sums_of(grads, 20, 60, BALL, 3)
    for batch_size in (1, 2, 3, 5):
        total, *_ = sums_of(grads, 20, batch_size, BALL, 3)
        np.testing.assert_allclose(total, whole, atol=1e-5)
    for record in range(first, 60, 6):
        without, *_ = sums_of(grads, 20, 3, BALL, 3, without=record)
        assert abs(without - whole)[0] <= 2 + 1e-5


def test_positional_groups_would_break_that_bound():
    """Without slots, cutting a lot into pairs lets one record shift every later pair."""
    rng = np.random.default_rng(0)
    grads = np.repeat(rng.normal(size=(100, 3)), 2, 0) * np.tile([[1.0], [-0.9]], (100, 1)) * 1e3

    def positional(rows):
        pairs = [rows[i : i + 2].sum(0)[None] / 2 for i in range(0, len(rows), 2)]
        return BALL.clipped_sum([tf.constant(np.vstack(pairs), tf.float32)], tf.ones(len(pairs)))

    shifted = np.vstack([np.zeros((1, 3)), grads])
    moved = np.linalg.norm(positional(shifted)[0] - positional(grads)[0])
    assert moved > 2.5


def test_slots_are_uniform_and_independent_of_the_data():
    """χ² over 50 slots with 49 degrees of freedom: false alarm below 1e-4 at 95."""
    mask = tf.ones([10, 500])
    slots, _ = microbatch.sort_by_slot(SEED, 50, (mask,))
    counts = np.bincount(slots.numpy().reshape(-1), minlength=50)
    assert counts.sum() == 5000
    assert np.sum((counts - 100) ** 2 / 100) < 95
