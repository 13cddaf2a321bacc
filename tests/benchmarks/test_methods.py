"""The comparison of all methods: budgets, one small job for real, the table."""

import methods as study
import numpy as np
import pytest

import tf_adadp as dp
from tf_adadp import accounting


@pytest.fixture
def tiny(monkeypatch):
    """120 records of 100 features, 5 components, 4 steps."""
    rng = np.random.default_rng(0)

    def arrays():
        y = rng.integers(0, 10, 400).astype(np.int32)
        x = rng.random((400, 100)).astype(np.float32)
        x[np.arange(400), y] += 5.0
        return x[:300], y[:300], x[300:], y[300:]

    monkeypatch.setattr(study, "arrays", arrays)
    monkeypatch.setattr(study, "COMPONENTS", 5)
    monkeypatch.setattr(study, "HIDDEN", 8)
    monkeypatch.setattr(study, "LOT", 50)
    monkeypatch.setattr(study, "CELLS", {1.0: (20.0, 50)})
    monkeypatch.setattr(study, "SEEDS", (0, 1))
    study.components.cache_clear()
    yield
    study.components.cache_clear()


def test_components_and_steps_fit_the_budget_together():
    sigma = study.noise_for(1.0, 10.0, 600, 60000, 300)
    ledger = accounting.PrivacyLedger()
    dp.DPPCA(60, noise_multiplier=10.0).charge(ledger)
    law = accounting.PoissonSampling(60000, 600)
    ledger.add(law.event(sigma), 300, law=law)
    assert 0.995 < ledger.epsilon(study.DELTA) <= 1.0
    assert sigma > accounting.calibrate_noise_multiplier(1.0, study.DELTA, 0.01, 300)


def test_the_search_is_of_equal_effort():
    assert len({len(method.rates) for method in study.METHODS.values()}) == 1


def test_every_method_can_be_made():
    for method in study.METHODS.values():
        assert isinstance(method.make(method.rates[0], noise_multiplier=1.0), dp.DPOptimizer)


def test_a_job_searches_on_held_out_data_and_spends_the_budget(tiny, monkeypatch):
    monkeypatch.setitem(study.METHODS, "DPSGD", study.Method(dp.DPSGD, (0.01, 1.0)))
    row = study.run_job(("DPSGD", 1.0))
    assert set(row["held_out"]) == {"0.01", "1.0"}
    assert len(row["accuracies"]) == 2
    assert 0.99 < row["charged_epsilon"] <= 1.0
    text = study.table([row])
    assert "DPSGD" in text
    assert "ε = 1" in text
