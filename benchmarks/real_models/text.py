"""Text classifiers: a transformer of custom layers, and recurrent networks."""

import keras
from keras import layers, ops

from benchmarks.real_models.entry import classes, crossentropy, tokens


class TokenAndPosition(layers.Layer):
    """Adds an embedding of each token's place to that of the token."""

    def __init__(self, vocabulary, length, width, **kwargs):
        super().__init__(**kwargs)
        self.token = layers.Embedding(vocabulary, width)
        self.place = layers.Embedding(length, width)

    def call(self, inputs):
        """Embeds [batch, length] integers."""
        return self.token(inputs) + self.place(ops.arange(ops.shape(inputs)[-1]))


class EncoderBlock(layers.Layer):
    """Attention and a feed-forward net, each with dropout, a residual and a normalisation."""

    def __init__(self, width, heads, hidden, rate=0.1, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.feed_forward = keras.Sequential(
            [layers.Dense(hidden, activation="relu"), layers.Dense(width)]
        )
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [layers.Dropout(rate) for _ in range(2)]

    def call(self, inputs, training=None):
        """Maps [batch, length, width] to the same shape."""
        attended = self.attention(inputs, inputs)
        x = self.norms[0](inputs + self.dropouts[0](attended, training=training))
        fed = self.feed_forward(x)
        return self.norms[1](x + self.dropouts[1](fed, training=training))


def transformer(rows, small=False):
    """A classifier of embedded tokens, an encoder block, and dense layers on the mean."""
    vocabulary, length, width = (30, 6, 8) if small else (5000, 64, 64)
    inputs = keras.Input([length], dtype="int32")
    x = TokenAndPosition(vocabulary, length, width)(inputs)
    x = EncoderBlock(width, heads=2, hidden=2 * width)(x)
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dropout(0.1)(x)
    x = layers.Dense(20, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(2)(layers.Dropout(0.1)(x)))
    return model, tokens(rows, vocabulary, length), classes(rows, 2), crossentropy()


def bidirectional_lstm(rows, small=False):
    """Two bidirectional LSTMs over embedded tokens."""
    vocabulary, length, width = (30, 3, 4) if small else (5000, 50, 32)
    model = keras.Sequential(
        [
            keras.Input([length], dtype="int32"),
            layers.Embedding(vocabulary, width),
            layers.Bidirectional(layers.LSTM(width, return_sequences=True)),
            layers.Bidirectional(layers.LSTM(width)),
            layers.Dense(2),
        ]
    )
    return model, tokens(rows, vocabulary, length), classes(rows, 2), crossentropy()


def masked_gru(rows, small=False):
    """A GRU over embedded tokens; zeros at the end of a text are masked."""
    vocabulary, length, width = (30, 6, 4) if small else (5000, 50, 32)
    model = keras.Sequential(
        [
            keras.Input([length], dtype="int32"),
            layers.Embedding(vocabulary, width, mask_zero=True),
            layers.GRU(width),
            layers.Dense(16, activation="relu"),
            layers.Dense(2),
        ]
    )
    x = tokens(rows, vocabulary, length, padded=length // 3)
    return model, x, classes(rows, 2), crossentropy()
