"""ADADP and ADAN: the prior against a slow reference, the printed form, and no divergence."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.optimizers.cases import SHAPES, advance, make, make_variables, random_grads
from tf_adadp import noise, priors
from tf_adadp.optimizers.priors.base import FLOOR


def built(optimizer, shapes):
    optimizer.build([keras.Variable(np.zeros(s, np.float32)) for s in shapes])
    return optimizer


def slow_prior(history, decay, exponent):
    """ExponentialPrior in float64 with loops; `history` is a list of (released, stddevs)."""
    shapes = [g.shape for g in history[0][0]]
    moments = [np.zeros(s[:-1] if len(s) > 1 else ()) for s in shapes]
    variances = [np.zeros_like(m) for m in moments]
    for released, stddevs in history:
        for i, (g, s) in enumerate(zip(released, stddevs, strict=True)):
            rows = g.reshape(-1, g.shape[-1]) if g.ndim > 1 else g.reshape(1, -1)
            tau2 = np.broadcast_to(s, g.shape).reshape(rows.shape) ** 2
            debiased = np.array([np.mean(r**2 - t) for r, t in zip(rows, tau2, strict=True)])
            spread = np.array(
                [
                    np.mean(2 * t**2) + 4 * max(d, 0) * np.mean(t)
                    for t, d in zip(tau2, debiased, strict=True)
                ]
            )
            n = rows.shape[1]
            moments[i] = decay * moments[i] + (1 - decay) * debiased.reshape(moments[i].shape)
            variances[i] = decay**2 * variances[i] + (1 - decay) ** 2 * (spread / n).reshape(
                moments[i].shape
            )
    weight = 1 - decay ** len(history)
    moments = [m / weight for m in moments]
    variances = [v / weight**2 for v in variances]
    sizes = np.array([math.prod(s) for s in shapes])
    means = np.array([m.mean() for m in moments])
    overall = np.sum(sizes * means) / sizes.sum()

    def shrink(values, mean, var, share):
        between = np.sum(share * (values - mean) ** 2)
        rho = max(1 - np.sum(share * var) / between, 0) if between > 0 else 0
        return mean + rho * (values - mean)

    mean_var = np.array([v.mean() / v.size for v in variances])
    shrunk_means = shrink(means, overall, mean_var, sizes / sizes.sum())
    values = [
        shrunk_means[i] + shrink(m, means[i], v, 1 / m.size) - means[i]
        for i, (m, v) in enumerate(zip(moments, variances, strict=True))
    ]
    powers = [np.maximum(v / overall, 0) ** exponent for v in values]
    full = np.concatenate(
        [
            np.broadcast_to(p[..., None] if len(s) > 1 else p, s).reshape(-1)
            for p, s in zip(powers, shapes, strict=True)
        ]
    )
    return np.sqrt(FLOOR**2 + (1 - FLOOR**2) * full**2 / np.mean(full**2))


@pytest.mark.parametrize(("decay", "exponent"), [(0.9, 0.25), (0.5, 0.5), (0.0, 1.0)])
def test_the_prior_equals_a_slow_reference(decay, exponent):
    variables = make_variables()
    prior = priors.ExponentialPrior(decay=decay, exponent=exponent)
    prior.build(
        lambda shape, name: keras.Variable(np.zeros(shape, np.float32), trainable=False), variables
    )
    rng = np.random.default_rng(0)
    history = []
    for _ in range(6):
        released = [g.numpy()[0] for g in random_grads(rng, 1, 0.1)]
        stddevs = [np.float32(0.02 * (i + 1)) for i in range(len(released))]
        prior.update([tf.constant(g) for g in released], [tf.constant(s) for s in stddevs])
        history.append((released, stddevs))
    r = np.concatenate(
        [
            np.broadcast_to(t.numpy(), s).reshape(-1)
            for t, s in zip(prior.shape(), SHAPES.values(), strict=True)
        ]
    )
    np.testing.assert_allclose(r, slow_prior(history, decay, exponent), rtol=2e-4)
    assert np.mean(r**2) == pytest.approx(1.0, rel=1e-4)
    assert r.min() >= FLOOR * (1 - 1e-4)
    assert r.max() / r.min() > 1.5


def test_the_prior_finds_the_sizes_that_are_there():
    """Rows whose gradients differ 100-fold in variance, at a tenth of the noise's variance."""
    optimizer = built(dp.ADAN(noise_multiplier=1.0, prior_decay=0.99, seed=0), [(50, 200)])
    rng = np.random.default_rng(0)
    sizes = np.repeat([0.03, 0.3], 25)[:, None]
    for _ in range(200):
        optimizer._observe(
            [tf.constant(rng.normal(size=(50, 200)) * np.sqrt(sizes**2 + 1), tf.float32)],
            [tf.constant(1.0)],
        )
    r = optimizer._prior.shape()[0].numpy()[:, 0]
    assert r[25:].min() > 1.2 * r[:25].max()


