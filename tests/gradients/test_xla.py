"""XLA compiles a physical batch once, whatever the lengths of the lots."""

import os
import re
import subprocess
import sys

import pytest

PROGRAM = """
import keras
import numpy as np
import tf_adadp as dp

layers = [keras.Input((20,)), keras.layers.Dense(30, "tanh"), keras.layers.Dense(3)]
model = dp.DPModel(keras.Sequential(layers), gradient_engine="{engine}", physical_batch_size=32)
model.compile(dp.DPSGD(noise_multiplier=1.0), "mse", jit_compile=True)
x = np.random.default_rng(0).normal(size=(3000, 20)).astype("float32")
model.fit(x, x[:, :3], batch_size=200, steps_per_epoch=12, verbose=0)
"""


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["ghost", "vectorized"])
def test_a_physical_batch_is_compiled_once(engine):
    """Twelve Poisson lots of 200 ± 14 records, in physical batches of 32."""
    # TensorFlow logs each compilation.
    variables = {"TF_CPP_VMODULE": "device_compiler=1", "TF_CPP_MIN_LOG_LEVEL": "0"}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(engine=engine)],
        capture_output=True, text=True, timeout=300, env={**os.environ, **variables},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    compilations = re.findall(r"Compilation of XLA executable.*#called: (\d+)", process.stderr)
    assert compilations == ["1"]
