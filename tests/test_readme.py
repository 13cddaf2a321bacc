"""The README's program runs as it is printed, and its figures are those of the result files."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks import adadp_report, step_report
from tests.helpers import python_blocks

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def results(name):
    return json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))["rows"]


def test_it_is_short():
    assert len(README.splitlines()) < 150


def test_its_program_is_the_example():
    (program,) = python_blocks(ROOT / "README.md")
    assert program == (ROOT / "examples/digits.py").read_text(encoding="utf-8")


def test_the_program_trains_well_within_its_budget(tmp_path):
    script = ROOT / "examples/digits.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    lines = done.stdout.splitlines()
    accuracy = float(re.findall(r"val_accuracy: ([\d.]+)", done.stdout)[-1])
    # Runs reach 0.90 to 0.93. The noise is unseeded: a false alarm needs ten times that spread.
    assert accuracy > 0.8
    assert 1.9 < float(lines[-1].removeprefix("epsilon = ")) <= 2.0
    assert (tmp_path / "digits.keras").exists()


def test_its_accuracies_are_those_of_the_study():
    assert adadp_report.architectures(results("adadp_default.json")) in README


@pytest.mark.parametrize(("model", "title"), [("mlp", "dense network"), ("cnn", "convolutional")])
def test_its_step_times_are_the_measured_ones(model, title):
    measured = step_report.libraries(results("step_time.json"))[model]
    ratios = {name: f"{r:.1f}" if r < 10 else f"{r:.0f}" for name, r in measured.items()}
    [row] = [line for line in README.splitlines() if line.startswith("|") and title in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    ours = f"{ratios['tf_adadp, DPSGD']} (ADADP {ratios['ADADP']})"
    assert cells == [ours, *(ratios[name] for name in ("TF Privacy", "Opacus", "JAX-Privacy"))]
