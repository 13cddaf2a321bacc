"""MirroredStrategy on four logical devices, see `mirrored.py`."""

import json
import os
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).with_name("mirrored.py")
NUMBER_OF_CHECKS = 11


def test_four_devices_train_as_one(tmp_path):
    # One test for all checks: they share a process, which takes as long to start as to run.
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = [json.loads(s[7:]) for s in run.stdout.splitlines() if s.startswith("RESULT ")]
    failures = [f"{name}:\n{failure}" for name, failure in lines if failure is not None]
    assert not failures, "\n".join(failures)
    assert len(lines) == NUMBER_OF_CHECKS, run.stderr[-4000:]
