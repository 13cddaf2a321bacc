"""What ε, δ, unit and lot buy: the cells, one of each unit trained for real, tables and figure.

The table itself is tested where statsmodels is installed, and made here elsewhere.
"""

import dataclasses
import importlib.util
import json
import re
import sys

import numpy as np
import pytest
from scipy import stats

import tf_adadp as dp
from benchmarks import choosing as study


def test_each_panel_varies_one_thing():
    for field, panel in study.PANELS.values():
        others = [{**dataclasses.asdict(cell), field: None} for cell in panel]
        assert all(other == others[0] for other in others)
        assert len({getattr(cell, field) for cell in panel}) == len(panel)
    assert study.BASE in study.cells()
    assert len(study.cells()) == len(set(study.cells()))


@pytest.mark.skipif(importlib.util.find_spec("statsmodels") is None, reason="needs statsmodels")
def test_the_table_is_what_the_page_says():
    x, y, persons, order = study.table()
    assert x.shape == (20_190, len(study.RANGES))
    assert len(order) == len(np.unique(persons)) == 5_912
    assert 1 <= np.bincount(np.unique(persons, return_inverse=True)[1]).max() == 5
    assert np.isfinite(x).all()
    assert np.abs(x).max() <= 1.0  # the ranges hold
    assert abs(y.mean() - 0.5) < 0.01
    x_all, *_, x_test, _ = study.split(study.ALL)
    assert len(x_all) + len(x_test) == len(x)  # ALL is all but the test's


def test_without_statsmodels_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install statsmodels"):
        study.table_path()


@pytest.fixture
def small(monkeypatch):
    """60 people of one to five records, whose label follows one feature; a few steps."""
    rng = np.random.default_rng(0)
    persons = np.repeat(np.arange(60), rng.integers(1, 6, 60))
    x = rng.uniform(-1, 1, (len(persons), len(study.RANGES))).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    monkeypatch.setattr(study, "table", lambda: (x, y, persons, np.arange(60)))
    monkeypatch.setattr(study, "STEPS", 50)
    return persons


def test_no_person_is_in_training_and_test(small):
    x, y, persons, x_test, y_test = study.split(20)
    assert len(np.unique(persons)) == 20
    assert len(x) == len(y) == np.isin(small, persons).sum()
    assert len(x_test) == len(y_test) == (small < 12).sum()
    assert persons.min() >= 12


@pytest.mark.parametrize(
    ("unit", "k", "sensitivity"), [("record", None, 1), ("person", 1, 1), ("person", 3, 3)]
)
def test_a_cell_keeps_its_budget_by_the_law_of_its_unit(small, unit, k, sensitivity):
    cell = study.Cell(unit, epsilon=4.0, delta=1e-4, lot_size=20, persons=40, records_per_person=k)
    row = study.train(cell, 0)
    assert 0.99 * 4 < row["charged_epsilon"] <= 4
    assert row["people"] == 40
    x, y, persons, *_ = study.split(40)
    units = len(x) if unit == "record" else 40
    q = 20 / (k or 1) / units
    sigma = row["noise_multiplier"] / sensitivity
    # The loss that ADADP releases beside the gradient is a share of the same step.
    assert dp.accounting.epsilon(sigma, q, 50, 1e-4) == pytest.approx(4, rel=0.03)


def test_membership_accuracy():
    assert study.membership_accuracy(0.0) == 0.5
    assert study.membership_accuracy(np.log(3)) == pytest.approx(0.75)
    assert study.membership_accuracy(0.0, delta=1.0) == 1.0
    # Randomized response reaches it: it tells the truth with e^ε/(1 + e^ε).
    epsilon = 1.5
    truth = np.exp(epsilon) / (1 + np.exp(epsilon))
    assert np.log(truth / (1 - truth)) == pytest.approx(epsilon)
    assert study.membership_accuracy(epsilon) == pytest.approx(truth)


def test_exact_membership_accuracy():
    """Full lots are one Gaussian of σ/√T, between which the best test is right with Φ(1/(2σ))."""
    row = {"unit": "record", "records": 512, "people": 200, "lot_size": 512}
    row |= {"records_per_person": None, "noise_multiplier": 20.0}
    exact = stats.norm.cdf(np.sqrt(study.STEPS) / 20.0 / 2)
    assert study.exact_membership_accuracy(row) == pytest.approx(exact, abs=1e-3)
    person = {**row, "unit": "person", "people": 512, "records_per_person": 1}
    assert study.exact_membership_accuracy(person) == pytest.approx(exact, abs=1e-3)
    three = {**person, "people": 171, "lot_size": 513, "records_per_person": 3}
    three["noise_multiplier"] = 60.0
    assert study.exact_membership_accuracy(three) == pytest.approx(exact, abs=1e-3)


def test_a_second_run_trains_nothing_again_and_reports(small, monkeypatch, tmp_path, capsys):
    trained = []

    def train(cell, seed):
        trained.append((cell, seed))
        found = {"records": 9000, "people": 3000, "accuracy": 0.6 + 0.01 * seed, "majority": 0.5}
        return {
            **dataclasses.asdict(cell), "seed": seed, **found, "charged_epsilon": cell.epsilon,
            "noise_multiplier": None if cell.unit is None else 2.0, "seconds": 1.0,
        }  # fmt: skip

    monkeypatch.setattr(study, "train", train)
    out = tmp_path / "choosing.json"
    monkeypatch.setattr(sys, "argv", ["choosing", f"--out={out}"])
    study.main()
    assert len(trained) == len(study.cells()) * len(study.SEEDS)
    assert len(json.loads(out.read_text())["rows"]) == len(trained)
    assert out.with_suffix(".png").stat().st_size > 20_000
    study.main()
    assert len(trained) == len(study.cells()) * len(study.SEEDS)
    said = capsys.readouterr().out
    assert re.search(r"\| 0.5 \| 9,000 \| 2.00 \| 0.0039 \| \d+\.\d \| 61.0 ± 1.0 \|", said)
    assert "without privacy" in said
