"""examples/find_clip_norm.py: finds a clip norm, and reports what the search costs."""

import json
import pathlib
import subprocess
import sys

import pytest

import tf_adadp as dp

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "find_clip_norm.py"
# Processes: its flags have names of train.py's, which one process could not define twice.
pytestmark = pytest.mark.extended


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, cwd=SCRIPT.parents[1]
    )


def test_as_a_script_it_reports_cost_with_and_without_the_search():
    arguments = ["--mean_trials=2", "--epochs=2", "--clip_norms=0.1,1", "--target_epsilon=3"]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    *statement, last = done.stdout.splitlines()
    summary = json.loads(last)
    assert summary["clip_norm"] in (0.1, 1.0)
    assert 2.99 < summary["epsilon"] <= 3.0
    law = dp.accounting.PoissonSampling(1437, 128)
    one, searched = dp.PrivacyLedger(), dp.PrivacyLedger()
    step = law.event(summary["noise_multiplier"])
    one.add(step, summary["steps"], law=law)
    searched.add(dp.accounting.search_event(step, summary["steps"], 2), law=law)
    assert summary["epsilon_without_search"] == pytest.approx(one.epsilon(1e-5), rel=1e-9)
    assert summary["epsilon"] == pytest.approx(searched.epsilon(1e-5), rel=1e-9)
    assert summary["epsilon"] > summary["epsilon_without_search"]
    # Nothing of single trials was printed: the statement, and no progress.
    assert statement[0] == "Differential privacy statement"
    assert not any("loss" in line and "step" in line for line in statement)


@pytest.mark.parametrize(
    "flag", ["--mean_trials=0.5", "--mean_trials=inf", "--clip_norms=0", "--target_epsilon=0"]
)
def test_flags_out_of_range_are_refused(flag):
    done = run(flag)
    assert done.returncode != 0
    assert flag.partition("=")[0].strip("-") in done.stderr
