"""MNIST without public data: a softmax regression on scattering features (see record.py).

    python examples/records/mnist.py --data_dir=<folder of mnist.npz>

The recipes, `record.RECIPES`, were chosen by --held_out, with one seed, never by the test records.
"""

import record

if __name__ == "__main__":
    record.run("mnist")
