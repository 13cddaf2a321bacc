"""DP-SGD, with momentum."""

from typing import Any

import keras

from tf_adadp.optimizers.base import DPOptimizer


@keras.saving.register_keras_serializable(package="tf_adadp")
class DPSGD(DPOptimizer, keras.optimizers.SGD):
    """Differentially private stochastic gradient descent (Abadi et al. 2016, Algorithm 1).

        θ ← θ − η · (Σ_x clip_C(g_x) + N(0, σ*²C² I)) / L

    with Keras's momentum and Nesterov momentum on the released vector.

    Args:
        learning_rate: η, a float or a Keras schedule.
        momentum, nesterov: as in `keras.optimizers.SGD`.
        **kwargs: see `DPOptimizer` (training needs noise_multiplier) and `keras.optimizers.SGD`.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> dp.DPSGD(1.0, noise_multiplier=1.1, momentum=0.9).event(law)
        PoissonSampledDpEvent(sampling_probability=0.01,
        event=GaussianDpEvent(noise_multiplier=1.1))
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1.0,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        **kwargs: Any,
    ):
        super().__init__(
            learning_rate=learning_rate, momentum=momentum, nesterov=nesterov, **kwargs
        )
