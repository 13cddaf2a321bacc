"""Fashion-MNIST without public data: a softmax regression on features of scattering and patches.

    python examples/records/fashion_mnist.py --data_dir=<folder of fashion_mnist.npz>

Features and recipes were chosen by --held_out, never by the test records (see images.py, mnist.py).
"""

import images
import record
from mnist import RECIPES

NAME = "fashion_mnist"
FEATURES = {"features": images.scattering_and_patch_features, "floor": 0.001, "mirror": False}

if __name__ == "__main__":
    record.run(NAME, images.task(NAME, RECIPES, **FEATURES))
