"""ADADP: an adaptive learning rate and adaptive noise."""

import keras

from tf_adadp.optimizers.adaptive_noise import AdaptiveNoise


@keras.saving.register_keras_serializable(package="tf_adadp")
class ADADP(AdaptiveNoise, keras.optimizers.RMSprop):
    """ADADP (Xu et al., "An Adaptive and Fast Convergent Approach to Differentially Private Deep
    Learning", Algorithm 1), in a sound form.

    An RMSprop step (eq. 1, with 1 − ρ = γ = 0.1) on a release whose clipping set and noise follow
    the size that past releases showed of each coordinate; see `AdaptiveNoise` for set, noise and
    guarantee. What differs from the print, and why: the paper's prior averages RAW gradients, which
    leaks through the noise scale; feeding the noisy gradient back instead diverges. Here the prior
    sees released vectors with their known noise variance subtracted, and sets the shape of the
    noise at a fixed total scale. `prior="raw"` is the print, charged ε = ∞.

    Args:
        learning_rate: η, a float or a Keras schedule. The step is scale-free, so the default suits
            most models.
        rho: ρ = 1 − γ of the RMSprop step.
        clipping: "ellipsoid", or "local" for the paper's coordinate-wise clipping.
        prior: "released", or "raw" for the paper's, ε = ∞.
        warmup_steps, local_clip_factor (β), prior_decay (γ'), prior_exponent,
            local_clip_threshold (G): see `AdaptiveNoise`.
        momentum, epsilon, centered: as in `keras.optimizers.RMSprop`.
        **kwargs: see `DPOptimizer` (noise_multiplier is required) and `keras.optimizers.RMSprop`.
    """

    def __init__(
        self,
        learning_rate=4e-3,
        *,
        rho=0.9,
        clipping="ellipsoid",
        prior="released",
        warmup_steps=None,
        local_clip_factor=1.2,
        prior_decay=0.9,
        prior_exponent=0.25,
        local_clip_threshold=1e-6,
        momentum=0.0,
        epsilon=1e-7,
        centered=False,
        **kwargs,
    ):
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
