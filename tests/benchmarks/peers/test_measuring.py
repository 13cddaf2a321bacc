import json

import numpy as np
import pytest

from benchmarks.peers import measuring
from benchmarks.workloads import WORKLOADS


def parse(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["run_some.py", *arguments])
    return measuring.parse_arguments(("ghost", "plain"))


def test_arguments(monkeypatch):
    args = parse(monkeypatch, "--model=cnn", "--mode=ghost", "--lot_size=8")
    assert vars(args) == {
        "model": "cnn",
        "mode": "ghost",
        "lot_size": 8,
        "steps": 10,
        "examples": 80,
    }


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--model=resnet", "invalid choice: 'resnet'"),
        ("--mode=fast", "invalid choice: 'fast'"),
        ("--examples=7", "--examples=7 are fewer than --lot_size=8"),
    ],
)
def test_arguments_that_make_no_sense(monkeypatch, capsys, wrong, says):
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--model=cnn", "--mode=ghost", "--lot_size=8", wrong)
    assert says in capsys.readouterr().err


def test_measure_drops_the_settling_steps_and_counts_memory(monkeypatch, capsys):
    args = parse(monkeypatch, "--model=cnn", "--mode=ghost", "--lot_size=8", "--steps=3")
    seen = {}

    def train(lots, steps):
        seen["shapes"] = [array.shape for array in lots]
        seen["labels"] = (lots[1].min(), lots[1].max())
        # 1 GiB, given back: what lies below an earlier peak of this process is not counted.
        block = np.ones(2**27)
        seen["sum"] = block.sum()
        return [0.0, 5.0, 5.001, 5.003, 5.006][:steps]

    measuring.measure(args, train, ("numpy",))
    result = json.loads(capsys.readouterr().out)
    assert seen["shapes"] == [(10, 8, 28, 28, 1), (10, 8)]
    assert seen["labels"] == (0, 9)
    assert result["step_ms"] == [1.0, 2.0, 3.0]
    assert result["data_mb"] == round(80 * (784 * 4 + 8) / 2**20, 1)
    assert result["memory_mb"] > 200
    assert result["versions"] == {"numpy": np.__version__}


def test_lots_come_in_turns():
    seen = []
    lots = np.arange(6).reshape(3, 2), np.arange(6, 12).reshape(3, 2)
    ends = measuring.run_steps(lambda x, y: seen.append((*x, *y)), lots, 4)
    assert seen == [(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11), (0, 1, 6, 7)]
    assert len(ends) == 4
    assert ends == sorted(ends)


def test_models_take_what_the_workloads_do():
    assert {name: WORKLOADS[name].features.shape for name in measuring.SHAPES} == measuring.SHAPES
