"""Image models: U-Net, autoencoders, and networks of patches."""

import keras
import numpy as np
from keras import layers, ops

from benchmarks.real_models.entry import classes, crossentropy, images


def unet(rows, small=False):
    """A classifier of pixels, with group normalisation and a skip at every size."""
    size, widths = (8, (4, 8)) if small else (64, (16, 32, 64))
    inputs = keras.Input([size, size, 3])
    x, skips = inputs, []
    for width in widths[:-1]:
        x = _normalised_conv(_normalised_conv(x, width), width)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = _normalised_conv(x, widths[-1])
    for width, skip in zip(widths[-2::-1], skips[::-1], strict=True):
        x = layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = layers.Concatenate()([x, skip])
        x = _normalised_conv(_normalised_conv(x, width), width)
    model = keras.Model(inputs, layers.Conv2D(3, 1)(x))
    return model, images(rows, size, size, 3), classes(rows, 3, size, size), crossentropy()


def _normalised_conv(x, width):
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
    return layers.Activation("relu")(layers.GroupNormalization(groups=4)(x))


class Sampling(layers.Layer):
    """Draws a code around its mean, so that the gradient passes: mean + exp(log_var / 2) * noise.

    Args:
        stddev: of the noise; 0 gives the mean.
    """

    def __init__(self, stddev=1.0, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.stddev = stddev
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, inputs):
        """Draws codes from means and logarithms of variances."""
        mean, log_var = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + self.stddev * ops.exp(0.5 * log_var) * noise


class Divergence(layers.Layer):
    """Adds the mean Kullback-Leibler divergence from the standard normal to the loss."""

    def __init__(self, weight, **kwargs):
        super().__init__(**kwargs)
        self.weight = weight

    def call(self, inputs):
        """Passes means and logarithms of variances through."""
        mean, log_var = inputs
        each = -0.5 * ops.sum(1 + log_var - ops.square(mean) - ops.exp(log_var), axis=-1)
        self.add_loss(self.weight * ops.mean(each))
        return mean, log_var


def vae(rows, small=False):
    """A variational autoencoder whose layers draw and add a loss."""
    size, width, code = (8, 4, 2) if small else (28, 32, 8)
    inputs = keras.Input([size, size, 1])
    x = layers.Conv2D(width, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(2 * width, 3, strides=2, padding="same", activation="relu")(x)
    inner = x.shape[1:]
    x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
    moments = Divergence(1 / size**2)([layers.Dense(code)(x), layers.Dense(code)(x)])
    x = Sampling()(moments)
    x = layers.Dense(int(np.prod(inner)), activation="relu")(x)
    x = layers.Reshape(inner)(x)
    for filters in (2 * width, width):
        x = layers.Conv2DTranspose(filters, 3, strides=2, padding="same", activation="relu")(x)
    outputs = layers.Conv2DTranspose(1, 3, padding="same", activation="sigmoid")(x)
    x = images(rows, size, size, 1)
    return keras.Model(inputs, outputs), x, x, keras.losses.BinaryCrossentropy()


def conv_autoencoder(rows, small=False):
    """An autoencoder that pools on the way in and has transposed convolutions on the way out."""
    size, width = (8, 4) if small else (28, 32)
    model = keras.Sequential([keras.Input([size, size, 1])])
    for _ in range(2):
        model.add(layers.Conv2D(width, 3, activation="relu", padding="same"))
        model.add(layers.MaxPooling2D(2, padding="same"))
    for _ in range(2):
        model.add(layers.Conv2DTranspose(width, 3, strides=2, activation="relu", padding="same"))
    model.add(layers.Conv2D(1, 3, activation="sigmoid", padding="same"))
    x = images(rows, size, size, 1)
    return model, x, x, keras.losses.BinaryCrossentropy()


class Patches(layers.Layer):
    """Cuts images into squares and flattens each."""

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def call(self, inputs):
        """Maps [batch, height, width, channels] to [batch, patches, values]."""
        cut = ops.image.extract_patches(inputs, self.size)
        _, height, width, values = cut.shape
        return ops.reshape(cut, [ops.shape(inputs)[0], height * width, values])


class PlacedPatches(layers.Layer):
    """Projects patches and adds an embedding of their places."""

    def __init__(self, patches, width, **kwargs):
        super().__init__(**kwargs)
        self.patches = patches
        self.project = layers.Dense(width)
        self.place = layers.Embedding(patches, width)

    def call(self, inputs):
        """Maps [batch, patches, values] to [batch, patches, width]."""
        places = ops.expand_dims(ops.arange(self.patches), axis=0)
        return self.project(inputs) + self.place(places)


def vit(rows, small=False):
    """A vision transformer from scratch: patches, places, attention."""
    size, patch, width, blocks = (8, 4, 8, 1) if small else (32, 4, 64, 4)
    patches = (size // patch) ** 2
    inputs = keras.Input([size, size, 3])
    x = PlacedPatches(patches, width)(Patches(patch)(inputs))
    for _ in range(blocks):
        normed = layers.LayerNormalization(epsilon=1e-6)(x)
        attended = layers.MultiHeadAttention(2, width // 2, dropout=0.1)(normed, normed)
        x = layers.Add()([attended, x])
        normed = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([_gelu_net(normed, 2 * width, width, rate=0.1), x])
    x = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x))
    x = _gelu_net(layers.Dropout(0.5)(x), 2 * width, width, rate=0.5)
    model = keras.Model(inputs, layers.Dense(10)(x))
    return model, images(rows, size, size, 3), classes(rows, 10), crossentropy()


def mixer(rows, small=False):
    """An MLP-Mixer: dense layers along the patches in turns with dense layers along the values."""
    size, patch, width, blocks = (8, 4, 8, 1) if small else (32, 4, 64, 4)
    patches = (size // patch) ** 2
    inputs = keras.Input([size, size, 3])
    x = layers.Dense(width)(Patches(patch)(inputs))
    for _ in range(blocks):
        turned = layers.Permute([2, 1])(layers.LayerNormalization(epsilon=1e-6)(x))
        mixed = layers.Permute([2, 1])(_gelu_net(turned, patches, patches))
        x = layers.Add()([x, mixed])
        normed = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([x, _gelu_net(normed, width, width)])
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(10)(layers.Dropout(0.2)(x)))
    return model, images(rows, size, size, 3), classes(rows, 10), crossentropy()


def _gelu_net(x, hidden, width, rate=0.0):
    """Two dense layers, with dropout after each where there is a rate."""
    for units, activation in ((hidden, keras.activations.gelu), (width, None)):
        x = layers.Dense(units, activation=activation)(x)
        if rate:
            x = layers.Dropout(rate)(x)
    return x
