"""AutoSGD, AdaCliP, DPOPT and `make_private` against slow references, and at their edges."""

import math

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import data, private_model
from tests.optimizers.cases import SHAPES, SIGMA, advance, make, make_variables, random_grads
from tf_adadp import accounting

LAW = accounting.PoissonSampling(num_examples=1000, expected_size=100)


def built(optimizer):
    optimizer.build(make_variables())
    return optimizer


def flat(tensors):
    return np.concatenate([np.reshape(np.asarray(t, np.float64), -1) for t in tensors])


def step(optimizer, grads, lot_size):
    """One private step; returns how the weights moved, as one vector."""
    variables = optimizer._trainable_variables
    before = flat([v.numpy() for v in variables])
    sums = optimizer.clipping_set().clipped_sum(grads, tf.ones([len(grads[0])]))
    optimizer.apply_private(sums, lot_size)
    return flat([v.numpy() for v in variables]) - before


def rows_of(grads):
    """[B, m] float64."""
    return np.stack([flat([g[i] for g in grads]) for i in range(len(grads[0]))])


# AutoSGD, and automatic clipping everywhere.


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_autosgd_is_its_formula(scale):
    optimizer = built(dp.AutoSGD(0.5, gamma=0.1, noise_multiplier=0.0, allow_no_noise=True))
    grads = random_grads(np.random.default_rng(0), 6, scale)
    rows = rows_of(grads)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    expected = -0.5 * np.sum(rows / (norms + 0.1), 0) / 6.0
    np.testing.assert_allclose(step(optimizer, grads, 6.0), expected, rtol=1e-4, atol=1e-7)


def test_automatic_clipping_of_groups_and_ellipsoids():
    grads = random_grads(np.random.default_rng(1), 4, 0.3)
    sets = dp.clipping.LayerBalls([0.5, 2.0], groups=(0, 0, 1, 1), gamma=0.2)
    clipped = sets.clip(grads)
    for members, bound in (((0, 1), 0.5), ((2, 3), 2.0)):
        rows = rows_of([grads[i] for i in members])
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        expected = bound * rows / (norms + 0.2)
        np.testing.assert_allclose(rows_of([clipped[i] for i in members]), expected, rtol=1e-4)
    scales = [
        tf.constant(np.linspace(0.1, 3.0, math.prod(s)).reshape(s), tf.float32)
        for s in SHAPES.values()
    ]
    clipped = dp.clipping.Ellipsoid(scales, gamma=0.2).clip(grads)
    b = flat(scales)
    w = rows_of(grads) / b
    expected = b * w / (np.linalg.norm(w, axis=1, keepdims=True) + 0.2)
    np.testing.assert_allclose(rows_of(clipped), expected, rtol=1e-4, atol=1e-7)


def test_where_automatic_clipping_has_no_place():
    with pytest.raises(ValueError, match=r"automatic_clipping=0\.1 .*box"):
        dp.ADADP(noise_multiplier=1.0, clipping="local", automatic_clipping=0.1)
    for bad in (0, -1.0, math.nan, "a", True):
        with pytest.raises(ValueError, match="automatic_clipping"):
            dp.DPSGD(noise_multiplier=1.0, automatic_clipping=bad)
    for name in ("l2_norm_clip", "automatic_clipping"):
        with pytest.raises(ValueError, match=f"{name}=2"):
            dp.AutoSGD(noise_multiplier=1.0, **{name: 2.0})


# AdaCliP.


