"""Every set against a slow float64 reference, and the guarantee in float32."""

import math

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_adadp import clipping
from tf_adadp.clipping import row_gradients

SHAPES = ((), (7,), (9, 4), (3, 2, 5))
NUM_SCALARS = sum(math.prod(s) for s in SHAPES)
SIGMA = 1.7
# How far a clipped vector may end short of its bound.
SHORT = 1e-5


def _positive(seed, low=0.1, high=2.0):
    rng = np.random.default_rng(seed)
    return [rng.uniform(low, high, s).astype(np.float32) for s in SHAPES]


BOUNDS = _positive(1)
BOUNDS_WITH_ZEROS = [np.where(np.indices(c.shape).sum(0) % 3 == 0, 0, c) for c in BOUNDS]
WEIGHTS = _positive(2, 0.01, 3.0)
CENTER = [(w - 1).astype(np.float32) for w in _positive(3)]


def _norm(vectors):
    """L2 norm of each row over all variables, in float64."""
    return np.sqrt(sum((v.astype(np.float64) ** 2).sum(tuple(range(1, v.ndim))) for v in vectors))


def _scale(vectors, factor):
    return [v * factor.reshape([-1] + [1] * (v.ndim - 1)) for v in vectors]


def _ball(grads, bound):
    return _scale(grads, np.minimum(1, bound / np.maximum(_norm(grads), 1e-300)))


def _ellipsoid(grads, scales, center):
    w = [
        np.where(b > 0, (g - a) / np.where(b > 0, b, 1), 0)
        for g, b, a in zip(grads, scales, center, strict=True)
    ]
    return [b * w for b, w in zip(scales, _ball(w, 1.0), strict=True)]


def _layers(grads, bounds, groups):
    clipped = [None] * len(grads)
    for group, bound in enumerate(bounds):
        members = [i for i, g in enumerate(groups) if g == group]
        for i, v in zip(members, _ball([grads[i] for i in members], bound), strict=True):
            clipped[i] = v
    return clipped


def _box(grads, bounds):
    return [np.clip(g, -c, c) for g, c in zip(grads, bounds, strict=True)]


ZERO = [np.float64(0)] * len(SHAPES)
LAYERS = ([0.5, 2.0, 1.0], [0, 1, 1, 2])
# name: (makes the set, the reference of clip)
SETS = {
    "l2": (lambda: clipping.L2Ball(1.3), lambda g: _ball(g, 1.3)),
    "layers": (lambda: clipping.LayerBalls(*LAYERS), lambda g: _layers(g, *LAYERS)),
    "layers-one-each": (
        lambda: clipping.LayerBalls([0.5, 2.0, 1.0, 0.1]),
        lambda g: _layers(g, [0.5, 2.0, 1.0, 0.1], range(4)),
    ),
    "box": (lambda: clipping.Box(BOUNDS), lambda g: _box(g, BOUNDS)),
    "box-least-squares": (
        lambda: clipping.Box(BOUNDS_WITH_ZEROS, "least_squares"),
        lambda g: _box(g, BOUNDS_WITH_ZEROS),
    ),
    "box-weighted": (lambda: clipping.Box(BOUNDS, WEIGHTS), lambda g: _box(g, BOUNDS)),
    "ellipsoid": (lambda: clipping.Ellipsoid(BOUNDS), lambda g: _ellipsoid(g, BOUNDS, ZERO)),
    "ellipsoid-center": (
        lambda: clipping.Ellipsoid(BOUNDS_WITH_ZEROS, CENTER),
        lambda g: _ellipsoid(g, BOUNDS_WITH_ZEROS, CENTER),
    ),
    "normalized": (
        lambda: clipping.L2Ball(1.0, gamma=0.01),
        lambda g: _scale(g, 1 / (_norm(g) + 0.01)),
    ),
    "switch": (
        lambda: clipping.Switch(
            tf.constant(True), clipping.Box(BOUNDS), clipping.Ellipsoid(BOUNDS, CENTER)
        ),
        lambda g: _box(g, BOUNDS),
    ),
}
every_set = pytest.mark.parametrize("name", SETS)


