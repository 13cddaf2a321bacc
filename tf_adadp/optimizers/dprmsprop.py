"""RMSprop on DP-SGD's release: ADADP's adaptive learning rate alone (ADAL)."""

from typing import Any

import keras

from tf_adadp.optimizers.found_rate import FoundRate


@keras.saving.register_keras_serializable(package="tf_adadp")
class DPRMSprop(FoundRate, keras.optimizers.RMSprop):
    """RMSprop fed with DP-SGD's released vector; ADAL in Xu et al., Section IV-E.

        E[g̃²] ← ρ E[g̃²] + (1 − ρ) g̃²,   θ ← θ − η g̃ / √(E[g̃²] + ε0)          (eq. 1)

    with the paper's γ = 1 − ρ = 0.1. `ADAL` is an alias of this class. A rate that is found falls
    to 0 at the end of a `fit`, and a second `fit` goes on at the one before that, as in `ADADP`. In
    a loop of yours, call `plan_steps`, or there is no such end.

    Args:
        learning_rate: η, a float or a Keras schedule; None to find it in training, `FoundRate`.
        rho, momentum, epsilon, centered: as in `keras.optimizers.RMSprop`.
        **kwargs: see `DPOptimizer` (training needs noise_multiplier) and
            `keras.optimizers.RMSprop`.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> dp.ADAL(noise_multiplier=1.1).event(law)
        PoissonSampledDpEvent(sampling_probability=0.01,
        event=GaussianDpEvent(noise_multiplier=1.1))
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | None = None,
        *,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **kwargs: Any,
    ):
        super().__init__(
            learning_rate=learning_rate,
            rho=rho,
            momentum=momentum,
            epsilon=epsilon,
            centered=centered,
            **kwargs,
        )


ADAL = DPRMSprop