@pytest.mark.extended
def test_noise_alone_leaves_dpsgd():
    """The shape stays 1 within 25 % without signal; without shrinkage rows would differ 3-fold."""
    optimizer = built(dp.ADADP(noise_multiplier=1.0, seed=0), [(300, 10), (10,)])
    rng = np.random.default_rng(0)
    for _ in range(100):
        noise = [rng.normal(size=s).astype(np.float32) for s in [(300, 10), (10,)]]
        optimizer._observe([tf.constant(n) for n in noise], [tf.constant(1.0)] * 2)
    for r in optimizer._prior.shape():
        assert np.abs(r.numpy() - 1).max() < 0.25


def test_warm_up_is_dpsgd():
    optimizer = make("adan", warmup_steps=4, l2_norm_clip=0.5)
    for step in range(7):
        stddevs = optimizer.clipping_set().noise_stddev(2.0, len(SHAPES))
        isotropic = all(np.allclose(s.numpy(), 1.0) for s in stddevs)
        assert isotropic == (step < 4)
        advance(optimizer, np.random.default_rng(step), 1)


def test_rmsprop_and_sgd_steps_are_those_of_keras():
    """The private optimizer takes the same step as Keras's for the same release."""
    for private, plain in (
        (dp.ADADP(0.01, scale_step=False, noise_multiplier=0, allow_no_noise=True,
                  l2_norm_clip=1e6),
         keras.optimizers.RMSprop(0.01)),
        (dp.ADAN(0.1, noise_multiplier=0, allow_no_noise=True, l2_norm_clip=1e6),
         keras.optimizers.SGD(0.1)),
        (dp.DPAdam(noise_multiplier=0, allow_no_noise=True, l2_norm_clip=1e6),
         keras.optimizers.Adam(1e-3)),
    ):  # fmt: skip
        first, second = keras.Variable(np.ones((3, 2))), keras.Variable(np.ones((3, 2)))
        private.build([first])
        plain.build([second])
        rng = np.random.default_rng(0)
        for _ in range(4):
            rows = tf.constant(rng.normal(size=(5, 3, 2)), tf.float32)
            private.apply_private(private.clipping_set().clipped_sum([rows], tf.ones(5)), 5)
            plain.apply([tf.reduce_mean(rows, 0)], [second])
        np.testing.assert_allclose(first.numpy(), second.numpy(), rtol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_step_is_divided_by_the_shape_of_the_noise(momentum):
    """Against RMSprop on the same released vector, with the shape that it was released with."""
    optimizer = dp.ADADP(
        0.01, noise_multiplier=0.3, seed=1, warmup_steps=2, momentum=momentum, prior_decay=0.9
    )
    variables = make_variables()
    optimizer.build(variables)
    released = []
    observe = optimizer._observe
    optimizer._observe = lambda g, std: (released.append(g), observe(g, std))
    velocity, step = [np.zeros(s) for s in SHAPES.values()], [np.zeros(s) for s in SHAPES.values()]
    theta = [v.numpy() for v in variables]
    rng = np.random.default_rng(5)
    for t in range(6):
        shape = [np.asarray(r) for r in optimizer.noise_shape()]
        assert all(np.all(r == 1) for r in shape) == (t < 2)
        advance(optimizer, rng, 1)
        for i, g in enumerate(released[-1]):
            velocity[i] = 0.9 * velocity[i] + 0.1 * g.numpy() ** 2
            step[i] = momentum * step[i] + 0.01 / shape[i] * g / np.sqrt(velocity[i] + 1e-7)
            theta[i] = theta[i] - step[i]
    for variable, expected in zip(variables, theta, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize(("prior", "least", "most"), [("released", 1.7, 3.5), ("factored", 1.5, 3)])
def test_a_rescaled_input_is_trained_alike(prior, least, most):
    """Rows of gradients scaled by s make rows of the weights move 1/s as far: once the prior knows
    the scales, the functions that are trained agree, up to its floor and rate of learning. By rows
    the floor leaves √(1.67/0.33) = 2.3 of the factor 3, in a product of groups √(1.48/0.52) = 1.7.
    """
    scales = np.where(np.arange(20) % 2, 0.5, 1.5)[:, None]
    moved = {}
    for name, scale_step in (("scaled", True), ("rmsprop", False)):
        optimizer = dp.ADADP(
            0.01,
            prior=prior,
            noise_multiplier=1e-3,
            l2_norm_clip=10.0,
            seed=1,
            scale_step=scale_step,
        )
        variable = keras.Variable(np.zeros((20, 8), np.float32))
        optimizer.build([variable])
        rng = np.random.default_rng(0)
        for _ in range(60):
            before = variable.numpy()
            rows = tf.constant(scales * rng.normal(size=(30, 20, 8)), tf.float32)
            sums = optimizer.clipping_set().clipped_sum([rows], tf.ones([30]))
            optimizer.apply_private(sums, 30.0)
        steps = np.sqrt(np.mean((variable.numpy() - before) ** 2, 1)).reshape(10, 2).mean(0)
        moved[name] = steps[1] / steps[0]
    assert moved["rmsprop"] == pytest.approx(1.0, rel=0.3)
    assert least < moved["scaled"] < most


def test_the_default_schedule():
    schedule = dp.InverseSqrtDecay()
    for step, rate in ((0, 0.0064), (4, 0.032 / 1.2**0.5), (60, 0.016), (300, 0.008)):
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-5)
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert again.get_config() == schedule.get_config()
    for make_one in (dp.ADADP, dp.ADAL):
        optimizer = make_one(noise_multiplier=1.0)
        assert float(optimizer.learning_rate) == pytest.approx(0.0064, rel=1e-5)
        copy = type(optimizer).from_config(optimizer.get_config())
        assert float(copy.learning_rate) == pytest.approx(0.0064, rel=1e-5)
        assert float(make_one(0.5, noise_multiplier=1.0).learning_rate) == pytest.approx(0.5)
    assert float(dp.ADADP(prior="raw", noise_multiplier=1.0).learning_rate) < 0.0065
    for bad in (
        {"initial_learning_rate": 0},
        {"decay_steps": -1},
        {"decay_steps": "a"},
        {"warmup_steps": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            dp.InverseSqrtDecay(**bad)


@pytest.mark.parametrize("warm", [False, True])
def test_the_printed_form_is_algorithm_1(warm):
    """One step of Algorithm 1 by hand, in float64, without noise."""
    beta, gamma, clip, lot = 1.2, 0.9, 0.5, 8
    optimizer = dp.ADADP(
        0.01, noise_multiplier=0, allow_no_noise=True, l2_norm_clip=clip, prior="raw",
        clipping="local", warmup_steps=None if warm else 100,
    )  # fmt: skip
    variable = keras.Variable(np.zeros((4, 3), np.float32))
    optimizer.build([variable])
    rng = np.random.default_rng(2)
    prior = np.zeros((4, 3))
    velocity, theta = np.zeros((4, 3)), np.zeros((4, 3))
    for _ in range(3):
        rows = rng.normal(size=(lot, 4, 3)) * np.exp(rng.normal(size=(4, 3)))
        local = warm and np.var(np.sqrt(prior)) > 1e-6
        if local:
            s = beta * np.sqrt(prior)
            clipped = np.clip(rows, -s, s)
        else:
            norms = np.sqrt((rows**2).sum((1, 2), keepdims=True))
            clipped = rows / np.maximum(1, norms / clip)
        g = clipped.sum(0) / lot
        velocity = 0.9 * velocity + 0.1 * g**2
        theta -= 0.01 * g / np.sqrt(velocity + 1e-7)
        prior = gamma * prior + (1 - gamma) * rows.mean(0) ** 2
        sums = optimizer.clipping_set().clipped_sum([tf.constant(rows, tf.float32)], tf.ones([lot]))
        optimizer.apply_private(sums, float(lot))
    np.testing.assert_allclose(variable.numpy(), theta, rtol=1e-4)


@pytest.mark.parametrize(("share", "adapts"), [(0.9, True), (1.1, False)])
def test_the_switch_looks_at_the_shape_and_not_at_its_factors(share, adapts):
    """Var(r) > G, r by rows and columns."""

    def released(threshold):
        prior = dp.priors.ExponentialPrior(pooling="both", shrinkage=False)
        optimizer = dp.ADADP(
            0.01, noise_multiplier=1e-6, prior=prior, clipping="local",
            local_clip_threshold=threshold, warmup_steps=None,
        )  # fmt: skip
        shapes = (4, 3), (1, 1)  # those of the outputs have one factor
        optimizer.build([keras.Variable(np.zeros(shape, np.float32)) for shape in shapes])
        g = tf.constant(np.outer([1, 2, 3, 4], [1, 3, 9]), tf.float32)
        sums = dp.ClippedSums([g, tf.ones([1, 1])], optimizer.clipping_set())
        optimizer.apply_private(sums, 1.0)
        return np.concatenate([r.numpy().ravel() for r in optimizer.noise_shape()])

    variance = np.var(released(0.0))
    assert variance > 0
    assert (np.var(released(share * variance)) > 0) == adapts


def test_the_printed_prior_outlives_huge_records():
    optimizer = make("adadp", prior="raw")
    for value in (1e30, np.inf, np.nan):
        optimizer._prior.update([tf.fill(s, value) for s in SHAPES.values()])
        roots = optimizer._prior.root()
        assert all(np.all(np.isfinite(r)) and np.all(np.isfinite(r**2)) for r in roots)
    assert all(np.all(r > 1e11) for r in roots)


def test_the_printed_noise_is_algorithm_1():
    optimizer = make("adadp", prior="raw", clipping="local")
    advance(optimizer, np.random.default_rng(0), 5)
    m = sum(math.prod(s) for s in SHAPES.values())
    stddevs = optimizer.clipping_set().noise_stddev(3.0, len(SHAPES))
    for s, root in zip(stddevs, optimizer._prior.root(), strict=True):
        np.testing.assert_allclose(s.numpy(), 1.2 * 3.0 * np.sqrt(m) * root.numpy(), rtol=1e-4)


def test_the_printed_form_is_charged_infinity():
    import dp_accounting

    law = dp.accounting.PoissonSampling(1000, 10)
    for make_one in (dp.ADADP, dp.ADAN):
        event = make_one(noise_multiplier=8.0, prior="raw").event(law)
        assert isinstance(event, dp_accounting.NonPrivateDpEvent)
        event = make_one(noise_multiplier=8.0).event(law)
        assert event == law.event(8.0)


@pytest.mark.representative(2, 10)
@pytest.mark.parametrize("clipping", ["ellipsoid", "local"])
@pytest.mark.parametrize("signal", [0.0, 1.0])
@pytest.mark.parametrize("lot", [64, 8192])
@pytest.mark.parametrize(("rows", "columns"), [(10, 100), (1000, 1000)])
@pytest.mark.parametrize("sigma", [0.5, 4.0, 16.0])
def test_no_run_diverges(sigma, rows, columns, lot, signal, clipping):
    """The noise stays within its fixed total scale for 300 steps (25 for 10⁶ parameters).

    The paper's prior, fed with the noisy gradient instead of the raw one, overflows here at large
    σ*²m/L²; ours keeps Σ s² = σ*²C²m exactly, whatever is released.
    """
    optimizer = built(
        dp.ADADP(
            2e-3, noise_multiplier=sigma, clipping=clipping, prior_exponent=0.5, warmup_steps=1,
            local_clip_factor=1.0, seed=0,
        ),
        [(rows, columns), (columns,)],
    )  # fmt: skip
    m = rows * columns + columns
    direction = [
        tf.fill([rows, columns], tf.constant(signal * lot / np.sqrt(m), tf.float32)),
        tf.fill([columns], tf.constant(signal * lot / np.sqrt(m), tf.float32)),
    ]

    def release():
        sums = dp.ClippedSums(direction, optimizer.clipping_set())
        optimizer.apply_private(sums, float(lot))

    step = tf.function(release)
    for i in range(25 if m > 1e5 else 300):
        step()
        if i % 8 == 0 or i == 24:
            stddevs = optimizer.clipping_set().noise_stddev(sigma, 2)
            squares = sum(
                float(tf.reduce_sum(tf.square(tf.broadcast_to(s, g.shape))))
                for s, g in zip(stddevs, direction, strict=True)
            )
            assert squares == pytest.approx(sigma**2 * m, rel=1e-3)
    weights = optimizer._trainable_variables[0].numpy()
    assert np.all(np.isfinite(weights))
    assert np.abs(weights).max() < 300 * 2e-3 * 4


def test_feeding_the_noisy_gradient_back_would_diverge():
    """The test above can fail: the print with noisy feedback overflows within 300 steps."""
    rng = np.random.default_rng(0)
    m, lot, sigma, beta = 71_010, 600, 8.0, 1.2
    prior = np.full(m, 1e-8)
    with np.errstate(over="ignore"):
        for _ in range(300):
            noisy = rng.normal(size=m) * beta * sigma * np.sqrt(m * prior) / lot
            prior = 0.9 * prior + 0.1 * noisy**2
    assert not np.all(prior < 1e100)


def test_sums_kept_over_releases_get_the_noise_of_their_set(monkeypatch):
    """Under the noise of the next set one record reached 1.57 where 1/σ* = 1 is charged."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, use_bias=False)])
    optimizer = dp.ADADP(noise_multiplier=1.0, prior_decay=0.0, warmup_steps=0)
    optimizer.build(model.trainable_variables)
    stddevs = []
    draw = noise.add_gaussian

    def watched(values, s, *args, **kwargs):
        stddevs[:] = [np.broadcast_to(b, v.shape) for b, v in zip(s, values, strict=True)]
        return draw(values, s, *args, **kwargs)

    monkeypatch.setattr(noise, "add_gaussian", watched)
    lot = dp.make_lot(np.float32([[30, 0, 0, 0]]), np.full((1, 6), 1e3, np.float32), None, 8)
    loss = keras.losses.MeanSquaredError()
    stale = dp.clipped_sum(model, loss, lot, optimizer)
    for _ in range(3):  # of other coordinates, for which the noise becomes larger
        others = [tf.constant([[0.0], [90.0], [0.0], [0.0]]) + tf.zeros([4, 6]), tf.zeros([])]
        optimizer.apply_private(dp.ClippedSums(others, optimizer.clipping_set()), 10.0)
    now = optimizer.clipping_set().noise_stddev(1.0, 1)[0].numpy()
    assert np.linalg.norm(stale[0].numpy() / now) > 1.5
    returned = tf.function(lambda: dp.clipped_sum(model, loss, lot, optimizer), autograph=False)
    for unknown in (list(stale), stale[:], stale + [], returned()):
        with pytest.raises(ValueError, match="sums without their clipping set.*ADADP.*clipped_sum"):
            optimizer.apply_private(unknown, 10.0)
    assert optimizer.releases == 3
    optimizer.apply_private(stale, 10.0)
    assert np.linalg.norm(stale[0].numpy() / stddevs[0]) <= 1 + 1e-5
