"""A rate that falls where the examples of a lot agree: for update rules of a fixed length."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.clipping import ClippingSet
from tf_adadp.optimizers.base import DPOptimizer
from tf_adadp.utils.checks import check_number

_MEMORY = 0.7  # of the smoothed coherence
_DEVIATIONS = 2.0  # of the noise, within which a coherence may be none


class CoherenceRate(DPOptimizer):
    """Mixin: multiplies the rate by min(1, τ'/ρ²), ρ² the coherence of the released gradient.

        ρ² = Σ_i (g̃_i/b_i)² − Σ_i (s_i/b_i)²,   τ' = τ + 2·√(2 Σ_i (s_i/b_i)⁴)

    with g̃ the release, s the std of its noise, and b the clipping set's scale (‖v/b‖₂ ≤ 1 for what
    one example contributes), so that E[ρ²] = ‖mean clipped gradient‖², in units of the clip norm:
    1 where all examples pull in one direction at full length, 1/L where they are independent. The
    second term of τ' is what noise alone would show in ρ² (two standard deviations). The larger of
    ρ² and its running mean is used.

    Why: the step of RMSprop has one length whatever consists g̃ of. Steps that are mostly noise
    average out. Steps on which most examples agree do not: they overshoot, all examples then agree
    on the way back, and a network of saturating units, thrown far, does not return. So the rate is
    held where no more than a share of about τ of the lots' energy is common to all.

    Guarantee: b, s and g̃ are public or released, so the factor is post-processing.

    Args:
        coherence_limit: τ in (0, 1], or None for a factor of 1.
        **kwargs: see `DPOptimizer`.
    """

    def __init__(self, *args: Any, coherence_limit: float | None = None, **kwargs: Any):
        if coherence_limit is not None:
            coherence_limit = check_number("coherence_limit", coherence_limit, above=0, at_most=1)
        super().__init__(*args, **kwargs)
        self.coherence_limit = coherence_limit

    def _build_private(self, variables):
        super()._build_private(variables)
        if self.coherence_limit is not None:
            self._coherence = self._add_state((), "coherence")  # the running mean of ρ²
            self._rate_factor = self._add_state((), "rate_factor")

    def _noisy_mean(self, clipping_set, sums, expected_lot_size):
        released, stddevs = super()._noisy_mean(clipping_set, sums, expected_lot_size)
        if self.coherence_limit is not None:
            self._limit_rate(clipping_set, released, stddevs)
        return released, stddevs

    def _limit_rate(self, clipping_set, released, stddevs):
        """Sets the factor of this step from its release."""
        coherence, deviation = coherence_of(
            clipping_set, released, stddevs, len(self._trainable_variables)
        )
        mean = _MEMORY * self._coherence.value + (1 - _MEMORY) * coherence
        self._coherence.assign(mean)
        limit = self.coherence_limit + _DEVIATIONS * deviation
        self._rate_factor.assign(limit / tf.maximum(limit, tf.maximum(coherence, mean)))

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Applies Keras's rule to one variable, at the limited rate."""
        if self.coherence_limit is not None:
            learning_rate = learning_rate * tf.cast(self._rate_factor.value, learning_rate.dtype)
        super().update_step(gradient, variable, learning_rate)

    def step_logs(self) -> dict[str, tf.Tensor]:
        """Returns the factor of the last step as "rate_factor", a released quantity."""
        if self.coherence_limit is None:
            return super().step_logs()
        return {**super().step_logs(), "rate_factor": tf.convert_to_tensor(self._rate_factor.value)}

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "coherence_limit": self.coherence_limit}


def coherence_of(
    clipping_set: ClippingSet,
    released: Sequence[tf.Tensor],
    stddevs: Sequence[tf.Tensor],
    num_variables: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Estimates ρ² of a release without bias; returns it with the std of its noise.

    Args:
        clipping_set: the set that the examples were clipped to.
        released: the noisy means of the variables; a count that follows them is left out.
        stddevs: the std of their noise.
        num_variables: how many variables there are.
    """
    energy, noise, variance = [], [], []
    scales = clipping_set.noise_stddev(1.0, num_variables)[:num_variables]
    for g, s, b in zip(released, stddevs, scales, strict=False):
        share = tf.square(tf.math.divide_no_nan(tf.cast(s, tf.float32), b))
        # Both broadcast to the variable.
        each = math.prod(g.shape) / max(math.prod(share.shape), 1)
        energy.append(tf.reduce_sum(tf.square(tf.math.divide_no_nan(g, b))))
        noise.append(each * tf.reduce_sum(share))
        variance.append(2 * each * tf.reduce_sum(tf.square(share)))
    return tf.add_n(energy) - tf.add_n(noise), tf.sqrt(tf.add_n(variance))
