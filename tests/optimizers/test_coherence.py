"""A rate that falls where examples agree: the estimate, the factor, the step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import data, private_model
from tests.optimizers.cases import SHAPES, SIGMA, advance, make, random_grads, step
from tf_adadp.accounting import PoissonSampling
from tf_adadp.optimizers.coherence import coherence_of

NO_NOISE = {"noise_multiplier": 0, "allow_no_noise": True}


def of_mean(optimizer, grads):
    """‖mean of the clipped gradients / b‖², in float64."""
    k = optimizer.clipping_set()
    scales = k.noise_stddev(1.0, len(SHAPES))
    clipped = [v.numpy().astype(np.float64).mean(0) for v in k.clip(grads)]
    return sum(np.sum((v / b.numpy()) ** 2) for v, b in zip(clipped, scales, strict=False))


@pytest.mark.parametrize("name", ["coherent_adadp", "coherent_dprmsprop", "dpsgd_per_layer"])
def test_without_noise_it_is_the_square_of_the_mean(name):
    optimizer = make(name, **NO_NOISE)
    rng = np.random.default_rng(0)
    if name == "coherent_adadp":
        optimizer = make(name)  # its ellipsoid takes shape
        advance(optimizer, rng, 8)
    grads, k = random_grads(rng, 30), optimizer.clipping_set()
    sums = k.clipped_sum(grads, tf.ones([30]))
    stddevs = [0.0 * s for s in k.noise_stddev(1.0, len(SHAPES))]
    found, deviation = coherence_of(k, [s / 30 for s in sums], stddevs, len(SHAPES))
    np.testing.assert_allclose(found, of_mean(optimizer, grads), rtol=1e-4)
    assert float(deviation) == 0.0


def test_the_estimate_has_no_bias_and_the_deviation_that_it_says():
    """2,000 releases: off by 5 standard errors once in 10⁶ times, by 10 % of the std in 10⁸."""
    optimizer = make("coherent_adadp")
    rng = np.random.default_rng(1)
    advance(optimizer, rng, 8)
    grads, k = random_grads(rng, 30), optimizer.clipping_set()
    sums, stddevs = k.clipped_sum(grads, tf.ones([30])), k.noise_stddev(SIGMA, len(SHAPES))

    @tf.function
    def draw(number):
        released, of_mean = optimizer._with_noise(sums, stddevs, 30.0, number)
        return coherence_of(k, released, of_mean, len(SHAPES))

    found = np.array([draw(tf.constant(i, tf.int64)) for i in range(2000)])
    wanted, deviation = of_mean(optimizer, grads), found[0, 1]
    # The signal adds 4·(signal · noise)², of which the deviation, for no signal, knows nothing.
    spread = np.sqrt(deviation**2 + 4 * wanted * (SIGMA / 30) ** 2)
    assert abs(found[:, 0].mean() - wanted) < 5 * spread / np.sqrt(2000)
    assert abs(found[:, 0].std() / spread - 1) < 0.1


def test_examples_that_agree_lower_the_rate_and_others_do_not():
    rng = np.random.default_rng(0)
    agreeing = [tf.repeat(100 * g, 50, axis=0) for g in random_grads(rng, 1)]
    optimizer = make("coherent_adadp", **NO_NOISE)
    step(optimizer, agreeing)
    np.testing.assert_allclose(optimizer.step_logs()["rate_factor"], 0.05, rtol=1e-4)
    optimizer = make("coherent_adadp", **NO_NOISE)
    step(optimizer, random_grads(rng, 50))
    assert float(optimizer.step_logs()["rate_factor"]) == 1.0


def test_the_factor_comes_back_as_the_mean_forgets():
    rng = np.random.default_rng(0)
    optimizer = make("coherent_dprmsprop", **NO_NOISE)
    step(optimizer, [tf.repeat(100 * g, 50, axis=0) for g in random_grads(rng, 1)])
    factors = [float(optimizer.step_logs()["rate_factor"])]
    for _ in range(8):
        step(optimizer, [0.0 * g for g in random_grads(rng, 50)])
        factors.append(float(optimizer.step_logs()["rate_factor"]))
    # ρ² = 1 at first; the mean is 0.3, then 0.7 times that at every step.
    wanted = [0.05, *np.minimum(0.05 / (0.3 * 0.7 ** np.arange(1, 9)), 1)]
    np.testing.assert_allclose(factors, wanted, rtol=1e-3)


@pytest.mark.extended
def test_noise_alone_seldom_lowers_the_rate():
    """300 lots without examples; where nothing but noise is released ρ² passes τ' once in 40 times,
    so that 300 steps have more than 25 of them less often than once in 10⁶ times."""
    optimizer = make("coherent_dprmsprop", seed=4)
    zeros = [tf.zeros((0, *shape)) for shape in SHAPES.values()]
    factors = []
    for _ in range(300):
        sums = optimizer.clipping_set().clipped_sum(zeros, tf.zeros([0]))
        optimizer.apply_private(sums, 3.0)
        factors.append(float(optimizer.step_logs()["rate_factor"]))
    assert 0 < sum(f < 1 for f in factors) <= 25


@pytest.mark.parametrize("name", ["ADADP", "DPRMSprop"])
def test_the_step_is_that_of_the_rate_times_the_factor(name):
    rng = np.random.default_rng(0)
    grads = [tf.repeat(g, 20, axis=0) for g in random_grads(rng, 1)]
    moved = {}
    for limit in (0.5, None):
        optimizer = getattr(dp, name)(0.1, coherence_limit=limit, noise_multiplier=0.5, seed=1)
        variables = [keras.Variable(np.zeros(s, np.float32)) for s in SHAPES.values()]
        optimizer.build(variables)
        step(optimizer, grads)
        moved[limit] = [v.numpy() for v in variables]
        if limit is not None:
            factor = float(optimizer.step_logs()["rate_factor"])
    assert 0.4 < factor < 1
    for a, b in zip(moved[0.5], moved[None], strict=True):
        np.testing.assert_allclose(a, factor * b, rtol=1e-5)


@pytest.mark.parametrize("arguments", [{}, {"clipping": "local"}, {"microbatch_size": 2}])
def test_it_trains_at_the_same_price_and_is_saved(arguments, tmp_path):
    x, y = data()
    limited = dp.ADADP(coherence_limit=1e-3, noise_multiplier=1.0, **arguments)
    private = private_model(limited)
    history = private.fit(x, y, batch_size=30, epochs=2, verbose=0).history
    assert 0 < history["rate_factor"][-1] <= 1
    law = PoissonSampling(120, 30)
    assert limited.event(law) == dp.ADADP(noise_multiplier=1.0, **arguments).event(law)
    private.save(tmp_path / "model.keras")
    loaded = dp.load_model(tmp_path / "model.keras").optimizer
    assert loaded.coherence_limit == 1e-3
    assert float(loaded._coherence.numpy()) == float(limited._coherence.numpy()) != 0


@pytest.mark.parametrize("limit", [0, -1, 2, np.nan, "0.05"])
def test_the_limit_is_checked(limit):
    with pytest.raises(ValueError, match="coherence_limit"):
        dp.ADADP(coherence_limit=limit, noise_multiplier=1.0)


def test_the_paper_to_the_letter_has_none():
    with pytest.raises(ValueError, match='coherence_limit=0.05 with prior="raw"'):
        dp.ADADP(coherence_limit=0.05, prior="raw", noise_multiplier=1.0)
