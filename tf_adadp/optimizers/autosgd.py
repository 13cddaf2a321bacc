"""AUTO-S: SGD with automatic clipping, which has no clip norm."""

from typing import Any

import keras

from tf_adadp.optimizers.base import DPOptimizer


@keras.saving.register_keras_serializable(package="tf_adadp")
class AutoSGD(DPOptimizer, keras.optimizers.SGD):
    """DP-SGD with automatic clipping (AUTO-S; Bu et al. 2022, "Automatic clipping", eq. 4.1).

        θ ← θ − η · (Σ_x g_x / (‖g_x‖₂ + γ) + N(0, σ*² I)) / L

    Every example contributes a vector of norm below 1, however small its gradient is: there is no
    clip norm to tune, and the rate has one meaning for all models. Any other optimizer of this
    package does the same with `automatic_clipping=γ`.

    Guarantee: ‖v‖₂ < 1 for every contribution, so a step costs one Gaussian mechanism of
    multiplier σ*; see `DPOptimizer`.

    Args:
        learning_rate: η, a float or a Keras schedule.
        gamma: γ > 0; a gradient of norm γ contributes half as much as a large one.
        momentum, nesterov: as in `keras.optimizers.SGD`.
        **kwargs: see `DPOptimizer` (training needs noise_multiplier; there is no l2_norm_clip)
            and `keras.optimizers.SGD`.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> dp.AutoSGD(1.0, noise_multiplier=1.1).event(law)
        PoissonSampledDpEvent(sampling_probability=0.01,
        event=GaussianDpEvent(noise_multiplier=1.1))
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1.0,
        *,
        gamma: float = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **kwargs: Any,
    ):
        for name in ("l2_norm_clip", "automatic_clipping"):
            if name in kwargs:
                raise ValueError(
                    f"{name}={kwargs[name]!r}: AutoSGD divides every gradient by its own norm plus "
                    f"gamma, and has no {name}. Leave it out, or use DPSGD."
                )
        super().__init__(
            learning_rate=learning_rate,
            automatic_clipping=gamma,
            momentum=momentum,
            nesterov=nesterov,
            **kwargs,
        )

    @property
    def gamma(self) -> float:
        """Returns γ."""
        return self.automatic_clipping

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        config = super().get_config()
        del config["l2_norm_clip"]
        config["gamma"] = config.pop("automatic_clipping")
        return config
