"""Features of CIFAR-10 from convolutions trained on other, public images, and then frozen.

    TF_ADADP_DATA_DIR=folder python -m benchmarks.cifar_features

As in the ADADP paper's CIFAR-10 experiment: convolutional layers are trained without privacy on
CIFAR-100, whose images are not those of CIFAR-10, and only what follows them is trained privately.
Reads cifar10.npz and cifar100_20k.npz (uint8 arrays x_train, y_train, x_test, y_test; any part of
CIFAR-100 will do) from the folder, and writes cifar10_features.npz into it: 1,024 features of every
image, float16.
"""

import argparse
import os
import pathlib

import keras
import numpy as np

from benchmarks import harness, models

FILE = "cifar10_features.npz"


def convolutions():
    """Two convolutions and three poolings, [32, 32, 3] to 1,024 features."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([32, 32, 3]),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.AveragePooling2D(2),
            layers.Flatten(),
        ]
    )


def _images(path):
    with np.load(path) as arrays:
        return {
            name: arrays[name].astype(np.float32) / 255 - 0.5
            if name.startswith("x")
            else arrays[name].reshape(-1).astype(np.int32)
            for name in ("x_train", "y_train", "x_test", "y_test")
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=harness.count, default=10, help="on CIFAR-100")
    epochs = parser.parse_args().epochs
    folder = pathlib.Path(os.environ[models.DATA_DIR_VARIABLE])
    keras.utils.set_random_seed(0)
    public = _images(folder / "cifar100_20k.npz")
    base = convolutions()
    model = keras.Sequential([base, keras.layers.Dropout(0.3), keras.layers.Dense(100)])
    model.compile(keras.optimizers.Adam(2e-3), loss=models.loss(), metrics=["accuracy"])
    model.fit(
        public["x_train"],
        public["y_train"],
        batch_size=128,
        epochs=epochs,
        validation_data=(public["x_test"], public["y_test"]),
        verbose=2,
    )
    private = _images(folder / "cifar10.npz")
    features = {
        name: base.predict(private[name], batch_size=500, verbose=0).astype(np.float16)
        for name in ("x_train", "x_test")
    }
    np.savez(folder / FILE, **features, y_train=private["y_train"], y_test=private["y_test"])
    print(folder / FILE)


if __name__ == "__main__":
    main()
