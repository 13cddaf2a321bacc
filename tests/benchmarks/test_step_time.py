import dataclasses

import common
import numpy as np
import pytest
import step_time

import tf_adadp as dp

TINY = step_time.Workload("mlp", "tiny", lambda: common.mlp(6, 4, 10), (6,), 16, {"": 60.0})


def make_results(path):
    key = ("measure", "model", "method", "physical_batch_size")
    return common.Results(path, key=key, one_machine=True)


def test_timer_drops_the_settling_steps(monkeypatch):
    ends = iter([0.0, 5.0, 5.001, 5.003])
    monkeypatch.setattr(step_time.time, "perf_counter", lambda: next(ends))
    timer = step_time.StepTimer()
    for step in range(step_time.SETTLING_STEPS + 2):
        timer.on_train_batch_end(step)
    np.testing.assert_allclose(timer.milliseconds(), [1.0, 2.0])


def test_contenders_take_turns():
    calls = []

    def train_as(name):
        def train(steps, callbacks=()):
            calls.append((name, steps))
            for callback in callbacks:
                for step in range(steps):
                    callback.on_train_batch_end(step)

        return train

    times = step_time.interleaved_times(
        {"a": train_as("a"), "b": train_as("b")}, steps=4, repeats=3
    )
    settling = step_time.SETTLING_STEPS
    turns = [("a", settling + 4), ("b", settling + 4)]
    assert calls == [("a", settling), ("b", settling)] + 3 * turns
    assert times["a"].shape == times["b"].shape == (3, 4)


def test_default_methods_and_limits_name_what_there_is():
    limits = {method for w in step_time.WORKLOADS.values() for method in w.limits} - {""}
    for method in {*step_time.DEFAULT_METHODS, *limits}:
        name, _, jit = method.partition(":")
        optimizer = step_time.OPTIMIZERS[name]()
        assert isinstance(optimizer, dp.DPOptimizer)
        assert getattr(optimizer, "clipping", "ellipsoid") == (
            "local" if "local" in method else "ellipsoid"
        )
        assert jit in step_time.JIT_COMPILE


def test_time_rows_of_real_training():
    methods = [("dpsgd", 8), ("adadp_local:noxla", None)]
    rows = list(step_time.time_rows(TINY, methods, steps=2, repeats=2))
    assert [(r["method"], r["physical_batch_size"]) for r in rows[2:]] == methods
    assert [row["method"] for row in rows[:2]] == list(step_time.PLAIN)
    plain = min(row["step_ms"] for row in rows[:2])
    for row in rows:
        assert row["step_ms"] > 0
        assert row["plain_ms"] == plain
        assert row["ratio"] == pytest.approx(row["step_ms"] / plain, rel=0.02, abs=0.02)
        # The ratio of medians over all rounds may lie outside of the rounds' own ratios.
        assert 0 < row["ratio_range"][0] <= row["ratio_range"][1]


def test_memory_of_a_child_holds_its_per_example_gradients():
    workload = step_time.WORKLOADS["mlp"]
    row = step_time.memory_row(workload, "dpsgd:noxla", 32, steps=1)
    assert row["memory_mb"] > 32 * 795_010 * 4 / 2**20
    assert row["data_mb"] == pytest.approx(6000 * 784 * 4 / 2**20, abs=0.1)


def fake_time_rows(workload, methods, steps, repeats):
    for method, size in [*((plain, None) for plain in step_time.PLAIN), *methods]:
        yield {
            "measure": "time",
            "model": workload.name,
            "method": method,
            "physical_batch_size": size,
            "lot_size": workload.lot_size,
            "steps": steps,
            "repeats": repeats,
            "step_ms": 30.0,
            "ratio": 3.0,
            "ratio_range": [2.5, 3.5],
        }


def fake_memory_row(workload, method, size, steps):
    return {
        "measure": "memory",
        "model": workload.name,
        "method": method,
        "physical_batch_size": size,
        "lot_size": workload.lot_size,
        "steps": steps,
        "memory_mb": {"keras": 80.0, "keras:noxla": 50.0}.get(method, 100.0),
    }


def test_run_measures_what_is_missing_only(tmp_path, monkeypatch):
    timed, sized = [], []

    def time_rows(workload, methods, steps, repeats):
        timed.append(methods)
        return fake_time_rows(workload, methods, steps, repeats)

    def memory_row(workload, method, size, steps):
        sized.append((method, size))
        return fake_memory_row(workload, method, size, steps)

    monkeypatch.setattr(step_time, "time_rows", time_rows)
    monkeypatch.setattr(step_time, "memory_row", memory_row)

    def run(methods, sizes, workload=TINY, **settings):
        timed.clear()
        sized.clear()
        results = make_results(tmp_path / "r.json")
        step_time.run([workload], methods, sizes, results=results, **settings)

    settings = {"steps": 10, "repeats": 3}
    run(["dpsgd", "adadp"], [32], **settings)
    assert timed == [[("dpsgd", 32), ("adadp", 32)]]
    assert sized == [("keras", None), ("keras:noxla", None), ("dpsgd", 32), ("adadp", 32)]
    run(["dpsgd", "adadp"], [32, None], **settings)
    assert timed == [[("dpsgd", None), ("adadp", None)]]
    assert sized == [("dpsgd", None), ("adadp", None)]
    run(["dpsgd", "adadp"], [32, None], **settings)
    assert not timed + sized
    run(["dpsgd"], [32], steps=10, repeats=5)
    assert timed == [[("dpsgd", 32)]]
    assert not sized
    run(["dpsgd"], [32], workload=dataclasses.replace(TINY, lot_size=32), **settings)
    assert timed == [[("dpsgd", 32)]]


def test_table_and_plot(tmp_path):
    results = make_results(tmp_path / "r.json")
    for workload in step_time.WORKLOADS.values():
        for row in fake_time_rows(workload, [("dpsgd", 32), ("adadp", None)], 1, 1):
            results.put(row)
            results.put(fake_memory_row(workload, row["method"], row["physical_batch_size"], 1))
    assert "| MLP 784-1000-10 | dpsgd, B=32 | 30.0 | 3.0 (2.5–3.5) | 100 | 2.00 |" in (
        step_time.table(results)
    )
    step_time.plot(results, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "r.png").stat().st_size < 200_000
