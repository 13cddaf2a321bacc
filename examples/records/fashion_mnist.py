"""Fashion-MNIST without public data: a softmax regression on scattering features (see record.py).

    python examples/records/fashion_mnist.py --data_dir=<folder of fashion_mnist.npz>

Recipes were chosen by --held_out, with one seed, never by the test records.
"""

import record

if __name__ == "__main__":
    record.run(
        "fashion_mnist",
        {
            1.0: record.Recipe(steps=200, learning_rate=160),
            2.0: record.Recipe(steps=250, learning_rate=160),
            3.0: record.Recipe(steps=300, learning_rate=160),
        },
    )
