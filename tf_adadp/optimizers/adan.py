"""ADAN: ADADP's adaptive noise with a plain gradient step."""

from typing import Any

import keras

from tf_adadp.optimizers.adaptive_noise import AdaptiveNoise
from tf_adadp.optimizers.priors import Prior


@keras.saving.register_keras_serializable(package="tf_adadp")
class ADAN(AdaptiveNoise, keras.optimizers.SGD):
    """Adaptive noise alone (ADAN in Xu et al., Section IV-E): θ ← θ − η·g̃.

    Set, noise and guarantee are those of `AdaptiveNoise`. For a plain step the scale that adds the
    least total noise is b ∝ (second moment)^(1/4), the default here.

    Args:
        learning_rate: η, a float or a Keras schedule.
        clipping, prior, warmup_steps, local_clip_factor, prior_decay, prior_exponent,
            local_clip_threshold: see `AdaptiveNoise`.
        momentum, nesterov: as in `keras.optimizers.SGD`.
        **kwargs: see `DPOptimizer` (training needs noise_multiplier) and `keras.optimizers.SGD`.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> dp.ADAN(1.0, noise_multiplier=1.1).event(law)
        PoissonSampledDpEvent(sampling_probability=0.01,
        event=GaussianDpEvent(noise_multiplier=1.1))
    """

    _default_exponent = 0.25

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1.0,
        *,
        clipping: str = "ellipsoid",
        prior: str | Prior = "released",
        warmup_steps: int | None = None,
        local_clip_factor: float = 1.2,
        prior_decay: float | None = None,
        prior_exponent: float | None = None,
        local_clip_threshold: float = 1e-6,
        momentum: float = 0.0,
        nesterov: bool = False,
        **kwargs: Any,
    ):
        super().__init__(
            learning_rate=learning_rate,
            clipping=clipping,
            prior=prior,
            warmup_steps=warmup_steps,
            local_clip_factor=local_clip_factor,
            prior_decay=prior_decay,
            prior_exponent=prior_exponent,
            local_clip_threshold=local_clip_threshold,
            momentum=momentum,
            nesterov=nesterov,
            **kwargs,
        )