@pytest.mark.parametrize("scale", ["normalized", "free"])
def test_adaclip_is_algorithm_1(scale):
    """Ten steps by hand in float64, without noise; the prior's shape is taken as it is."""
    rng = np.random.default_rng(2)
    clip, beta1, beta2, lot = 0.7, 0.8, 0.9, 5.0
    optimizer = built(
        dp.AdaCliP(
            0.3,
            scale=scale,
            center_decay=beta1,
            variance_decay=beta2,
            l2_norm_clip=clip,
            noise_multiplier=0.0,
            allow_no_noise=True,
            warmup_steps=0,
        )
    )
    m = len(flat(optimizer._trainable_variables))
    a, variance = np.zeros(m), np.full(m, clip**2 / m)
    b = np.full(m, clip)
    for _ in range(10):
        grads = [g + 0.5 for g in random_grads(rng, 5, 0.3)]
        if scale == "normalized":
            b = clip * flat(
                [
                    np.broadcast_to(r, s)
                    for r, s in zip(optimizer.noise_shape(), SHAPES.values(), strict=True)
                ]
            )
            assert np.mean(b**2) == pytest.approx(clip**2, rel=1e-4)
        w = (rows_of(grads) - a) / b
        w /= np.maximum(1.0, np.linalg.norm(w, axis=1, keepdims=True))
        centred = b * w.sum(0) / lot
        moved = step(optimizer, grads, lot)
        np.testing.assert_allclose(moved, -0.3 * (centred + a), rtol=2e-3, atol=2e-6)
        a = a + (1 - beta1) * centred
        np.testing.assert_allclose(flat(optimizer._center), a, rtol=2e-3, atol=2e-6)
        estimate = np.clip(lot * centred**2, 1e-12, clip**2 / m)
        variance = beta2 * variance + (1 - beta2) * estimate
        root = np.sqrt(variance)
        b = np.sqrt(root * root.sum())


def noise_only(optimizer, steps, lot_size):
    """rms of b after steps on empty lots."""
    for _ in range(steps):
        empty = [tf.zeros([0, *s]) for s in SHAPES.values()]
        step(optimizer, empty, lot_size)
    stddevs = optimizer.clipping_set().noise_stddev(1.0, len(SHAPES))
    b = [np.broadcast_to(s, shape) for s, shape in zip(stddevs, SHAPES.values(), strict=True)]
    return float(np.sqrt(np.mean(flat(b) ** 2)))


@pytest.mark.extended
def test_adaclip_does_not_diverge():
    """σ*²·m/L = 110, far above 2.07: only the print's free scale with a large h2 runs away."""
    arguments = {"noise_multiplier": 4.0, "seed": 3}
    assert noise_only(built(dp.AdaCliP(**arguments)), 60, 10.0) == pytest.approx(1.0, rel=1e-3)
    assert noise_only(built(dp.AdaCliP(scale="free", **arguments)), 60, 10.0) <= 1.0 + 1e-4
    printed = dp.AdaCliP(scale="free", max_variance=1e30, **arguments)
    assert noise_only(built(printed), 60, 10.0) > 1e3


@pytest.mark.extended
def test_adaclip_shrinks_noise_where_gradients_are_small():
    """Section 3's toy: one coordinate varies, the others hardly; the noise follows."""
    rng = np.random.default_rng(4)
    optimizer = dp.AdaCliP(
        0.0, noise_multiplier=0.5, seed=1, prior=dp.priors.ExponentialPrior(pooling="coordinate")
    )
    variable = keras.Variable(np.zeros((1, 20), np.float32))
    optimizer.build([variable])
    for _ in range(200):
        rows = np.zeros((100, 1, 20))
        rows[:, 0, 0] = rng.normal(0.5, 1.0, 100)
        sums = optimizer.clipping_set().clipped_sum([tf.constant(rows, tf.float32)], tf.ones([100]))
        optimizer.apply_private(sums, 100.0)
    r = flat(optimizer.noise_shape())
    assert r[0] > 1.5 * r[1:].max()


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"scale": "other"}, "scale='other'"),
        ({"center_decay": 1.1}, r"center_decay=1\.1"),
        ({"variance_decay": 1.0}, r"variance_decay=1\.0"),
        ({"min_variance": 0}, "min_variance=0"),
        ({"max_variance": 1e-13}, "max_variance=1e-13"),
        ({"prior": "raw"}, 'prior="raw"'),
        ({"l2_norm_clip": {"": 1.0}}, "one number"),
    ],
)
def test_bad_arguments_of_adaclip(bad, match):
    with pytest.raises(ValueError, match=match):
        dp.AdaCliP(noise_multiplier=1.0, **bad)


# DPOPT.


