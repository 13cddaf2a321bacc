"""The collision test in short: real trainings, killed and resumed, never use a seed twice."""

import subprocess
import sys
import textwrap

from tests.helpers import ROOT
from verification import key_collisions


def test_no_seed_is_used_twice_over_kills_and_resumes(tmp_path):
    rows = key_collisions.run(3, 3, tmp_path, methods=("adadp",))  # asserts after each kill
    assert len(rows) == 3
    found = key_collisions.records(tmp_path)
    assert set(found.values()) == {1}
    assert {record[:1] for record in found} == {b"n", b"l"}


def test_a_seed_that_is_used_twice_is_found(tmp_path):
    """Two optimizers, and two lots, of one public seed: what unseeded ones must never be."""
    script = """
        import sys
        import keras, numpy as np, tensorflow as tf
        import tf_adadp as dp
        from verification import key_collisions
        key_collisions.watch(sys.argv[1])
        for _ in range(2):
            one = dp.DPSGD(0.1, noise_multiplier=1.0, seed=7)
            one.build([keras.Variable(np.zeros(3, np.float32))])
            one.apply_private([tf.zeros(3)], 1.0)
            dp.PoissonLots(np.zeros((9, 1)), expected_size=3, seed=7)._indices(0)
            tf.function(lambda: dp.noise.stream(np.int64([1, 2]), 3, 4))()
    """
    arguments = [sys.executable, "-c", textwrap.dedent(script), tmp_path / "seeds0"]
    subprocess.run(arguments, check=True, capture_output=True, timeout=300, cwd=ROOT)
    assert sorted(key_collisions.records(tmp_path).values()) == [2, 2, 2]
