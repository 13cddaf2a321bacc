import json
import os
import sys

import numpy as np
import pytest

from benchmarks import peer_times, step_report, step_time
from benchmarks.peers import environments
from benchmarks.workloads import PLAIN, WORKLOADS, Contender
from tests.benchmarks.fakes import TINY, make_results

# Answers as a peer's script does: every step takes as many milliseconds as the mode has letters.
FAKE = """\
import json, os, sys
given = dict(argument[2:].split("=") for argument in sys.argv[1:])
with open({log!r}, "a") as log:
    log.write(json.dumps([given, os.environ.get("PYTHONPATH")]) + "\\n")
print("some words of a library")
times = int(given["steps"]) * [len(given["mode"])]
memory = {{"memory_mb": 70.0, "data_mb": 18.0}}
print(json.dumps({{"step_ms": times, **memory, "versions": {{"a": "1"}}}}))
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Environments of this interpreter and a script that notes its arguments; the notes' path."""
    log = tmp_path / "log.jsonl"
    (tmp_path / "fake.py").write_text(FAKE.format(log=str(log)))
    monkeypatch.setattr(peer_times, "_SCRIPTS", tmp_path)
    peers = {
        "one": peer_times.Peer("fake.py", {"mlp": ("fast", "slow"), "cnn": ("fast",)}),
        "two": peer_times.Peer("fake.py", {"mlp": ("x",)}),
    }
    monkeypatch.setattr(peer_times, "PEERS", peers)
    for peer in peers:
        python = environments.python_of(tmp_path / "envs", peer)
        python.parent.mkdir(parents=True)
        os.symlink(sys.executable, python)
    return log


def test_blocks_run_the_modes_of_the_model(fakes, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    envs = fakes.parent / "envs"
    assert list(peer_times.peer_contenders(WORKLOADS["cnn"], envs)) == [Contender("one:fast")]
    blocks = peer_times.peer_contenders(WORKLOADS["mlp"].at(64, 900), envs)
    assert list(blocks) == [Contender(m) for m in ("one:fast", "one:slow", "two:x")]
    np.testing.assert_array_equal(blocks[Contender("two:x")](3), [1, 1, 1])
    given, python_path = json.loads(fakes.read_text())
    assert given == {"model": "mlp", "mode": "x", "lot_size": "64", "examples": "900", "steps": "3"}
    assert python_path is None
    assert blocks[Contender("two:x")].memory_fields() == {
        "memory_mb": 70.0,
        "data_mb": 18.0,
        "versions": {"a": "1"},
    }


def test_memory_is_the_median_of_the_blocks():
    block = peer_times.PeerBlock([])
    block._outputs = [{"memory_mb": m, "data_mb": 1.0, "versions": {}} for m in (5.0, 90.0, 7.0)]
    assert block.memory_fields()["memory_mb"] == 7.0


def test_a_peer_that_fails_says_what_it_said(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('no such mode')")
    with pytest.raises(RuntimeError, match="fails.py --steps=2 failed: no such mode"):
        peer_times.PeerBlock([sys.executable, str(script)])(2)


def test_a_missing_environment_is_named_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"peers.environments --dir=\S+ tf_privacy"):
        peer_times.peer_contenders(WORKLOADS["mlp"], tmp_path)


def test_peers_and_private_contenders_each_come_after_plain_keras(fakes, monkeypatch):
    order = []

    def make_block(workload, contender, data):
        def block(steps):
            order.append(contender.method)
            return np.full(steps, {"keras": 2.0, "keras:noxla": 1.0}.get(contender.method, 5.0))

        return block

    monkeypatch.setattr(step_time, "make_block", make_block)
    envs = fakes.parent / "envs"
    rows = list(step_time.peer_rows(TINY, [Contender("dpsgd", "auto")], envs, steps=2, repeats=2))
    plain = [p.method for p in PLAIN]
    # The peers' blocks, in their own processes, fall between the later pairs of plain ones.
    assert order == 2 * (plain + ["dpsgd"] + 3 * plain)
    times = [row for row in rows if row["measure"] == "peer_time"]
    assert [(row["method"], row["engine"], row["ratio"]) for row in times] == [
        ("dpsgd", "auto", 5.0),
        ("one:fast", None, 4.0),
        ("one:slow", None, 4.0),
        ("two:x", None, 1.0),
    ]
    memories = [row for row in rows if row["measure"] == "memory"]
    assert [row["method"] for row in memories] == ["one:fast", "one:slow", "two:x"]
    assert all(row["versions"] == {"a": "1"} for row in memories)


def test_run_peers_fills_the_results(fakes, monkeypatch, tmp_path):
    monkeypatch.setattr(step_time, "memory_row", lambda workload, contender, steps: {
        "measure": "memory", **workload.fields(), **contender.fields(), "memory_mb": 35.0,
        "data_mb": 1.0, "steps": steps,
    })  # fmt: skip
    results = make_results(tmp_path / "r.json")
    step_time.run_peers([TINY], [], fakes.parent / "envs", steps=1, repeats=1, results=results)
    row = results.find(measure="memory", method="one:slow")
    assert step_report.memory_ratio(results, row) == 2.0
    assert [r["method"] for r in results.rows if r["measure"] == "peer_time"] == [
        *("one:fast", "one:slow", "two:x")
    ]


def test_the_peers_there_are_have_scripts_environments_and_models():
    assert set(peer_times.PEERS) == set(environments.REQUIREMENTS)
    assert peer_times.MODELS == ("mlp", "cnn")
    for peer in peer_times.PEERS.values():
        assert (peer_times._SCRIPTS / peer.script).exists()
        assert set(peer.modes) <= set(WORKLOADS)
