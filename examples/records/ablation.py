"""Trains records of images at ε = 3 with one part of their features changed.

    python examples/records/ablation.py --data_dir=<folder of .npz files>

Parts that are in the recipe are variants of the scripts themselves (`linear.parts`):

    python examples/records/mnist.py --epsilons=3 --variants="noise by RDP,without momentum"

The recipe is that of the record: each part is changed alone, and rates are not searched again.
"""

import dataclasses

import cifar10
import fashion_mnist
import images
import mnist
import record
from absl import flags

COMMON = {"pixels": {"features": images.pixels}, "without public whitening": {"floor": None}}
CHANGES = {
    mnist: {
        **COMMON,
        "without straightening": {"straighten": False},
        "without group normalisation": {"features": images.plain_scattering_features},
        "patches beside": {"features": images.scattering_and_patch_features},
    },
    fashion_mnist: {
        **COMMON,
        "scattering alone": {"features": images.scattering_features},
        "patches alone": {"features": images.patch_features},
    },
    cifar10: {
        **COMMON,
        "without mirror images": {"mirror": False},
        "mirror images by augmentation multiplicity 4": {"mirror": "copies"},
    },
}


def main(options):
    """Runs all changes that have no runs yet."""
    for script, changes in CHANGES.items():
        if options.only not in (None, script.NAME):
            continue
        recipe = script.RECIPES[3.0]
        for title, change in changes.items():
            copies = 4 if change.get("mirror") == "copies" else 1
            recipes = {3.0: dataclasses.replace(recipe, augmentation_multiplicity=copies)}
            task = images.task(script.NAME, recipes, **{**script.FEATURES, **change})
            record.record(f"{script.NAME}, {title}", task, options)


if __name__ == "__main__":
    flags.DEFINE_enum("only", None, [s.NAME for s in CHANGES], "One data set.")
    record.start(main)
