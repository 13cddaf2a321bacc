"""The priors: groups and shrinkage against slow references, public shapes, saving, misuse."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import data, plain_model, private_model
from tests.optimizers.cases import SHAPES, make_variables
from tf_adadp import priors
from tf_adadp.optimizers.priors.moments import POOLINGS

PRIORS = {
    "exponential": lambda: priors.ExponentialPrior(),
    "windowed": lambda: priors.WindowedPrior(window=2),
    "fan_in": lambda: priors.FanInPrior(),
    "equal_layers": lambda: priors.EqualLayersPrior(),
    "fixed": lambda: priors.FixedPrior({"first": 0.3, "first/bias": [1, 2, 3, 4, 5]}),
    **{
        f"pooled by {p}": lambda p=p: priors.ExponentialPrior(pooling=p, shrinkage=False)
        for p in POOLINGS
    },
}


def _variable(shape, name):
    return keras.Variable(np.zeros(shape, np.float32), trainable=False, name=name)


def _built(prior, variables=None):
    prior.build(_variable, variables or make_variables())
    return prior


def _feed(prior, rng, steps, sizes, std):
    """Releases of signal `sizes` (arrays, per variable) with random signs and noise of `std`."""
    for _ in range(steps):
        signal = [s * rng.choice([-1.0, 1.0], s.shape) for s in sizes]
        released = [tf.constant(g + std * rng.normal(size=g.shape), tf.float32) for g in signal]
        prior.update(released, [tf.constant(std, tf.float32)] * len(sizes))


@pytest.mark.parametrize("name", PRIORS)
def test_shapes_have_mean_square_1_whatever_was_released(name):
    prior = _built(PRIORS[name]())
    rng = np.random.default_rng(0)
    for scale in (0.0, 1e-12, 1.0, 1e12):
        _feed(prior, rng, 3, [scale * np.ones(s) for s in SHAPES.values()], 0.1)
        shape = prior.shape()
        full = [np.broadcast_to(r, s).ravel() for r, s in zip(shape, SHAPES.values(), strict=True)]
        full = np.concatenate(full)
        assert np.all(np.isfinite(full))
        assert np.all(full > 0)
        assert np.mean(full.astype(np.float64) ** 2) == pytest.approx(1.0, rel=1e-4)


def test_releases_that_are_not_finite_do_not_raise():
    """The noise cannot overflow by itself; a huge learning rate can make weights infinite, and the
    prior of a run that is lost need not be right, only not raise."""
    prior = _built(priors.ExponentialPrior())
    prior.update([tf.fill(s, np.inf) for s in SHAPES.values()], [tf.constant(0.1)] * len(SHAPES))
    assert len(prior.shape()) == len(SHAPES)


@pytest.mark.parametrize(
    ("pooling", "axes"),
    [("row", (1,)), ("column", (0,)), ("layer", (0, 1)), ("coordinate", ())],
)
def test_groups_are_debiased_means(pooling, axes):
    prior = priors.ExponentialPrior(decay=0.5, pooling=pooling, shrinkage=False)
    _built(prior, [_variable((4, 6), "w")])
    rng = np.random.default_rng(1)
    expected, weight = 0.0, 0.0
    for step in range(4):
        g, std = rng.normal(size=(4, 6)), rng.uniform(0.1, 1.0, (4, 1)) * (step + 1)
        prior.update([tf.constant(g, tf.float32)], [tf.constant(std, tf.float32)])
        expected = 0.5 * expected + 0.5 * np.mean(g**2 - std**2, axes, keepdims=True)
        weight = 0.5 * weight + 0.5
    np.testing.assert_allclose(prior.moments()[0], expected / weight, rtol=1e-4, atol=1e-5)


def test_rows_and_columns_make_a_matrix_of_rank_one():
    """Sizes that are a product of a row's and a column's are found without noise."""
    rng = np.random.default_rng(2)
    sizes = np.outer(rng.uniform(1, 2, 5), rng.uniform(1, 3, 7))
    variables = [_variable((5, 7), "w"), _variable((7, 2), "outputs")]
    prior = _built(priors.ExponentialPrior(pooling="both"), variables)
    _feed(prior, rng, 3, [sizes, np.ones((7, 2))], 0.0)
    np.testing.assert_allclose(prior.moments()[0], sizes**2, rtol=1e-4)


def test_a_shape_by_rows_and_columns_is_compiled_by_xla():
    prior = _built(priors.ExponentialPrior(pooling="both", exponent=0.5))
    _feed(prior, np.random.default_rng(5), 3, [np.ones(s) for s in SHAPES.values()], 0.1)
    compiled = tf.function(prior.factors, jit_compile=True)()
    for of, eager in zip(compiled, prior.factors(), strict=True):
        for one, other in zip(of, eager, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("exponent", [0.25, 0.5])
def test_rows_and_columns_are_factors_with_a_floor_each(exponent):
    """r² = V·R·K: of three matrices of rank one and two vectors, known without noise."""
    rng = np.random.default_rng(4)
    rows, columns = 10.0 ** rng.uniform(-2, 1, (5, 1)), 10.0 ** rng.uniform(-2, 1, (1, 7))
    sizes = [rows * columns, np.full(7, 0.1), 3 * columns.T * rows.T, np.full(5, 0.0)]
    sizes.append(2 * rows * columns)  # the last matrix, the outputs: no K
    names = [_variable(s.shape, f"v{i}") for i, s in enumerate(sizes)]
    prior = priors.ExponentialPrior(pooling="both", exponent=exponent, shrinkage=False, floor=0.3)
    _feed(_built(prior, names), rng, 3, sizes, 0.0)
    sizes[-1] = np.sqrt(np.mean(sizes[-1] ** 2, 1, keepdims=True)) * np.ones((5, 7))
    powers = [np.abs(s) ** (4 * exponent) for s in sizes]  # of r² before the floors
    totals = np.array([p.mean() for p in powers])
    counts = np.array([p.size for p in powers])
    relative = totals / (totals @ counts / counts.sum())
    for i, (factors, r, of, total) in enumerate(
        zip(prior.factors(), prior.shape(), powers, relative, strict=True)
    ):
        expected = 0.09 + 0.91 * total
        if of.ndim == 2:
            sides = [[len(of), 1], [1, of.shape[1]]][: len(factors)]
            assert [f.shape.as_list() for f in factors] == sides
            assert len(factors) == (1 if i == 4 else 2)
            for axis in (1, 0)[: len(factors)]:
                side = of.mean(axis, keepdims=True) / of.mean()
                expected = expected * (0.3 + 0.7 * side)
        np.testing.assert_allclose(r, np.sqrt(expected) * np.ones_like(r), rtol=1e-4)
        np.testing.assert_allclose(np.prod(np.broadcast_arrays(*factors), axis=0), r, rtol=1e-6)


def test_shrinkage_keeps_pure_noise_flat():
    """Without signal the shape is close to 1, where the unshrunk one is not. Rows of 20 entries,
    30 releases, five runs of a fixed seed."""
    rng = np.random.default_rng(3)
    spread = {}
    for shrinkage in (True, False):
        found = []
        for _ in range(5):
            prior = priors.ExponentialPrior(decay=0.97, exponent=0.5, shrinkage=shrinkage)
            _built(prior, [_variable((40, 20), "w")])
            _feed(prior, rng, 30, [np.full((40, 20), 0.15)], 1.0)
            found.append(np.std(prior.shape()[0]))
        spread[shrinkage] = np.mean(found)
    assert spread[True] < 0.5 * spread[False]


def test_a_window_sees_what_single_releases_hide():
    """Two groups of rows whose constant signal is far below the noise: the mean of a window tells
    them apart, with the noise of a mean subtracted."""
    rng = np.random.default_rng(4)
    signal = np.repeat([0.1, 0.5], 20)[:, None] * np.ones((40, 50))
    prior = priors.WindowedPrior(window=20, decay=0.5, shrinkage=False)
    _built(prior, [_variable((40, 50), "w")])
    for step in range(100):
        before = prior.moments()[0].numpy()
        g = signal + rng.normal(size=signal.shape)
        prior.update([tf.constant(g, tf.float32)], [tf.constant(1.0)])
        if (step + 1) % 20:
            np.testing.assert_array_equal(prior.moments()[0], before)
    moments = prior.moments()[0].numpy().reshape(2, 20).mean(1)
    np.testing.assert_allclose(moments, [0.01, 0.25], atol=0.01)


def test_public_shapes():
    variables = [_variable((100, 10), "kernel"), _variable((10,), "bias")]
    kernel, bias = (r.numpy().item() for r in _built(priors.FanInPrior(floor=0), variables).shape())
    assert bias / kernel == pytest.approx(10.0, rel=1e-5)
    kernel, bias = (
        r.numpy().item() for r in _built(priors.EqualLayersPrior(floor=0), variables).shape()
    )
    assert 1000 * kernel**2 == pytest.approx(10 * bias**2, rel=1e-5)
    scales = np.linspace(1, 2, 100)[:, None]
    shape = _built(priors.FixedPrior({"kernel": scales}), variables).shape()
    np.testing.assert_allclose(
        shape[0] / shape[1][0], np.broadcast_to(scales, (100, 10)), rtol=1e-5
    )


@pytest.mark.parametrize("make", [dp.ADADP, dp.ADAN])
@pytest.mark.parametrize("name", PRIORS)
def test_optimizers_take_any_prior_and_keep_it_when_saved(make, name):
    optimizer = make(noise_multiplier=1.0, prior=PRIORS[name]())
    config = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(config)
    assert type(again.prior) is type(optimizer.prior)
    assert again.prior.get_config() == optimizer.prior.get_config()
    assert again.prior is not optimizer.prior


@pytest.mark.extended
def test_a_prior_of_the_users_own(tmp_path):
    @keras.saving.register_keras_serializable(package="tests")
    class Halves(priors.Prior):
        def _build(self, add_variable, variables):
            self._seen = add_variable((), "seen")

        def update(self, released, stddevs):
            self._seen.assign(self._seen.value + 1.0)

        def moments(self):
            return [
                tf.reshape(tf.linspace(1.0, 2.0, s[0]), [s[0]] + [1] * (len(s) - 1))
                for s in self._shapes
            ]

    model = dp.DPModel(keras.Sequential([keras.Input([4]), keras.layers.Dense(3)]))
    model.compile(dp.ADADP(noise_multiplier=1.0, prior=Halves()), loss="mse")
    x, y = np.ones((20, 4), np.float32), np.ones((20, 3), np.float32)
    model.fit(x, y, batch_size=10, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = dp.load_model(tmp_path / "model.keras")
    assert float(loaded.optimizer.prior._seen.value) == 4.0
    loaded.fit(x, y, batch_size=10, verbose=0)


def test_one_prior_serves_one_optimizer():
    prior = priors.ExponentialPrior()
    _built(prior)
    optimizer = dp.ADADP(noise_multiplier=1.0, prior=prior)
    with pytest.raises(ValueError, match="serves an optimizer already"):
        optimizer.build(make_variables())


def test_a_build_that_failed_is_not_taken_up_again():
    """Else the second `fit` would train with the state of another optimizer."""
    prior = priors.ExponentialPrior()
    dp.ADADP(noise_multiplier=1.0, prior=prior).build(make_variables())
    second = dp.ADADP(noise_multiplier=1.0, prior=prior)
    for match in ("serves an optimizer already", "earlier build .* failed"):
        with pytest.raises(ValueError, match=match):
            second.build(make_variables())
    for bad in ({"l2_norm_clip": {"nowhere": 1.0}},):
        optimizer = dp.DPSGD(noise_multiplier=1.0, **bad)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"nowhere|earlier build"):
                optimizer.build(make_variables())


@keras.saving.register_keras_serializable(package="tests")
class Restless(priors.Prior):
    """Moments that are another at every look."""

    def _build(self, add_variable, variables):
        self._seed = 0

    def update(self, released, stddevs):
        pass

    def moments(self):
        self._seed += 1
        rng = np.random.default_rng(self._seed)
        return [tf.constant(rng.uniform(size=s) ** 4, tf.float32) for s in self._shapes]


def test_clipping_and_noise_are_of_one_shape_whatever_a_prior_does():
    """A prior that is no function of its state, and one whose arguments are changed."""
    for prior in (Restless(), priors.ExponentialPrior(decay=0.5)):
        optimizer = dp.ADADP(noise_multiplier=1.5, prior=prior, warmup_steps=0)
        variables = make_variables()
        optimizer.build(variables)
        rng = np.random.default_rng(0)
        for step in range(5):
            rows = [tf.constant(rng.normal(size=(1, *s)), tf.float32) for s in SHAPES.values()]
            sums = optimizer.clipping_set().clipped_sum([100.0 * r for r in rows], tf.ones([1]))
            prior.exponent = 0.1 * (step + 1)
            stddevs = optimizer.clipping_set().noise_stddev(1.5, len(rows))
            moved = sum(
                float(tf.reduce_sum(tf.square(u / s))) for u, s in zip(sums, stddevs, strict=True)
            )
            assert np.sqrt(moved) <= (1 + 1e-5) / 1.5
            optimizer.apply_private(sums, 1.0)


def test_a_coordinate_without_noise_stays_where_it_is():
    """floor = 0 lets a scale be 0; then so are gradient, noise and step, and nothing is NaN."""
    prior = priors.ExponentialPrior(floor=0.0, decay=0.9, shrinkage=False, pooling="coordinate")
    optimizer = dp.ADADP(noise_multiplier=1.0, prior=prior, seed=0)
    variables = make_variables()
    optimizer.build(variables)
    rng = np.random.default_rng(1)
    for _ in range(15):
        rows = [tf.constant(rng.normal(size=(4, *s)), tf.float32) for s in SHAPES.values()]
        sums = optimizer.clipping_set().clipped_sum(rows, tf.ones([4]))
        optimizer.apply_private(sums, 4.0)
    assert any(np.any(r == 0) for r in optimizer.noise_shape())
    assert all(np.all(np.isfinite(v.numpy())) for v in variables)


def test_large_exponents_of_rows_and_columns_do_not_overflow():
    """r² is the most that the floors leave for one entry of 10⁶, and what they leave elsewhere."""
    prior = priors.ExponentialPrior(exponent=8.0, pooling="both", shrinkage=False, floor=0.16)
    _built(prior, [_variable((1000, 1000), "w"), _variable((1, 1), "outputs")])
    release = np.zeros((1000, 1000), np.float32)
    release[3, 7] = 1.0
    prior.update([tf.constant(release), tf.zeros([1, 1])], [tf.constant(0.0)] * 2)
    squares = np.square(prior.shape()[0].numpy(), dtype=np.float64)
    assert np.mean(squares) == pytest.approx(1.0, rel=1e-4)
    assert squares[3, 7] == pytest.approx((0.16 + 0.84 * 1000) ** 2, rel=1e-4)
    assert squares[0, 0] == pytest.approx(0.16**2, rel=1e-4)


def test_large_exponents_do_not_overflow():
    prior = priors.ExponentialPrior(exponent=8.0, pooling="coordinate", shrinkage=False)
    _built(prior, [_variable((1000,), "w")])
    release = np.full(1000, 1e-3, np.float32)
    release[7] = 1.0
    prior.update([tf.constant(release)], [tf.constant(0.0)])
    r = prior.shape()[0].numpy()
    assert np.mean(r.astype(np.float64) ** 2) == pytest.approx(1.0, rel=1e-4)
    assert np.argmax(r) == 7


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: dp.ADADP(noise_multiplier=1.0, scale_step="no"), "scale_step='no'"),
        (lambda: dp.ADADP(noise_multiplier=1.0, prior=priors.FanInPrior), "instance"),
        (lambda: dp.ADADP(noise_multiplier=1.0, prior=np.array(["raw"])), "instance"),
        (
            lambda: dp.ADADP(noise_multiplier=1.0, prior=priors.FanInPrior(), prior_exponent=1.0),
            "give it to the prior",
        ),
        (lambda: dp.ADADP(noise_multiplier=1.0, prior="raw").noise_shape(), "raw gradients"),
        (lambda: priors.ExponentialPrior(shrinkage="no"), "shrinkage='no'"),
        (lambda: priors.ExponentialPrior(exponent=10**400), "exponent=1"),
        (lambda: priors.ExponentialPrior(exponent=True), "exponent=True"),
        (lambda: priors.FixedPrior({"first": "x"}), "first"),
        (lambda: priors.FixedPrior({"first": [[1], [1, 2]]}), "first"),
        (lambda: priors.FixedPrior({"first": []}), "first"),
        (lambda: _built(priors.FixedPrior({"first": 1e-25})), "10¹⁵"),
        (lambda: priors.ExponentialPrior(decay=1.0), "decay=1.0"),
        (lambda: priors.ExponentialPrior(pooling="rows"), "pooling='rows'"),
        (lambda: priors.ExponentialPrior(exponent=0), "exponent=0"),
        (lambda: priors.ExponentialPrior(floor=1.0), "floor=1.0"),
        (lambda: priors.WindowedPrior(window=0), "window=0"),
        (lambda: priors.WindowedPrior(window=2.5), "window=2.5"),
        (lambda: priors.FixedPrior({"first": 0.0}), "first"),
        (lambda: priors.FixedPrior({"first": float("nan")}), "first"),
        (lambda: _built(priors.FixedPrior({"third": 1.0})), "third"),
        (lambda: _built(priors.FixedPrior({"first/bias": [1, 2]})), "broadcast"),
        (lambda: dp.ADADP(noise_multiplier=1.0, prior="fan_in"), "prior='fan_in'"),
    ],
)
def test_bad_arguments(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_scales_must_be_a_dict():
    with pytest.raises(TypeError, match="scales=1.0"):
        priors.FixedPrior(1.0)


@pytest.mark.parametrize("make", [dp.DPSGD, dp.ADADP, dp.AdaCliP, dp.DPOPT])
def test_a_frozen_model_is_not_trained(make):
    model = plain_model()
    model.trainable = False
    frozen = private_model(make(noise_multiplier=1.0), model)
    with pytest.raises(ValueError, match="has no trainable weights"):
        frozen.fit(*data(), batch_size=30, verbose=0)
    assert frozen.ledger.steps == 0
    frozen.optimizer.build([])  # as `load_model` does


def test_a_model_that_was_frozen_is_loaded(tmp_path):
    private = private_model(dp.DPSGD(noise_multiplier=1.0))
    private.fit(*data(), batch_size=30, verbose=0)
    private.trainable = False
    private.save(tmp_path / "frozen.keras")
    again = keras.saving.load_model(tmp_path / "frozen.keras")
    assert again.ledger.steps == private.ledger.steps


class _Turning(priors.ExponentialPrior):
    """Its shape is another one after the first release."""

    calls = 0

    def moments(self):
        self.calls += 1
        return [np.ones((1, 3) if self.calls == 1 else (3, 1), np.float32)]


def test_a_shape_that_changes_is_refused():
    optimizer = dp.ADADP(0.1, noise_multiplier=1.0, prior=_Turning())
    optimizer.build([keras.Variable(np.zeros((3, 3), np.float32))])
    with pytest.raises(ValueError, match="give the same every time"):
        optimizer.apply_private(dp.ClippedSums([tf.zeros((3, 3))], optimizer.clipping_set()), 10.0)
