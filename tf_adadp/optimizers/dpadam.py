"""Adam on DP-SGD's release."""

from typing import Any

import keras

from tf_adadp.optimizers.base import DPOptimizer


@keras.saving.register_keras_serializable(package="tf_adadp")
class DPAdam(DPOptimizer, keras.optimizers.Adam):
    """Adam fed with DP-SGD's released vector; the update rule is Keras's own.

    The moments see released vectors only, so they cost nothing beyond DP-SGD.

    Args:
        learning_rate: η, a float or a Keras schedule.
        beta_1, beta_2, epsilon, amsgrad: as in `keras.optimizers.Adam`.
        **kwargs: see `DPOptimizer` (training needs noise_multiplier) and `keras.optimizers.Adam`.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> dp.DPAdam(0.001, noise_multiplier=1.1).event(law)
        PoissonSampledDpEvent(sampling_probability=0.01,
        event=GaussianDpEvent(noise_multiplier=1.1))
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1e-3,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **kwargs: Any,
    ):
        super().__init__(
            learning_rate=learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            **kwargs,
        )
