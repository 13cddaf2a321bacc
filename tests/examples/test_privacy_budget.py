"""examples/privacy_budget.py, run as a user runs it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tf_adadp import accounting

ROOT = pathlib.Path(__file__).parents[2]
# A process that imports TensorFlow in spite of the promise ends with an error.
CODE = (
    "import runpy, sys; sys.modules['tensorflow'] = sys.modules['keras'] = None;"
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    script = str(ROOT / "examples" / "privacy_budget.py")
    return subprocess.run(
        [sys.executable, "-c", CODE, script, *arguments],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def test_plan_for_given_noise(tmp_path):
    done = run(
        "--num_examples=1000", "--lot_size=50", "--epochs=3", "--noise_multiplier=4",
        f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files, table = done.stdout.split("\n\n", maxsplit=1)
    assert table == f"{accounting.compare(4.0, 0.05, 60, 1e-5)}\n"  # whole, and nothing after it
    budget, bounds, numbers = map(pathlib.Path, files.splitlines())
    assert min(budget.stat().st_size, bounds.stat().st_size) > 10_000
    summary = json.loads(numbers.read_text(encoding="utf-8"))
    expected = [accounting.epsilon(4.0, 0.05, 20 * epoch, 1e-5) for epoch in (1, 2, 3)]
    assert summary["epsilon_after_epoch"] == pytest.approx(expected, rel=1e-12)
    assert summary["steps"] == 60
    assert not [row for row in summary["bounds"] if row["name"] == "gdp_clt"][0]["is_guarantee"]


def test_plan_for_a_budget_with_components(tmp_path):
    done = run(
        "--num_examples=1000", "--lot_size=100", "--epochs=2", "--target_epsilon=1",
        "--pca_noise_multiplier=12", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "budget.json").read_text(encoding="utf-8"))
    assert 0.999 <= summary["epsilon_after_epoch"][-1] <= 1
    split = accounting.split_budget(1.0, 1e-5, 0.1, 20, release_noise_multiplier=12.0)
    assert summary["noise_multiplier"] == pytest.approx(split.noise_multiplier, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lot_size=100000"], "there are 60000 records"),
        (["--target_epsilon=1", "--pca_noise_multiplier=1"], "is spent"),
    ],
)
def test_refusals(arguments, message):
    done = run(*arguments)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
