"""Fashion-MNIST without public data: a softmax regression on scattering features (see images.py).

    python examples/records/fashion_mnist.py --data_dir=<folder of fashion_mnist.npz>

The recipes are `images.SCATTERING_RECIPES`, chosen by --held_out, never by the test records.
"""

import images
import record

NAME, RECIPES, FEATURES = "fashion_mnist", images.SCATTERING_RECIPES, images.SCATTERING

if __name__ == "__main__":
    record.run(NAME, images.task(NAME, RECIPES, **FEATURES))
