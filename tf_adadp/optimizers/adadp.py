"""ADADP: an adaptive learning rate and adaptive noise."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.clipping.row_gradients import SMALLEST_SCALE, product
from tf_adadp.optimizers.adaptive_noise import AdaptiveNoise
from tf_adadp.optimizers.found_rate import FoundRate
from tf_adadp.optimizers.priors import Prior
from tf_adadp.optimizers.schedules import InverseSqrtDecay
from tf_adadp.utils.checks import check_bool


@keras.saving.register_keras_serializable(package="tf_adadp")
class ADADP(FoundRate, AdaptiveNoise, keras.optimizers.RMSprop):
    """ADADP (Xu et al., "An Adaptive and Fast Convergent Approach to Differentially Private Deep
    Learning", Algorithm 1), in a sound form whose defaults need no tuning.

    An RMSprop step (eq. 1, with 1 − ρ = γ = 0.1) on a release g̃ whose clipping set and noise follow
    the shape r that past releases showed of the gradients; see `AdaptiveNoise` for set, noise and
    guarantee. With `scale_step` the step follows r as well:

        θ_i ← θ_i − m·f_l · (η_t / r_i) · g̃_i / √(E[g̃²]_i + ε0),   η_t of `InverseSqrtDecay()`

    so that clipping, noise and step are those of coordinates θ_i·r_i in which all gradients have
    one size. Of a matrix r is one number per row times one per column. Without `scale_step` RMSprop
    undoes the shape of the noise: if noise is most of g̃, its denominator is the noise's own std,
    and every coordinate gets the same noise for any r. Where releases cannot tell coordinates
    apart, r ≡ 1 and this is RMSprop on DP-SGD's release.
    m of the network and f_l ≤ 1 of tensor l are found in training, from releases: `FoundRate`. In
    the last three in ten steps of a `fit` the rate falls to 0, and one of more than 300 steps goes
    slowly for longer; a second `fit` goes on at the rate that the first had before its end. In a
    loop of yours, call `plan_steps`, or there is no such end.

    Measured (`benchmarks/adadp_default.py`, docs/results/adadp.md), against DP-SGD tuned for each
    task and budget, over 66 cells: 1 point above it in the mean on dense networks, 2 on LoRA and
    logistic regression, 4 on convolutional, residual and recurrent ones, 37 on a transformer; more
    than 0.5 below it in 4. DP-SGD's rate was constant; it gains about as much from such an end.

    Differences from the paper, with reasons: its prior averages RAW gradients, which leaks
    through the noise scale; feeding the noisy gradient back instead diverges. Here the prior
    sees released vectors with their known noise variance subtracted, and sets the shape of the
    noise at a fixed total scale. `prior="raw"` is the print, charged ε = ∞; it has no `scale_step`,
    and, like `clipping="local"`, follows `InverseSqrtDecay()` where no rate is given.

    Args:
        learning_rate: None to find it; a float η or a Keras schedule is taken as it is, m = f = 1.
            The step does not depend on the scale of gradients or noise while g̃² is far above
            epsilon.
        rho: ρ = 1 − γ of the RMSprop step.
        clipping: "ellipsoid", or "local" for the paper's coordinate-wise clipping.
        prior: "factored" (r by rows and columns of each matrix), "released" (by rows), another
            `tf_adadp.priors.Prior`, or "raw" for the paper's, ε = ∞.
        scale_step: whether the step is divided by r once the warm-up is over. Post-processing.
        warmup_steps, local_clip_factor (β), prior_decay (γ'), prior_exponent,
            local_clip_threshold (G): see `AdaptiveNoise`.
        momentum, epsilon, centered: as in `keras.optimizers.RMSprop`.
        **kwargs: see `DPOptimizer` (training needs noise_multiplier) and
            `keras.optimizers.RMSprop`.

    Example:
        >>> layers = [keras.Input((4,)), keras.layers.Dense(1)]
        >>> model = dp.DPModel(keras.Sequential(layers))
        >>> model.compile(dp.ADADP(noise_multiplier=2.0), "mse", log_raw_metrics=False)
        >>> history = model.fit(np.ones((100, 4)), np.ones((100, 1)), batch_size=20, verbose=0)
        >>> print(f"epsilon = {model.epsilon(delta=1e-3):.3f} after {model.ledger.steps} steps")
        epsilon = 0.869 after 5 steps
    """

    _default_exponent = 0.5

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | None = None,
        *,
        rho: float = 0.9,
        clipping: str = "ellipsoid",
        prior: str | Prior = "factored",
        scale_step: bool = True,
        warmup_steps: int | None = None,
        local_clip_factor: float = 1.2,
        prior_decay: float | None = None,
        prior_exponent: float | None = None,
        local_clip_threshold: float = 1e-6,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **kwargs: Any,
    ):
        if prior == "raw" and learning_rate is None:
            learning_rate = InverseSqrtDecay()  # the paper to the letter finds none
        super().__init__(
            learning_rate=learning_rate,
            rho=rho,
            clipping=clipping,
            prior=prior,
            warmup_steps=warmup_steps,
            local_clip_factor=local_clip_factor,
            prior_decay=prior_decay,
            prior_exponent=prior_exponent,
            local_clip_threshold=local_clip_threshold,
            momentum=momentum,
            epsilon=epsilon,
            centered=centered,
            **kwargs,
        )
        self.scale_step = check_bool("scale_step", scale_step)
        self._step_factors = None

    @tf.autograph.experimental.do_not_convert
    def apply_private(
        self,
        sums: Sequence[tf.Tensor],
        expected_lot_size: tf.Tensor | float,
        regularization_gradients: Sequence[tf.Tensor | None] | None = None,
    ) -> None:
        """See `DPOptimizer.apply_private`."""
        if self.scale_step and self.prior != "raw":
            # The shape that this release was made with: `super` changes the prior.
            # A coordinate without noise, r = 0, has no gradient either.
            inverse = [tf.where(r > SMALLEST_SCALE, 1.0 / r, 0.0) for r in self._factor_vectors()]
            self._step_factors = [product(of) for of in self._unpacked(inverse)]
        try:
            super().apply_private(sums, expected_lot_size, regularization_gradients)
        finally:
            self._step_factors = None

    def _step_scales(self):
        return self._step_factors

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Takes Keras's RMSprop step of one variable, with its rate divided by r."""
        if self._step_factors is not None:
            factor = self._step_factors[self._get_variable_index(variable)]
            learning_rate = learning_rate * tf.cast(factor, learning_rate.dtype)
        super().update_step(gradient, variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "scale_step": self.scale_step}
