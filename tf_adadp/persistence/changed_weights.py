"""Notices weights that were changed by anything but private training."""

import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.utils.attached import LEFT, attach, attached, detach

CHANGED = (
    "the weights are not those that the last private step left: the plain model was trained, "
    "loaded or set by other means since, and what that used of the records is not in epsilon"
)


def corner(variable: keras.Variable) -> np.ndarray:
    """Returns a few entries of a variable, from all over it."""
    value = tf.convert_to_tensor(variable.value)
    return tf.reshape(value, [-1])[:: 1 + math.prod(value.shape) // 256].numpy()


def remember_left(variables: Sequence[keras.Variable]) -> None:
    """Remembers the values that private training left, to see changes by others."""
    for variable in variables:
        attach(variable, LEFT, corner(variable))


def remember_loaded(model: keras.Model) -> None:
    """Remembers the values of a `DPModel` that was loaded with releases in its ledger."""
    if model.ledger.entries:
        remember_left(model.trainable_variables)


def forget_left(variables: Sequence[keras.Variable]) -> None:
    """Forgets these values, where a private step, or weights with their ledger, come next."""
    for variable in variables:
        detach(variable, LEFT)


def note_changes(variables: Sequence[keras.Variable], ledger: PrivacyLedger) -> None:
    """Records in a ledger, once, that variables changed after private training."""
    for variable in variables:
        left = attached(variable, LEFT)
        if left is not None and not np.array_equal(corner(variable), left, equal_nan=True):
            ledger.mark_not_covered(CHANGED)
            forget_left(variables)
            return
