"""The recipe "Add a clipping set" of CONTRIBUTING.md, followed for a set that is made up here.

The set has nothing outside of this file: no registration and no export.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_adadp as dp
from tests.clipping.test_clipping import SHAPES, SIGMA, ratios
from tests.helpers import crossentropy, data, plain_model, private_model
from tf_adadp.clipping import ClippingSet
from tf_adadp.clipping.base import Gradients, stddev
from tf_adadp.clipping.row_gradients import ROUNDOFF, as_rows, raised_sum
from tf_adadp.utils.checks import check_number

both_engines = pytest.mark.parametrize("engine", ["ghost", "vectorized"])

# tf_adadp/clipping/l1_ball.py


class L1Ball(ClippingSet):
    """‖v‖₁ ≤ C over all variables: v = g·min(1, C/‖g‖₁), s = σ*·C.

    Guarantee: (R) of `clipping.base`, since ‖v‖₂ ≤ ‖v‖₁ ≤ C; a v with one coordinate reaches it.
    The norm is an upper bound of the float32 sum, so rounding keeps v inside.

    Args:
        l1_norm_clip: C > 0.
    """

    def __init__(self, l1_norm_clip: float):
        self._l1_norm_clip = check_number("l1_norm_clip", l1_norm_clip, above=0)

    def clip(self, grads: Gradients) -> list[tf.Tensor]:
        """See `ClippingSet.clip`."""
        rows = [as_rows(g).materialize() for g in grads]
        norm = tf.add_n([raised_sum(tf.abs(r)) for r in rows])
        norm *= 1.0 + (len(rows) + 8) * ROUNDOFF
        factor = tf.minimum(self._l1_norm_clip / norm, 1.0)
        return [r * tf.reshape(factor, [-1] + [1] * (r.shape.rank - 1)) for r in rows]

    def noise_stddev(
        self, noise_multiplier: float | tf.Tensor, num_variables: int
    ) -> list[tf.Tensor]:
        """See `ClippingSet.noise_stddev`: σ*·C for each variable."""
        return [stddev(noise_multiplier, self._l1_norm_clip)] * num_variables


# The optimizer that uses it.


class L1SGD(dp.DPSGD):
    """DP-SGD that clips to an L1 ball."""

    def clipping_set(self):
        """The ball of radius `l2_norm_clip`."""
        return L1Ball(self.l2_norm_clip)


# tests/clipping/test_l1_ball.py


def _rows(rng, num_rows, exponent=0.0, spread=0.0):
    sizes = [10.0 ** (exponent + spread * rng.normal(size=(num_rows, *s))) for s in SHAPES]
    return [tf.constant(n * rng.choice([-1, 1], n.shape), tf.float32) for n in sizes]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    exponent=st.floats(-30, 30),
    spread=st.sampled_from([0.0, 0.5, 5.0]),
    radius=st.floats(1e-3, 1e3),
)
def test_no_row_leaves_the_set(seed, exponent, spread, radius):
    """‖v/s‖₂·σ* ≤ 1, and ‖v‖₁ ≤ C, for rows from tiny to huge."""
    with np.errstate(over="ignore"):
        grads = _rows(np.random.default_rng(seed), 4, exponent, spread)
    clipping_set = L1Ball(radius)
    finite = [tf.where(tf.math.is_finite(g), g, 0.0) for g in grads]
    assert ratios(clipping_set, finite).max() <= 1
    norms = sum(np.abs(np.float64(v)).reshape(len(v), -1).sum(1) for v in clipping_set.clip(finite))
    assert norms.max() <= radius


def test_the_noise_is_no_larger_than_it_has_to_be():
    grads = [tf.zeros((1, *s)) for s in SHAPES[1:]]
    corner = tf.tensor_scatter_nd_update(tf.zeros((1, *SHAPES[1])), [[0, 3]], [-50.0])
    np.testing.assert_allclose(ratios(L1Ball(0.7), [corner, *grads[1:]]), 1.0, rtol=1e-5)


def test_neighbouring_lots_differ_by_one_vector_of_the_set():
    clipping_set = L1Ball(0.7)
    grads = _rows(np.random.default_rng(0), 9, 2.0, 0.5)
    with_it, without = (
        clipping_set.clipped_sum(grads, tf.constant([*np.ones(8), last], tf.float32))
        for last in (1.0, 0.0)
    )
    moved = [(a - b).numpy() for a, b in zip(with_it, without, strict=True)]
    stddevs = clipping_set.noise_stddev(SIGMA, len(SHAPES))
    squares = [np.sum((m / np.float64(s)) ** 2) for m, s in zip(moved, stddevs, strict=True)]
    assert np.sqrt(sum(squares)) <= (1 + 1e-5) / SIGMA


def test_bad_rows_and_masks_come_to_nothing():
    """Tests the guarantee that every set has from `ClippingSet.clipped_sum`."""
    clipping_set = L1Ball(1.0)
    rows = [[0.5, 0.25], [np.nan, 1.0], [np.inf, 1.0], [0.0, 0.0], [4.0, 4.0]]
    sums = clipping_set.clipped_sum([tf.constant(rows)], tf.constant([7.0, 1.0, 1.0, 1.0, np.nan]))
    np.testing.assert_allclose(sums[0], [0.5, 0.25], rtol=1e-5)
    assert sums.clipping_set is clipping_set


# In both engines.


def _by_hand(model, x, y, radius):
    """Σ clip(gradient), one example at a time, in float64."""
    loss, sums = crossentropy(), [np.zeros(v.shape) for v in model.trainable_variables]
    for one, label in zip(x, y, strict=True):
        with tf.GradientTape() as tape:
            value = loss(label[None], model(one[None]))
        grads = tape.gradient(value, [v.value for v in model.trainable_variables])
        factor = min(1.0, radius / sum(np.abs(np.float64(g)).sum() for g in grads))
        sums = [s + factor * np.float64(g) for s, g in zip(sums, grads, strict=True)]
    return sums


@pytest.mark.representative(1)
@both_engines
@pytest.mark.parametrize("jit_compile", [False, True])
def test_clipped_sum_of_a_custom_loop(engine, jit_compile):
    model, (x, y) = plain_model(), data(rows=10)
    optimizer = L1SGD(0.5, noise_multiplier=SIGMA, l2_norm_clip=0.3)
    optimizer.build(model.trainable_variables)
    lot = dp.make_lot(x, y, physical_batch_size=4)  # the last batch is padded
    sums = dp.clipped_sum(
        model, crossentropy(), lot, optimizer, gradient_engine=engine, jit_compile=jit_compile
    )
    for found, expected in zip(sums, _by_hand(model, x, y, 0.3), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert isinstance(sums.clipping_set, L1Ball)
    before = [v.numpy() for v in model.trainable_variables]
    optimizer.apply_private(sums, expected_lot_size=10)
    changed = [
        np.any(b != v.numpy()) for b, v in zip(before, model.trainable_variables, strict=True)
    ]
    assert all(changed)


@both_engines
def test_training_with_the_set(engine):
    """Without noise, one step on all of the data is θ − η·Σ clip(g)/N."""
    keras.utils.set_random_seed(3)
    x, y = data(rows=24)
    optimizer = L1SGD(0.5, noise_multiplier=0, allow_no_noise=True, l2_norm_clip=0.3)
    private = private_model(optimizer, wrap={"gradient_engine": engine})
    before = [v.numpy() for v in private.model.trainable_variables]
    expected = _by_hand(private.model, x, y, 0.3)
    private.fit(x, y, batch_size=24, epochs=1, verbose=0)
    for v, b, e in zip(private.model.trainable_variables, before, expected, strict=True):
        np.testing.assert_allclose(v.numpy(), b - 0.5 * e / 24, rtol=1e-4, atol=1e-6)
    assert private.gradient_plan().engine == engine


def test_the_charge_is_that_of_the_noise_multiplier():
    x, y = data(rows=24)
    private, reference = (
        private_model(kind(0.1, noise_multiplier=2.0, l2_norm_clip=0.3))
        for kind in (L1SGD, dp.DPSGD)
    )
    for model in (private, reference):
        model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    assert private.ledger.epsilon(1e-5) == reference.ledger.epsilon(1e-5)
