"""A learning-rate schedule that needs no number of steps."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tf_adadp.utils.checks import check_integer, check_number


@keras.saving.register_keras_serializable(package="tf_adadp")
class InverseSqrtDecay(keras.optimizers.schedules.LearningRateSchedule):
    """η_t = η₀ · min(1, (t + 1)/warmup_steps) / √(1 + t/decay_steps), t = 0, 1, … the step.

    Steps are long while the signal is large, and short when noise is most of each step. It needs no
    horizon: a budget may stop the run, or the run may go on. It is for `ADADP` and `DPRMSprop`,
    whose steps do not depend on the scale of the gradients or of the noise. A rate that they find
    is this one times a factor.

    The warm-up is for RMSprop's average, which starts at 0: its first steps are up to
    1/√(1 − ρ) = 3 times as long as the rate says, all in the direction of one release.

    Args:
        initial_learning_rate: η₀ > 0.
        decay_steps: > 0; after three times as many steps the rate is half of η₀.
        warmup_steps: ≥ 1, an integer; 1 for no warm-up.

    Example:
        >>> schedule = dp.InverseSqrtDecay(0.032, decay_steps=20, warmup_steps=5)
        >>> [round(float(schedule(step)), 4) for step in (0, 4, 60, 300)]
        [0.0064, 0.0292, 0.016, 0.008]
    """

    def __init__(
        self,
        initial_learning_rate: float = 0.032,
        decay_steps: float = 20,
        warmup_steps: int = 5,
    ):
        wanted = "a finite number above 0"
        self.initial_learning_rate = check_number(
            "initial_learning_rate", initial_learning_rate, wanted, above=0
        )
        self.decay_steps = check_number("decay_steps", decay_steps, wanted, above=0)
        self.warmup_steps = check_integer("warmup_steps", warmup_steps, at_least=1)

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the rate of a step."""
        step = ops.cast(step, "float32")
        warm = ops.minimum((step + 1.0) / self.warmup_steps, 1.0)
        return self.initial_learning_rate * warm * ops.rsqrt(1.0 + step / self.decay_steps)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "decay_steps": self.decay_steps,
            "warmup_steps": self.warmup_steps,
        }
