"""MultiWorkerMirroredStrategy: three processes over loopback, see `hosts.py`."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import tf_adadp as dp
from tf_adadp import accounting
from verification import faults

WORKERS = 3


def test_three_hosts_train_as_one(tmp_path):
    # One test for all checks: they share the processes, which take longest to start.
    seen = _run(tmp_path)
    _check_state(seen)
    _check_parts_of_lots(seen)
    _check_budget(seen)
    _check_ledger_file(seen, tmp_path)
    _check_refusals(seen)
    _check_parts_given_as_lots(seen, tmp_path)


def _run(folder):
    """Returns the results of each worker."""
    program = pathlib.Path(__file__).with_name("hosts.py")
    processes = faults.start_cluster(
        [[sys.executable, str(program), str(folder)]] * WORKERS,
        [subprocess.PIPE] * WORKERS,
        text=True,
    )
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = []
    for out, err in outputs:
        lines = [line[7:] for line in out.splitlines() if line.startswith("RESULT ")]
        assert lines, err[-4000:]
        found.append(json.loads(lines[0]))
    return found


def _check_state(seen):
    for name in (
        "count",
        "from_chief",
        "bytes",
        "history",
        "key",
        "weights",
        "state",
        "steps",
        "released",
    ):
        assert [s[name] for s in seen] == [seen[0][name]] * WORKERS, name
    assert [s["number"] for s in seen] == [0, 1, 2]
    assert seen[0]["from_chief"] == [-0.0, 0.0]
    assert seen[0]["bytes"] == "chief"
    assert all(np.isfinite(w).all() for w in map(np.asarray, seen[0]["weights"]))


def _check_parts_of_lots(seen):
    """Shares have mean 20; over 13 lots the sample mean leaves 20 ± 6 in 1 of 10⁵ trials."""
    assert all(s["only_own_records"] for s in seen)
    assert all(14 < s["mean_share"] < 26 for s in seen)


def _check_budget(seen):
    steps = accounting.max_steps(2.0, 60 / 500, target_epsilon=0.8, delta=1e-3)
    assert 0 < steps < 20
    # The filter's order is fixed beforehand, which costs a few steps.
    assert steps - 3 <= seen[0]["steps"][0] == seen[0]["steps"][1] <= steps
    assert max(seen[0]["history"]["epsilon"]) <= 0.8


def _check_ledger_file(seen, folder):
    assert all(s["file"] for s in seen)
    stored = accounting.PrivacyLedger.load(folder / "ledger.json")
    assert stored.steps == seen[0]["steps"][0]
    assert stored.entries[0].law.num_examples == 500


def _check_refusals(seen):
    for name, text in {
        "unequal": "The workers do not agree (num_examples: 40",
        "twice": "The workers hold 1500 records together, and the law says 500",
        "law": "FixedSizeLots on several hosts",
    }.items():
        assert all(s[name].startswith(text) for s in seen), [s[name] for s in seen]


def _check_parts_given_as_lots(seen, folder):
    steps = seen[0]["steps"][0] + 2
    assert [s["steps_after"] for s in seen] == [steps] * WORKERS
    assert seen[0]["epsilon"] == pytest.approx(accounting.epsilon(2.0, 60 / 500, steps, 1e-3))
    loaded = dp.load_model(folder / "model.keras")  # in one process
    assert loaded.epsilon(1e-3) == pytest.approx(seen[0]["epsilon"])
