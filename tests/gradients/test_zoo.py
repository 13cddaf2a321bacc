"""Both engines equal a loop over single examples, for every kind of model in the zoo."""

import json
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
NAMES = [
    "dense", "conv", "separable_conv", "lstm", "masked_lstm", "embedding", "attention",
    "layer_norm", "shared_layers", "two_inputs_two_outputs", "dropout", "regularizers",
    "frozen_batch_norm",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_clipped_sum_equals_a_loop_over_single_examples(name):
    process = subprocess.run(
        [sys.executable, HERE / "zoo.py", name], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads(process.stdout.strip().splitlines()[-1])
    assert result["norm"] > 0.1
    assert set(result["errors"]) == {"vectorized"} | ({"ghost"} if name != "dropout" else set())
    assert all(error < 1e-5 for error in result["errors"].values())
