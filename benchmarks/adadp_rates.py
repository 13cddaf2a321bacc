"""A candidate for ADADP's default: each tensor's rate grows until its steps overshoot.

Benchmark code: it has no options in its configuration and cannot be saved.
"""

import tensorflow as tf

import tf_adadp as dp

_GROWTH = 0.3  # most that log f rises in a step
_FALL = 0.5  # and falls
_DEVIATIONS = 2.0  # of the noise of S, within which it may be none
_LOWEST_START = 0.1


class OvershootRate(dp.ADADP):
    """ADADP whose rate is η_t·f_l·√(1 − ρ^(t+1)) for the tensor l, f_l ≤ 1 from released vectors.

        S_l = ⟨g̃_t, θ_t − θ_{t−1}⟩_l,   G_l = ⟨g̃² − s², |θ_t − θ_{t−1}| / |g̃|⟩_l of the last step
        a = q·max(G_l, 0) + 2·√Σ (s·(θ_t − θ_{t−1}))²
        ln f_l ← min(0, ln f_l + w·(a − S_l)/(a + |S_l|)),   w = 0.3 upwards, 0.5 downwards

    G is what the last step gained to first order, S the slope that is left along it, above 0 where
    the step went too far; the noise in g̃_t is independent of that step, so S has no bias. On a
    quadratic S = G where a step takes the loss back to where it was. The start is
    f = (1 + κR)^(−1/2), at least 0.1, R the first release's ratio of signal to noise: where noise
    is most of it, long steps average out. The root corrects RMSprop's empty average, which makes
    first steps 1/√(1 − ρ) times as long.

    Guarantee: every quantity is released, public, or a function of them: post-processing.

    Args:
        overshoot: q, the share of the gain that may be left as slope behind the step.
        caution: κ.
        **kwargs: see `ADADP`.
    """

    def __init__(self, overshoot=0.7, caution=1000.0, **kwargs):
        # No warm-up beside the start.
        super().__init__(dp.InverseSqrtDecay(0.032, warmup_steps=1), **kwargs)
        self.overshoot = overshoot
        self.caution = caution

    def _build_private(self, variables):
        super()._build_private(variables)
        self._previous = [
            self._add_state(tuple(v.shape), f"previous_{i}") for i, v in enumerate(variables)
        ]
        self._factors = self._add_state((len(variables),), "factors")
        self._gains = self._add_state((len(variables),), "gains")
        self._now = None

    def _observe(self, released, stddevs):
        super()._observe(released, stddevs)
        weights = [tf.convert_to_tensor(v) for v in self._trainable_variables]
        steps = [w - p for w, p in zip(weights, self._previous, strict=True)]
        slopes = tf.stack([tf.reduce_sum(g * d) for g, d in zip(released, steps, strict=True)])
        noise = [tf.reduce_sum(tf.square(s * d)) for s, d in zip(stddevs, steps, strict=True)]
        allowed = self.overshoot * tf.maximum(self._gains.value, 0.0)
        allowed += _DEVIATIONS * tf.sqrt(tf.stack(noise))
        room = tf.math.divide_no_nan(allowed - slopes, allowed + tf.abs(slopes))
        # The first step has no gain yet that could be compared: it came from an empty average.
        room = tf.where(self.iterations.value > 1, room, 1.0)
        change = tf.where(room > 0, _GROWTH, _FALL) * room
        factors = tf.minimum(1.0, self._factors.value * tf.exp(change))
        start = self._start(released, stddevs)
        factors = tf.where(self.iterations.value < 1, start, factors)
        self._factors.assign(factors)
        self._now = tf.unstack(factors)
        self._gains.assign(self._first_order_gains(released, stddevs, factors))
        for kept, weight in zip(self._previous, weights, strict=True):
            kept.assign(weight)

    def _first_order_gains(self, released, stddevs, factors):
        """Returns what the coming step gains: its length per coordinate times g̃² − s²."""
        gains = []
        scales = self._step_factors or [1.0] * len(released)
        for g, s, scale, velocity in zip(released, stddevs, scales, self._velocities, strict=True):
            moment = self.rho * velocity + (1 - self.rho) * tf.square(g)
            signal = scale * (tf.square(g) - tf.square(s))
            gains.append(tf.reduce_sum(tf.math.divide_no_nan(signal, tf.sqrt(moment))))
        rate = self._corrected(tf.cast(self.learning_rate, tf.float32))
        return tf.stack(gains) * rate * factors

    def _start(self, released, stddevs):
        energy = tf.add_n([tf.reduce_sum(tf.square(g)) for g in released])
        noise = [
            tf.reduce_sum(tf.square(s * tf.ones_like(g)))
            for g, s in zip(released, stddevs, strict=True)
        ]
        ratio = tf.maximum(energy / tf.add_n(noise) - 1, 0.0)  # ∞ without noise
        return tf.maximum(tf.math.rsqrt(1 + self.caution * ratio), _LOWEST_START)

    def _corrected(self, learning_rate):
        """η with the bias of RMSprop's average taken out."""
        count = tf.cast(self.iterations.value + 1, tf.float32)
        return learning_rate * tf.sqrt(1 - tf.pow(tf.cast(self.rho, tf.float32), count))

    def update_step(self, gradient, variable, learning_rate):
        """Applies Keras's rule to one variable at its own rate."""
        factor = self._now[self._get_variable_index(variable)]
        super().update_step(gradient, variable, self._corrected(learning_rate) * factor)
