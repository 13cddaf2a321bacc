"""Published changes to the release or to the step of a private optimizer, to try on ADADP.

Each class is charged as the class that it extends: one Gaussian mechanism of multiplier σ* for a
step, at the neighbouring relation of `DPOptimizer` (add or remove one record under Poisson
sampling). Its docstring says why: either it changes only what follows the release
(post-processing), or its clipping set and noise follow from past releases and meet rule (R) of
`tf_adadp.clipping`. `adadp_geoclip` has one more. All of them are for runs, none to be saved.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import tf_adadp as dp
from tf_adadp import priors
from tf_adadp.optimizers.adaptive_noise import AdaptiveNoise
from tf_adadp.optimizers.base import DPOptimizer


class CorrectedMoment(DPOptimizer):
    """Mixin: takes the known variance of the noise off the second moment that the step divides by.

        n ← d·n + (1 − d)·s²,   √v  becomes  √max(v − n, f·n)

    with v the second moment E[g̃²] of the Keras optimizer, d its decay and s the std of the noise in
    g̃: DP-AdamBC (Tang et al. 2023, arXiv 2312.14334), whose update is m̂/√max(v̂ − Φ, γ'), Φ = s².
    v and n start at 0 and have the same weights, so v − n estimates E[g²] without bias at every
    step, also where s changes. The paper searches γ' for each task. Here it is a share of the
    noise, γ' = f·Φ. On a held-out tenth of the digits at ε = 1, f = 0.3 and 1 were level for ADADP
    and 0.1 was worse, 0.1 and 0.3 were level for DPAdam.

    Guarantee: s is public and v is made of releases, so this is post-processing.

    Args:
        moment_floor: f > 0.
        **kwargs: those of the optimizer, without `centered` and `amsgrad`.
    """

    def __init__(self, *args: Any, moment_floor: float = 0.3, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.moment_floor = moment_floor

    def _build_private(self, variables):
        super()._build_private(variables)
        self._noise_moments = self._add_slots("noise_moment", variables)

    def _observe(self, released, stddevs):
        super()._observe(released, stddevs)
        d = self._moment_decay
        for moment, s in zip(self._noise_moments, stddevs, strict=True):
            moment.assign(d * moment.value + (1 - d) * tf.square(s))

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Applies Keras's rule, at a rate that exchanges its denominator."""
        i, d = self._get_variable_index(variable), self._moment_decay
        # As Keras will have it when it divides.
        moment = d * self._velocities[i].value + (1 - d) * tf.square(gradient)
        noise = self._noise_moments[i].value
        corrected = tf.maximum(moment - noise, self.moment_floor * noise)
        factor = self._root(moment) / self._root(corrected)
        super().update_step(gradient, variable, learning_rate * factor)


class CorrectedADADP(CorrectedMoment, dp.ADADP):
    """ADADP with the corrected second moment, see `CorrectedMoment`."""

    @property
    def _moment_decay(self):
        return self.rho

    def _root(self, moment):
        return tf.sqrt(moment + self.epsilon)


class CorrectedDPAdam(CorrectedMoment, dp.DPAdam):
    """DPAdam with the corrected second moment: DP-AdamBC, see `CorrectedMoment`."""

    @property
    def _moment_decay(self):
        return self.beta_2

    def _root(self, moment):
        return tf.sqrt(moment) + self.epsilon


class LowPassADADP(dp.ADADP):
    """ADADP whose RMSprop step sees the releases through a first-order low-pass filter.

        m_t = p·m_{t−1} + b·(g̃_t + g̃_{t−1}),   c_t = the same of ones,   m_t / c_t to RMSprop

    DOPPLER (Zhang et al. 2024, arXiv 2408.13460, Algorithm 1) with the coefficients a₁ = −p and
    b₀ = b₁ = b = (1 − p)/2. What is constant passes unchanged, what changes sign at every step not
    at all, and of the variance of white noise (1 − p)/2 is left. c corrects the start: a constant
    passes unchanged from the first step on. The prior sees the releases as they are.

    Guarantee: the filter sees releases alone, so it is post-processing.

    Args:
        pole: p in [0, 1).
        **kwargs: those of `ADADP`.
    """

    def __init__(self, *args: Any, pole: float = 0.9, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pole = pole

    def _build_private(self, variables):
        super()._build_private(variables)
        self._filtered = self._add_slots("filtered", variables)
        self._last_releases = self._add_slots("last_release", variables)
        self._filtered_one = self._add_state((), "filtered_one")

    def _release(self, sums, expected_lot_size):
        released = super()._release(sums, expected_lot_size)
        p, b = self.pole, (1.0 - self.pole) / 2
        ones = 1.0 + tf.cast(self.iterations.value > 0, tf.float32)
        self._filtered_one.assign(p * self._filtered_one.value + b * ones)
        filtered = []
        for m, last, g in zip(self._filtered, self._last_releases, released, strict=True):
            m.assign(p * m.value + b * (g + last.value))
            last.assign(g)
            filtered.append(m.value / self._filtered_one.value)
        return filtered


class MicroAdam(keras.optimizers.Optimizer):
    """Adam on the largest entries, what is left out being added to the next gradient.

        a = g + e,   w_t = the k entries of a that are largest in absolute value,   e ← a − w_t
        m̂ = (1 − β₁)/(1 − β₁^t) Σ_i β₁^(t−i) w_i,   v̂ = (1 − β₂)/(1 − β₂^t) Σ_i β₂^(t−i) w_i²
        θ ← θ − η·m̂ / (ε + √v̂)

    The sums are over the last `window` steps, and k is counted per variable. MicroAdam (Modoranu et
    al. 2024, arXiv 2405.15593) without what saves memory: there e is quantized to 4 bits, and the
    window holds the k entries with their indices instead of dense tensors.

    Args:
        learning_rate: η.
        density: k over the number of entries, in (0, 1].
        window: how many past gradients count.
        beta_1, beta_2, epsilon: as in `keras.optimizers.Adam`.
        **kwargs: see `keras.optimizers.Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        *,
        density: float = 0.01,
        window: int = 10,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ):
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.density = density
        self.window = window
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates errors and windows."""
        if self.built:
            return
        super().build(variables)
        self._errors = self.add_optimizer_variables(variables, "error")
        self._windows = [
            self.add_variable((self.window, *v.shape), dtype="float32", name=f"window_{i}")
            for i, v in enumerate(variables)
        ]

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Moves one variable."""
        i = self._get_variable_index(variable)
        error, window = self._errors[i], self._windows[i]
        sparse, left = largest_entries(tf.cast(gradient, tf.float32) + error.value, self.density)
        self.assign(error, left)
        step = tf.cast(self.iterations.value, tf.int32)
        slots = tf.range(self.window)
        axes = [-1] + [1] * len(variable.shape)
        now = tf.reshape(tf.equal(slots, step % self.window), axes)
        self.assign(window, tf.where(now, sparse, window.value))
        # Slots that were never filled are zero, whatever age they are given.
        ages = tf.reshape(tf.cast((step - slots) % self.window, tf.float32), axes)
        number = tf.cast(step + 1, tf.float32)

        def mean(decay, values):
            total = tf.reduce_sum(decay**ages * values, axis=0)
            return (1 - decay) / (1 - decay**number) * total

        first = mean(self.beta_1, window.value)
        second = mean(self.beta_2, tf.square(window.value))
        rate = tf.cast(learning_rate, tf.float32)
        self.assign_sub(variable, rate * first / (self.epsilon + tf.sqrt(second)))


def largest_entries(values: tf.Tensor, density: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Splits a tensor into its largest entries, as many as `density` says, and the others."""
    flat = tf.reshape(values, [-1])
    number = max(1, round(density * flat.shape[0]))
    _, places = tf.math.top_k(tf.abs(flat), number)
    kept = tf.scatter_nd(places[:, None], tf.gather(flat, places), flat.shape)
    sparse = tf.reshape(kept, values.shape)
    return sparse, values - sparse


class DPMicroAdam(DPOptimizer, MicroAdam):
    """MicroAdam on DP-SGD's release: DP-MicroAdam (Hudişteanu et al. 2025, arXiv 2511.20509).

    Guarantee: entries are chosen from the release and from what past releases left out, so
    everything after DP-SGD's release is post-processing.

    Args:
        learning_rate: η, a float or a Keras schedule.
        **kwargs: see `DPOptimizer` and `MicroAdam`.
    """


class SecondMomentPrior(priors.Prior):
    """The second moment of the releases, as an optimizer has it: v ← d·v + (1 − d)·g̃².

    The noise in g̃ is not taken off, and nothing is pooled; compare `priors.ExponentialPrior`.

    Args:
        decay: d in [0, 1).
        floor: as in `priors.Prior`.
    """

    def __init__(self, *, decay: float, floor: float = 0.4):
        super().__init__(exponent=0.5, floor=floor)
        self.decay = decay

    def _build(self, add_variable, variables):
        self._moments = [
            add_variable(shape, f"prior_moment_{i}") for i, shape in enumerate(self._shapes)
        ]

    def update(self, released: Sequence[tf.Tensor], stddevs: Sequence[tf.Tensor]) -> None:
        """See `Prior.update`."""
        for moment, g in zip(self._moments, released, strict=True):
            moment.assign(self.decay * moment.value + (1 - self.decay) * tf.square(g))

    def moments(self) -> list[tf.Tensor]:
        """See `Prior.moments`."""
        return [moment.value for moment in self._moments]


def scale_then_privatize(
    learning_rate: Any = None, *, rho: float = 0.9, floor: float = 0.4, **kwargs: Any
) -> dp.ADADP:
    """Makes RMSprop on gradients that its own second moment scales before they are made private.

        w_x = g_x / (C·r),  r ∝ √v_{t−1}:   g̃ = C·r∘(Σ_x w_x·min(1, 1/‖w_x‖) + N(0, σ*²I)) / L
        v_t = ρ·v_{t−1} + (1 − ρ)·g̃²,   θ ← θ − η·g̃ / √v_t

    Scale-then-privatize (Ganesh, McMahan and Thakurta 2025, arXiv 2507.01129, Algorithm 8) with
    RMSprop as its adaptive optimizer. It is ADADP with another prior: ADADP's takes the noise off,
    pools the coordinates of a row, shrinks, remembers 200 releases instead of 10, and the step is
    scaled by r once more (`scale_step`). Two things differ from the paper. There 1/(√v + ε_s) is
    the scale itself, so that C has the unit of √v and the noise of a release scales the next one;
    here mean(r²) = 1 and C keeps its meaning; the shape still follows the noise, as there. And the
    floor of r stands in for ε_s.

    Guarantee: r comes from past releases alone, and clipping set and noise are those of
    `AdaptiveNoise`, which meet (R).

    Args:
        learning_rate: as in `ADADP`.
        rho: ρ.
        floor: as in `priors.Prior`.
        **kwargs: those of `ADADP`.
    """
    prior = SecondMomentPrior(decay=rho, floor=floor)
    return dp.ADADP(learning_rate, rho=rho, prior=prior, scale_step=False, **kwargs)


class ScaleThenPrivatizeAdam(AdaptiveNoise, keras.optimizers.Adam):
    """`scale_then_privatize` with Adam, the optimizer of the paper, and its second moment.

    Args:
        learning_rate: as in `DPAdam`.
        beta_1, beta_2, epsilon: as in `keras.optimizers.Adam`.
        floor: of `SecondMomentPrior`.
        **kwargs: see `DPOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        floor: float = 0.4,
        **kwargs: Any,
    ):
        super().__init__(
            learning_rate=learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            clipping="ellipsoid",
            prior=SecondMomentPrior(decay=beta_2, floor=floor),
            warmup_steps=None,
            local_clip_factor=1.0,
            prior_decay=None,
            prior_exponent=None,
            local_clip_threshold=1e-6,
            **kwargs,
        )
