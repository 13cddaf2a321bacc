"""`secure_noise` reaches every place where an optimizer, or DPPCA, adds noise to a sum."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import data, private_model
from tf_adadp import noise

X, Y = data(rows=60)
ENERGY = {"energy_data": (X[50:], Y[50:]), "energy_noise_multiplier": 1.0, "energy_clip": 1.0}
MADE = {  # and how many gradients and single numbers the first two steps release
    "dpsgd": (lambda **k: dp.DPSGD(noise_multiplier=1.0, **k), (2, 0)),
    "adadp_local": (lambda **k: dp.ADADP(noise_multiplier=1.0, clipping="local", **k), (2, 0)),
    "autosgd": (lambda **k: dp.AutoSGD(noise_multiplier=1.0, **k), (2, 0)),
    "adaclip": (lambda **k: dp.AdaCliP(noise_multiplier=1.0, **k), (2, 0)),
    "dpopt": (
        lambda **k: dp.DPOPT(
            noise_multiplier=1.0, directions="budgeted", direction_noise_multiplier=1.0, **k
        ),
        (4, 0),
    ),
    "sadpsgd": (lambda **k: dp.SADPSGD(noise_multiplier=1.0, **ENERGY, **k), (2, 2)),
    "agd": (lambda **k: dp.AGD(total_epsilon=5.0, total_delta=1e-3, **k), (1, 0)),
    "dpnadam": (
        lambda **k: dp.make_private(keras.optimizers.Nadam)(noise_multiplier=1.0, **k),
        (2, 0),
    ),
}


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", MADE)
def test_every_draw_of_a_secure_optimizer_is_of_64_bits(name, monkeypatch):
    make, expected = MADE[name]
    drawn, dtypes = [], set()
    gaussian = noise.gaussian

    def record(key, step, index, shape, stddev, dtype=tf.float32):
        drawn.append(math.prod(shape))
        dtypes.add(dtype)
        return gaussian(key, step, index, shape, stddev, dtype)

    monkeypatch.setattr(noise.draws, "gaussian", record)
    private = private_model(make(secure_noise=True), run_eagerly=True)
    private.fit(X[:50], Y[:50], batch_size=25, epochs=1, steps_per_epoch=2, verbose=0)
    weights = sum(v.shape.num_elements() for v in private.trainable_variables)
    gradients, numbers = expected
    assert sum(drawn) == gradients * weights + numbers
    assert dtypes == {tf.float64}
    assert all(np.isfinite(w).all() for w in private.get_weights())
    config = private.optimizer.get_config()
    assert config["secure_noise"] is True
    restored = type(private.optimizer).from_config(config)
    assert restored.secure_noise is True
    with pytest.raises(AttributeError, match="secure_noise of a .* is read-only"):
        restored.secure_noise = False


def test_it_is_off_unless_asked_for_and_takes_no_other_values():
    assert dp.DPSGD(noise_multiplier=1.0).secure_noise is False
    with pytest.raises(ValueError, match="secure_noise='yes': give True or False"):
        dp.DPSGD(noise_multiplier=1.0, secure_noise="yes")
    with pytest.raises(ValueError, match="secure_noise=1: give True or False"):
        dp.DPPCA(1, 1.0, secure_noise=1)


def test_released_stddevs_include_what_rounding_costs():
    optimizer = dp.DPSGD(noise_multiplier=2.0, l2_norm_clip=0.5, secure_noise=True)
    weights = keras.Variable(np.zeros((300, 200), np.float32))
    optimizer.build([weights])
    released, (stddev,) = optimizer._noisy_mean(
        optimizer.clipping_set(), [tf.zeros((300, 200))], 10.0
    )
    factor = 1 + 2.0 * 2.0**-24 * np.sqrt(60_000)
    assert float(stddev) == pytest.approx(2.0 * 0.5 / 10 * factor, rel=1e-6)
    assert np.std(released[0]) == pytest.approx(0.1, rel=5 / np.sqrt(2 * 60_000))  # 5σ


def test_secure_components_lie_on_the_grid():
    x = np.random.default_rng(0).normal(size=(50, 6))
    pca = dp.DPPCA(6, 4.0, seed=1, secure_noise=True).fit(x)
    entries = (pca.components_.T * pca.explained_variance_) @ pca.components_
    multiples = entries / (4.0 * 2.0**-24)
    assert np.abs(multiples - np.round(multiples)).max() < 1e-4  # eigenvectors are rounded
    again = dp.DPPCA.from_config(pca.get_config())
    assert again.secure_noise is True
    np.testing.assert_array_equal(again.fit(x).components_, pca.components_)
    assert np.any(dp.DPPCA(6, 4.0, seed=2, secure_noise=True).fit(x).components_ != pca.components_)
