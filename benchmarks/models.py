"""Models and data of the studies."""

import dataclasses
import os
import pathlib

import keras
import numpy as np

DATA_DIR_VARIABLE = "TF_ADADP_DATA_DIR"


def loss():
    """Cross-entropy of the models below, which give logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(*widths):
    """Dense layers with ReLU between them; `mlp(784, 1000, 10)` has inputs of size 784."""
    inputs, *hidden, outputs = widths
    return keras.Sequential(
        [
            keras.Input([inputs]),
            *(keras.layers.Dense(width, activation="relu") for width in hidden),
            keras.layers.Dense(outputs),
        ]
    )


def tanh_cnn():
    """The convolutional network of SA-DPSGD for 28×28 images, 26,010 parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([28, 28, 1]),
            layers.Conv2D(16, 8, strides=2, padding="same", activation="tanh"),
            layers.MaxPooling2D(2, strides=1),
            layers.Conv2D(32, 4, strides=2, activation="tanh"),
            layers.MaxPooling2D(2, strides=1),
            layers.Flatten(),
            layers.Dense(32, activation="tanh"),
            layers.Dense(10),
        ]
    )


def cifar_cnn():
    """The convolutional network of SA-DPSGD for 32×32 colour images, 550,570 parameters."""
    layers = keras.layers
    blocks = []
    for filters in (32, 64, 128):
        blocks += [
            layers.Conv2D(filters, 3, padding="same", activation="tanh"),
            layers.Conv2D(filters, 3, padding="same", activation="tanh"),
            layers.MaxPooling2D(2),
        ]
    return keras.Sequential(
        [
            keras.Input([32, 32, 3]),
            *blocks,
            layers.Flatten(),
            layers.Dense(128, activation="tanh"),
            layers.Dense(10),
        ]
    )


def deep_mlp(shape, depth):
    """Returns an MLP of `depth` hidden layers of 64 ELU units, without normalisation."""
    hidden = [keras.layers.Dense(64, activation="elu") for _ in range(depth)]
    layers = [keras.Input(shape), keras.layers.Flatten(), *hidden, keras.layers.Dense(10)]
    return keras.Sequential(layers)


def small_cnn(shape, activation, *, normalized=False):
    """Returns two convolutions and two dense layers, for small images; group norm before each
    activation of a convolution where `normalized`.
    """
    layers = keras.layers
    blocks = []
    for filters, size, stride in ((16, 5, 2), (32, 3, 1)):
        blocks.append(layers.Conv2D(filters, size, strides=stride, padding="same"))
        if normalized:
            blocks.append(layers.GroupNormalization(4))
        blocks.append(layers.Activation(activation))
    head = [layers.Flatten(), layers.Dense(32, activation=activation), layers.Dense(10)]
    return keras.Sequential([keras.Input(shape), *blocks, layers.MaxPooling2D(2), *head])


def residual(shape):
    """Returns two residual blocks of group norm, ReLU and convolution, for small images."""
    layers = keras.layers

    def activated(x):
        return layers.Activation("relu")(layers.GroupNormalization(4)(x))

    inputs = keras.Input(shape)
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for filters, stride in ((16, 1), (32, 2)):
        y = activated(x)
        z = layers.Conv2D(filters, 3, strides=stride, padding="same")(y)
        z = layers.Conv2D(filters, 3, padding="same")(activated(z))
        x = z + (x if stride == 1 else layers.Conv2D(filters, 1, strides=stride)(y))
    pooled = layers.GlobalAveragePooling2D()(activated(x))
    return keras.Model(inputs, layers.Dense(10)(pooled))


def recurrent(shape, cell):
    """Returns a recurrent layer of 64 units, "LSTM" or "GRU", over the rows of an image."""
    layers = keras.layers
    rows = [layers.Reshape(shape[:2]), getattr(layers, cell)(64), layers.Dense(10)]
    return keras.Sequential([keras.Input(shape), *rows])


def patches(shape):
    """Returns a transformer encoder of two blocks over patches of 2×2 pixels.

    Positions are random and fixed: their embedding is worked out once, as the model is built.
    """
    layers = keras.layers
    inputs, side, width = keras.Input(shape), shape[0] // 2, 32
    x = layers.Reshape((side * side, width))(layers.Conv2D(width, 2, strides=2)(inputs))
    x = x + layers.Embedding(side * side, width)(keras.ops.arange(side * side))
    for _ in range(2):
        x = encoder_block(x, 2, 64)
    pooled = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(pooled))


def encoder_block(x, heads, feed_forward):
    """Applies attention, then a feed-forward net of GELU: x + f(norm(x)) each."""
    layers, width = keras.layers, x.shape[-1]
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(y, y)
    y = layers.LayerNormalization()(x)
    return x + layers.Dense(width)(layers.Dense(feed_forward, activation="gelu")(y))


