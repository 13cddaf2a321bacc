"""MirroredStrategy on four logical devices, see `mirrored.py`."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("mirrored.py")
CHECKS = re.findall(r"^    (\w+),$", SCRIPT.read_text().split("CHECKS = [")[1], re.MULTILINE)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{check: its failure or None}, of one process."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path_factory.mktemp("mirrored"),
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = [json.loads(s[7:]) for s in run.stdout.splitlines() if s.startswith("RESULT ")]
    found = dict(lines)
    return {name: found.get(name, f"did not run:\n{run.stderr[-4000:]}") for name in CHECKS}


@pytest.mark.slow
@pytest.mark.xdist_group("mirrored")
@pytest.mark.parametrize("check", CHECKS)
def test_on_four_devices(results, check):
    assert results[check] is None, results[check]


def test_every_check_is_run():
    assert len(CHECKS) == 9
