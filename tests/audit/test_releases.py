"""Audits of optimizers through their own release path. Seeds are fixed.

A bound is taken at 99.9 %: over random seeds, each "bound ≤ claim" of a sound mechanism would raise
a false alarm less than once in a thousand.
"""

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tf_adadp import accounting, audit

DELTA, CONFIDENCE = 1e-5, 0.999
LAW = accounting.PoissonSampling(num_examples=1, expected_size=1)


def built(optimizer, size=3):
    optimizer.build([keras.Variable(np.zeros(size, np.float32), trainable=True, name="w")])
    return optimizer


def claim(optimizer, steps=1, law=LAW):
    ledger = accounting.PrivacyLedger()
    optimizer.charge(ledger, law, steps)
    return ledger.epsilon(DELTA, "pld")


def audited(optimizer, canary=(100.0, -30.0, 50.0), **arguments):
    given = {"draws": 5000, "delta": DELTA, "confidence": CONFIDENCE, "seed": 1}
    return audit.audit_optimizer(optimizer, [np.array(canary)], **{**given, **arguments})


@pytest.fixture(scope="module")
def dpsgd():
    """DP-SGD at ε = 4 in one step, 200,000 releases on each data set."""
    sigma = accounting.calibrate_noise_multiplier(4.0, DELTA, 1.0, 1, "pld")
    optimizer = built(dp.DPSGD(noise_multiplier=sigma))
    return sigma, claim(optimizer), audited(optimizer, draws=200_000, jit_compile=True)


def test_an_adversarial_canary_comes_near_the_claim(dpsgd):
    _, claimed, found = dpsgd
    assert claimed / 1.8 < found.epsilon <= claimed
    estimate = audit.gaussian_epsilon_estimate(found.scores, found.neighbor_scores, DELTA)
    assert estimate == pytest.approx(claimed, rel=0.03)


def test_a_false_claim_is_refuted(dpsgd):
    """A ledger that believes in twice the noise."""
    sigma, _, found = dpsgd
    assert found.epsilon > accounting.epsilon(2 * sigma, 1.0, 1, DELTA, "pld")


def test_the_gaussian_bound_sees_a_false_claim_of_a_tenth(dpsgd):
    """The 95 % bound of 200,000 releases is 1/1.10 of the claim at least; it sees a noise / 0.9."""
    sigma, claimed, found = dpsgd
    bound = audit.gaussian_epsilon_lower_bound(found.scores, found.neighbor_scores, DELTA)
    assert claimed / 1.10 < bound.epsilon <= claimed
    false = accounting.epsilon(sigma / 0.9, 1.0, 1, DELTA, "pld")
    assert bound.epsilon > false > found.epsilon


@pytest.mark.extended
def test_the_law_of_sampled_releases_sees_less_noise():
    """q = 0.1, 4 steps, 10⁵ releases, at 95 %: honest, and with 0.8 of the noise charged."""
    q, steps = 0.1, 4
    law = accounting.PoissonSampling(num_examples=1000, expected_size=100)
    sigma = accounting.calibrate_noise_multiplier(1.0, DELTA, q, steps, "pld")
    event = dp_accounting.SelfComposedDpEvent(law.event(sigma), steps)
    for share in (1.0, 0.8):
        optimizer = built(dp.DPSGD(noise_multiplier=share * sigma))
        sampled = {"sampling_probability": q, "steps": steps, "jit_compile": True}
        found = audited(optimizer, **sampled, draws=100_000)
        pair = found.scores, found.neighbor_scores
        assert audit.law_epsilon_lower_bound(*pair, event, DELTA).refuted == (share < 1)
        assert audit.epsilon_lower_bound(*pair, DELTA).epsilon < claim(
            built(dp.DPSGD(noise_multiplier=sigma)), steps, law
        )


