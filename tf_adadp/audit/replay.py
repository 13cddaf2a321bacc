"""Replays steps of an optimizer from its releases, without data."""

import contextlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from tf_adadp.audit.releases import (
    check_optimizer,
    examples,
    own_keys,
    recorded_releases,
    restorable_state,
)
from tf_adadp.optimizers import DPOptimizer
from tf_adadp.utils.checks import check_integer


def replay_difference(
    optimizer: DPOptimizer, gradients: Sequence[ArrayLike], *, steps: int = 3
) -> float:
    """Measures what weights and state of an optimizer take from the data past its releases.

    The optimizer takes `steps` steps on the gradients' sum, and what it releases is recorded. From
    the same start it takes them again on empty lots, with the recorded releases in place of new
    ones. Where weights and state follow from releases alone, as post-processing must, both ends are
    equal to the last bit:

        difference = max |θ − θ_replayed|, over weights and state

    So a difference above 0 is a leak that ε does not cover, unless the update draws random numbers
    of its own, as `SADPSGD` does. `audit_optimizer` cannot see such a leak: it scores the releases.
    Steps are taken as it takes them, by `apply_private`, eagerly and on the whole set of gradients.

    A difference of 0 is no proof. Not seen are: a noise scale that depends on the data; what
    Python attributes keep from one call to the next; `step_on_lot`; a leak that begins after so
    many steps.

    Args:
        optimizer: a built `DPOptimizer` without `seed`. Its state and keys are as before when the
            replay ends.
        gradients: the examples' gradients, a list of arrays [B, *shape], one per variable.
        steps: how many steps are taken.

    Returns:
        The largest difference; infinite where only one end is a finite number, or where the replay
        asks for another number of releases.

    Raises:
        ValueError: as `audit_optimizer`.

    Example:
        >>> optimizer = dp.ADADP(0.1, noise_multiplier=1.0)
        >>> optimizer.build([keras.Variable(np.zeros(2, "float32"))])
        >>> dp.audit.replay_difference(optimizer, [np.array([[3.0, 4.0], [1.0, 2.0]])])
        0.0
    """
    check_optimizer(optimizer)
    steps = check_integer("steps", steps, at_least=1)
    rows = examples(optimizer, gradients)
    size = rows[0].shape[0]
    losses = tf.range(1.0, size + 1.0)
    state, restore = restorable_state(optimizer)

    def run(mask):
        restore()
        for _ in range(steps):
            sums = optimizer.clipping_set().sums_beside(rows, mask, losses)
            optimizer.apply_private(sums, float(size))
        return [v.numpy() for v in state]

    with own_keys(optimizer, None):
        try:
            with recorded_releases(optimizer) as releases:
                ends = run(tf.ones([size]))
            with _released_again(optimizer, releases):
                replayed = run(tf.zeros([size]))
        except _NoReleaseLeft:
            return np.inf
        finally:
            restore()
    return np.inf if releases else max(map(_difference, ends, replayed), default=0.0)


class _NoReleaseLeft(Exception):
    """Says that a replay asks for more releases than were recorded."""


@contextlib.contextmanager
def _released_again(optimizer, releases):
    """Lets the optimizer release what was recorded, and takes it off the list."""

    def release(*args, **kwargs):
        if not releases:
            raise _NoReleaseLeft
        return releases.pop(0)

    optimizer._with_noise = release  # on the instance: `del` brings the method back
    try:
        yield
    finally:
        del optimizer._with_noise


def _difference(a, b):
    if np.array_equal(a, b, equal_nan=True) or not a.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        largest = np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)))
    return float(largest) if np.isfinite(largest) else np.inf
