"""Features of patches: filters are patches of images drawn at random, so they cost no privacy.

Coates, Ng and Lee, "An Analysis of Single-Layer Networks in Unsupervised Feature Learning" (2011),
take filters from the records; here no record is read.
"""

import keras
import numpy as np
import tensorflow as tf
from drawn_images import drawn_images

_IMAGES, _PATCHES = 6000, 100_000  # drawn
_LEAST_CONTRAST = 0.001  # added to the variance of a patch, of pixels in [0, 1]
_RIDGE = 0.1  # of the whitening: added to variances of patches whose pixels have 1


@keras.saving.register_keras_serializable(package="records")
class PatchFeatures(keras.layers.Layer):
    """Finds filters in the cells of a grid: [n, h, w, c] to [n, g, g, 2K].

    A patch of side p at each pixel is normalised, p ← (p − mean)/√(variance + 0.001), and whitened
    by W, the inverse root of the second moment of drawn patches plus 0.1. Filter k is a whitened
    drawn patch f_k of length 1; patches of one colour are left out. A feature is the mean over a
    cell of

        max(±⟨f_k, W p⟩ − t, 0)

    Every image is transformed by itself, with filters that are the same for all data.

    Args:
        num_filters: K.
        patch_size: p.
        cells: g, along each side of the image.
        threshold: t.
    """

    def __init__(self, num_filters=256, patch_size=5, cells=2, threshold=0.5, **kwargs):
        super().__init__(**kwargs)
        self.num_filters = num_filters
        self.patch_size = patch_size
        self.cells = cells
        self.threshold = threshold

    def build(self, input_shape):
        """Draws the filters for one size of image."""
        size, (height, width, channels) = self.patch_size, input_shape[1:]
        filters = drawn_filters(self.num_filters, size, height, width, channels)
        self.kernel = self.add_weight(
            shape=filters.shape,
            initializer=lambda shape, dtype: tf.constant(filters, dtype),
            trainable=False,
            name="kernel",
        )

    def compute_output_shape(self, input_shape):
        """Returns [n, g, g, 2K]."""
        return input_shape[0], self.cells, self.cells, 2 * self.num_filters

    def call(self, images):
        """Returns the features: those of +f_k, then those of −f_k."""
        box = tf.ones_like(self.kernel[..., :1]) / self.kernel[..., 0].shape.num_elements()
        mean = _convolved(images, box)
        variance = tf.nn.relu(_convolved(images**2, box) - mean**2)
        found = _convolved(images, self.kernel) - mean * tf.reduce_sum(self.kernel, (0, 1, 2))
        found *= tf.math.rsqrt(variance + _LEAST_CONTRAST)
        return tf.concat([self._averaged(found), self._averaged(-found)], axis=-1)

    def get_config(self):
        """Returns the arguments."""
        names = ("num_filters", "patch_size", "cells", "threshold")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}

    def _averaged(self, found):
        """Returns the means over the cells of what exceeds t. Places beyond the edge count as 0."""
        sides = [-(-side // self.cells) for side in found.shape[1:3]]
        lacking = [
            self.cells * cell - side for cell, side in zip(sides, found.shape[1:3], strict=True)
        ]
        padding = [[0, 0], *([n // 2, n - n // 2] for n in lacking), [0, 0]]
        return tf.nn.avg_pool2d(
            tf.pad(tf.nn.relu(found - self.threshold), padding), sides, sides, "VALID"
        )


def drawn_filters(number, size, height, width, channels):
    """Returns W f_k of whitened drawn patches f_k of length 1, [size, size, channels, number]."""
    rng = np.random.default_rng(0)
    images = drawn_images(_IMAGES, height, width, channels)
    windows = np.lib.stride_tricks.sliding_window_view(images, (size, size), axis=(1, 2))
    places = [rng.integers(side, size=_PATCHES) for side in windows.shape[:3]]
    # [patches, channels, size, size] to rows in the order of a kernel.
    patches = windows[tuple(places)].transpose(0, 2, 3, 1).reshape(_PATCHES, -1)
    patches = patches.astype(np.float64)  # whitening enlarges what rounding leaves of the mean
    patches -= patches.mean(axis=1, keepdims=True)
    patches /= np.sqrt(patches.var(axis=1, keepdims=True) + _LEAST_CONTRAST)
    values, vectors = np.linalg.eigh(patches.T @ patches / len(patches))
    whitening = (vectors / np.sqrt(values + _RIDGE)) @ vectors.T
    seen = np.linalg.norm(patches, axis=1) > 1  # others have one colour, up to rounding
    filters = patches[seen][:number] @ whitening
    filters /= np.linalg.norm(filters, axis=1, keepdims=True)
    return (filters @ whitening).T.reshape(size, size, channels, number).astype(np.float32)


def _convolved(images, kernel):
    return tf.nn.conv2d(images, kernel, strides=1, padding="VALID")
