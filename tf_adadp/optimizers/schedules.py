"""A learning-rate schedule that needs no number of steps."""

import keras
from keras import ops

from tf_adadp.optimizers.checks import check_number


@keras.saving.register_keras_serializable(package="tf_adadp")
class InverseSqrtDecay(keras.optimizers.schedules.LearningRateSchedule):
    """η_t = η₀ / √(1 + t / decay_steps), t = 0, 1, … the step.

    Long steps while the signal is large, short ones once noise is most of what moves the weights,
    and no horizon to know beforehand: a run can be stopped by its budget, or go on. The default
    schedule of `ADADP` and `DPRMSprop`, whose steps do not depend on the scale of the gradients or
    of the noise.

    Args:
        initial_learning_rate: η₀ > 0.
        decay_steps: > 0; after three times as many steps the rate is half of η₀.
    """

    def __init__(self, initial_learning_rate=0.032, decay_steps=50):
        wanted = "a finite number above 0"
        self.initial_learning_rate = check_number(
            "initial_learning_rate", initial_learning_rate, wanted, above=0
        )
        self.decay_steps = check_number("decay_steps", decay_steps, wanted, above=0)

    def __call__(self, step):
        """The rate of a step."""
        time = ops.cast(step, "float32") / self.decay_steps
        return self.initial_learning_rate * ops.rsqrt(1.0 + time)

    def get_config(self):
        """The arguments of the constructor."""
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "decay_steps": self.decay_steps,
        }
