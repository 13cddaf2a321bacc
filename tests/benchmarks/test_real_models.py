import dataclasses
import functools

import pytest

from benchmarks import harness, step_time
from benchmarks.real_models import __main__ as program
from benchmarks.real_models import entry as entries
from benchmarks.real_models import report
from benchmarks.real_models.zoo import MODELS
from benchmarks.workloads import OPTIMIZERS, PLAIN, Contender

HEADER = (
    "| model | method | engine | step, ms | × plain (rounds) | limit | first fit, s (plain) "
    "| limit | memory, MiB | × plain | limit | below all |"
)
VAE, GRU = MODELS["vae"], MODELS["masked_gru"]
DPSGD, ADADP = Contender("dpsgd", "auto"), Contender("adadp", "auto")


def make_results(path):
    return harness.Results(path, key=report.KEY, one_machine=True)


def time_row(entry, contender, **fields):
    return {
        "measure": "time",
        **entry.fields(),
        **contender.fields(),
        "steps": 1,
        "repeats": 1,
        "step_ms": 20.0,
        "ratio": 2.0,
        "ratio_range": [1.9, 2.2],
        **fields,
    }


def fresh_row(entry, contender, **fields):
    made = {"first_fit_s": 2.0, "memory_mb": 100.0}
    if contender not in PLAIN:
        made = {"first_fit_s": 7.0, "memory_mb": 150.0, "plan": "ghost", "reason": "as it should"}
    row = {"measure": "fresh", **entry.fields(), **contender.fields(), "steps": 1}
    return {**row, **made, **fields}


def put_plain(results, entry):
    for plain, seconds, memory in zip(PLAIN, (9.0, 2.0), (100.0, 120.0), strict=True):
        results.put(time_row(entry, plain))
        results.put(fresh_row(entry, plain, first_fit_s=seconds, memory_mb=memory))


def test_every_entry_has_limits_optimizers_and_its_own_name():
    for name, entry in MODELS.items():
        assert entry.name == name
        assert entry.step_limit in (2.5, 4.0, 6.0)
        assert "dpsgd" in entry.methods
        assert set(entry.methods) <= set(OPTIMIZERS)
        assert entry.fields() == {
            "model": name,
            "lot_size": entry.lot_size,
            "examples": 10 * entry.lot_size,
        }


def test_table_compares_each_figure_with_its_limit(tmp_path):
    results = make_results(tmp_path / "r.json")
    for entry in (GRU, VAE):
        put_plain(results, entry)
    results.put(time_row(GRU, DPSGD, ratio=5.9))
    results.put(fresh_row(GRU, DPSGD))
    results.put(time_row(VAE, DPSGD, ratio=2.51))
    results.put(
        fresh_row(
            VAE, DPSGD, first_fit_s=7.6, memory_mb=201.0, plan="vectorized", reason="it adds a loss"
        )
    )
    lines = report.tables(results).splitlines()
    assert lines[0] == HEADER
    assert lines[2:4] == [
        "| variational autoencoder, add_loss | dpsgd | vectorized | 20.0 | 2.51 (1.90–2.20) "
        "| ≤ 2.5 | 7.6 (2.0) | ≤ 7.5 | 201 | 2.01 | ≤ 2 | NO: step, first fit, memory |",
        "| GRU, masked zeros | dpsgd | ghost | 20.0 | 5.90 (1.90–2.20) | ≤ 6 "
        "| 7.0 (2.0) | ≤ 7.5 | 150 | 1.50 | ≤ 2 | yes |",
    ]
    assert "Below all limits: 1 of 2." in lines
    assert lines[-1] == "- variational autoencoder, add_loss: it adds a loss"


def test_what_failed_or_was_not_measured_is_not_below_its_limit(tmp_path):
    results = make_results(tmp_path / "r.json")
    put_plain(results, VAE)
    failed = fresh_row(VAE, DPSGD)
    for name in ("first_fit_s", "memory_mb", "plan", "reason"):
        del failed[name]
    results.put({**failed, "error": "ValueError: no"})
    results.put(time_row(VAE, ADADP))
    text = report.tables(results)
    assert text.splitlines()[2:4] == [
        "| variational autoencoder, add_loss | dpsgd |  |  |  | ≤ 2.5 |  | ≤ 7.5 |  |  | ≤ 2 "
        "| NO: step, first fit, memory |",
        "| variational autoencoder, add_loss | adadp |  | 20.0 | 2.00 (1.90–2.20) | ≤ 2.5 "
        "|  | ≤ 7.5 |  |  | ≤ 2 | NO: first fit, memory |",
    ]
    assert text.endswith("- vae, dpsgd, auto, B=auto, fresh: ValueError: no")


