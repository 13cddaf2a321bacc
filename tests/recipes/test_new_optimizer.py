"""The recipe "Add an optimizer" of CONTRIBUTING.md, followed for a method that is made up here.

The optimizer has nothing outside of this file: where a part of the package had to know it, a test
below would fail.
"""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, data, plain_model, private_model
from tests.optimizers.cases import SHAPES, SIGMA, advance, make_variables, random_grads
from tests.optimizers.test_sensitivity import moved_by
from tf_adadp import clipping
from tf_adadp.accounting import PoissonSampling, PrivacyLedger, epsilon
from tf_adadp.utils.checks import check_number

# tf_adadp/optimizers/layer_shares.py

_SMALLEST = 1e-6  # m_0


@keras.saving.register_keras_serializable(package="tests")
class LayerShares(dp.DPOptimizer, keras.optimizers.Adagrad):
    """Adagrad on a release that clips every variable in proportion to its past gradients.

        b_v = C·√(m_v / Σ_u m_u·d_u/D),   K = {g : Σ_v ‖g_v‖²/b_v² ≤ 1}
        m_v ← β·m_v + (1 − β)·max(mean(g̃_v²) − (noise std)², m_0)

    with d_v the size of variable v and D = Σ_v d_v; m starts at m_0 = 1e-6, which is DP-SGD's
    ball.

    Guarantee: b depends on past releases alone, and noise σ*·b fits K, so a step costs one Gaussian
    mechanism of multiplier σ*; see `DPOptimizer`.

    Args:
        learning_rate: η, a float or a Keras schedule.
        decay: β in [0, 1).
        **kwargs: see `DPOptimizer` (training needs noise_multiplier) and
            `keras.optimizers.Adagrad`.
    """

    def __init__(self, learning_rate: float = 0.1, *, decay: float = 0.9, **kwargs: Any):
        super().__init__(learning_rate, **kwargs)
        self.decay = check_number("decay", decay, at_least=0, below=1)

    def _build_private(self, variables):
        self._sizes = [math.prod(v.shape) for v in variables]
        self._mean_squares = [self._add_state((), f"square_{i}") for i in range(len(variables))]
        for m in self._mean_squares:
            m.assign(_SMALLEST)

    def clipping_set(self) -> clipping.ClippingSet:
        """Returns the ellipsoid of this step, from past releases."""
        m = [tf.convert_to_tensor(m.value) for m in self._mean_squares]
        total = tf.add_n([x * d for x, d in zip(m, self._sizes, strict=True)]) / sum(self._sizes)
        return clipping.Ellipsoid([self.l2_norm_clip * tf.sqrt(x / total) for x in m])

    def _observe(self, released: Sequence[tf.Tensor], stddevs: Sequence[tf.Tensor]):
        for m, g, std in zip(self._mean_squares, released, stddevs, strict=True):
            signal = tf.reduce_mean(tf.square(g)) - tf.reduce_mean(tf.square(std))
            m.assign(self.decay * m.value + (1.0 - self.decay) * tf.maximum(signal, _SMALLEST))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "decay": self.decay}


# Its tests.

DELTA = 1e-3
LOT = 30


def build(**arguments):
    optimizer = LayerShares(**{"noise_multiplier": SIGMA, **arguments})
    optimizer.build(make_variables())
    return optimizer


def scales(optimizer):
    stddevs = optimizer.clipping_set().noise_stddev(1.0, len(optimizer._mean_squares))
    return np.array([float(tf.reduce_max(s)) for s in stddevs])


def fit(optimizer):
    model = private_model(optimizer)
    model.fit(*data(), batch_size=LOT, epochs=2, verbose=0)
    return model


@pytest.fixture(scope="module")
def trained():
    return fit(LayerShares(noise_multiplier=1.0))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_one_example_moves_the_sum_by_at_most_one_over_sigma(size):
    optimizer = build()
    advance(optimizer, np.random.default_rng(5), 10)
    assert np.ptp(scales(optimizer)) > 0.1
    rng = np.random.default_rng(0)
    assert moved_by(optimizer, random_grads(rng, 2), random_grads(rng, 1, size)) <= 1 + 1e-5


