"""Parity with tensorflow-privacy itself, number by number.

    make parity
    python -m verification.parity.compare --python=python3.11

tensorflow-privacy 0.9.0 needs a TensorFlow of before Keras 3, so each side runs in an environment
of its own: `run_tf_adadp.py` here, `run_tf_privacy.py` in the one that peers/environments.py
makes, in .peers/ beside .venv, where `tf_adadp.accounting` runs as well. Weights and data pass
through a file. Prints a table of differences, writes results/parity.json, and ends with 1 if a
difference is not allowed; `checks.py` has what is, and why.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from benchmarks import harness
from benchmarks.peers import environments
from verification.parity import checks

PEER = "tf_privacy"
STORED = harness.ROOT / "verification" / "results" / "parity.json"
_STORED_IMPLEMENTATION = "DPKeras"


def start(python, script, folder):
    """Starts one side, its words in a log; `finish` waits for it."""
    environment = {
        **os.environ,
        # This checkout on both sides, and nothing of another environment.
        "PYTHONPATH": str(harness.ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    log = pathlib.Path(folder, f"{script}.log")
    with log.open("w") as file:
        command = [str(python), "-m", f"verification.parity.{script}", str(folder)]
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file), log


def finish(process, log):
    """Waits for a side.

    Raises:
        RuntimeError: with the end of what it said, if it failed.
    """
    if process.wait():
        raise RuntimeError(f"{' '.join(process.args)} failed: {log.read_text()[-3000:]}")


def run(python, envs):
    """Runs both sides; makes the other environment meanwhile where it is missing.

    Returns:
        What both wrote: `ours, peer`.
    """
    with tempfile.TemporaryDirectory() as folder:
        ours = start(sys.executable, "run_tf_adadp", folder)
        try:
            if not environments.is_complete(envs, PEER):
                print(f"Making {envs / PEER} once.", flush=True)
                environments.make(envs, PEER, python)
        finally:
            finish(*ours)
        finish(*start(environments.python_of(envs, PEER), "run_tf_privacy", folder))
        read = [pathlib.Path(folder, f"{side}.json").read_text() for side in ("tf_adadp", PEER)]
        return tuple(map(json.loads, read))


def all_checks(ours, peer):
    """Every comparison of two sides, a list of `checks.Check`."""
    return [
        *checks.accounting_checks(
            ours["accounting"], peer["tf_adadp_accounting"], peer["accounting"]
        ),
        *checks.training_checks(ours["training"], peer["training"]),
    ]


def table(found):
    """The checks as Markdown."""
    return harness.markdown_table(
        ["compared", "numbers", "least", "greatest difference", "allowed", ""],
        [
            [
                check.what,
                check.numbers,
                f"{check.least:.1e}",
                f"{check.greatest:.1e}",
                f"{check.allowed[0]:.1e} to {check.allowed[1]:.1e} {check.unit}",
                "" if check.holds else "MISS",
            ]
            for check in found
        ],
    )


def store(path, ours, peer, found):
    """Writes the checks and tensorflow-privacy's figures, which the tests compare with."""
    results = harness.Results(path, key=("figure", "of"), one_machine=False, force=True)
    rows = {
        ("versions", "tf_adadp"): ours["versions"],
        ("versions", "tf_privacy"): peer["versions"],
        **{("check", c.what): _check_row(c) for c in found},
        **{("accounting", k): {"values": v} for k, v in peer["accounting"].items()},
    }
    for model, implementations in peer["training"].items():
        figures = implementations[_STORED_IMPLEMENTATION]
        rows["gradient", model] = {"values": _float32(figures["gradient"])}
        for optimizer, weights in figures["weights"].items():
            ends = [_float32(weights[0]), _float32(weights[-1])]
            rows["weights", f"{model}, {optimizer}"] = {"values": ends}
    for (figure, of), fields in rows.items():
        results.put({"figure": figure, "of": of, **fields})


def stored(path=STORED):
    """The peer's figures of a results file, in the form in which `all_checks` takes them."""
    rows = {(r["figure"], r["of"]): r for r in json.loads(path.read_text())["rows"]}
    training = {}
    for (figure, of), row in rows.items():
        if figure == "gradient":
            training.setdefault(of, {"weights": {}})["gradient"] = row["values"]
        elif figure == "weights":
            model, optimizer = of.split(", ")
            training.setdefault(model, {"weights": {}})["weights"][optimizer] = row["values"]
    return {
        "accounting": {of: r["values"] for (f, of), r in rows.items() if f == "accounting"},
        "training": {m: {_STORED_IMPLEMENTATION: figures} for m, figures in training.items()},
    }


def _check_row(check):
    ends = {"least": check.least, "greatest": check.greatest}
    ends = {name: _json_number(value) for name, value in ends.items()}
    allowed = [_json_number(value) for value in check.allowed]
    return {**check._asdict(), **ends, "allowed": allowed, "holds": check.holds}


def _json_number(value):
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)


def _float32(values):
    """The shortest decimals that give the same float32 numbers."""
    return [float(str(value)) for value in np.asarray(values, np.float32)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="python3.11", help="to make the other environment of")
    parser.add_argument("--envs", type=pathlib.Path, default=environments.DIR)
    parser.add_argument("--out", type=pathlib.Path, default=STORED)
    args = parser.parse_args()
    ours, peer = run(args.python, args.envs)
    found = all_checks(ours, peer)
    print(table(found))
    store(args.out, ours, peer, found)
    misses = [check.what for check in found if not check.holds]
    if misses:
        sys.exit(f"{len(misses)} of {len(found)} differ: {'; '.join(misses)}.")
    print(f"All {len(found)} agree, {sum(check.numbers for check in found)} numbers.")


if __name__ == "__main__":
    main()
