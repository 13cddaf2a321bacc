"""Scattering features of images: fixed, so they are public and cost no privacy.

Bruna and Mallat, "Invariant Scattering Convolution Networks" (2013). Tramèr and Boneh (2021) train
private classifiers on them.
"""

import itertools

import keras
import numpy as np
import tensorflow as tf


@keras.saving.register_keras_serializable(package="records")
class Scattering(keras.layers.Layer):
    """Scattering transform of second order: [n, h, w, c] to [n, h/2^J, w/2^J, c·K].

    With φ a Gaussian low-pass filter and ψ_jθ Morlet wavelets of scale 2^j and angle θ = πl/L:

        S_0 = x*φ,   S_1 = |x*ψ_jθ|*φ,   S_2 = ||x*ψ_jθ|*ψ_j'θ'|*φ  for j' > j,

    each taken at every 2^J-th pixel: K = 1 + J·L + L²·J·(J − 1)/2. Images are mirrored at their
    edges by 2^J pixels, and convolutions are circular. σ(φ) = 0.8·2^(J−1); ψ_jθ has σ = 0.8·2^j,
    frequency 3π/4/2^j, and is L/4 times as long along its crests as across them.

    Every image is transformed by itself, with filters that are the same for all data.

    Args:
        num_scales: J; h and w are multiples of 2^J.
        num_angles: L.
    """

    def __init__(self, num_scales: int = 2, num_angles: int = 8, **kwargs):
        super().__init__(**kwargs)
        self.num_scales = num_scales
        self.num_angles = num_angles

    def build(self, input_shape):
        """Makes the filters for one size of image."""
        pad = 2**self.num_scales
        if any(side % pad for side in input_shape[1:3]):
            raise ValueError(f"images of {input_shape[1:3]} pixels: give multiples of {pad}.")
        sizes = [side + 2 * pad for side in input_shape[1:3]]
        self._wavelets = [
            np.stack([morlet(sizes, j, angle, self.num_angles) for angle in range(self.num_angles)])
            for j in range(self.num_scales)
        ]
        self._low_pass = [low_pass_matrix(side, self.num_scales) for side in sizes]

    def compute_output_shape(self, input_shape):
        """Returns [n, h/2^J, w/2^J, c·K]."""
        scales, angles = self.num_scales, self.num_angles
        channels = 1 + scales * angles + angles**2 * scales * (scales - 1) // 2
        rows, columns = (side // 2**scales for side in input_shape[1:3])
        return input_shape[0], rows, columns, input_shape[3] * channels

    def call(self, images):
        """Returns the coefficients: for each channel S_0, then S_1, then S_2."""
        pad = 2**self.num_scales
        padding = [[0, 0], [pad, pad], [pad, pad], [0, 0]]
        images = tf.pad(tf.cast(images, tf.float32), padding, "REFLECT")
        # The last two dimensions of an FFT are the image: [n, c, k, h, w], k so far 1.
        images = tf.transpose(images, [0, 3, 1, 2])[:, :, None]
        first = [self._moduli(images, wavelets) for wavelets in self._wavelets]
        second = [
            self._moduli(waves, wavelets)
            for scale, waves in enumerate(first)
            for wavelets in self._wavelets[scale + 1 :]
        ]
        found = tf.concat([self._averaged(waves) for waves in (images, *first, *second)], axis=2)
        _, channels, kinds, rows, columns = found.shape
        return tf.reshape(
            tf.transpose(found, [0, 3, 4, 1, 2]), [-1, rows, columns, channels * kinds]
        )

    def _moduli(self, images, wavelets):
        """Returns |x*ψ| for all angles: [n, c, k, h, w] to [n, c, k·L, h, w]."""
        spectrum = tf.signal.fft2d(tf.cast(images, tf.complex64))[..., None, :, :]
        moduli = tf.abs(tf.signal.ifft2d(spectrum * tf.constant(wavelets, tf.complex64)))
        _, channels, before, angles, rows, columns = moduli.shape
        return tf.reshape(moduli, [-1, channels, before * angles, rows, columns])

    def _averaged(self, images):
        rows, columns = self._low_pass
        return tf.einsum("ia,nckab,jb->nckij", rows, images, columns)

    def get_config(self):
        """Returns the arguments of the constructor."""
        arguments = {"num_scales": self.num_scales, "num_angles": self.num_angles}
        return {**super().get_config(), **arguments}


def morlet(sizes, scale, angle, num_angles):
    """Returns the spectrum of ψ_jθ on the grid of an FFT, real, [rows, columns].

    A Gaussian around its frequency, less the one around 0 that makes its mean 0; both repeated at
    2π, as the spectrum of what is sampled is.
    """
    theta = np.pi * angle / num_angles
    sigma, frequency, slant = 0.8 * 2**scale, 0.75 * np.pi / 2**scale, 4 / num_angles
    y, x = np.meshgrid(*(2 * np.pi * np.fft.fftfreq(size) for size in sizes), indexing="ij")
    periods = 2 * np.pi * np.arange(-2, 3)

    def gaussian(centre):
        total = 0.0
        for period_y, period_x in itertools.product(periods, periods):
            across = (x + period_x) * np.cos(theta) + (y + period_y) * np.sin(theta) - centre
            along = (y + period_y) * np.cos(theta) - (x + period_x) * np.sin(theta)
            total += np.exp(-(sigma**2) / 2 * (across**2 + (along / slant) ** 2))
        return total

    wave, mean = gaussian(frequency), gaussian(0.0)
    return (wave - wave[0, 0] / mean[0, 0] * mean).astype(np.float32)


def low_pass_matrix(side, num_scales):
    """Returns x ↦ x*φ at every 2^J-th of the pixels inside of the padding, [side/2^J − 2, side]."""
    step = 2**num_scales
    frequencies = 2 * np.pi * np.fft.fftfreq(side)[:, None] + 2 * np.pi * np.arange(-2, 3)
    sigma = 0.8 * 2 ** (num_scales - 1)
    kernel = np.fft.ifft(np.exp(-((sigma * frequencies) ** 2) / 2).sum(1)).real
    kernel /= kernel.sum()
    places = np.arange(step, side - step, step)
    distances = (places[:, None] - np.arange(side)) % side
    return kernel[distances].astype(np.float32)
