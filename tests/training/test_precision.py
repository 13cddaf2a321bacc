"""Training in other precisions: it learns, and a saved model keeps its policies."""

import keras
import numpy as np
import pytest

import tf_adadp as dp
from tests.helpers import data, exact_sgd, plain_model, private_model

L = keras.layers


def _policies(model):
    return [layer.dtype_policy.name for layer in model.layers]


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float64", "per layer"])
def test_training_learns_and_a_saved_model_keeps_its_policies(policy, tmp_path):
    """Full lots, no noise: gradient descent, whose loss has to fall. Then saved, and trained on."""
    first, last = ("float64", "mixed_float16") if policy == "per layer" else (policy, policy)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            L.Dense(8, activation="tanh", dtype=first),
            L.Dense(3, dtype=last),
        ]
    )
    x, y = data()
    private = private_model(exact_sgd(2.0, momentum=0.5), model)
    losses = private.fit(x, y, batch_size=len(x), epochs=10, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    private.save(tmp_path / "model.keras")
    loaded = dp.load_model(tmp_path / "model.keras")
    assert _policies(loaded.model) == _policies(model) == [first, last]
    for a, b in zip(private.variables, loaded.variables, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert loaded.epsilon(1e-3) == np.inf  # noise_multiplier=0 is charged so
    if policy == "per layer":
        again = loaded.fit(x, y, batch_size=len(x), verbose=0).history["loss"]
        assert again[-1] < losses[-2]


@pytest.mark.extended
def test_float64_throughout_trains_privately():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        x, y = data()
        private = private_model(dp.ADADP(noise_multiplier=1.0), plain_model())
        private.fit(x.astype("float64"), y, batch_size=60, epochs=2, verbose=0)
        assert private.model.layers[0].kernel.dtype == "float64"
        assert all(np.all(np.isfinite(v)) for v in private.get_weights())
        assert private.ledger.steps == 4
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
