"""Norms of rows are upper bounds in float32, whatever the magnitudes; bad rows stay bad."""

import numpy as np
import pytest
import tensorflow as tf

from tf_adadp.clipping import row_gradients
from tf_adadp.clipping.row_gradients import AxisScales, Rows, raised_sum, row_norms, sum_of_squares

# Rows that are hard to measure: (name, array [B, n] in float64, rounded to float32 below).
RNG = np.random.default_rng(0)
HARD = {
    "one entry": np.array([[3.0], [-1e-30]]),
    "zeros": np.zeros((2, 5)),
    "tiny": RNG.normal(size=(3, 70)) * 1e-30,
    "denormal": RNG.normal(size=(3, 70)) * 1e-41,
    "huge": RNG.normal(size=(3, 70)) * 1e18,
    "tiny beside huge": 10.0 ** RNG.uniform(-30, 17, (20, 90)),
    "many equal": np.full((2, 40_000), 0.1),
    "many rounded up": np.full((1, 33_333), 1.0000001),
    "one large, many small": np.concatenate([np.ones((1, 1)), np.full((1, 30_000), 2e-4)], 1),
}
every_hard_row = pytest.mark.parametrize("name", HARD)


def _float32(values):
    return np.asarray(values, np.float32)


def _norms(rows):
    return np.sqrt((np.asarray(rows, np.float64) ** 2).sum(tuple(range(1, np.ndim(rows)))))


def _run(function, mode, *args):
    return np.float64(tf.function(function, jit_compile=mode == "jit")(*args))


# --- norms ----------------------------------------------------------------------------------------


@every_hard_row
@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_row_norms_are_upper_bounds(name, mode):
    rows = _float32(HARD[name])
    found, true = _run(row_norms, mode, rows), _norms(rows)
    assert np.all(found >= true)
    # Tight to 2e-5, and to what the smallest float32 square adds for each entry.
    assert np.all(found <= true * (1 + 2e-5) + 1.1e-19 * np.sqrt(rows.shape[1]))


@every_hard_row
@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_sums_of_squares_are_upper_bounds(name, mode):
    rows = _float32(HARD[name])
    found, true = _run(sum_of_squares, mode, rows), _norms(rows) ** 2
    lost = 1.2e-38 * rows.shape[1]  # what underflow may take
    assert np.all(found >= true - lost)
    assert np.all(found <= true * (1 + 2e-5))


def test_sums_over_several_axes():
    terms = RNG.uniform(size=(3, 7, 1, 50)).astype(np.float32)
    found, true = (
        np.float64(raised_sum(tf.constant(terms))),
        terms.astype(np.float64).sum((1, 2, 3)),
    )
    assert np.all(found >= true)
    assert np.all(found <= true * (1 + 1e-5))
    np.testing.assert_array_equal(raised_sum(tf.ones([4])), 1 + 4 * row_gradients.ROUNDOFF)


def test_a_sum_in_any_order_would_not_do():
    """Unraised sums fall short: the bounds above can fail."""
    rows = RNG.uniform(size=(200, 5000)).astype(np.float32)
    plain = np.float64(tf.reduce_sum(tf.square(rows), 1))
    true = _norms(rows) ** 2
    assert np.any(plain < true)
    assert np.all(np.float64(sum_of_squares(tf.constant(rows))) >= true)


