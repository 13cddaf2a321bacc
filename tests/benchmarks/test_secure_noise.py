"""The cost of secure noise: what the study compares is what it says."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import secure_noise


def test_every_way_adds_noise_of_one_size():
    sums = np.concatenate(
        [tf.random.stateless_normal(s, [1, 2]).numpy().ravel() for s in secure_noise.SHAPES]
    )
    assert sums.size == 795_010
    for function in secure_noise.noises().values():
        released = np.concatenate([r.numpy().ravel() for r in function(tf.constant(3, tf.int64))])
        # 5σ of a standard deviation of n numbers is 5/√(2n).
        assert np.std(released - sums) == pytest.approx(4.0, rel=5 / np.sqrt(2 * sums.size))


def test_summary():
    rounds = [{"a": [1.0, 3.0, 2.0], "b": [4.0]}, {"a": [1.0], "b": [5.0]}]
    found = secure_noise.summary(rounds, ["a", "b"])
    assert found["b"] == {"median_ms": 4.5, "ratio": 3.5, "least_ratio": 2.0, "largest_ratio": 5.0}
    assert found["a"]["ratio"] == 1.0
