"""Canaries in one training: coins, lots, ledger, and what the audit finds."""

import keras
import numpy as np
import pytest

import tf_adadp as dp
from tests.helpers import crossentropy, data, exact_sgd, plain_model, private_model
from tf_adadp import audit

pytestmark = pytest.mark.extended

M, DELTA = 200, 1e-5


def canaries(count=M):
    """Records that a model can only fit by heart: each an input of its own, a random label."""
    rng = np.random.default_rng(5)
    return np.eye(count, dtype=np.float32), rng.integers(0, 3, count).astype(np.int32)


def run(optimizer, epochs=4, seed=1):
    """A `DPModel` trained on 40 records and the canaries, and its audit."""
    x, y = data(40, features=M)
    one_run = audit.OneRunAudit(*canaries(), seed=seed)
    private = private_model(
        optimizer,
        model=keras.Sequential([keras.Input((M,)), keras.layers.Dense(3, use_bias=False)]),
    )
    lots = one_run.lots(0.01 * x, y, expected_size=M + 40, seed=seed)
    private.fit(lots, epochs=epochs, verbose=0, callbacks=[one_run])
    return private, one_run


@pytest.fixture(scope="module")
def exact():
    return run(exact_sgd(300.0))


def test_training_without_noise_is_refuted_at_once(exact):
    """ε = ∞; of 200 canaries the theorem cannot prove more than about log(200/3)."""
    _, one_run = exact
    assert one_run.bound(DELTA).epsilon > 2.5
    fall = one_run.scores
    assert fall[one_run.coins].mean() > fall[~one_run.coins].mean() + 0.5


def test_private_training_keeps_its_claim():
    """The 99.9 % bound exceeds ε in less than one of a thousand seeds."""
    private, one_run = run(dp.DPSGD(1.0, noise_multiplier=4.0, seed=2))
    claimed = private.epsilon(DELTA)  # the ledger takes the audited lots as it takes any
    assert one_run.bound(DELTA, 0.999).epsilon <= claimed
    assert private.ledger.steps == 4
    assert one_run.bound(DELTA, 0.999).canaries == M


def test_the_law_of_the_bound_is_the_ledgers():
    """The f-DP bound of the training's own releases, which Steinke's bound is compared with."""
    private, one_run = run(dp.DPSGD(1.0, noise_multiplier=4.0, seed=2))
    found = one_run.bound(DELTA)
    assert found == audit.one_run_bound(one_run.scores, one_run.coins, DELTA, claim=private.ledger)
    assert found.epsilon >= one_run.bound(DELTA, claim=None).epsilon
    assert found.steinke_epsilon <= found.epsilon <= private.epsilon(DELTA)


def test_a_ledger_without_privacy_has_no_law(exact):
    _, one_run = exact
    assert one_run.bound(DELTA) == one_run.bound(DELTA, claim=None)
    assert one_run.bound(DELTA).method == "steinke"


def test_canaries_that_are_out_are_never_drawn():
    one_run = audit.OneRunAudit(*canaries(30), seed=4)
    x, y = data(50, features=30)
    lots = one_run.lots(x, y, expected_size=40, seed=3)
    assert lots.law == dp.accounting.PoissonSampling(80, 40)
    drawn = np.zeros(30, int)
    for (rows, _, _), mask in lots.take(40, 8):
        rows = rows.numpy()[mask.numpy() > 0]
        is_canary = (rows.max(axis=1) == 1) & (rows.sum(axis=1) == 1)
        drawn += rows[is_canary].sum(axis=0).astype(int)
    assert (drawn[one_run.coins] > 0).all()
    assert (drawn[~one_run.coins] == 0).all()


def test_coins_are_fair_secret_and_independent_of_the_seed_of_keras():
    """Over seeds a count this far from 5,000 comes up once in a million."""
    x, y = np.zeros((10_000, 1)), np.zeros(10_000)
    first = audit.OneRunAudit(x, y).coins
    keras.utils.set_random_seed(11)
    second = audit.OneRunAudit(x, y).coins
    for count in (first.sum(), (first ^ second).sum()):
        assert abs(count - 5000) < 4.9 * 50


def test_a_bound_needs_a_run():
    with pytest.raises(RuntimeError, match="has not ended"):
        audit.OneRunAudit(*canaries(4)).bound(DELTA)


def test_losses_are_those_of_the_records(exact):
    private, _ = exact
    x, y = data(50, features=M)
    logits = private.model.predict(x, verbose=0)
    expected = crossentropy(reduction="none")(y, logits).numpy()
    for model in (private, private.model):
        if model is private.model:
            model.compile(loss=crossentropy())
            with pytest.raises(ValueError, match="not built"):
                audit.example_losses(model, x, y)
            model.evaluate(x, y, verbose=0)
        found = audit.example_losses(model, x, y, batch_size=16)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_losses_need_a_compiled_loss():
    with pytest.raises(ValueError, match="compile the model"):
        audit.example_losses(plain_model(), *data(4))
