"""Straightens handwriting: a picture is centred, and its slant removed, each by itself.

LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (1998), deslant digits so.
"""

import keras
from keras import ops

_LEAST_MASS = 1e-3  # a picture without ink stays as it is


@keras.saving.register_keras_serializable(package="records")
class Straighten(keras.layers.Layer):
    """Centres and shears images so that ink leans neither way: [n, h, w, 1] to the same.

    With means over the pixels (x, y) of an image, weighted by ink:

        slant = mean((x − x̄)(y − ȳ))/mean((y − ȳ)²), at most 1 in size.

    A pixel of the result, (x', y') away from the middle, is that at (x̄ + x' + slant·y', ȳ + y') of
    the image. Every image is transformed by itself.
    """

    def call(self, images):
        """Returns the images, straightened."""
        height, width, channels = images.shape[1:]
        if channels != 1:
            raise ValueError(f"images of {channels} channels: ink is one channel.")
        middle_y, middle_x = (height - 1) / 2, (width - 1) / 2
        y = ops.arange(height, dtype="float32")[:, None] - middle_y
        x = ops.arange(width, dtype="float32") - middle_x
        ink = ops.cast(images[..., 0], "float32")
        mass = ops.sum(ink, (1, 2)) + _LEAST_MASS

        def mean(values):
            return ops.sum(ink * values, (1, 2)) / mass

        mean_x, mean_y = mean(x), mean(y)
        covariance, variance = mean(x * y) - mean_x * mean_y, mean(y**2) - mean_y**2
        slant = ops.clip(covariance / (variance + _LEAST_MASS), -1, 1)
        zero, one = ops.zeros_like(slant), ops.ones_like(slant)
        rows = [
            *(one, slant, mean_x - slant * middle_y),
            *(zero, one, mean_y),
            *(zero, zero),
        ]
        return ops.image.affine_transform(images, ops.stack(rows, axis=-1))

    def compute_output_shape(self, input_shape):
        """Returns the shape of the images."""
        return input_shape
