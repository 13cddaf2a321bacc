"""Rates that tensors find by themselves: against the formula, at the edges, and in training."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import data, private_model
from tests.optimizers.cases import OPTIMIZERS, SHAPES, make, make_variables, random_grads, step
from tf_adadp.accounting import PoissonSampling

NO_NOISE = {"noise_multiplier": 0, "allow_no_noise": True}
ENDS = np.cumsum([math.prod(shape) for shape in SHAPES.values()])


def flat(tensors):
    """Tensors that broadcast to the variables, as one vector."""
    pairs = zip(tensors, SHAPES.values(), strict=True)
    return np.concatenate([np.ravel(np.broadcast_to(t, s)) for t, s in pairs]).astype(np.float64)


def by_tensor(vector):
    return np.stack([np.sum(part) for part in np.split(vector, ENDS[:-1])])


def factors(optimizer):
    return optimizer._rate_factors.numpy()


class Expected:
    """`OvershootRate` in float64, for one vector of all coordinates."""

    def __init__(self):
        self.v = self.theta = self.before = 0.0
        self.gains = np.zeros(len(SHAPES))
        self.t = 0

    def step(self, g, s, r):
        rate = 0.032 / np.sqrt(1 + self.t / 20) * np.sqrt(1 - 0.9 ** (self.t + 1))
        moved = self.theta - self.before
        slopes = by_tensor(g * moved)
        if self.t == 0:
            ratio = max(np.sum(g**2) / np.sum(s**2) - 1, 0)
            f = np.full(len(SHAPES), max(1 / np.sqrt(1 + 1000 * ratio), 0.1))
        else:
            noise = 2 * np.sqrt(by_tensor((s * moved) ** 2))
            allowed = 1.0 * np.maximum(self.gains, 0) + noise
            room = (allowed - slopes) / (allowed + np.abs(slopes))
            room = room if self.t > 1 else np.ones(len(SHAPES))
            up = 0.1 + 0.2 * noise / allowed
            f = np.clip(self.f * np.exp(np.where(room > 0, up, 0.5) * room), 0.1, 1)
            self.room = room
        self.v = 0.9 * self.v + 0.1 * g**2
        self.gains = rate * f * by_tensor((g**2 - s**2) / r / np.sqrt(self.v + 1e-7))
        each = np.repeat(f, np.diff([0, *ENDS]))
        self.before = self.theta
        self.theta = self.theta - rate * each / r * g / np.sqrt(self.v + 1e-7)
        self.f, self.t = f, self.t + 1


@pytest.mark.parametrize("name", ["adadp", "adadp_local", "dprmsprop", "quantile_adadp"])
@pytest.mark.parametrize("sigma", [0.02, 3.0])
def test_factors_and_weights_against_numpy(name, sigma):
    optimizer = OPTIMIZERS[name](noise_multiplier=sigma, seed=3)
    optimizer.build(make_variables())
    expected, observe, seen = Expected(), optimizer._observe, []

    def recording(released, stddevs):
        seen.append((flat(released), flat(stddevs)))
        observe(released, stddevs)

    optimizer._observe = recording
    rng, signs = np.random.default_rng(1), set()
    for t in range(12):
        r = flat(optimizer.noise_shape()) if hasattr(optimizer, "noise_shape") else 1.0
        step(optimizer, random_grads(rng, 20))
        expected.step(*seen[-1], r)
        signs |= set(np.sign(expected.room)) if t else set()
        np.testing.assert_allclose(factors(optimizer), expected.f, rtol=5e-3)
    np.testing.assert_allclose(
        flat([v.numpy() for v in optimizer._trainable_variables]),
        expected.theta, rtol=5e-3, atol=1e-5,
    )  # fmt: skip
    assert signs == ({-1.0, 1.0} if sigma < 1 else {1.0})  # noise alone is no overshoot


def quadratic(curvatures, steps, **arguments):
    """Trains ½·Σ c·(θ − 1)² per tensor from 0, without noise; returns θ and the factors."""
    optimizer = dp.ADAL(l2_norm_clip=1e6, **NO_NOISE, **arguments)
    variables = [keras.Variable(np.zeros(20, np.float32)) for _ in curvatures]
    optimizer.build(variables)
    seen = []
    for _ in range(steps):
        pairs = zip(curvatures, variables, strict=True)
        step(optimizer, [tf.convert_to_tensor(c * (v.value - 1.0))[None] for c, v in pairs])
        seen.append(factors(optimizer))
    return [v.numpy() for v in variables], np.array(seen)


def test_a_tensor_at_its_minimum_slows_down_and_others_do_not():
    (near, far), seen = quadratic([1.0, 1.0], 60)
    assert np.allclose(near, far)
    optimizer = dp.ADAL(l2_norm_clip=1e6, **NO_NOISE)
    there = keras.Variable(np.full(20, 0.999, np.float32))
    away = keras.Variable(np.full(20, -50.0, np.float32))
    optimizer.build([there, away])
    for _ in range(40):
        step(optimizer, [tf.convert_to_tensor(v.value - 1.0)[None] for v in (there, away)])
    assert factors(optimizer)[1] == 1.0
    assert factors(optimizer)[0] < 0.5
    assert np.max(np.abs(there.numpy() - 1)) < 0.05


def test_the_scale_of_the_loss_does_not_matter():
    for scale in (1e-3, 1e3):
        found = quadratic([scale], 30)[1]
        np.testing.assert_allclose(found, quadratic([1.0], 30)[1], rtol=1e-2)


def test_noise_alone_lets_the_rate_grow_to_its_end():
    """Takes 300 lots without examples. A factor falls where noise exceeds two of its standard
    deviations, once in 44 times, and by 0.5·(S − a)/(S + a) then: six in a row, with which the
    mean of the four factors were below 0.3 after 20 steps, are less likely than 10⁻⁹."""
    optimizer = make("dprmsprop", seed=4)
    zeros = [tf.zeros((0, *shape)) for shape in SHAPES.values()]
    found = []
    for _ in range(300):
        sums = optimizer.clipping_set().clipped_sum(zeros, tf.zeros([0]))
        optimizer.apply_private(sums, 3.0)
        found.append(float(np.mean(factors(optimizer))))
    assert min(found[20:]) > 0.3
    assert np.mean(found[20:]) > 0.9


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_without_signal_or_noise_nothing_breaks(rows):
    optimizer = make("dprmsprop", **NO_NOISE)
    for _ in range(4):
        step(optimizer, [tf.zeros((rows, *shape)) for shape in SHAPES.values()], 3.0)
    assert np.all(np.isfinite(factors(optimizer)))
    for _ in range(4):
        step(optimizer, random_grads(np.random.default_rng(0), 3, scale=1e15))
    found = factors(optimizer)
    assert np.all((found >= 0.1) & (found <= 1))
    assert all(np.all(np.isfinite(v.numpy())) for v in optimizer._trainable_variables)


@pytest.mark.parametrize("name", ["ADADP", "ADAL"])
def test_a_given_rate_is_taken_as_it_is(name):
    make_one = getattr(dp, name)
    given, found = make_one(0.1, noise_multiplier=1.0), make_one(noise_multiplier=1.0)
    assert not given.finds_rate
    assert found.finds_rate
    assert given.get_config()["learning_rate"] == pytest.approx(0.1)
    assert found.get_config()["learning_rate"] is None
    assert type(found).from_config(found.get_config()).finds_rate
    rng = np.random.default_rng(0)
    given.build([keras.Variable(np.zeros(s, np.float32)) for s in SHAPES.values()])
    grads = random_grads(rng, 20)
    step(given, grads)
    # RMSprop's first step is rate/√(1 − ρ) where g̃² is far above its epsilon.
    moved = flat([v.numpy() for v in given._trainable_variables])
    assert np.median(np.abs(moved)) == pytest.approx(0.1 / np.sqrt(0.1), rel=1e-2)
    assert not dp.ADADP(prior="raw", noise_multiplier=1.0).finds_rate


@pytest.mark.parametrize("arguments", [{}, {"clipping": "local"}, {"microbatch_size": 2}])
def test_it_trains_at_the_same_price_and_is_saved(arguments, tmp_path):
    x, y = data()
    found = dp.ADADP(noise_multiplier=1.0, **arguments)
    private = private_model(found)
    private.fit(x, y, batch_size=30, epochs=2, verbose=0)
    assert np.all((factors(found) >= 0.1) & (factors(found) <= 1))
    law = PoissonSampling(120, 30)
    assert found.event(law) == dp.ADADP(0.1, noise_multiplier=1.0, **arguments).event(law)
    private.save(tmp_path / "model.keras")
    loaded = dp.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.finds_rate
    np.testing.assert_array_equal(factors(loaded.optimizer), factors(found))
    for a, b in zip(loaded.optimizer._previous, found._previous, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    # A second fit goes on where the first ended.
    loaded.fit(x, y, batch_size=30, epochs=1, verbose=0)
    assert loaded.optimizer.steps_taken == 12


@pytest.mark.parametrize("name", ["ADADP", "ADAL"])
def test_no_rate_is_set_where_one_is_found(name):
    found, given = (getattr(dp, name)(r, noise_multiplier=1.0) for r in (None, 0.1))
    for rate in (0.2, keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)):
        with pytest.raises(TypeError, match="compile again"):
            found.learning_rate = rate  # a schedule would be lost when it is saved
    given.learning_rate = 0.2
    assert float(given.learning_rate) == pytest.approx(0.2)
    assert float(found.learning_rate) == pytest.approx(0.032)


def test_without_variables_there_is_nothing_to_do():
    optimizer = dp.ADAL(noise_multiplier=1.0)
    optimizer.build([])
    optimizer.apply_private([], 3.0)
    assert optimizer.steps_taken == 0


@pytest.mark.parametrize("name", ["ADADP", "ADAL"])
def test_an_overflow_leaves_finite_weights(name):
    """Squares of a noise of std 1e19 are infinite in float32; RMSprop's step is not."""
    optimizer = getattr(dp, name)(noise_multiplier=1e9, l2_norm_clip=1e10)
    variable = keras.Variable(np.zeros(100, np.float32))
    optimizer.build([variable])
    for _ in range(3):
        step(optimizer, [tf.ones((1, 100))])
    assert np.all((factors(optimizer) >= 0.1) & (factors(optimizer) <= 1))
    assert np.all(np.isfinite(variable.numpy()))


def test_weights_that_are_set_anew_after_a_nan_train_again():
    optimizer = dp.ADAL(noise_multiplier=1.0)
    variable = keras.Variable(np.zeros(5, np.float32))
    optimizer.build([variable])
    for value in (0.0, np.nan, 0.0):
        variable.assign(np.full(5, value, np.float32))
        step(optimizer, [tf.ones((4, 5))])
    assert np.all(np.isfinite(factors(optimizer)))
    assert np.all(np.isfinite(variable.numpy()))
