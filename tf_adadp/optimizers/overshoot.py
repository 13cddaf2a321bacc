"""A rate for each tensor that falls where its steps overshoot: for steps of a fixed length."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.optimizers.base import DPOptimizer
from tf_adadp.optimizers.schedules import InverseSqrtDecay
from tf_adadp.utils.keras_compat import second_moments


class OvershootRate(DPOptimizer):
    """Mixin of RMSprop: the rate of tensor l is η_t·f_l·√(1 − ρ^(t+1)), 0.1 ≤ f_l ≤ 1.

    With g̃_t the release, s the std of its noise and d = θ_t − θ_{t−1} the last step:

        S_l = ⟨g̃_t, d⟩_l,   G_l = Σ_l (g̃_{t−1}² − s²)·|d/g̃_{t−1}|,   n_l = 2·√Σ_l (s·d)²
        a_l = q·max(G_l, 0) + n_l,   x_l = (a_l − S_l)/(a_l + |S_l|)
        ln f_l ← ln f_l + x_l·(0.1 + 0.2·n_l/a_l)   where x_l > 0,   + 0.5·x_l   otherwise

    G is what the last step gained to first order, S the slope that is left behind it, above 0 where
    the loss rises again. The noise of g̃_t is independent of d, so S has no bias, and n is what it
    may show there (two standard deviations). G is low by up to (1 − ρ)·Σ s·|d|, as the noise of
    g̃_{t−1} is in RMSprop's average as well. At q = 1 a step may take the loss back to where it was,
    on a quadratic, and not above. f starts at (1 + κR)^(−1/2), κ = 1000, with R the
    signal-to-noise ratio of the whole first release; f is never below 0.1, and 0.1 where it cannot
    be told. The slope behind the first step counts as x = 1. The root corrects RMSprop's
    average, which starts at 0 and makes first steps 1/√(1 − ρ) times as long: it replaces a
    warm-up.

    Why: the step of RMSprop has one length whatever g̃ consists of. Steps that are mostly noise
    average out and may be long; coherent ones do not, and how far a network bears to be moved
    differs from tensor to tensor. The slope behind a step shows it at no price. So the rate starts
    low where the signal is strong, grows while it does no harm, and falls where it does.

    Guarantee: g̃ and θ are released, s and ρ public, so f is post-processing.

    Args:
        learning_rate: None for η_t = 0.032/√(1 + t/20) times the factors; a float or a Keras
            schedule is taken as it is, without them.
        **kwargs: see `DPOptimizer`.

    G leaves out what else moves weights: `momentum`, `centered`, weight decay, regularisers,
    constraints, Keras's clipping of gradients, averages that overwrite weights. S sees all of it.
    """

    _rate = 0.032  # η_0
    _limit = 1.0  # q
    _caution = 1000.0  # κ
    _lowest = 0.1
    _growth = 0.1  # of ln f, most in a step, where the last step was all signal
    _growth_in_noise = 0.3  # where it was all noise
    _fall = 0.5
    _deviations = 2.0

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | None,
        **kwargs: Any,
    ):
        finds_rate = learning_rate is None
        if finds_rate:
            learning_rate = InverseSqrtDecay(self._rate, warmup_steps=1)
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.finds_rate = finds_rate
        self._multipliers = None

    def _build_private(self, variables):
        super()._build_private(variables)
        if self.finds_rate:
            self._previous = self._add_slots("previous", variables)
            self._gains = self._add_state((len(variables),), "gains")
            ones = keras.initializers.Ones()
            self._rate_factors = self._add_state(
                (len(variables),), "rate_factors", initializer=ones
            )

    def _observe(self, released, stddevs):
        super()._observe(released, stddevs)
        if not self.finds_rate:
            return
        slopes, noise = [], []
        for g, s, kept, variable in zip(
            released, stddevs, self._previous, self._trainable_variables, strict=True
        ):
            weight = tf.cast(variable, tf.float32)
            step = weight - kept
            kept.assign(weight)
            slopes.append(tf.reduce_sum(g * step))
            noise.append(tf.reduce_sum(tf.square(s * step)))
        if not slopes:  # no variables
            return
        factors = self._next_factors(tf.stack(slopes), tf.stack(noise))
        factors = tf.cond(
            self.iterations.value > 0, lambda: factors, lambda: self._start(released, stddevs)
        )
        # Kept as it is, a NaN would stay: after an overflow, or in weights that are set anew.
        factors = tf.where(tf.math.is_finite(factors), factors, self._lowest)
        self._rate_factors.assign(factors)
        rate = tf.cast(self.learning_rate, tf.float32) * self._correction()
        self._gains.assign(rate * factors * tf.stack(list(self._unit_gains(released, stddevs))))

    def _next_factors(self, slopes, noise_energy):
        """f of this step, from S and Σ(s·d)² of the last one."""
        noise = self._deviations * tf.sqrt(noise_energy)
        allowed = self._limit * tf.maximum(self._gains.value, 0.0) + noise
        room = tf.math.divide_no_nan(allowed - slopes, allowed + tf.abs(slopes))
        # The slope behind the very first step is not judged: it came from an empty average.
        room = tf.where(self.iterations.value > 1, room, 1.0)
        share = tf.math.divide_no_nan(noise, allowed)
        growth = self._growth + (self._growth_in_noise - self._growth) * share
        factors = self._rate_factors.value * tf.exp(tf.where(room > 0, growth, self._fall) * room)
        return tf.clip_by_value(factors, self._lowest, 1.0)

    def _start(self, released, stddevs):
        """f of the first step, [tensors]: (1 + κR)^(−1/2), R = signal over noise, ∞ without it."""
        energies = [_energies(g, s) for g, s in zip(released, stddevs, strict=True)]
        total, noise = (tf.add_n(part) for part in zip(*energies, strict=True))
        signal = tf.maximum(total - noise, 0.0)
        start = tf.sqrt(tf.math.divide_no_nan(noise, noise + self._caution * signal))
        return tf.fill([len(released)], tf.maximum(start, self._lowest))

    def _unit_gains(self, released, stddevs):
        """Yields what the coming step gains in each tensor, for a rate of 1."""
        scales = self._step_scales() or [1.0] * len(released)
        moments = second_moments(self)
        for g, s, scale, velocity in zip(released, stddevs, scales, moments, strict=True):
            square = tf.square(g)
            velocity = tf.cast(velocity, tf.float32)
            moment = self.rho * velocity + (1 - self.rho) * square + self.epsilon
            yield tf.reduce_sum(scale * (square - tf.square(s)) * tf.math.rsqrt(moment))

    def _step_scales(self) -> Sequence[tf.Tensor] | None:
        """Hook: what the step is multiplied with per variable, besides the rate; None for 1."""
        return None

    def _correction(self):
        """√(1 − ρ^(t+1))."""
        count = tf.cast(self.iterations.value + 1, tf.float32)
        return tf.sqrt(1 - tf.pow(tf.cast(self.rho, tf.float32), count))

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        if self.finds_rate:  # once for all variables
            factors = tf.convert_to_tensor(self._rate_factors.value)
            self._multipliers = tf.unstack(self._correction() * factors)
        try:
            super()._backend_update_step(grads, trainable_variables, learning_rate)
        finally:
            self._multipliers = None

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Applies Keras's rule to one variable, at its own rate."""
        if self._multipliers is not None:
            factor = self._multipliers[self._get_variable_index(variable)]
            learning_rate = learning_rate * tf.cast(factor, learning_rate.dtype)
        super().update_step(gradient, variable, learning_rate)

    @property
    def learning_rate(self) -> Any:
        """η_t; where the rate is found, without f_l. Not settable then."""
        return super().learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate):
        if self.finds_rate:
            raise TypeError(
                f"This {type(self).__name__} was made without learning_rate and finds one for each "
                f"tensor, so none can be set. Make it with a rate, "
                f"{type(self).__name__}(learning_rate=0.01, ...), and compile again."
            )
        keras.optimizers.RMSprop.learning_rate.fset(self, learning_rate)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        config = super().get_config()
        return {**config, "learning_rate": None} if self.finds_rate else config


def _energies(released, stddev):
    """Σg̃² and Σs² of a tensor."""
    noise = tf.reduce_sum(tf.square(stddev) * tf.ones_like(released))
    return tf.reduce_sum(tf.square(released)), noise
