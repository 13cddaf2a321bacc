import accuracy
import common
import numpy as np
import pytest

import tf_adadp as dp


def separable():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    return x[:200], y[:200], x[200:], y[200:]


TINY = accuracy.Task(
    title="tiny",
    load=separable,
    widths=(5, 2),
    lot_size=40,
    noise_multiplier=2.0,
    steps=20,
    methods=(accuracy.BASELINE, "DPSGD", "ADADP"),
    seeds=(0,),
)


def make_results(path):
    return common.Results(path, key=("task", "method", "seed"), one_machine=False)


def test_every_method_of_a_task_is_in_the_table():
    for task in accuracy.TASKS.values():
        assert set(task.methods) <= set(accuracy.METHODS)
        assert task.steps % accuracy.RECORDS == 0
    for method in set(accuracy.METHODS) - {accuracy.BASELINE}:
        for arguments in ({}, *accuracy.METHODS[method].values()):
            getattr(dp, method)(noise_multiplier=1.0, **arguments)


def test_training_learns_and_reports_what_it_cost():
    row = accuracy.train("tiny", TINY, "DPSGD", seed=0)
    assert row["accuracy"] > 0.75
    assert row["accuracy"] == row["curve_accuracy"][-1]
    assert len(row["curve_accuracy"]) == len(row["curve_epsilon"]) == accuracy.RECORDS
    for accountant in ("rdp", "pld"):
        cost = dp.accounting.epsilon(2.0, 40 / 200, 20, accuracy.DELTA, accountant)
        assert row[f"epsilon_{accountant}"] == pytest.approx(cost, abs=1e-4)
    assert row["curve_epsilon"][-1] == row["epsilon_rdp"]
    again = accuracy.train("tiny", TINY, "DPSGD", seed=0)
    assert again["curve_accuracy"] == row["curve_accuracy"]


def test_baseline_is_not_private_and_says_so():
    row = accuracy.train("tiny", TINY, accuracy.BASELINE, seed=0)
    assert row["epsilon_rdp"] is row["epsilon_pld"] is row["noise_multiplier"] is None
    assert len(row["curve_accuracy"]) == accuracy.RECORDS


def row_of(method, seed, value, task="digits"):
    private = method != accuracy.BASELINE
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "steps": 20,
        "accuracy": value,
        "epsilon_rdp": 1.25 if private else None,
        "epsilon_pld": 1.0 if private else None,
        "curve_accuracy": [0.5, value],
        "curve_epsilon": [0.9, 1.25] if private else None,
        "seconds": 1.0,
    }


def test_run_trains_what_is_missing_only(tmp_path, monkeypatch):
    trained = []

    def train(name, task, method, seed):
        trained.append((method, seed))
        return {**row_of(method, seed, 0.5), **accuracy.settings(name, task, method, seed)}

    monkeypatch.setattr(accuracy, "train", train)

    def run(methods):
        trained.clear()
        accuracy.run({"tiny": TINY}, methods, make_results(tmp_path / "r.json"))

    run(["DPSGD"])
    assert trained == [("DPSGD", 0)]
    run(["DPSGD", "ADADP"])
    assert trained == [("ADADP", 0)]
    monkeypatch.setitem(accuracy.METHODS, "DPSGD", {"tiny": {"learning_rate": 0.1}})
    run(["DPSGD", "ADADP"])
    assert trained == [("DPSGD", 0)]
    rows = make_results(tmp_path / "r.json").rows
    assert sorted(row["method"] for row in rows) == ["ADADP", "DPSGD"]


def test_table_has_mean_and_sample_std():
    rows = [row_of("DPSGD", seed, value) for seed, value in enumerate((0.8, 0.9, 1.0))]
    lines = accuracy.table([*rows, row_of(accuracy.BASELINE, 0, 0.95)]).splitlines()
    assert lines[2] == "| digits | non-private Adam | 1 | 95.00 | ∞ | ∞ | 20 |"
    assert lines[3] == "| digits | DPSGD | 3 | 90.00 ± 10.00 | 1.250 | 1.000 | 20 |"


def test_plot(tmp_path):
    rows = [row_of(m, s, 0.8 + s / 100) for m in ("DPSGD", accuracy.BASELINE) for s in (0, 1)]
    accuracy.plot([*rows, row_of("DPSGD", 0, 0.7, "mnist")], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").stat().st_size < 200_000


def test_mnist_is_skipped_aloud_without_its_data(monkeypatch, capsys):
    monkeypatch.delenv(common.DATA_DIR_VARIABLE, raising=False)
    assert list(accuracy.tasks_with_data(["digits", "mnist"])) == ["digits"]
    assert common.DATA_DIR_VARIABLE in capsys.readouterr().out
    monkeypatch.setenv(common.DATA_DIR_VARIABLE, "anywhere")
    assert list(accuracy.tasks_with_data(["digits", "mnist"])) == ["digits", "mnist"]
