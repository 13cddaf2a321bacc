"""Models of tables: recommendation, wide and deep, and a subclassed model of raw operations."""

import keras
import numpy as np
from keras import layers, ops

from benchmarks.real_models.entry import classes, crossentropy


class Recommender(keras.Model):
    """Scores pairs (user, item) by the product of their embeddings, plus a bias of each."""

    def __init__(self, users, items, width, **kwargs):
        super().__init__(**kwargs)
        self.user = self._table(users, width)
        self.user_bias = layers.Embedding(users, 1)
        self.item = self._table(items, width)
        self.item_bias = layers.Embedding(items, 1)

    @staticmethod
    def _table(rows, width):
        return layers.Embedding(
            rows,
            width,
            embeddings_initializer="he_normal",
            embeddings_regularizer=keras.regularizers.l2(1e-6),
        )

    def call(self, inputs):
        """Maps [batch, 2] integers to probabilities [batch, 1]."""
        user, item = inputs[:, 0], inputs[:, 1]
        product = ops.sum(self.user(user) * self.item(item), axis=1, keepdims=True)
        return ops.sigmoid(product + self.user_bias(user) + self.item_bias(item))


def recommender(rows, small=False):
    users, items, width = (20, 30, 4) if small else (2000, 3000, 50)
    rng = np.random.default_rng(4)
    x = np.stack([rng.integers(users, size=rows), rng.integers(items, size=rows)], axis=1)
    x = x.astype(np.int32)
    y = rng.random((rows, 1), dtype=np.float32)
    return _called(Recommender(users, items, width), x), x, y, keras.losses.BinaryCrossentropy()


def wide_and_deep(rows, small=False):
    """One-hot columns into a linear model, embedded ones and numbers into a deep one.

    The integers are as StringLookup gives them: 0 is a value out of the vocabulary.
    """
    columns = {"job": 5, "town": 9} if small else {"job": 15, "town": 200, "school": 16, "kin": 6}
    width, numeric = (8, 3) if small else (64, 6)
    inputs = {name: keras.Input([1], dtype="int32", name=name) for name in columns}
    inputs["numbers"] = keras.Input([numeric], name="numbers")
    scaled = layers.Normalization(mean=[0.5] * numeric, variance=[0.1] * numeric)(inputs["numbers"])
    wide, deep = [scaled], [scaled]
    for name, size in columns.items():
        wide.append(layers.CategoryEncoding(size, output_mode="one_hot")(inputs[name]))
        embedded = layers.Embedding(size, int(size**0.5))(inputs[name])
        deep.append(layers.Flatten()(embedded))
    hidden = layers.Concatenate()(deep)
    for _ in range(2):
        hidden = layers.Dropout(0.1)(layers.Dense(width, activation="relu")(hidden))
    merged = layers.Concatenate()([layers.Concatenate()(wide), hidden])
    model = keras.Model(inputs, layers.Dense(1)(merged))
    rng = np.random.default_rng(5)
    x = {name: rng.integers(size, size=(rows, 1), dtype=np.int32) for name, size in columns.items()}
    x["numbers"] = rng.random((rows, numeric), dtype=np.float32)
    y = rng.integers(2, size=(rows, 1)).astype(np.float32)
    return model, x, y, keras.losses.BinaryCrossentropy(from_logits=True)


class SubclassedOps(keras.Model):
    """Windows of a signal, scored by dense and Lambda layers with keras.ops in between."""

    def __init__(self, windows, width, classes, **kwargs):
        super().__init__(**kwargs)
        self.windows = windows
        self.centred = layers.Lambda(lambda x: x - ops.mean(x, axis=-1, keepdims=True))
        self.hidden = layers.Dense(width)
        self.gate = layers.Dense(width, activation="sigmoid")
        self.doubled = layers.Lambda(lambda x: 2.0 * x)
        self.scores = layers.Dense(classes)

    def call(self, inputs):
        """Maps [batch, windows * size] to [batch, classes]."""
        x = ops.reshape(self.centred(inputs), [-1, self.windows, inputs.shape[-1] // self.windows])
        x = ops.tanh(self.hidden(x)) * self.gate(x)
        return self.scores(self.doubled(ops.sum(x, axis=1)))


def subclassed_ops(rows, small=False):
    """A subclassed model of Lambda layers and raw operations."""
    windows, size, width = (3, 4, 8) if small else (16, 32, 128)
    x = np.random.default_rng(6).normal(size=(rows, windows * size)).astype(np.float32)
    model = _called(SubclassedOps(windows, width, 10), x)
    return model, x, classes(rows, 10), crossentropy()


def _called(model, x):
    """The model, built by a call."""
    model(x[:1])
    return model
