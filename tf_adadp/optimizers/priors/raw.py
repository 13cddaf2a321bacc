"""The prior of the ADADP paper as printed. Not private."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

_LARGEST = 1e12  # of a raw mean: its square, and that of the noise scaled by it, stay finite


class RawPrior:
    """ADADP's prior as printed, of the RAW gradient: E'[g²] ← γ'·E'[g²] + (1 − γ')·g²   (eq. 4).

    Not private: it puts a raw statistic of the lot into the noise scale and into the switch of
    line 7 of Algorithm 1. For research; an optimizer that uses it is charged ε = ∞.
    """

    distributable = True

    def __init__(self, decay: float):
        self._decay = decay

    def build(self, add_variable: Callable, variables: Sequence[keras.Variable]) -> None:
        """Creates E', one value per coordinate."""
        self._moments = [
            add_variable(tuple(v.shape), f"raw_prior_moment_{i}") for i, v in enumerate(variables)
        ]

    def update(self, raw: Sequence[tf.Tensor]) -> None:
        """Takes in the raw mean gradient of a lot."""
        d = self._decay
        for g, moment in zip(raw, self._moments, strict=True):
            # Huge records overflow in the sum too, and one such lot would end a study.
            g = tf.clip_by_value(tf.where(tf.math.is_nan(g), 0.0, g), -_LARGEST, _LARGEST)
            moment.assign(d * moment.value + (1.0 - d) * tf.square(g))

    def root(self) -> list[tf.Tensor]:
        """Returns √E', a list of tensors of the variables' shapes."""
        return [tf.sqrt(m.value) for m in self._moments]


def variance(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the variance over all entries of a list of tensors."""
    flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
    return tf.math.reduce_variance(flat)
