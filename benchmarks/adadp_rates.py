"""ADADP with one part or constant of its rate changed, for the study in adadp_default.py."""

import keras
import tensorflow as tf

import tf_adadp as dp


def _changed(**constants):
    """Returns ADADP with other constants of `FoundRate`; it cannot be saved."""
    return type("ADADP", (dp.ADADP,), {f"_{name}": value for name, value in constants.items()})


class NoEnd(dp.ADADP):
    """ADADP that is not told how many steps there are."""

    def plan_steps(self, steps, total=None):
        """Forgets what it is told."""


class EndingRate(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that falls to 0 in the last part of N steps, as ADADP's does."""

    def __init__(self, learning_rate, steps):
        self.learning_rate, self.steps = learning_rate, steps

    def __call__(self, step):
        """Returns the rate of a step."""
        left = self.steps - tf.cast(step, tf.float32)
        return self.learning_rate * tf.minimum(1.0, left / (dp.ADADP._ending * self.steps))


RATES = {
    "as it is": dp.ADADP,
    "the schedule alone": lambda **k: dp.ADADP(dp.InverseSqrtDecay(), **k),
    "f = 1": _changed(lowest=1.0),
    "m = 1": _changed(least=1.0, most=1.0, waits=False),
    "no cautious start": _changed(first_steps=1),
    "the first loss alone": _changed(readings=1),
    "decay from the start": _changed(waits=False),
    "promise 0.18": _changed(promise=0.18),
    "promise 0.5": _changed(promise=0.5),
    "promise 0.7": _changed(promise=0.7),
    "growth 0.3": _changed(growth=0.3),
    "fall 0.25": _changed(fall=0.25),
    "fall 1": _changed(fall=1.0),
    "one deviation": _changed(deviations=1.0),
    "κ = 1": _changed(gain_share=1.0),
    "10 % for the loss": _changed(share=0.1),
    "no end": NoEnd,
    "end of 10 %": _changed(ending=0.1),
    "end of 60 %": _changed(ending=0.6),
    "rows alone": lambda **k: dp.ADADP(prior="released", **k),
}
RATE_CELLS = (
    ("digits", 1.0),
    ("mnist_gru", 1.0),
    ("cifar10_group_norm", 1.0),
    ("cifar10_relu", 1.0),
    ("cifar10_tanh", 1.0),
    ("mnist", 3.0),
    ("fashion_tanh", 3.0),
    ("fashion_deep", 1.0),
)
# DPSGD whose rate is searched, and has the end of ADADP's.
ENDING = "DPSGD, the same end"
# Without any noise, DPSGD's rate searched.
NO_NOISE_CELLS = (("digits", 8.0), ("mnist_gru", 3.0), ("cifar10_tanh", 3.0))
