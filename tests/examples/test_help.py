"""--help of every example that has flags."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SCRIPTS = [
    path
    for path in sorted(EXAMPLES.rglob("*.py"))
    if re.search(r"\b(app|experiment|record)\.(run|start)\(", path.read_text(encoding="utf-8"))
    if path.stem not in ("experiment", "record")  # what scripts share
]
# A module that is None cannot be imported.
WITHOUT_TENSORFLOW = (
    "import runpy, sys; sys.modules['tensorflow'] = sys.modules['keras'] = None;"
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def test_the_scripts_were_found():
    names = {path.stem for path in SCRIPTS}
    assert {"train", "find_clip_norm", "privacy_budget", "cosine", "trajectories"} <= names


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_loads_no_tensorflow(script):
    """So it takes about a second instead of ten, and has none of TensorFlow's log lines."""
    folders = (script.parent, EXAMPLES, EXAMPLES.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", WITHOUT_TENSORFLOW, script, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1  # as absl's --help does
    assert done.stderr == ""
    flags = [line for line in done.stdout.splitlines() if line.lstrip().startswith("--")]
    assert len(flags) > 2
