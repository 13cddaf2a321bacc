"""Variables of other precisions: releases stay float32, and float64 changes nothing else."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.cases import OPTIMIZERS, SHAPES, SIGMA, advance

STEPS = 3


def _variables(dtype):
    variables = []
    for path, shape in SHAPES.items():
        scope, _, name = path.rpartition("/")
        with keras.name_scope(scope or "top"):
            value = np.linspace(0.5, 1, int(np.prod(shape))).reshape(shape)
            variables.append(keras.Variable(value, dtype=dtype, trainable=True, name=name))
    return variables


def _trained(name, dtype, floatx="float32"):
    """The optimizer after a few noisy steps on the same sums, and the weights in float64."""
    keras.config.set_floatx(floatx)
    try:
        optimizer = OPTIMIZERS[name](
            noise_multiplier=SIGMA, seed=3, weight_decay=0.01, use_ema=True, clipnorm=50.0
        )
        variables = _variables(dtype)
        optimizer.build(variables)
        advance(optimizer, np.random.default_rng(5), STEPS, rows=4)
    finally:
        keras.config.set_floatx("float32")
    return optimizer, [np.float64(v) for v in variables]


@pytest.mark.representative(1, 18)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_float64_weights_take_the_steps_of_float32_ones(name):
    """Same sums, same noise: only the rounding of weights and of Keras's slots is another."""
    _, expected = _trained(name, "float32")
    optimizer, found = _trained(name, "float64", floatx="float64")
    start = [np.float64(v) for v in _variables("float32")]
    for f, e, s in zip(found, expected, start, strict=True):
        way = np.max(np.abs(e - s))
        assert way > 1e-5
        assert np.max(np.abs(f - e)) < 1e-3 * way + 5e-7  # float32 rounds weights of size 1 so far
    clipping_set = optimizer.clipping_set()
    sums = [tf.ones(shape) for shape in SHAPES.values()]
    released, stddevs = optimizer._noisy_mean(clipping_set, sums, 10.0)
    assert {t.dtype for t in (*released, *stddevs)} == {tf.float32}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["dpadam", "adadp", "dpopt_box"])
def test_half_precision_weights_stay_finite_and_what_is_released_float32(name, dtype):
    optimizer, found = _trained(name, dtype)
    assert all(np.all(np.isfinite(f)) for f in found)
    sums = [tf.ones(shape) for shape in SHAPES.values()]
    released, stddevs = optimizer._noisy_mean(optimizer.clipping_set(), sums, 10.0)
    assert {t.dtype for t in (*released, *stddevs)} == {tf.float32}