def least_weighted(weights, bounds, steps=4000):
    """min Σ w·s subject to Σ c²/s² = 1, by gradient descent on log s, projected by rescaling."""
    log_s = np.zeros_like(weights)
    for _ in range(steps):
        s = np.exp(log_s)
        s *= np.sqrt(np.sum(bounds**2 / s**2))
        # Gradient of log(Σ w·s) + ½·log(Σ c²/s²), which does not change with the scale of s.
        log_s = np.log(s) - 0.3 * (weights * s / np.sum(weights * s) - bounds**2 / s**2)
    return s


def test_the_closed_forms_are_the_optimum():
    """Ellipsoid (b for given v and w) and box (s for given c and w)."""
    rng = np.random.default_rng(5)
    optimizer = make("dpopt")
    advance(optimizer, rng, 20)
    w = flat(optimizer.importances())
    prior = dp.ADAN(noise_multiplier=SIGMA, prior_exponent=1 / 3)  # the shape v^(1/3) itself
    prior.build(make_variables())
    v = (
        flat(
            [
                np.broadcast_to(r, s)
                for r, s in zip(optimizer._prior.shape(), SHAPES.values(), strict=True)
            ]
        )
        ** 3
    )
    b = flat(optimizer.noise_shape())
    best = least_weighted(w, np.sqrt(v))
    np.testing.assert_allclose(b / np.sqrt(np.mean(b**2)), best / np.sqrt(np.mean(best**2)), 2e-3)
    assert np.mean(b**2) == pytest.approx(1.0, rel=1e-4)

    box = make("dpopt_box")
    advance(box, rng, 20)
    w = flat(box.importances())
    clipping_set = box.clipping_set()
    s = flat(clipping_set.noise_stddev(1.0, len(SHAPES)))
    corner = [tf.fill((1, *shape), 1e6) for shape in SHAPES.values()]
    c = flat(clipping_set.clip(corner))
    np.testing.assert_allclose(s, least_weighted(w, c), 2e-3)


def test_the_solver_tells_a_wrong_exponent():
    w, c = np.linspace(0.1, 2.0, 9), np.linspace(3.0, 0.5, 9)
    s = least_weighted(w, c)
    wrong = (c**2 * w) ** (1 / 3)  # the print's: more noise where it matters
    wrong *= np.sqrt(np.sum(c**2 / wrong**2))
    assert np.sum(w * s) < 0.98 * np.sum(w * wrong)


def test_important_coordinates_get_less_noise():
    w = [np.linspace(0.05, 2.0, math.prod(s)).reshape(s) for s in SHAPES.values()]
    w[-1] = np.array(1.0)
    for clipping in ("ellipsoid", "local"):
        optimizer = built(dp.DPOPT(noise_multiplier=SIGMA, directions=w, clipping=clipping))
        stddevs = optimizer.clipping_set().noise_stddev(SIGMA, len(SHAPES))
        kernel = np.broadcast_to(stddevs[0], SHAPES["first/kernel"]).reshape(-1)
        assert np.all(np.diff(kernel) < 0)
    printed = built(dp.DPOPT(noise_multiplier=SIGMA, directions=w, variant="printed"))
    stddevs = printed.clipping_set().noise_stddev(SIGMA, len(SHAPES))
    assert np.all(np.diff(stddevs[0].numpy().reshape(-1)) > 0)
    assert printed.event(LAW) == dp_accounting.NonPrivateDpEvent()


def test_budgeted_directions_cost_their_own_release():
    x, y = data()
    optimizer = dp.DPOPT(
        0.5, directions="budgeted", direction_noise_multiplier=3.0, noise_multiplier=4.0
    )
    private = private_model(optimizer)
    private.fit(x, y, batch_size=60, epochs=1, verbose=0)
    law = private.step_law
    both = 1 / math.hypot(1 / 4.0, 1 / 3.0)
    assert private.ledger.entries[0].event == law.event(both)
    steps = private.ledger.steps
    assert private.epsilon(1e-5) == pytest.approx(
        accounting.epsilon(both, law.probability, steps, 1e-5)
    )
    alone = accounting.epsilon(4.0, law.probability, steps, 1e-5)
    assert private.epsilon(1e-5) > 1.1 * alone
    assert flat(optimizer._direction).std() > 0