def test_the_bound_is_reached():
    optimizer = build()
    advance(optimizer, np.random.default_rng(5), 10)
    example = random_grads(np.random.default_rng(0), 1, 1e6)
    nothing = [e[:0] for e in example]
    assert moved_by(optimizer, nothing, example) == pytest.approx(1.0, rel=1e-4)


def test_it_starts_as_dpsgd_and_keeps_the_mean_scale():
    optimizer = build(l2_norm_clip=2.0)
    assert scales(optimizer) == pytest.approx(2.0)
    advance(optimizer, np.random.default_rng(5), 10)
    sizes = [math.prod(s) for s in SHAPES.values()]
    assert np.average(scales(optimizer) ** 2, weights=sizes) == pytest.approx(4.0, rel=1e-5)


def test_its_state_is_a_function_of_its_releases():
    first, second, releases = build(), build(), []
    with_noise = first._noisy_mean

    def record(*args):
        releases.append(with_noise(*args))
        return releases[-1]

    first._noisy_mean = record
    advance(first, np.random.default_rng(5), 5)
    left = iter(releases)
    second._noisy_mean = lambda *args: next(left)
    advance(second, np.random.default_rng(6), 5)  # other gradients
    for a, b in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_fit_trains_and_charges_it(trained):
    optimizer, entries = trained.optimizer, trained.ledger.entries
    assert optimizer.releases == trained.ledger.steps == 8
    assert optimizer.uncharged_releases == 0
    assert {entry.origin for entry in entries} == {"LayerShares"}
    assert trained.epsilon(DELTA) == pytest.approx(epsilon(1.0, LOT / ROWS, 8, DELTA))
    assert np.ptp(scales(optimizer)) > 0


def test_it_covers_released_metrics():
    model = private_model(
        LayerShares(noise_multiplier=1.0),
        released_metrics=dp.ReleasedMetrics(noise_multiplier=5.0, loss_bound=5.0),
    )
    model.fit(*data(), batch_size=LOT, verbose=0)
    assert model.epsilon(DELTA) > epsilon(1.0, LOT / ROWS, 4, DELTA)


def test_it_is_saved_and_loaded(trained, tmp_path):
    trained.save(tmp_path / "model.keras")
    loaded = dp.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LayerShares
    assert loaded.optimizer.get_config() == trained.optimizer.get_config()
    for a, b in zip(loaded.optimizer.variables, trained.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert loaded.epsilon(DELTA) == trained.epsilon(DELTA)
    loaded.fit(*data(), batch_size=LOT, verbose=0)
    assert loaded.epsilon(DELTA) > trained.epsilon(DELTA)


def test_custom_loops_charge_it():
    model, ledger = plain_model(), PrivacyLedger()
    optimizer = LayerShares(noise_multiplier=1.0)
    lots = dp.PoissonLots(*data(), expected_size=LOT)
    for lot in lots.take(2, physical_batch_size=LOT):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)
    assert ledger.steps == optimizer.releases == 2
    assert ledger.entries[0].law == PoissonSampling(ROWS, LOT)


def test_the_guards_hold_without_a_word_of_its_own():
    optimizer = build()
    with pytest.raises(RuntimeError, match="LayerShares takes no raw gradients"):
        optimizer.apply([tf.zeros(s) for s in SHAPES.values()])
    with pytest.raises(AttributeError, match="decay of a LayerShares is read-only"):
        optimizer.decay = 0.5
    with pytest.raises(ValueError, match="decay=1: give a number"):
        LayerShares(decay=1)
    with pytest.raises(ValueError, match="sums without their clipping set"):
        optimizer.apply_private([tf.zeros(s) for s in SHAPES.values()], 10.0)
    with pytest.raises(ValueError, match="made without noise_multiplier"):
        private_model(LayerShares())
