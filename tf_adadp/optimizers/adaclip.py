"""AdaCliP: gradients centred and scaled before they are clipped."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp import clipping as sets
from tf_adadp.optimizers.adaptive_noise import AdaptiveNoise
from tf_adadp.optimizers.priors import Prior
from tf_adadp.utils.checks import check_choice, check_number


@keras.saving.register_keras_serializable(package="tf_adadp")
class AdaCliP(AdaptiveNoise, keras.optimizers.SGD):
    """AdaCliP (Pichapati et al. 2019, "AdaCliP: Adaptive Clipping for Private SGD", Algorithm 1).

        w_x = (g_x − a) / b,   R = Σ_x w_x · min(1, 1/‖w_x‖₂) + N(0, σ*² I)
        g̃ = b∘R / L + a,   θ ← θ − η·g̃,   a ← β1·a + (1 − β1)·g̃

    The centre a is the running mean of past releases, b a scale for every coordinate:

    - `scale="normalized"`: b = C·r with mean(r²) = 1, r the shape that the prior finds of g̃ − a,
      b_i ∝ √s_i for a standard deviation s_i as in the paper (its eq. for the optimal b).
      The total scale stays C, so nothing can run away. See `AdaptiveNoise` for the prior.
    - `scale="free"`: the paper's, b_i = √(s_i · Σ_j s_j), with s_i² ← β2·s_i² + (1 − β2)·v_i and
      v_i = L·((g̃_i − a_i)² − (noise std)²) clamped to [h1, h2]. From b ≡ C on, and never above it
      at the default h2. As printed, with h2 large, it diverges where σ*²·m/L > 2.07 and gradients
      are small: the clamped estimate feeds the noise back.

    The number of records in a lot is private, so R is divided by the EXPECTED size; absent records
    contribute 0, and a comes back once, after the noise.

    Guarantee: a and b come from past releases alone (the paper's own form is private, too), and
    ‖w‖₂ ≤ 1 after clipping, so a step costs one Gaussian mechanism of multiplier σ*; see
    `DPOptimizer`.

    Args:
        learning_rate: η, a float or a Keras schedule.
        center_decay: β1 in [0, 1]; 1 keeps a = 0.
        scale: "normalized" or "free".
        variance_decay: β2 in [0, 1), of "free".
        min_variance: h1 > 0, of "free".
        max_variance: h2 ≥ h1, of "free"; None for C²/m, m the number of trainable scalars.
        prior, warmup_steps, prior_decay, prior_exponent: of "normalized", see `AdaptiveNoise`.
        momentum, nesterov: as in `keras.optimizers.SGD`.
        **kwargs: see `DPOptimizer` (training needs noise_multiplier) and `keras.optimizers.SGD`.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> dp.AdaCliP(1.0, noise_multiplier=1.1).event(law)
        PoissonSampledDpEvent(sampling_probability=0.01,
        event=GaussianDpEvent(noise_multiplier=1.1))
    """

    _default_exponent = 0.25

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1.0,
        *,
        center_decay: float = 0.99,
        scale: str = "normalized",
        variance_decay: float = 0.9,
        min_variance: float = 1e-12,
        max_variance: float | None = None,
        prior: str | Prior = "released",
        warmup_steps: int | None = None,
        prior_decay: float | None = None,
        prior_exponent: float | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        **kwargs: Any,
    ):
        check_choice("scale", scale, ("normalized", "free"))
        center_decay = check_number("center_decay", center_decay, at_least=0, at_most=1)
        variance_decay = check_number("variance_decay", variance_decay, at_least=0, below=1)
        min_variance = check_number("min_variance", min_variance, above=0)
        if max_variance is not None:
            max_variance = check_number(
                "max_variance",
                max_variance,
                f"None or a number of at least min_variance={min_variance:g}",
                at_least=min_variance,
            )
        if prior == "raw":
            raise ValueError(
                'prior="raw": AdaCliP is private as its paper prints it, and sees releases only. '
                "Leave prior out."
            )
        super().__init__(
            learning_rate=learning_rate,
            clipping="ellipsoid",
            prior=prior,
            warmup_steps=warmup_steps,
            local_clip_factor=1.0,
            prior_decay=prior_decay,
            prior_exponent=prior_exponent,
            local_clip_threshold=1e-6,
            momentum=momentum,
            nesterov=nesterov,
            **kwargs,
        )
        if self.adapts_clip_norm and scale == "free":
            self._refuse_quantile_clip('scale="free"', "b follows from the variances alone")
        self.center_decay = center_decay
        self.scale = scale
        self.variance_decay = variance_decay
        self.min_variance = min_variance
        self.max_variance = max_variance
        self._lot_divisor = None

    def _build_private(self, variables):
        super()._build_private(variables)
        self._center = self._add_slots("center", variables)
        self._variance = []
        self._kept_scale = []
        if self.scale == "free":
            self._variance = self._add_slots("variance", variables)
            self._kept_scale = self._add_slots("scale", variables)
            for variance, kept in zip(self._variance, self._kept_scale, strict=True):
                variance.assign(tf.fill(tuple(variance.shape), self._largest_variance()))
                kept.assign(tf.fill(tuple(kept.shape), self.l2_norm_clip))

    def _largest_variance(self):
        if self.max_variance is not None:
            return self.max_variance
        return max(self.l2_norm_clip**2 / self._num_scalars, self.min_variance)

    def clipping_set(self) -> sets.ClippingSet:
        """Returns ‖(v − a)/b‖₂ ≤ 1: an ellipsoid around the centre, from past releases."""
        if self.scale == "free":
            scales = [tf.convert_to_tensor(b.value) for b in self._kept_scale]
        else:
            scales = self._ellipsoid_scales()
        center = [tf.convert_to_tensor(a.value) for a in self._center]
        return self.with_statistics(sets.Ellipsoid(scales, center, gamma=self._relative_gamma()))

    @tf.autograph.experimental.do_not_convert
    def apply_private(
        self,
        sums: Sequence[tf.Tensor],
        expected_lot_size: tf.Tensor | float,
        regularization_gradients: Sequence[tf.Tensor | None] | None = None,
    ) -> None:
        """See `DPOptimizer.apply_private`."""
        self._lot_divisor = self._divisor(expected_lot_size)
        try:
            super().apply_private(sums, expected_lot_size, regularization_gradients)
        finally:
            self._lot_divisor = None

    def _observe(self, released, stddevs):
        # The release before a is added back: g̃ − a.
        super()._observe(released, stddevs)
        for center, r in zip(self._center, released, strict=True):
            center.assign_add((1.0 - self.center_decay) * r)
        if self.scale == "free":
            self._update_free_scale(released, stddevs)

    def _update_free_scale(self, released, stddevs):
        roots = []
        for variance, r, std in zip(self._variance, released, stddevs, strict=True):
            estimate = self._lot_divisor * (tf.square(r) - tf.square(std))
            estimate = tf.clip_by_value(estimate, self.min_variance, self._largest_variance())
            variance.assign(
                self.variance_decay * variance.value + (1.0 - self.variance_decay) * estimate
            )
            roots.append(tf.sqrt(tf.convert_to_tensor(variance.value)))
        total = tf.add_n([tf.reduce_sum(s) for s in roots])
        # Kept, as the shape is: clipping and noise must not differ in it.
        for kept, s in zip(self._kept_scale, roots, strict=True):
            kept.assign(tf.sqrt(s * total))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        config = super().get_config()
        for name in ("clipping", "local_clip_factor", "local_clip_threshold"):
            del config[name]
        config.update(
            center_decay=self.center_decay,
            scale=self.scale,
            variance_decay=self.variance_decay,
            min_variance=self.min_variance,
            max_variance=self.max_variance,
        )
        return config