def test_without_plain_keras_there_is_no_limit_of_the_first_fit(tmp_path):
    results = make_results(tmp_path / "r.json")
    row = fresh_row(VAE, DPSGD)
    results.put(row)
    step, first_fit, memory = report.checks(results, row)
    assert (first_fit.limit, memory.value) == (None, None)
    assert not any(check.passed for check in (step, first_fit, memory))
    put_plain(results, VAE)
    assert report.checks(results, row)[2].passed
    failed = {k: v for k, v in fresh_row(VAE, PLAIN[0]).items() if k != "memory_mb"}
    results.put({**failed, "error": "killed"})
    assert report.checks(results, row)[2].value is None


def test_run_measures_what_is_missing_or_failed_only(tmp_path, monkeypatch):
    calls = []

    def measured(module, model, *asked):
        calls.append((model, *asked))
        entry = MODELS[model.removeprefix("--model=")]
        if asked[-1] == "--method=adadp" and len(calls) < 9:
            raise RuntimeError("python -m said:\n\nValueError: no\nand why")
        if asked[-1].startswith("--method="):
            method = asked[-1].removeprefix("--method=")
            contender = next(c for c in (*PLAIN, DPSGD, ADADP) if c.method == method)
            keys = [*report.KEY, "steps"]
            return {k: v for k, v in fresh_row(entry, contender).items() if k not in keys}
        return [time_row(entry, c) for c in (*PLAIN, DPSGD, ADADP)]

    monkeypatch.setattr(harness, "from_process", measured)

    def run(**settings):
        calls.clear()
        results = make_results(tmp_path / "r.json")
        program.run([VAE], results=results, **{"steps": 1, "repeats": 1, **settings})
        return results

    fresh = [("--model=vae", "--steps=1", f"--method={c.method}") for c in (*PLAIN, DPSGD, ADADP)]
    timed = ("--model=vae", "--steps=1", "--repeats=1")
    results = run()
    assert calls == [timed, *fresh]
    assert results.find(measure="fresh", method="adadp")["error"] == "ValueError: no"
    run()
    assert calls == [fresh[-1]]
    results = run(repeats=2)
    assert calls == [("--model=vae", "--steps=1", "--repeats=2"), fresh[-1]]
    assert len([row for row in results.rows if row["measure"] == "fresh"]) == 4


def test_models_of_packages_that_are_not_there_are_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "from_process", lambda *asked: pytest.fail("measured"))
    absent = dataclasses.replace(VAE, needs="no_such_package")
    program.run([absent], 1, 1, make_results(tmp_path / "r.json"))
    assert "vae is skipped: it needs no_such_package" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["subclassed_ops", "wide_and_deep", "gemma_lora"])
@pytest.mark.parametrize("contender", [PLAIN[0], DPSGD], ids=["plain", "private"])
def test_first_fit_and_memory_of_a_model(contender, name):
    small = MODELS[name]
    if small.needs:
        pytest.importorskip(small.needs)
    small = dataclasses.replace(small, make=functools.partial(small.make, small=True))
    fields = program.measure_fresh(small, contender, steps=1)
    assert fields["first_fit_s"] > 0
    assert fields["memory_mb"] >= 0
    assert ("plan" in fields) == ("reason" in fields) == (contender is DPSGD)


def test_step_times_of_a_model():
    small = MODELS["subclassed_ops"]
    small = dataclasses.replace(small, make=functools.partial(small.make, small=True))
    rows = list(step_time.time_rows(small, [DPSGD], steps=1, repeats=1))
    assert [Contender(*(row[k] for k in report.KEY[-3:])) for row in rows] == [*PLAIN, DPSGD]
    assert all(row["ratio"] > 0 for row in rows)


def test_a_process_measures_one_model():
    row = program.fresh_row(MODELS["recommender"], PLAIN[1], steps=1)
    assert [row[name] for name in report.KEY] == [
        *("fresh", "recommender", 256, 2560, "keras:noxla", None, None)
    ]
    assert row["first_fit_s"] > 0
    assert "error" not in row


def test_flags():
    args = program.parse_arguments([])
    assert args.models == list(MODELS)
    assert args.out == harness.ROOT / "benchmarks" / "results" / "real_models.json"
    args = program.parse_arguments(["--models=vae,unet", "--steps=2", "--repeats=4", "--force"])
    assert (args.models, args.steps, args.repeats, args.force) == (["vae", "unet"], 2, 4, True)


def test_unknown_models_are_named(capsys):
    with pytest.raises(SystemExit):
        program.parse_arguments(["--models=vae,alexnet"])
    assert "'alexnet' is none of transformer, recommender" in capsys.readouterr().err


def test_accuracy_is_logged_where_there_are_classes():
    assert entries.options(entries.crossentropy())["metrics"] == ["accuracy"]
    assert entries.options("mse")["metrics"] == []
