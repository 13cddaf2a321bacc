import numpy as np
import pytest

from benchmarks import models, step_report, step_time
from benchmarks.workloads import PLAIN, WORKLOADS, Contender, Workload
from tests.benchmarks.fakes import TINY, fake_memory_row, fake_time_rows, make_results

NAMED = Workload(
    "tabular",
    "tiny",
    lambda: models.tabular_mlp(columns=2, vocabulary=5, width=3, numeric=4, hidden=(6,)),
    {"categorical": models.Features((2,), 5), "numeric": models.Features((4,))},
    lot_size=16,
    num_classes=2,
)


def test_timer_drops_the_settling_steps(monkeypatch):
    ends = iter([0.0, 5.0, 5.001, 5.003])
    monkeypatch.setattr(step_time.time, "perf_counter", lambda: next(ends))
    timer = step_time.StepTimer()
    for step in range(step_time.SETTLING_STEPS + 2):
        timer.on_train_batch_end(step)
    np.testing.assert_allclose(timer.milliseconds(), [1.0, 2.0])


def test_contenders_take_turns():
    calls = []

    def block_of(name):
        def block(steps):
            calls.append((name, steps))
            return np.full(steps, len(calls))

        return block

    times = step_time.interleaved_times(
        {"a": block_of("a"), "b": block_of("b")}, steps=4, repeats=3
    )
    assert calls == 3 * [("a", 4), ("b", 4)]
    np.testing.assert_array_equal(times["a"][:, 0], [1, 3, 5])
    np.testing.assert_array_equal(times["b"], [[2] * 4, [4] * 4, [6] * 4])


def test_figures_refer_to_the_faster_plain_step():
    slow, fast = np.full([2, 3], 9.0), np.array([[2.0] * 3, [4.0] * 3])
    fields = step_time.time_fields(np.array([[12.0] * 3, [18.0] * 3]), [slow, fast], lot_size=60)
    assert fields == {
        "step_ms": 15.0,
        "ms_per_example": 0.25,
        "round_ms": [12.0, 18.0],
        "plain_ms": 3.0,
        "ratio": 5.0,
        "ratio_range": [4.5, 6.0],
    }


@pytest.mark.parametrize("workload", [TINY, NAMED], ids=["one input", "named inputs"])
def test_time_rows_of_real_training(workload):
    contenders = [Contender("dpsgd", "auto", 8), Contender("adadp_local:noxla", "vectorized")]
    rows = list(step_time.time_rows(workload, contenders, steps=2, repeats=2))
    assert [Contender(*(r[k] for k in step_report.KEY[-3:])) for r in rows] == [
        *PLAIN,
        *contenders,
    ]
    plain = min(row["step_ms"] for row in rows[:2])
    for row in rows:
        assert row["step_ms"] > 0
        assert row["plain_ms"] == plain
        assert row["ratio"] == pytest.approx(row["step_ms"] / plain, rel=0.02, abs=0.02)
        # The ratio of medians over all rounds may lie outside of the rounds' own ratios.
        assert 0 < row["ratio_range"][0] <= row["ratio_range"][1]


def test_the_engine_is_the_models(monkeypatch):
    made = []

    class Made(Exception):
        pass

    def model(inner, **options):
        made.append(options)
        raise Made

    monkeypatch.setattr(step_time.dp, "DPModel", model)
    with pytest.raises(Made):
        step_time.make_block(TINY, Contender("dpsgd", "vectorized", 4), TINY.data())
    assert made == [{"physical_batch_size": 4, "gradient_engine": "vectorized"}]


def test_memory_of_a_child_holds_its_per_example_gradients():
    workload = WORKLOADS["mlp"].at(64, 6000)
    row = step_time.memory_row(workload, Contender("dpsgd:noxla", "vectorized", 32), steps=1)
    assert row["memory_mb"] > 32 * 795_010 * 4 / 2**20
    assert row["data_mb"] == pytest.approx(6000 * (784 * 4 + 8) / 2**20, abs=0.1)
    assert [row[name] for name in step_report.KEY] == [
        *("memory", "mlp", 64, 6000, "dpsgd:noxla", "vectorized", 32)
    ]


def test_run_measures_what_is_missing_only(tmp_path, monkeypatch):
    timed, sized = [], []

    def time_rows(workload, contenders, steps, repeats):
        timed.append(contenders)
        return fake_time_rows(workload, contenders, steps, repeats)

    def memory_row(workload, contender, steps):
        sized.append(contender)
        return fake_memory_row(workload, contender, steps)

    monkeypatch.setattr(step_time, "time_rows", time_rows)
    monkeypatch.setattr(step_time, "memory_row", memory_row)

    def run(contenders, workload=TINY, **settings):
        timed.clear()
        sized.clear()
        results = make_results(tmp_path / "r.json")
        step_time.run([workload], contenders, results=results, **settings)

    settings = {"steps": 10, "repeats": 3}
    first = [Contender("dpsgd", "auto"), Contender("adadp", "auto")]
    run(first, **settings)
    assert timed == [first]
    assert sized == [*PLAIN, *first]
    more = [Contender("dpsgd", "vectorized"), Contender("dpsgd", "auto", 32)]
    run(first + more, **settings)
    assert timed == [more]
    assert sized == more
    run(first + more, **settings)
    assert not timed + sized
    run(first[:1], steps=10, repeats=5)
    assert timed == [first[:1]]
    assert not sized
    for other in (TINY.at(32), TINY.at(16, 80)):
        run(first[:1], workload=other, **settings)
        assert timed == [first[:1]]
        assert sized == [*PLAIN, first[0]]


def parse(*arguments):
    _, workloads, contenders = step_time.parse_arguments(arguments)
    return workloads, contenders


def test_flags_by_default_ask_for_everything():
    workloads, contenders = parse()
    assert workloads == list(WORKLOADS.values())
    names = ("dpsgd", "dpadam", "dprmsprop", "adadp", "adan", "adadp_local")
    assert contenders == [
        Contender(name, engine) for name in names for engine in ("auto", "vectorized")
    ]


def test_flags_cross_models_with_lots_and_methods_with_engines():
    workloads, contenders = parse(
        "--models=mlp,cnn",
        "--lot_sizes=64,8192",
        "--examples=81920",
        "--methods=adadp,dpsgd:xla",
        "--engines=auto",
        "--physical_batch_sizes=auto,32",
    )
    assert [tuple(w.fields().values()) for w in workloads] == [
        (model, size, 81_920) for model in ("mlp", "cnn") for size in (64, 8192)
    ]
    assert contenders == [
        Contender(method, "auto", size) for method in ("adadp", "dpsgd:xla") for size in (None, 32)
    ]


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--models=mlp,resnet", "--models: 'resnet' is none of mlp, cnn"),
        ("--methods=adam", "--methods: 'adam' is none of dpsgd"),
        ("--methods=dpsgd:jit", "--methods: 'dpsgd:jit' is none of"),
        ("--engines=gpu", "--engines: 'gpu' is none of auto, vectorized"),
        ("--lot_sizes=64,all", "--lot_sizes: 'all' is not a whole number"),
        ("--lot_sizes=0", "--lot_sizes: '0' is not a whole number"),
        ("--physical_batch_sizes=big", "--physical_batch_sizes: 'big' is not a whole number"),
        ("--examples=100", "100 examples are fewer than a lot of 600"),
    ],
)
def test_flags_that_make_no_sense_are_named(argument, says, capsys):
    with pytest.raises(SystemExit):
        parse(argument)
    assert says in capsys.readouterr().err