def test_norms_keep_leading_axes():
    rows = RNG.normal(size=(2, 3, 4)).astype(np.float32)
    assert row_norms(tf.constant(rows)).shape == (2, 3)
    assert row_norms(tf.zeros([0, 3, 4])).shape == (0, 3)
    np.testing.assert_allclose(row_norms(tf.constant(rows)), np.linalg.norm(rows, axis=2), 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
def test_norms_of_rows_that_are_not_finite_or_overflow_are_not_finite(bad):
    rows = np.ones((3, 40), np.float32)
    rows[1, 7] = bad
    for found in (row_norms(tf.constant(rows)), sum_of_squares(tf.constant(rows))):
        np.testing.assert_array_equal(np.isfinite(found), [True, False, True])


# --- Rows -----------------------------------------------------------------------------------------

SHAPE = (6, 5)
SCALES = {
    "scalar": np.float64(0.3),
    "row": RNG.uniform(0.1, 2, (6, 1)),
    "column": RNG.uniform(0.1, 2, 5),
    "full": 10.0 ** RNG.uniform(-6, 6, SHAPE),
    "zeros": np.where(RNG.uniform(size=SHAPE) < 0.3, 0, RNG.uniform(0.1, 2, SHAPE)),
    "below the smallest": np.where(RNG.uniform(size=SHAPE) < 0.3, 1e-33, 0.5),
}


def _reference(rows, b, a, weights):
    """Squares and Σ weight·(g − a), in float64."""
    b = np.broadcast_to(_float32(b).astype(np.float64), SHAPE)
    kept = b >= row_gradients.SMALLEST_SCALE
    ratios = np.where(kept, (rows - a) / np.where(kept, b, 1), 0)
    return (ratios**2).sum((1, 2)), np.tensordot(weights, np.where(kept, rows - a, 0), 1)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("center", [None, 0.01, 30.0])
@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_rows_in_a_metric(name, center, num_rows):
    rows = _float32(RNG.normal(size=(num_rows, *SHAPE)))
    a = None if center is None else _float32(center * RNG.normal(size=SHAPE))
    weights = _float32(RNG.uniform(size=num_rows))
    squares, weighted_sum = Rows(tf.constant(rows)).measure(AxisScales(SCALES[name], a))
    true, total = _reference(rows.astype(np.float64), SCALES[name], 0 if a is None else a, weights)
    # Each difference is rounded once before it is squared: that is what gets summed, too.
    assert np.all(squares >= true * (1 - 3e-7))
    assert np.all(squares <= true * (1 + 1e-5))
    np.testing.assert_allclose(weighted_sum(weights), total, rtol=1e-5, atol=1e-5)
    assert squares.shape == (num_rows,)


def test_rows_of_weight_zero_contribute_exactly_zero():
    rows = _float32(RNG.normal(size=(4, *SHAPE)))
    rows[1], rows[2, 0, 0] = np.nan, np.inf
    weights = tf.constant([0.5, 0.0, 0.0, 1.0])
    for scales in (None, AxisScales(0.5), AxisScales(0.5, 0.1)):
        squares, weighted_sum = Rows(tf.constant(rows)).measure(scales)
        assert np.isfinite(squares).tolist() == [True, False, False, True]
        a = 0.0 if scales is None or scales.center is None else 0.1
        expected = 0.5 * (rows[0] - a) + rows[3] - a
        np.testing.assert_allclose(weighted_sum(weights), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(weighted_sum(tf.zeros([4])), np.zeros(SHAPE))
    clipped = Rows(tf.constant(rows)).clipped_sum(tf.fill(SHAPE, 0.2), weights)
    expected = 0.5 * np.clip(rows[0], -0.2, 0.2) + np.clip(rows[3], -0.2, 0.2)
    np.testing.assert_allclose(clipped, expected, rtol=1e-5, atol=1e-6)


def test_a_bad_entry_reaches_the_norm_where_the_scale_is_zero():
    rows = np.ones((2, *SHAPE), np.float32)
    rows[1, 0, 0] = np.nan
    scale = np.ones(SHAPE)
    scale[0, 0] = 0
    squares, _ = Rows(tf.constant(rows)).measure(AxisScales(scale))
    assert np.isfinite(squares).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_rows_are_float32(dtype):
    rows = Rows(tf.ones([2, 3], dtype))
    assert rows.materialize().dtype == tf.float32
    assert row_gradients.as_rows(rows) is rows
    assert row_gradients.as_rows(tf.ones([2, 3], dtype)).shape == (3,)
    assert rows.cost() == (9, 3)


def test_rows_need_static_shapes():
    with pytest.raises(ValueError, match=r"grads .*\(None, 3, None\).*must be static"):
        tf.function(lambda g: Rows(g).materialize()).get_concrete_function(
            tf.TensorSpec((None, 3, None))
        )


@pytest.mark.parametrize(
    ("scale", "center", "message"),
    [
        (np.ones(6), None, r"scales of shape \(6,\) for a variable of shape \(6, 5\)"),
        (np.ones((2, 6, 5)), None, r"scales of shape \(2, 6, 5\)"),
        (1.0, np.ones((5, 6)), r"center of shape \(5, 6\)"),
    ],
)
def test_scales_must_broadcast(scale, center, message):
    with pytest.raises(ValueError, match=message):
        Rows(tf.ones([2, *SHAPE])).measure(AxisScales(scale, center))


@pytest.mark.parametrize("scale", [3e38, *[(3e38,) * k for k in (2, 3, 4, 7)]], ids=str)
def test_scales_are_limited_to_those_with_a_reciprocal(scale):
    """Else 1/b is flushed to 0, and a row of norm 3 has the bound 0."""
    scales = AxisScales(scale)
    assert float(scales.scale) == pytest.approx(2.0**125, rel=1e-6)
    assert np.prod(np.float64(scales.inverse_factors)) == pytest.approx(2.0**-125, rel=1e-6)
    assert scales.metric == 1
    zero = AxisScales((np.float32([3e38, 1.0]), np.float32(3e38), np.float32([0.0, 1.0])))
    np.testing.assert_array_equal(zero.scale > 0, [False, True])
    np.testing.assert_array_equal(zero.metric, [0, 1])


def test_the_metric_of_axis_scales():
    scales = AxisScales([0.0, 1e-33, 2.0, 4.0, 2e30])
    assert scales.smallest == 2.0
    np.testing.assert_array_equal(scales.scale[:2], [0, 0])
    np.testing.assert_allclose(scales.inverse, [0, 0, 0.5, 0.25, 5e-31])
    np.testing.assert_allclose(scales.metric, [0, 0, 1, 0.25, 1e-24])
    no_scale = AxisScales([0.0])
    np.testing.assert_array_equal(no_scale.metric, [0])
    assert no_scale.smallest > 0
