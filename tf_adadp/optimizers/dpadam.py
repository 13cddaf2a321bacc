"""Adam on DP-SGD's release."""

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
    """

    def __init__(
        self,
        learning_rate=1e-3,
        *,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-7,
        amsgrad=False,
        **kwargs,
    ):
        super().__init__(
            learning_rate=learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            **kwargs,
        )