def test_directions_that_nobody_charged_are_noticed():
    """A step that dies between its two releases."""
    optimizer = built(
        dp.DPOPT(directions="budgeted", direction_noise_multiplier=3.0, noise_multiplier=4.0)
    )
    zeros = [tf.zeros(s) for s in SHAPES.values()]
    assert optimizer.uncharged_releases == 0
    optimizer._release_directions(zeros, dp.clipping.L2Ball(1.0))
    assert optimizer.uncharged_releases == 1
    # A sum that was clipped before, or without, the directions of its lot.
    with pytest.raises(RuntimeError, match="private_step"):
        optimizer.apply_private(zeros, 10.0)


def test_budgeted_noise_has_its_std():
    """The std of 4,000 draws is within 5 % of σ_w·C: false alarms below 1e-5."""
    optimizer = dp.DPOPT(
        directions="budgeted",
        direction_noise_multiplier=3.0,
        noise_multiplier=4.0,
        l2_norm_clip=0.5,
        seed=9,
    )
    optimizer.build([keras.Variable(np.zeros((40, 100), np.float32))])
    optimizer._release_directions([tf.zeros((40, 100))], dp.clipping.L2Ball(0.5))
    first = optimizer._direction[0].numpy()
    assert first.std() == pytest.approx(1.5, rel=0.05)
    before = optimizer._trainable_variables[0].numpy()
    optimizer._in_step = True
    sums = dp.ClippedSums([tf.zeros((40, 100))], optimizer.clipping_set())
    optimizer.apply_private(sums, 10.0)
    main = (before - optimizer._trainable_variables[0].numpy()).reshape(-1)
    # Independent of the main release, though both come from one seed; 4.5/√4000 = 0.07.
    assert abs(np.corrcoef(first.reshape(-1), main)[0, 1]) < 0.07


def test_pruning_keeps_back_what_it_does_not_apply():
    arguments = {"directions": "uniform", "noise_multiplier": SIGMA, "seed": 4}
    dense = built(dp.DPOPT(1.0, **arguments))
    pruned = built(dp.DPOPT(1.0, pruning=0.6, **arguments))
    total = 0.0
    for _ in range(12):
        empty = [tf.zeros([0, *s]) for s in SHAPES.values()]
        total += step(dense, empty, 10.0)
        moved = step(pruned, empty, 10.0)
        share = np.mean(moved[: math.prod(SHAPES["first/kernel"])] != 0)
        assert share == pytest.approx(0.4, abs=0.02)
    applied = flat([v.numpy() for v in pruned._trainable_variables])
    np.testing.assert_allclose(applied - flat(pruned._residual), total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"directions": "other"}, "directions='other'"),
        ({"directions": [np.array([np.nan])]}, "directions"),
        ({"directions": [np.array([np.inf])]}, "directions"),
        ({"directions": []}, "directions"),
        ({"directions": 3}, "directions=3"),
        ({"directions": ["a"]}, "directions"),
        ({"directions": "budgeted"}, "direction_noise_multiplier=None"),
        ({"direction_noise_multiplier": 1.0}, r"direction_noise_multiplier=1\.0"),
        (
            {"directions": "budgeted", "direction_noise_multiplier": 0},
            "direction_noise_multiplier=0",
        ),
        ({"direction_decay": 1.0}, r"direction_decay=1\.0"),
        ({"pruning": 1.0}, r"pruning=1\.0"),
        ({"variant": "other"}, "variant='other'"),
        ({"prior": "raw"}, 'prior="raw"'),
    ],
)
def test_bad_arguments_of_dpopt(bad, match):
    with pytest.raises(ValueError, match=match):
        dp.DPOPT(noise_multiplier=1.0, **bad)


def test_directions_of_the_wrong_shape():
    optimizer = dp.DPOPT(noise_multiplier=1.0, directions=[np.ones(3)])
    with pytest.raises(ValueError, match=r"directions have the shapes \[\(3,\)\]"):
        optimizer.build(make_variables())


# Any Keras optimizer.


