"""ADADP with one part or constant of its rate changed, for the study in adadp_default.py."""

import math

import tf_adadp as dp


def _changed(**constants):
    """Returns ADADP with other constants of `OvershootRate`; it cannot be saved."""
    return type("ADADP", (dp.ADADP,), {f"_{name}": value for name, value in constants.items()})


RATES = {
    "as it is": dp.ADADP,
    "the schedule alone": _changed(lowest=1.0),
    "warmed up over 5 steps, 0.032": lambda **k: dp.ADADP(dp.InverseSqrtDecay(), **k),
    "f starts at 1": _changed(caution=0.0),
    "f starts at 0.1": _changed(caution=math.inf),
    "f ≥ 0.02": _changed(lowest=0.02),
    "f ≥ 0.2": _changed(lowest=0.2),
    "q = 0.5": _changed(limit=0.5),
    "q = 2": _changed(limit=2.0),
    "growth 0.3": _changed(growth=0.3),
    "fall 0.25": _changed(fall=0.25),
    "fall 1": _changed(fall=1.0),
    "one deviation": _changed(deviations=1.0),
    "η × 0.5": _changed(rate=0.016),
    "η × 2": _changed(rate=0.064),
}
RATE_CELLS = (
    ("digits", 1.0),
    ("mnist_gru", 1.0),
    ("cifar10_group_norm", 1.0),
    ("fashion_tanh", 3.0),
    ("cifar10_tanh", 3.0),
)
# Without any noise, DPSGD's rate searched.
NO_NOISE_CELLS = (("digits", 8.0), ("mnist_gru", 3.0), ("cifar10_tanh", 3.0))
