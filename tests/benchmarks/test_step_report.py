from benchmarks import step_report
from benchmarks.workloads import WORKLOADS, Contender
from tests.benchmarks.fakes import fake_memory_row, fake_time_rows, make_results

HEADER = (
    "| model | lot | method | step, ms | ms per example | × plain (rounds) | mark "
    "| memory, MiB (data) | × plain | mark |"
)


def fill(results, workload, contenders):
    for row in fake_time_rows(workload, contenders, 1, 1):
        results.put(row)
        contender = Contender(*(row[name] for name in step_report.KEY[-3:]))
        results.put(fake_memory_row(workload, contender, 1))


def put_peer(results, workload):
    ghost = Contender("opacus:ghost")
    row = list(fake_time_rows(workload, [ghost], 1, 1))[-1]
    results.put({**row, "measure": "peer_time", "ratio": 7.0})
    results.put(fake_memory_row(workload, ghost, 1))


def test_table_has_the_ratios_and_the_marks(tmp_path):
    results = make_results(tmp_path / "r.json")
    mlp = WORKLOADS["mlp"]
    fill(results, mlp, [Contender("dpsgd", "auto", 32), Contender("adadp", "vectorized")])
    fill(results, mlp.at(64), [Contender("dpsgd", "auto")])
    lines = step_report.tables(results).splitlines()
    assert lines[0] == HEADER
    assert lines[2:] == [
        "| MLP 784-1000-10 | 600 | keras | 30.0 | 0.0500 | 3.0 (2.5–3.5) |  | 80 (18) | 1.60 |  |",
        "| MLP 784-1000-10 | 600 | keras:noxla | 30.0 | 0.0500 | 3.0 (2.5–3.5) |  "
        "| 50 (18) | 1.00 |  |",
        "| MLP 784-1000-10 | 600 | dpsgd, auto, B=32 | 30.0 | 0.0500 | 3.0 (2.5–3.5) | ≤ 1.8 "
        "| 100 (18) | 2.00 | ≤ 1.5 |",
        "| MLP 784-1000-10 | 600 | adadp, vectorized, B=auto | 30.0 | 0.0500 | 3.0 (2.5–3.5) "
        "| ≤ 60 | 100 (18) | 2.00 | ≤ 3 |",
        *(line.replace("| 600 |", "| 64 |") for line in lines[2:4]),
        "| MLP 784-1000-10 | 64 | dpsgd, auto, B=auto | 30.0 | 0.0500 | 3.0 (2.5–3.5) |  "
        "| 100 (18) | 2.00 |  |",
    ]


def test_memory_is_relative_to_plain_keras_of_the_same_lot_and_data(tmp_path):
    results = make_results(tmp_path / "r.json")
    mlp = WORKLOADS["mlp"]
    fill(results, mlp, [Contender("dpsgd", "auto")])
    lonely = fake_memory_row(mlp.at(600, 60_000), Contender("dpsgd", "auto"), 1)
    assert step_report.memory_ratio(results, lonely) is None
    for plain, peak in (("keras", 30.0), ("keras:noxla", 25.0)):
        row = fake_memory_row(mlp.at(600, 60_000), Contender(plain), 1)
        results.put({**row, "memory_mb": peak})
    assert step_report.memory_ratio(results, lonely) == 4.0


def test_peers_have_a_table_of_their_own(tmp_path):
    results = make_results(tmp_path / "r.json")
    fill(results, WORKLOADS["cnn"], [Contender("dpsgd", "auto")])
    put_peer(results, WORKLOADS["cnn"])
    alone, beside = step_report.tables(results).split("\n\nNext to other libraries:\n\n")
    assert "opacus" not in alone
    assert beside.splitlines()[0] == HEADER
    assert beside.splitlines()[2:] == [
        "| tanh CNN, 26,010 weights | 512 | opacus:ghost | 30.0 | 0.0500 | 7.0 (2.5–3.5) |  "
        "| 100 (18) | 2.00 |  |"
    ]


def test_plot_of_every_workload(tmp_path):
    results = make_results(tmp_path / "r.json")
    for workload in WORKLOADS.values():
        fill(results, workload, [Contender("dpsgd", "auto", 32), Contender("adan", "vectorized")])
    fill(results, WORKLOADS["mlp"].at(64), [Contender("dpsgd", "auto")])
    put_peer(results, WORKLOADS["mlp"])
    step_report.plot(results, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "r.png").stat().st_size < 300_000


def test_a_row_that_was_timed_twice_is_plotted_once():
    row = {"method": "dpsgd", "engine": "auto", "physical_batch_size": None}
    alone = {**row, "measure": "time", "ratio": 2.0}
    beside = {**row, "measure": "peer_time", "ratio": 3.0}
    assert step_report._timed([beside, alone]) == [alone]
    assert step_report._timed([beside]) == [beside]


def test_error_bars_end_where_the_rounds_do():
    assert step_report._spread({"ratio": 3.0, "ratio_range": [2.5, 4.0]}) == [0.5, 1.0]
    assert step_report._spread({"ratio": 3.0, "ratio_range": [1.5, 2.0]}) == [1.5, 0.0]


def test_peers_are_plotted_below_the_private_contenders():
    rows = [
        {"measure": "memory", "engine": engine, "method": method}
        for method, engine in (("opacus:ghost", None), ("dpsgd", "auto"))
    ]
    assert [row["method"] for row in step_report._sized(rows)] == ["dpsgd", "opacus:ghost"]
