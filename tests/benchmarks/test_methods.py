"""The comparison of all methods: budgets, one small job for real, the table."""

import dataclasses

import keras
import numpy as np
import pytest

import tf_adadp as dp
from benchmarks import methods as study
from tf_adadp import accounting


@pytest.fixture
def tiny(monkeypatch):
    """120 records of 100 features, 5 components, 4 steps."""
    rng = np.random.default_rng(0)

    def arrays(name, shape):
        y = rng.integers(0, 10, 400).astype(np.int32)
        x = rng.random((400, 100)).astype(np.float32)
        x[np.arange(400), y] += 5.0
        return x[:300], y[:300], x[300:], y[300:]

    monkeypatch.setattr(study, "arrays", arrays)
    monkeypatch.setattr(study, "COMPONENTS", 5)
    monkeypatch.setattr(study, "HIDDEN", 8)
    task = dataclasses.replace(study.TASKS["mnist"], cells={1.0: (20.0, 50)}, lot_size=50)
    monkeypatch.setitem(study.TASKS, "mnist", task)
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
    assert 0.999 <= ledger.epsilon(study.DELTA) <= 1.0
    assert sigma > accounting.calibrate_noise_multiplier(1.0, study.DELTA, 0.01, 300)


def test_the_search_is_of_equal_effort():
    assert len({len(method.rates) for method in study.METHODS.values()}) == 1


def test_the_rest_of_a_budget_and_the_components_are_the_budget():
    law = accounting.PoissonSampling(60000, 600)
    total = study.rest_of(1.0, 10.0, law, splits=40)
    agd = dp.AGD(total_epsilon=total, total_delta=study.DELTA, splits=40)
    agd.build([keras.Variable(np.zeros(3, np.float32))])
    agd.begin(law, None, 1)
    order = agd.budget_filter.order
    whole = accounting.RenyiFilter(
        order, 1.0, study.DELTA, agd.budget_filter.neighboring_relation
    ).budget
    components = order / (2 * 10.0**2)
    assert agd.budget_filter.budget + components == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("name", study.METHODS)
def test_every_method_can_be_made(name):
    method = study.METHODS[name]
    private = {"noise_multiplier": 1.0}
    if method.own_budget:
        private = {"total_epsilon": 1.0, "total_delta": 1e-5}
    if method.public:
        private["energy_data"] = (np.zeros((3, 2), np.float32), np.zeros(3))
    assert isinstance(method.make(method.rates[0], **private), dp.DPOptimizer)


def among(score, rates):
    """The search without what lies beyond the rates."""
    return {rate: score(rate) for rate in rates}


@pytest.mark.parametrize(
    "name", ["SADPSGD", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("DPSGD", "AGD"))]
)
def test_a_job_searches_on_held_out_data_and_spends_the_budget(tiny, monkeypatch, name):
    method = study.METHODS[name]
    rates = {"AGD": (5,)}.get(name, (0.01, 1.0))
    method = dataclasses.replace(method, rates=rates, public=20 if method.public else 0)
    monkeypatch.setitem(study.METHODS, name, method)
    monkeypatch.setattr(study.study, "search", among)
    row = study.run_job(("mnist", name, 1.0))
    assert set(row["held_out"]) == {str(rate) for rate in rates}
    assert len(row["accuracies"]) == 2
    assert 0.99 < row["charged_epsilon"] <= 1.0
    if name == "AGD":
        assert 0 < row["steps"] < 100
    else:
        assert row["steps"] == 50
    if name == "SADPSGD":
        assert len(row["accepted"]) == len(row["claimed_epsilon"]) == 2
        assert all(0 <= kept <= 50 for kept in row["accepted"])
    text = study.table([row])
    assert name in text
    assert "mnist, ε = 1" in text


@pytest.mark.parametrize("name", ["fashion_cnn", "cifar10_small"])
def test_networks_on_images_are_trained_too(tiny, monkeypatch, name):
    def arrays(name, shape, side):
        rng = np.random.default_rng(0)
        y = rng.integers(0, 10, 90).astype(np.int32)
        x = rng.random((90, *shape)).astype(np.float32)
        return x[:70], y[:70], x[70:], y[70:]

    monkeypatch.setattr(study, "arrays", arrays)
    task = study.TASKS[name]
    task = dataclasses.replace(task, cells={3.0: (None, 50)}, search_steps=20, lot_size=50)
    monkeypatch.setattr(study.study, "search", among)
    monkeypatch.setitem(study.TASKS, name, task)
    monkeypatch.setitem(study.METHODS, "DPSGD", study.Method(dp.DPSGD, (1.0,)))
    row = study.run_job((name, "DPSGD", 3.0))
    assert row["steps"] == 50
    assert row["components_noise_multiplier"] is None
    assert 2.98 < row["charged_epsilon"] <= 3.0


def test_jobs_are_those_asked_for():
    jobs = study.jobs(["mnist", "mnist_cnn"], ["DPSGD", "AGD"], [0.5, 3.0])
    assert jobs == [("mnist", "DPSGD", 0.5), ("mnist", "AGD", 0.5), ("mnist_cnn", "DPSGD", 3.0)]
