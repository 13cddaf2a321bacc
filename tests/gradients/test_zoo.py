"""Both engines equal a loop over single examples, for every kind of model in the zoo."""

import json
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
# Few processes: each takes as long to start as two models take.
GROUPS = [
    ("dense", "conv", "separable_conv", "embedding"),
    ("attention", "layer_norm", "shared_layers", "two_inputs_two_outputs"),
    ("dropout", "regularizers", "frozen_batch_norm"),
    ("lstm", "masked_lstm"),
]


@pytest.mark.representative(0, 3)
@pytest.mark.parametrize("names", GROUPS, ids=" ".join)
def test_clipped_sum_equals_a_loop_over_single_examples(names):
    process = subprocess.run(
        [sys.executable, HERE / "zoo.py", *names], capture_output=True, text=True, timeout=300
    )
    results = [json.loads(s) for s in process.stdout.splitlines() if s.startswith("{")]
    done = [result["name"] for result in results]
    assert (done, process.returncode) == ([*names], 0), process.stderr[-3000:]
    for result in results:
        name, errors = result["name"], result["errors"]
        assert result["norm"] > 0.1, name
        assert set(errors) == {"vectorized"} | ({"ghost"} if name != "dropout" else set()), name
        assert all(error < 1e-5 for error in errors.values()), (name, errors)