def _gradients(num_rows, seed=0):
    """Rows of norms from 10⁻³ to 10³, float32."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(size=(num_rows, *s)) for s in SHAPES]
    norms = _norm(rows) if num_rows else np.ones(0)
    scaled = _scale(rows, 10.0 ** rng.uniform(-3, 3, num_rows) / norms)
    return [g.astype(np.float32) for g in scaled]


def _masked_sum(vectors, mask):
    return [np.tensordot(mask.astype(np.float64), v, 1) for v in vectors]


def _tensors(arrays, dtype=tf.float32):
    return [tf.constant(a, dtype) for a in arrays]


def _assert_close(actual, expected, rtol=2e-5):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == tf.float32
        assert a.shape == e.shape
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * max(1e-6, np.abs(e).max(initial=0)))


def ratios(clipping_set, grads):
    """σ*·‖v/s‖₂ of each row, in float64 from the float32 results."""
    stddevs = clipping_set.noise_stddev(SIGMA, len(grads))
    quotients = []
    for v, s in zip(clipping_set.clip(grads), stddevs, strict=True):
        v, s = np.asarray(v, np.float64), np.broadcast_to(np.float64(s), v.shape)
        assert np.all(v[s == 0] == 0)
        quotients.append(v / np.where(s == 0, 1, s))
    return SIGMA * _norm(quotients)


# --- against the reference ------------------------------------------------------------------------


@pytest.mark.representative(16)
@every_set
@pytest.mark.parametrize("mode", ["eager", "graph", "dynamic", "jit"])
def test_sum_and_clip_match_the_reference(name, mode):
    make, reference = SETS[name]
    grads, mask = _gradients(33), (np.arange(33) % 4 != 0).astype(np.float32)

    def run(grads, mask):
        clipping_set = make()
        return clipping_set.clipped_sum(grads, mask), clipping_set.clip(grads)

    if mode == "dynamic":
        signature = [tf.TensorSpec([None, *s]) for s in SHAPES]
        run = tf.function(run, input_signature=[signature, tf.TensorSpec([None])], autograph=False)
    elif mode != "eager":
        run = tf.function(run, jit_compile=mode == "jit", autograph=False)
    sums, clipped = run(_tensors(grads), tf.constant(mask))
    expected = reference([g.astype(np.float64) for g in grads])
    _assert_close(clipped, expected)
    _assert_close(sums, _masked_sum(expected, mask))


@pytest.mark.parametrize(
    ("name", "jit"), [*((name, False) for name in SETS), ("l2", True), ("ellipsoid-center", True)]
)
@pytest.mark.parametrize("num_rows", [0, 1])
def test_empty_and_single_row_batches(name, num_rows, jit):
    make, reference = SETS[name]
    grads = _gradients(num_rows)
    run = tf.function(lambda g, m: make().clipped_sum(g, m), jit_compile=jit, autograph=False)
    sums = run(_tensors(grads), tf.ones([num_rows]))
    expected = reference([g.astype(np.float64) for g in grads])
    _assert_close(sums, _masked_sum(expected, np.ones(num_rows)))


@every_set
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_float_types_are_cast_to_float32_first(name, dtype):
    make, reference = SETS[name]
    grads = _tensors(_gradients(5), dtype)
    expected = reference([tf.cast(g, tf.float64).numpy() for g in grads])
    _assert_close(make().clipped_sum(grads, tf.ones([5])), _masked_sum(expected, np.ones(5)))


@pytest.mark.parametrize(
    ("name", "jit"),
    [*((name, False) for name in SETS), ("layers", True), ("box", True), ("ellipsoid", True)],
)
def test_bad_rows_contribute_exactly_zero(name, jit):
    """NaN, ±Inf, and a norm beyond float32, each in another variable, padded or not."""
    make, _ = SETS[name]
    grads = _gradients(12)
    good = [g[:7] for g in grads]
    grads[0][7] = np.nan
    grads[1][8, 3] = np.inf
    grads[2][9, 8, 3] = -np.inf
    grads[3][10, 0, 1, 0] = 3e38
    grads[3][11, 0, 1, 2] = np.nan
    mask = np.ones(12, np.float32)
    mask[11] = 0
    run = tf.function(lambda g, m: make().clipped_sum(g, m), jit_compile=jit, autograph=False)
    expected = make().clipped_sum(_tensors(good), tf.ones([7]))
    _assert_close(run(_tensors(grads), tf.constant(mask)), [e.numpy() for e in expected], rtol=1e-6)
    assert all(np.all(v.numpy()[7:] == 0) for v in make().clip(_tensors(grads)))


def test_nan_is_seen_where_the_scale_is_zero():
    grads = [tf.constant([[np.nan, 1.0], [5.0, 0.5]])]
    clipping_set = clipping.Ellipsoid([tf.constant([0.0, 1.0])])
    np.testing.assert_array_equal(clipping_set.clipped_sum(grads, tf.ones([2]))[0], [0.0, 0.5])


@every_set
def test_a_mask_above_one_or_nan_cannot_raise_the_sensitivity(name):
    clipping_set = SETS[name][0]()
    grads = _tensors(_gradients(4))
    sums = clipping_set.clipped_sum(grads, tf.constant([5.0, np.nan, -1.0, 0.5]))
    expected = clipping_set.clipped_sum(grads, tf.constant([1.0, 0.0, 0.0, 0.5]))
    for a, e in zip(sums, expected, strict=True):
        np.testing.assert_array_equal(a, e)


def test_absent_rows_of_a_centred_set_add_nothing():
    clipping_set = clipping.Ellipsoid(BOUNDS, CENTER)
    sums = clipping_set.clipped_sum(_tensors([np.zeros((3, *s)) for s in SHAPES]), tf.zeros([3]))
    assert all(np.all(s.numpy() == 0) for s in sums)
    for a, c in zip(clipping_set.center, CENTER, strict=True):
        np.testing.assert_array_equal(a, c)


@pytest.mark.parametrize("name", ["l2", "ellipsoid-center", "switch"])
def test_a_compiled_body_in_a_while_loop(name):
    make, reference = SETS[name]
    grads = _gradients(12)

    @tf.function(autograph=False)
    def run(grads):
        clipping_set = make()
        body = tf.function(clipping_set.clipped_sum, jit_compile=True, autograph=False)

        def step(i, sums):
            new = body([g[4 * i : 4 * i + 4] for g in grads], tf.ones([4]))
            return i + 1, [a + b for a, b in zip(sums, new, strict=True)]

        zeros = [tf.zeros(s) for s in SHAPES]
        return tf.while_loop(lambda i, _: i < 3, step, (tf.constant(0), zeros))[1]

    expected = _masked_sum(reference([g.astype(np.float64) for g in grads]), np.ones(12))
    _assert_close(run(_tensors(grads)), expected)


@pytest.mark.parametrize("name", [name for name in SETS if name != "switch"])
def test_the_graph_has_no_branch_and_no_shape_that_depends_on_values(name):
    graph = tf.function(SETS[name][0]().clipped_sum, autograph=False).get_concrete_function(
        [tf.TensorSpec([None, *s]) for s in SHAPES], tf.TensorSpec([None])
    )
    kinds = {op.type for op in graph.graph.get_operations()}
    assert "SelectV2" in kinds
    assert not kinds & {
        "If",
        "StatelessIf",
        "While",
        "StatelessWhile",
        "Where",
        "Case",
        "EagerPyFunc",
    }


# --- the guarantee --------------------------------------------------------------------------------


@every_set
@hypothesis.settings(derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**31),
    exponent=st.floats(-30, 30),
    spread=st.sampled_from([0.0, 0.5, 5.0, 40.0]),
    aligned=st.booleans(),
)
def test_no_row_leaves_the_set(name, seed, exponent, spread, aligned):
    """sup ‖v/s‖·σ* ≤ 1 for norms 1e-30 to 1e30, few or all coordinates large, far centres."""
    rng = np.random.default_rng(seed)
    clipping_set = SETS[name][0]()
    stddevs = [
        np.broadcast_to(s, shape)
        for s, shape in zip(clipping_set.noise_stddev(1.0, len(SHAPES)), SHAPES, strict=True)
    ]
    with np.errstate(over="ignore"):
        grads = [
            (
                (s if aligned else 1.0)
                * 10.0 ** (exponent + spread * rng.normal(size=(6, *shape)))
                * rng.choice([-1, 1], size=(6, *shape))
            ).astype(np.float32)
            for s, shape in zip(stddevs, SHAPES, strict=True)
        ]
    assert ratios(clipping_set, _tensors(grads)).max() <= 1


def _long_rows(n):
    """Rows whose squares float32 adds worst: equal ones, one 1 before many small ones, a ramp."""
    third = np.full(n, math.sqrt(1 / 3))
    stagnating = np.full(n, 2.0**-12.5)
    stagnating[0] = 1.0
    ramp = np.linspace(1, 2, n)
    return 1e4 * np.stack([third, stagnating, ramp, -ramp[::-1]])


@pytest.mark.representative(1)
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("shape", [(1000, 1000), (1_000_003,)], ids=["composite", "prime"])
def test_no_long_row_leaves_the_set(shape, jit):
    rows = _long_rows(math.prod(shape)).reshape(-1, *shape).astype(np.float32)
    b = 1e-3 * (1.5 + np.sin(np.arange(math.prod(shape)))).reshape(shape).astype(np.float32)
    sets = [clipping.L2Ball(0.5)]
    if len(shape) == 2:
        sets += [
            clipping.L2Ball(1.0, gamma=0.01),
            clipping.Ellipsoid([b], [1e4 * b]),
            clipping.Box([b]),
            clipping.Box([b], "least_squares"),
            clipping.Box([b], [1 / b]),
        ]
    for clipping_set in sets:
        run = tf.function(clipping_set.clip, jit_compile=jit, autograph=False)
        (clipped,) = run([tf.constant(rows)])
        (s,) = tf.function(clipping_set.noise_stddev, jit_compile=jit)(SIGMA, 1)
        ratio = SIGMA * _norm([clipped.numpy() / np.float64(s)])
        assert ratio.max() <= 1
        if isinstance(clipping_set, clipping.Box):
            continue  # its rows reach the corners, or not, by coordinate
        assert ratio.min() >= 1 - 2e-5


def test_a_compiler_keeps_the_levels_of_the_sum_apart():
    """Joined, they would be one long sum, with its error and four times its run time."""
    rows = tf.ones([2, 784_000])
    total, terms = row_gradients._tree_sum(rows, (784, 1000))
    np.testing.assert_array_equal(total, [784_000] * 2)
    assert terms <= 5 * 32

    compiled = tf.function(lambda r: row_gradients._tree_sum(r, (784, 1000))[0], jit_compile=True)
    text = compiled.experimental_get_compiler_ir(rows)(stage="optimized_hlo")
    assert text.count(" reduce(") >= 4
    assert " reduce-window(" not in text


@every_set
def test_the_noise_is_no_larger_than_it_has_to_be(name):
    """(R) holds with equality: the worst row has σ*·‖v/s‖ = 1."""
    clipping_set = SETS[name][0]()
    directions = [
        np.broadcast_to(np.where(s > 0, np.maximum(s, 0.1), 1), shape)
        for s, shape in zip(clipping_set.noise_stddev(1.0, len(SHAPES)), SHAPES, strict=True)
    ]
    ratio = ratios(clipping_set, _tensors([1e6 * d[None] for d in directions]))
    np.testing.assert_allclose(ratio, 1.0, rtol=SHORT)


@every_set
def test_neighbouring_lots_differ_by_one_vector_of_the_set(name):
    clipping_set = SETS[name][0]()
    grads = _tensors([100 * g for g in _gradients(9)])
    with_it, without = (
        clipping_set.clipped_sum(grads, tf.constant([*np.ones(8), last], tf.float32))
        for last in (1.0, 0.0)
    )
    stddevs = clipping_set.noise_stddev(SIGMA, len(SHAPES))
    moved = [
        np.where(np.asarray(s) > 0, (a - b).numpy() / np.where(np.asarray(s) > 0, s, 1), 0)[None]
        for a, b, s in zip(with_it, without, stddevs, strict=True)
    ]
    # The float32 sum of nine rows rounds by itself.
    assert SIGMA * _norm(moved)[0] <= 1 + 1e-5


@pytest.mark.parametrize(
    "clipping_set",
    [
        clipping.L2Ball(2.0),
        clipping.LayerBalls([2.0] * 4),
        clipping.Box([2 * np.ones(s) for s in SHAPES]),
    ],
)
def test_rows_inside_the_set_pass_unchanged(clipping_set):
    rows = _scale(_gradients(5), 2.0 * (1 - SHORT) / _norm(_gradients(5)))
    grads = _tensors([g.astype(np.float32) for g in rows])
    for v, g in zip(clipping_set.clip(grads), grads, strict=True):
        np.testing.assert_array_equal(v, g)


# --- the noise's formulas -------------------------------------------------------------------------


def _flat(tensors):
    return np.concatenate([np.ravel(np.asarray(t, np.float64)) for t in tensors])


def test_noise_of_balls():
    np.testing.assert_allclose(clipping.L2Ball(0.3).noise_stddev(2.0, 3), [0.6] * 3, rtol=1e-6)
    np.testing.assert_allclose(
        clipping.LayerBalls([3.0, 4.0], [0, 1, 0]).noise_stddev(2.0, 3), [10.0] * 3, rtol=1e-6
    )
    normalized = clipping.L2Ball(1.0, gamma=0.01)
    np.testing.assert_allclose(normalized.noise_stddev(tf.constant(2.0), 2), [2.0, 2.0])


@pytest.mark.parametrize("bounds", [BOUNDS, BOUNDS_WITH_ZEROS], ids=["positive", "zeros"])
def test_noise_of_the_box(bounds):
    c, w = _flat(bounds), _flat(WEIGHTS)
    stddevs = {
        name: _flat(clipping.Box(bounds, allocation).noise_stddev(SIGMA, len(SHAPES)))
        for name, allocation in [
            ("adadp", "adadp"),
            ("least", "least_squares"),
            ("weighted", WEIGHTS),
        ]
    }
    expected = {
        "adadp": SIGMA * c * np.sqrt(np.count_nonzero(c)),
        "least": SIGMA * np.sqrt(c * c.sum()),
        "weighted": SIGMA * np.sqrt(((c * w) ** (2 / 3)).sum()) * c ** (2 / 3) * w ** (-1 / 3),
    }
    for name, s in stddevs.items():
        np.testing.assert_allclose(s, expected[name], rtol=1e-5)
        assert np.all((s == 0) == (c == 0))
    # Each is the best at what it minimises.
    assert (stddevs["least"] ** 2).sum() < 0.999 * min(
        (stddevs["adadp"] ** 2).sum(), (stddevs["weighted"] ** 2).sum()
    )
    assert (w * stddevs["weighted"]).sum() < 0.999 * min(
        (w * stddevs["adadp"]).sum(), (w * stddevs["least"]).sum()
    )


def test_box_with_degenerate_bounds_and_weights():
    nothing = clipping.Box([tf.zeros([3])], "least_squares")
    np.testing.assert_array_equal(nothing.noise_stddev(SIGMA, 1)[0], np.zeros(3))
    assert np.all(nothing.clip([tf.ones([2, 3])])[0].numpy() == 0)

    bounds = [np.array([1.0, 2.0, 3.0], np.float32)]
    for weights in ([0.0, 0.0, 0.0], [0.0, 1e-30, 1e30], [-1.0, 2.0, -3.0]):
        clipping_set = clipping.Box(bounds, [np.array(weights, np.float32)])
        assert np.all(np.isfinite(clipping_set.noise_stddev(SIGMA, 1)[0]))
        ratio = ratios(clipping_set, [tf.constant([[9.0, -9.0, 9.0]])])
        np.testing.assert_allclose(ratio, 1.0, rtol=SHORT)


@pytest.mark.parametrize("allocation", ["adadp", "least_squares"])
def test_box_bounds_of_any_size_keep_their_noise(allocation):
    bounds = [np.array([1e-29, 1e-10, 1.0, 1e15], np.float32)]
    clipping_set = clipping.Box(bounds, allocation)
    ratio = ratios(clipping_set, [tf.constant([[1e18] * 4])])
    np.testing.assert_allclose(ratio, 1.0, rtol=SHORT)


def test_ellipsoid_scales_may_broadcast():
    scales = [tf.constant(2.0), tf.constant([[0.5], [1.0], [2.0]])]
    full = [tf.broadcast_to(scales[0], [4]), tf.broadcast_to(scales[1], [3, 2])]
    grads = _tensors(np.random.default_rng(0).normal(size=(5, *s)) for s in [(4,), (3, 2)])
    for a, b in zip(
        clipping.Ellipsoid(scales).clip(grads), clipping.Ellipsoid(full).clip(grads), strict=True
    ):
        np.testing.assert_array_equal(a, b)


# --- Switch ---------------------------------------------------------------------------------------


@pytest.mark.representative(1)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("predicate", [True, False])
def test_switch_is_the_chosen_set(predicate, jit):
    chosen = clipping.Ellipsoid(BOUNDS, CENTER) if predicate else clipping.L2Ball(0.7)
    grads = _tensors(_gradients(6))

    @tf.function(jit_compile=jit, autograph=False)
    def run(predicate, grads):
        switch = clipping.Switch(
            predicate, clipping.Ellipsoid(BOUNDS, CENTER), clipping.L2Ball(0.7)
        )
        noise = switch.noise_stddev(SIGMA, len(SHAPES))
        return switch.clipped_sum(grads, tf.ones([6])), switch.clip(grads), noise, switch.center

    sums, clipped, noise, center = run(tf.constant(predicate), grads)
    _assert_close(sums, [s.numpy() for s in chosen.clipped_sum(grads, tf.ones([6]))])
    _assert_close(clipped, [v.numpy() for v in chosen.clip(grads)])
    expected_noise = chosen.noise_stddev(SIGMA, len(SHAPES))
    for i, shape in enumerate(SHAPES):
        np.testing.assert_allclose(noise[i], np.broadcast_to(expected_noise[i], shape), rtol=1e-6)
        np.testing.assert_array_equal(center[i], CENTER[i] if predicate else np.zeros(shape))


def test_switch_clips_with_one_set_only():
    class Counting(clipping.L2Ball):
        def __init__(self):
            super().__init__(1.0)
            self.calls = tf.Variable(0)

        def clipped_sum(self, grads, mask):
            self.calls.assign_add(1)
            return super().clipped_sum(grads, mask)

    first, second = Counting(), Counting()
    run = tf.function(
        lambda p, g: clipping.Switch(p, first, second).clipped_sum([g], tf.ones([2])),
        autograph=False,
    )
    for predicate in (True, False, False):
        run(tf.constant(predicate), tf.ones([2, 3]))
    assert (int(first.calls), int(second.calls)) == (1, 2)
    assert clipping.Switch(True, first, second).center is None


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 1e-11, 1e11, "1", None, True])
def test_bounds_have_to_be_numbers_that_float32_can_square(value):
    with pytest.raises(ValueError, match=r"l2_norm_clip=.*give a number in \[1e-10, 1e\+10\]"):
        clipping.L2Ball(value)
    with pytest.raises(ValueError, match=r"bounds\[1\]="):
        clipping.LayerBalls([1.0, value])
    if value is not None:
        with pytest.raises(ValueError, match="gamma="):
            clipping.L2Ball(1.0, gamma=value)
    with pytest.raises(ValueError, match="l2_norm_clip="):
        clipping.bounds_for(["a"], value)
    with pytest.raises(ValueError, match=r"l2_norm_clip\['a'\]="):
        clipping.bounds_for(["a"], {"a": value})


@pytest.mark.parametrize("groups", [[0, 0], [0, 2], [0, 1, -1]])
def test_groups_have_to_fit_the_bounds(groups):
    with pytest.raises(ValueError, match="groups="):
        clipping.LayerBalls([1.0, 2.0], groups)


def test_unknown_allocations():
    with pytest.raises(ValueError, match="allocation='even'"):
        clipping.Box([tf.ones([2])], "even")
    with pytest.raises(ValueError, match="one weight per coordinate"):
        clipping.Box([tf.ones([2])], [tf.ones([])])


@pytest.mark.parametrize("name", ["layers", "box", "ellipsoid"])
def test_a_set_for_other_variables_is_refused(name):
    clipping_set = SETS[name][0]()
    with pytest.raises(ValueError, match="is for 4 variables: got 1"):
        clipping_set.clipped_sum([tf.ones([2, 3])], tf.ones([2]))
    with pytest.raises(ValueError, match="is for 4 variables: got 1"):
        clipping_set.noise_stddev(1.0, 1)


def test_shapes_that_do_not_fit_are_refused():
    grads, mask = [tf.ones([2, 3])], tf.ones([2])
    with pytest.raises(ValueError, match="one bound per coordinate"):
        clipping.Box([tf.ones([])]).clipped_sum(grads, mask)
    with pytest.raises(ValueError, match="scales of shape"):
        clipping.Ellipsoid([tf.ones([2, 3])]).clipped_sum(grads, mask)
    with pytest.raises(ValueError, match="center of shape"):
        clipping.Ellipsoid([tf.ones([3])], [tf.ones([1, 3])]).clipped_sum(grads, mask)
    with pytest.raises(ValueError, match="center is for 2 variables"):
        clipping.Ellipsoid([tf.ones([3])], [0.0, 0.0])
    dynamic = tf.function(lambda g: clipping.L2Ball(1.0).clip([g]), autograph=False)
    with pytest.raises(ValueError, match="must be static"):
        dynamic.get_concrete_function(tf.TensorSpec([4, None]))


# --- bounds_for -----------------------------------------------------------------------------------

PATHS = ["net/dense/kernel", "net/dense/bias", "net/dense_1/kernel", "net/out/kernel"]


def test_bounds_for_a_number():
    bound = clipping.bounds_for(PATHS, 2)
    assert isinstance(bound, float)
    assert bound == 2.0


def test_bounds_for_the_longest_prefix():
    bounds, groups = clipping.bounds_for(
        PATHS, {"": 3.0, "net/dense": 1.0, "net/dense/bias": 0.5, "net/dense_1/": 2.0}
    )
    assert [bounds[g] for g in groups] == [1.0, 0.5, 2.0, 3.0]
    np.testing.assert_allclose(
        clipping.LayerBalls(bounds, groups).noise_stddev(1.0, 4)[0], math.sqrt(14.25), rtol=1e-6
    )


def test_bounds_for_one_group_per_prefix():
    assert clipping.bounds_for(PATHS, {"net/d": 1.0, "net/out": 2.0}) == ([1.0, 2.0], [0, 0, 0, 1])


def test_bounds_for_names_what_does_not_match():
    with pytest.raises(
        ValueError, match=r"variable 'net/out/kernel': its prefixes are \['net/d'\]"
    ):
        clipping.bounds_for(PATHS, {"net/d": 1.0})
    with pytest.raises(ValueError, match=r"prefixes \['nut/'\], to which no variable is left"):
        clipping.bounds_for(PATHS, {"net/": 1.0, "nut/": 1.0})
    with pytest.raises(ValueError, match=r"prefixes \['net'\], to which no variable is left"):
        clipping.bounds_for(PATHS, {"net": 1.0, "net/": 1.0})


def test_layer_balls_of_tensors_name_the_set_that_takes_them():
    with pytest.raises(ValueError, match=r"take clipping\.Ellipsoid"):
        clipping.LayerBalls([1.0, tf.constant(2.0)])
