"""Gradients of operations that broadcast, from dimensions that were followed."""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tf_adadp.gradients.patching import PATCHING, replaced
from tf_adadp.gradients.proof.values import Dims
from tf_adadp.utils.keras_compat import math_grad


@contextlib.contextmanager
def broadcasts_by(dims_of: Callable[[tf.Tensor], Dims]) -> Iterator[None]:
    """Tells `tf.gradients` which operands were broadcast if the number of examples is unknown.

    By itself it asks when the graph runs, with eight operations for each sum or product of two
    tensors. They were half of the graph of a recurrent layer.

    Args:
        dims_of: a function that returns the dimensions of a tensor, or None.
    """

    def arguments(x, y, grad=None):
        del grad
        dims = dims_of(x), dims_of(y)
        axes = None if None in dims else _broadcast_axes(*dims)
        if axes is None:
            return when_run(x, y)
        rank = max(len(d) for d in dims)
        return tuple(
            (tf.shape(t), own, True) if own or len(d) < rank else (None, [], False)
            for t, d, own in zip((x, y), dims, axes, strict=True)
        )

    with PATCHING:
        when_run = math_grad.SmartBroadcastGradientArgs
        with replaced(math_grad, SmartBroadcastGradientArgs=arguments):
            yield


def _broadcast_axes(x_dims, y_dims):
    """Returns the axes that each of two tensors was broadcast along; None where unknown."""
    rank = max(len(x_dims), len(y_dims))
    x_dims, y_dims = ((1,) * (rank - len(d)) + tuple(d) for d in (x_dims, y_dims))
    axes = [], []
    for axis, (x, y) in enumerate(zip(x_dims, y_dims, strict=True)):
        if x == 1 and y != 1:
            axes[0].append(axis)
        elif y == 1 and x != 1:
            axes[1].append(axis)
        elif x is None or y is None or x != y:
            return None
    return axes
