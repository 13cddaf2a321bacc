"""The side of tf_adadp, in the environment of this package.

Called by compare.py with a folder: writes inputs.npz, the weights and lots for both sides, and
tf_adadp.json.
"""

import argparse
import importlib.metadata
import json
import pathlib

import keras
import numpy as np

import tf_adadp as dp
from verification.parity import accounting_figures, cases

_PACKAGES = ("tensorflow", "keras", "dp-accounting", "numpy", "scipy")
_NO_NOISE = {"noise_multiplier": 0.0, "allow_no_noise": True, "l2_norm_clip": cases.L2_NORM_CLIP}
ENGINES = ("ghost", "vectorized")


def mean_gradient(arrays, model, engine):
    """The first lot's clipped gradients, without noise, over the lot size."""
    plain = _plain(arrays, model)
    optimizer = dp.DPSGD(**_NO_NOISE)
    optimizer.build(plain.trainable_variables)
    lot = dp.make_lot(arrays[f"{model}/x"][0], arrays[f"{model}/y"][0])
    sums = dp.clipped_sum(plain, _loss(), lot, optimizer, gradient_engine=engine)
    return cases.flat(np.asarray(s) / cases.LOT_SIZE for s in sums)


def trained_weights(arrays, model, optimizer):
    """The weights after every step of a `DPModel`, a list of STEPS lists.

    With the engine that it chooses: what follows the clipped sum is the same for both.
    """
    plain = _plain(arrays, model)
    name, arguments = cases.OPTIMIZERS[optimizer]
    private = dp.DPModel(plain)
    private.compile(optimizer=getattr(dp, f"DP{name}")(**arguments, **_NO_NOISE), loss=_loss())
    law = dp.accounting.PoissonSampling(1000, cases.LOT_SIZE)
    weights = []
    for x, y in zip(arrays[f"{model}/x"], arrays[f"{model}/y"], strict=True):
        private.train_on_batch(x, y, law=law)
        weights.append(cases.flat(plain.get_weights()))
    return weights


def training_figures(arrays, models=cases.MODELS):
    """Returns, by model, the mean gradient of every engine and the weights of every optimizer."""
    return {
        model: {
            "gradients": {engine: mean_gradient(arrays, model, engine) for engine in ENGINES},
            "weights": {
                optimizer: trained_weights(arrays, model, optimizer)
                for optimizer in cases.OPTIMIZERS
            },
        }
        for model in models
    }


def _plain(arrays, model):
    plain = keras.Sequential(cases.layers(keras, model))
    plain.set_weights(cases.weights_of(arrays, model))
    return plain


def _loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    arrays = cases.inputs()
    np.savez(folder / "inputs.npz", **arrays)
    figures = {
        "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
        "accounting": accounting_figures.figures(cases),
        "training": training_figures(arrays),
    }
    (folder / "tf_adadp.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
