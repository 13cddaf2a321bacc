"""Images drawn at random, of which filters are taken, and what features have in common.

They contain no data, so all that is computed from them is public.
"""

import numpy as np


def drawn_images(count, height, width, channels, seed=0):
    """Returns images of clouds and of shapes, [count, height, width, channels] in [0, 1].

    Gaussian noise with a spectrum that falls as 1/|ω|^α, α between 1 and 2, as photographs have it
    (Field 1987), through a logistic curve of random gain: at a high gain it has two levels. The
    channels of an image share spectrum and curve.
    """
    rng = np.random.default_rng(seed)

    def one_for_each(low, high):
        return rng.uniform(low, high, (count, 1, 1, 1))

    frequencies = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width))
    frequencies[0, 0] = 1 / max(height, width)
    waves = rng.normal(size=(2, count, channels, height, width))
    spectrum = (waves[0] + 1j * waves[1]) / frequencies ** one_for_each(1.0, 2.0)
    clouds = np.fft.ifft2(spectrum).real
    clouds -= clouds.mean((1, 2, 3), keepdims=True)
    clouds /= clouds.std((1, 2, 3), keepdims=True)
    level = rng.normal(0.0, 0.7, (count, 1, 1, 1))
    images = 1 / (1 + np.exp(-(10 ** one_for_each(0.0, 1.5)) * (clouds - level)))
    return images.transpose(0, 2, 3, 1).astype(np.float32)