def test_scores_are_the_privacy_loss(dpsgd):
    """Λ of a Gaussian mechanism is N(∓1/(2σ²), 1/σ²), in a graph as under XLA; six standard errors
    are a false alarm of 2e-9."""
    sigma, _, compiled = dpsgd
    plain = audited(built(dp.DPSGD(noise_multiplier=sigma)), draws=1000)
    for found in (plain, compiled):
        for scores, sign in ((found.scores, -1), (found.neighbor_scores, 1)):
            error = 6 / (sigma * np.sqrt(len(scores)))
            assert np.mean(scores) == pytest.approx(sign / (2 * sigma**2), abs=error)
            assert np.std(scores) == pytest.approx(1 / sigma, abs=error)


def test_sampling_is_audited_too():
    """The bound at q = 0.001 is below the amplified claim; without the sampling it would not be."""
    law = accounting.PoissonSampling(num_examples=1000, expected_size=1)
    optimizer = built(dp.DPSGD(noise_multiplier=0.5))
    claimed = claim(optimizer, law=law)
    assert audited(optimizer, sampling_probability=0.001, draws=1000).epsilon <= claimed
    assert audited(optimizer, draws=1000).epsilon > claimed


def test_adaptive_state_is_followed_over_steps():
    """Other examples move prior and shape; the canary is scored under the set of each step."""
    optimizer = built(dp.ADADP(noise_multiplier=1.0, warmup_steps=1, prior_decay=0.5))
    others = [np.array([[0.5, 0.0, 0.1], [0.4, 0.1, -0.1]])]
    found = audited(optimizer, gradients=others, steps=2, draws=600)
    assert found.epsilon <= claim(optimizer, 2)
    estimate = audit.gaussian_epsilon_estimate(found.scores, found.neighbor_scores, DELTA)
    # Each step is a whole Gaussian mechanism, whatever its shape: six standard errors.
    assert estimate == pytest.approx(claim(optimizer, 2), rel=0.3)


def test_an_audit_leaves_the_optimizer_as_it_was():
    optimizer = built(dp.DPAdam(noise_multiplier=1.0))
    optimizer.apply_private([tf.ones(3)], 1.0)
    before = [v.numpy() for v in [*optimizer.variables, *optimizer._trainable_variables]]
    key, releases = optimizer._noise_key.key.numpy(), optimizer._noise_key.releases
    audited(optimizer, draws=10)
    after = [v.numpy() for v in [*optimizer.variables, *optimizer._trainable_variables]]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(key, optimizer._noise_key.key.numpy())
    assert optimizer._noise_key.releases == releases
    assert "_with_noise" not in vars(optimizer)


def test_every_run_starts_from_the_same_state_with_other_noise():
    optimizer = built(dp.DPSGD(noise_multiplier=1.0), size=1)
    weights = optimizer._trainable_variables[0]

    def run(neighbor):
        start = tf.reduce_sum(weights.value)
        optimizer.apply_private([tf.zeros(1)], 1.0)
        return tf.where(start == 0.0, tf.reduce_sum(weights.value), np.nan)

    scores, others = audit.draw_scores(optimizer, run, 100, seed=3)
    assert np.isfinite(scores).all()
    assert len(np.unique([scores, others])) == 200
    again, _ = audit.draw_scores(optimizer, run, 100, seed=3)
    np.testing.assert_array_equal(scores, again)
    fresh, _ = audit.draw_scores(optimizer, run, 100)
    assert not np.isin(fresh, scores).any()


def test_what_is_refused():
    with pytest.raises(ValueError, match="give one of tf_adadp's optimizers"):
        audited(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="is not built"):
        audited(dp.DPSGD(noise_multiplier=1.0))
    with pytest.raises(ValueError, match="seed=3"):
        audited(built(dp.DPSGD(noise_multiplier=1.0, seed=3)))
    optimizer = built(dp.DPSGD(noise_multiplier=1.0))
    with pytest.raises(ValueError, match=r"canary of shapes \[\(2,\)\]"):
        audited(optimizer, canary=[1.0, 2.0])
    with pytest.raises(ValueError, match="sampling_probability=0"):
        audited(optimizer, sampling_probability=0)
    with pytest.raises(ValueError, match="draws=0"):
        audited(optimizer, draws=0)