def transformer_encoder(
    vocabulary=5000, length=64, width=128, heads=4, feed_forward=256, blocks=2, classes=2
):
    """A text classifier: embedded tokens, encoder blocks, their mean over the sequence.

    A block is attention and a feed-forward net, each added to its input and normalised. It has no
    positions: they would not change what a step costs.
    """
    layers = keras.layers
    tokens = keras.Input([length], dtype="int32")
    x = layers.Embedding(vocabulary, width)(tokens)
    for _ in range(blocks):
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = layers.LayerNormalization()(x + attention(x, x))
        hidden = layers.Dense(feed_forward, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(hidden))
    pooled = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(classes)(pooled))


def tabular_mlp(columns=8, vocabulary=1000, width=16, numeric=16, hidden=(256, 128), classes=2):
    """Categorical columns, each with an embedding of its own, and numeric ones, into an MLP.

    The inputs are a dict: "categorical" of integers [columns] and "numeric" of floats [numeric].
    """
    layers = keras.layers
    inputs = {
        "categorical": keras.Input([columns], dtype="int32", name="categorical"),
        "numeric": keras.Input([numeric], name="numeric"),
    }
    embedded = [
        layers.Embedding(vocabulary, width)(inputs["categorical"][:, column])
        for column in range(columns)
    ]
    x = layers.Concatenate()([*embedded, inputs["numeric"]])
    for units in hidden:
        x = layers.Dense(units, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(classes)(x))


@dataclasses.dataclass(frozen=True)
class Features:
    """Draws one input of a model: floats in [0, 1), or integers below `vocabulary`."""

    shape: tuple[int, ...]
    vocabulary: int | None = None

    def draw(self, rng, num_examples):
        """Random features, [num_examples, *shape]."""
        shape = (num_examples, *self.shape)
        if self.vocabulary is None:
            return rng.random(shape, dtype=np.float32)
        return rng.integers(self.vocabulary, size=shape, dtype=np.int32)


def random_data(num_examples, features, num_classes=10):
    """Features and labels that mean nothing, for timing: `x, y`.

    Args:
        num_examples: N.
        features: a `Features`, or a dict of them for a model of named inputs; x is alike.
        num_classes: labels are integers below it.
    """
    rng = np.random.default_rng(0)
    x = keras.tree.map_structure(lambda f: f.draw(rng, num_examples), features)
    return x, rng.integers(num_classes, size=num_examples)


def digits():
    """scikit-learn's 1,797 images of 8×8: x_train, y_train, x_test, y_test, a fixed split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        (x / 16).astype(np.float32), y, test_size=360, random_state=0, stratify=y
    )
    return x_train, y_train, x_test, y_test


def table():
    """20,000 drawn records of 20 columns and two classes: x_train, y_train, x_test, y_test."""
    from sklearn.datasets import make_classification

    x, y = make_classification(
        24_000, 20, n_informative=10, n_redundant=5, n_clusters_per_class=1, flip_y=0.1,
        random_state=0,
    )  # fmt: skip
    x = (x / x.std(0)).astype(np.float32)
    return x[:20_000], y[:20_000], x[20_000:], y[20_000:]


def data_file(name):
    """Returns the path of a file in the data folder."""
    return pathlib.Path(os.environ.get(DATA_DIR_VARIABLE, ".")) / name


def arrays(path, shape, side=None, classes=None):
    """Returns x_train, y_train, x_test, y_test of an npz file.

    Args:
        path: of the file.
        shape: of one example.
        side: images are averaged to `side` × `side` pixels where it is given.
        classes: a range; only its records are kept, and its first label becomes 0. None keeps all.
    """
    with np.load(path) as found:
        x_train, x_test = (found[n].astype(np.float32) for n in ("x_train", "x_test"))
        y_train, y_test = (found[n].astype(np.int32).reshape(-1) for n in ("y_train", "y_test"))
    scale = 255.0 if x_train.max() > 100 else 1.0
    parts = []
    for x, y in ((x_train, y_train), (x_test, y_test)):
        if classes is not None:
            kept = np.isin(y, classes)
            x, y = x[kept], y[kept] - classes.start
        x = x if side is None else averaged(x, side)
        parts += [x.reshape(-1, *shape) / scale, y]
    return tuple(parts)


def averaged(images, side):
    """Averages images [N, height, width(, channels)] to [N, side, side, channels]."""
    rows, size = images.shape[:2]
    window = size // side
    return images.reshape(rows, side, window, side, window, -1).mean((2, 4))
