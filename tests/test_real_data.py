"""Private training on real data: runs where TF_ADADP_DATA_DIR names a folder with mnist.npz."""

import os
import pathlib

import keras
import numpy as np
import pytest

import tf_adadp as dp

FOLDER = os.environ.get("TF_ADADP_DATA_DIR")
needs_data = pytest.mark.skipif(
    FOLDER is None or not (pathlib.Path(FOLDER or ".") / "mnist.npz").exists(),
    reason="TF_ADADP_DATA_DIR names no folder with mnist.npz",
)


@pytest.mark.extended
@needs_data
@pytest.mark.parametrize(
    "optimizer",
    [
        dp.DPSGD(2.0, noise_multiplier=1.0),
        dp.ADADP(noise_multiplier=1.0),
        dp.ADAN(2.0, noise_multiplier=1.0),
    ],
    ids=lambda o: o.name,
)
def test_mnist_is_learnt_in_sixty_steps(optimizer):
    """Four in five digits right at ε < 1.5; a guess is right once in ten."""
    with np.load(pathlib.Path(FOLDER) / "mnist.npz") as archive:
        x, y, x_test, y_test = (archive[k] for k in ("x_train", "y_train", "x_test", "y_test"))
    x, x_test = (a.reshape(len(a), 784).astype(np.float32) / 255 for a in (x, x_test))
    model = dp.DPModel(
        keras.Sequential(
            [keras.Input((784,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)]
        )
    )
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callback = dp.PrivacyCallback(1e-5)
    model.fit(x, y, batch_size=1000, steps_per_epoch=60, verbose=0, callbacks=[callback])
    assert callback.epsilon() < 1.5
    _, accuracy = model.evaluate(x_test, y_test, batch_size=1000, verbose=0)
    assert accuracy > 0.8
