"""The candidate whose tensors have rates of their own: against its formula, and a run."""

import math

import numpy as np

from benchmarks import adadp_rates
from tests.benchmarks.test_adadp_options import NO_NOISE, built, flat, releases, weights
from tests.helpers import data, private_model
from tests.optimizers.cases import SHAPES

ENDS = np.cumsum([math.prod(shape) for shape in SHAPES.values()])


def by_tensor(vector):
    return np.stack([np.sum(part) for part in np.split(vector, ENDS[:-1])])


def each(values):
    """One value a tensor, as a vector over coordinates."""
    return np.repeat(values, [math.prod(shape) for shape in SHAPES.values()])


def test_factors_and_weights_against_numpy():
    optimizer = built(
        adadp_rates.OvershootRate, scale_step=False, caution=2.0, noise_multiplier=0.05
    )
    found, observe = [], optimizer._observe

    def recording(*arguments):
        observe(*arguments)
        found.append(optimizer._factors.numpy())

    optimizer._observe = recording
    seen = releases(optimizer, 8)
    v = theta = 0.0
    before = np.zeros(len(seen[0][0]))
    gains = np.zeros(len(SHAPES))
    both = set()
    for t, (g, s, _, rate) in enumerate(seen):
        moved = theta - before
        rate = rate * np.sqrt(1 - 0.9 ** (t + 1))
        slopes = by_tensor(g * moved)
        if t == 0:
            start = 1 / np.sqrt(1 + 2.0 * max(np.sum(g**2) / np.sum(s**2) - 1, 0))
            factors = np.full(len(SHAPES), max(start, 0.1))
        else:
            allowed = 0.7 * np.maximum(gains, 0) + 2 * np.sqrt(by_tensor((s * moved) ** 2))
            room = (allowed - slopes) / (allowed + np.abs(slopes)) if t > 1 else np.ones(4)
            both |= set(np.sign(room))
            factors = np.minimum(1, factors * np.exp(np.where(room > 0, 0.3, 0.5) * room))
        np.testing.assert_allclose(found[t], factors, rtol=2e-3)
        v = 0.9 * v + 0.1 * g**2
        gains = rate * factors * by_tensor((g**2 - s**2) / np.sqrt(v))
        before, theta = theta, theta - rate * each(factors) * g / np.sqrt(v + 1e-7)
    assert both == {-1.0, 1.0}  # rates grew, and fell
    np.testing.assert_allclose(weights(optimizer), theta, rtol=2e-3, atol=1e-6)


def test_without_noise_it_starts_slowly_and_stays_finite():
    optimizer = built(adadp_rates.OvershootRate, **NO_NOISE)
    releases(optimizer, 1)
    np.testing.assert_allclose(optimizer._factors.numpy(), 0.1, rtol=1e-6)
    releases(optimizer, 5)
    assert np.all(np.isfinite(flat([optimizer._factors.value, weights(optimizer)])))


def test_it_trains():
    x, y = data(200)
    model = private_model(adadp_rates.OvershootRate(noise_multiplier=0.5, seed=1))
    before = model.evaluate(x, y, verbose=0)
    model.fit(x, y, batch_size=50, epochs=10, verbose=0)
    assert np.ravel(model.evaluate(x, y, verbose=0))[0] < 0.9 * np.ravel(before)[0]