@pytest.mark.parametrize("name", ["Nadam", "Adadelta", "Adagrad", "Adamax", "AdamW", "Lion"])
def test_any_keras_optimizer(name):
    """The update is Keras's own on the release."""
    rule = getattr(keras.optimizers, name)
    private_class = dp.make_private(rule)
    assert dp.make_private(rule) is private_class
    optimizer = built(private_class(learning_rate=0.1, noise_multiplier=0.0, allow_no_noise=True))
    plain = rule(learning_rate=0.1)
    variables = make_variables()
    plain.build(variables)
    rng = np.random.default_rng(6)
    for _ in range(3):
        grads = random_grads(rng, 5)
        sums = optimizer.clipping_set().clipped_sum(grads, tf.ones([5]))
        optimizer.apply_private(sums, 5.0)
        plain.apply([s / 5.0 for s in sums], variables)
    for a, b in zip(optimizer._trainable_variables, variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match=f"DP{name} takes no raw gradients"):
        optimizer.apply([s / 5.0 for s in sums])


def test_private_classes_are_serialised_under_their_own_names():
    private_class = dp.make_private(keras.optimizers.Nadam)
    assert private_class.__name__ == "DPNadam"
    config = keras.optimizers.serialize(private_class(noise_multiplier=2.0, learning_rate=0.3))
    assert config["registered_name"] == "tf_adadp>DPNadam"
    again = keras.optimizers.deserialize(config)
    assert type(again) is private_class
    assert again.noise_multiplier == 2.0
    assert float(again.learning_rate) == pytest.approx(0.3)
    assert dp.make_private(keras.optimizers.SGD) is dp.DPSGD


@keras.saving.register_keras_serializable("tests")
class HalfSGD(keras.optimizers.SGD):
    """Somebody's own rule: half of SGD's step."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, 0.5 * learning_rate)


def test_an_optimizer_of_ones_own():
    private_class = dp.make_private(HalfSGD)
    optimizer = built(private_class(learning_rate=1.0, noise_multiplier=0.0, allow_no_noise=True))
    grads = random_grads(np.random.default_rng(0), 3, 1e-3)
    expected = -0.5 * rows_of(grads).mean(0)
    np.testing.assert_allclose(step(optimizer, grads, 3.0), expected, rtol=1e-4, atol=1e-9)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is private_class


@pytest.mark.parametrize(
    "bad",
    [keras.optimizers.Nadam(), keras.layers.Dense, dp.DPSGD, keras.optimizers.LossScaleOptimizer],
)
def test_what_cannot_be_made_private(bad):
    with pytest.raises(TypeError, match="optimizer_class"):
        dp.make_private(bad)


# All of them.

NEW = (
    "autosgd",
    "automatic_per_layer",
    "automatic_adadp",
    "adaclip",
    "adaclip_free",
    "dpopt",
    "dpopt_uniform",
    "dpopt_box",
    "dpopt_public",
    "dpnadam",
)


@pytest.mark.parametrize("name", NEW)
def test_configs(name):
    optimizer = make(name)
    config = optimizer.get_config()
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer)
    assert str(again.get_config()) == str(config)


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    "make_one",
    [
        lambda: dp.AutoSGD(0.5, noise_multiplier=1.0),
        lambda: dp.AdaCliP(0.5, noise_multiplier=1.0),
        lambda: dp.AdaCliP(0.5, scale="free", noise_multiplier=1.0),
        lambda: dp.DPOPT(0.5, noise_multiplier=1.0, pruning=0.5),
        lambda: dp.DPOPT(0.5, noise_multiplier=1.0, clipping="local"),
        lambda: dp.DPOPT(
            0.5, noise_multiplier=1.0, directions="budgeted", direction_noise_multiplier=2.0
        ),
        lambda: dp.make_private(keras.optimizers.Adadelta)(noise_multiplier=1.0),
    ],
)
def test_a_model_trains_and_comes_back(make_one, tmp_path):
    x, y = data()
    private = private_model(make_one())
    private.fit(x, y, batch_size=60, epochs=1, verbose=0)
    assert all(np.all(np.isfinite(w)) for w in private.get_weights())
    path = tmp_path / "model.keras"
    private.save(path)
    again = dp.load_model(path)
    for a, b in zip(private.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    again.fit(x, y, batch_size=60, epochs=1, verbose=0)
    assert again.ledger.steps == 2 * private.ledger.steps
    assert again.epsilon(1e-5) > private.epsilon(1e-5)
