"""Fashion-MNIST without public data: a softmax regression on scattering features (see images.py).

    python examples/records/fashion_mnist.py --data_dir=<folder of fashion_mnist.npz>

The recipes are `images.SCATTERING_RECIPES`, chosen by --held_out, never by the test records.
"""

import images
import record

if __name__ == "__main__":
    features = {"features": images.scattering_features, "floor": 0.001, "mirror": False}
    record.run("fashion_mnist", images.task("fashion_mnist", images.SCATTERING_RECIPES, **features))
