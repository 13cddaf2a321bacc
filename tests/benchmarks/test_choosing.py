"""Tests the study of a health table: its cells, one of each unit trained, tables and figure.

The table itself is tested where statsmodels is installed, and made here elsewhere. The figures of
docs/explanation/choosing.md are those of the result file.
"""

import dataclasses
import importlib.util
import json
import math
import re
import sys

import numpy as np
import pytest
from scipy import optimize, stats

import tf_adadp as dp
from benchmarks import choosing as study
from benchmarks import harness

PAGE = " ".join(
    (harness.ROOT / "docs" / "explanation" / "choosing.md").read_text(encoding="utf-8").split()
)
RESULTS = harness.ROOT / "benchmarks" / "results" / "choosing.json"


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
    with pytest.raises(SystemExit, match=r"pip install \"\.\[studies\]\""):
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
    # The loss that ADADP releases beside the gradient has its share of σ*, so it costs no more.
    charged = dp.accounting.epsilon(sigma, q, 50, 1e-4)
    assert charged == pytest.approx(row["charged_epsilon"], rel=1e-3)  # σ* is rounded in the row


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


# --- the page


@pytest.fixture(scope="module")
def rows():
    return json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]


def _accuracy(rows):
    return "{:.1f} ± {:.1f}".format(*study.accuracy(rows))


def _noise(rows):
    return f"{rows[0]['noise_multiplier']:.2f}"


def _noise_over_lot(rows):
    return f"{rows[0]['noise_multiplier'] / rows[0]['lot_size']:.4f}"


def test_all_cells_have_their_seeds(rows):
    assert all(len(study.of_cell(rows, cell)) == len(study.SEEDS) for cell in study.cells())
    assert all(row["charged_epsilon"] <= row["epsilon"] for row in rows if row["unit"])


@pytest.mark.parametrize(
    ("label", "panel", "figure"),
    [
        ("one record protected", "ε, one record of 1,000 people", _accuracy),
        ("one person protected", "ε, one person of 1,000", _accuracy),
        ("ε = 1", "people", _accuracy),
        ("without privacy", "without privacy", _accuracy),
        (r"noise over the lot, σ\*/L", "people", _noise_over_lot),
        (r"σ\*", "δ", _noise),
        ("test accuracy, %", "δ", _accuracy),
        (r"σ\*", "lot size", _noise),
        (r"σ\*/L", "lot size", _noise_over_lot),
        ("test accuracy, %", "lot size", _accuracy),
    ],
)
def test_a_row_of_the_page_is_that_of_the_results(rows, label, panel, figure):
    figures = [figure(study.of_cell(rows, cell)) for cell in study.PANELS[panel][1]]
    assert f"| {' | '.join([label, *figures])} |" in PAGE


def test_what_an_adversary_learns_is_that_of_the_results(rows):
    for cell in study.PANELS["ε, one record of 1,000 people"][1]:
        odds = math.exp(cell.epsilon)
        odds = f"{odds:.3g}" if odds < 1000 else f"{odds:,.0f}"
        limit = 100 * study.membership_accuracy(cell.epsilon)
        limit = f"{limit:.2f}" if limit > 99 else f"{limit:.1f}"
        exact = 100 * study.exact_membership_accuracy(study.of_cell(rows, cell)[0])
        assert f"| {cell.epsilon:g} | {odds} | {limit} % | {exact:.1f} % |" in PAGE
        by_delta = study.membership_accuracy(cell.epsilon, cell.delta)
        assert 100 * (by_delta - study.membership_accuracy(cell.epsilon)) < 0.001


def test_figures_in_sentences_are_those_of_the_results(rows):
    def of(title):
        return [study.of_cell(rows, cell) for cell in study.PANELS[title][1]]

    one, three, five = map(_accuracy, of("records per person"))
    assert f"1, 3 and 5 records gave {one}, {three} and {five}." in PAGE
    least, *_, most = map(_accuracy, of("ε, one record of all people"))
    assert f"all people: {least} at 0.5, {most} at 8" in PAGE
    without = dict(zip(study.PERSONS, of("without privacy"), strict=True))[study.BASE.persons]
    assert f"Without privacy the same people give {_accuracy(without)}." in PAGE
    record, person = (study.accuracy(study.of_cell(rows, c))[0] for c in (study.BASE, study.PERSON))
    assert f"is {record - person:.1f} points at ε = 1" in PAGE
    assert f"{100 * rows[0]['majority']:.1f} % of the test records" in PAGE
    people = " | ".join(f"{r[0]['people']:,} ({r[0]['records']:,})" for r in of("people"))
    assert f"| people (records) | {people} |" in PAGE
    usual, smaller, _ = (r[0]["noise_multiplier"] for r in of("δ"))
    assert f"Ten times less δ costs {100 * (smaller / usual - 1):.0f} % more noise" in PAGE
    assert f"at a δ {sum(math.exp(i) for i in range(5)):.0f} times as large" in PAGE


def test_the_loss_of_a_gaussian_release_is_as_the_page_says():
    def delta(mu):  # of N(0, 1) and N(mu, 1) at ε = 1
        return stats.norm.cdf(mu / 2 - 1 / mu) - math.e * stats.norm.cdf(-mu / 2 - 1 / mu)

    mu = optimize.brentq(lambda mu: delta(mu) - 1e-5, 0.1, 1.0)
    # The loss is N(mu²/2, mu²).
    above = [stats.norm.sf((loss - mu**2 / 2) / mu) for loss in (1.0, 1.25, 2.0)]
    said = "above 1 with probability {:.1e}, above 1.25 with {:.0e}, and above 2 with {:.0e} ("
    assert said.format(*above).replace("e-0", "e-") in PAGE
