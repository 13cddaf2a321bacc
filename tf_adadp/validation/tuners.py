"""Notes in a model's ledger that a search by KerasTuner trained it, and refuses raw objectives."""

import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import keras

from tf_adadp.accounting import PrivacyLedger, PrivacyWarning

_ALONE = (
    "a KerasTuner search trained this model in one of its trials: epsilon is that of this trial "
    "alone, and not of the others, by whose scores it was chosen"
)
_WAY_OUT = (
    "Derive the tuner from tf_adadp.tuning.ComposedTuner, which charges all trials; or search with "
    "tf_adadp.tuning.search."
)
_WARNED: weakref.WeakSet = weakref.WeakSet()  # tuners


def check_tuner(
    callbacks: Iterable[keras.callbacks.Callback],
    raw_metrics: Iterable[str],
    ledger: PrivacyLedger,
) -> None:
    """Refuses a KerasTuner search by a raw training metric, and notes one that is not charged.

    Args:
        callbacks: those of `fit`; KerasTuner's among them reference the tuner.
        raw_metrics: names of the training metrics, with the loss.
        ledger: the model's. Unless the tuner is a `tuning.ComposedTuner`, it gets a note that it
            does not cover the other trials.

    Raises:
        ValueError: the objective is a raw training metric.

    Warns:
        PrivacyWarning: once per tuner that does not charge all trials.
    """
    tuner = _tuner_of(callbacks)
    if tuner is None:
        return
    objective = tuner.oracle.objective
    for part in getattr(objective, "objectives", [objective]):
        if part.name in raw_metrics:
            # Only an error of this class ends a search; others fail one trial.
            raise sys.modules["keras_tuner"].errors.FatalValueError(
                f"objective={part.name!r} steers the search by a raw training metric, which no ε "
                f"covers. Take a validation metric, objective='val_{part.name}'."
            )
    if getattr(tuner, "charges_every_trial", False):
        return
    ledger.mark_not_covered(_ALONE)
    if tuner not in _WARNED:
        _WARNED.add(tuner)
        warnings.warn(f"{_ALONE}. {_WAY_OUT}", PrivacyWarning, stacklevel=4)


def _tuner_of(callbacks: Iterable[keras.callbacks.Callback]) -> Any:
    """Returns the tuner that a callback of KerasTuner's belongs to, or None."""
    for callback in callbacks:
        if type(callback).__module__.partition(".")[0] == "keras_tuner":
            tuner = getattr(callback, "tuner", None)
            if tuner is not None:
                return tuner
    return None
