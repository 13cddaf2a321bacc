"""Priors from public facts: the shape of the model, or scales that the user gives."""

import abc
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.optimizers.priors.base import Prior
from tf_adadp.utils.checks import check_instance


class _Fixed(Prior):
    """Moments that no release changes."""

    def __init__(self, *, exponent: float = 0.5, **kwargs: Any):
        super().__init__(exponent=exponent, **kwargs)

    def _build(self, add_variable, variables):
        self._fixed = [tf.constant(m, tf.float32) for m in self._public_moments(variables)]

    @abc.abstractmethod
    def _public_moments(self, variables):
        """Returns one array per variable, of its rank, that broadcasts to it. A hook."""

    def update(self, released: Sequence[tf.Tensor], stddevs: Sequence[tf.Tensor]) -> None:
        """Does nothing: the shape depends on public facts only."""

    def moments(self) -> list[tf.Tensor]:
        """See `Prior.moments`."""
        return self._fixed


@keras.saving.register_keras_serializable(package="tf_adadp")
class FanInPrior(_Fixed):
    """Second moment 1/fan-in for every weight of a variable: r ∝ fan_in^(−exponent).

    Weights are initialised with a variance of about 1/fan-in, so at exponent = 1/2 the noise is in
    proportion to the weights. The fan-in is the product of all axes but the last; 1 for a bias.

    Args:
        exponent, floor: see `Prior`.

    Example:
        >>> dp.ADADP(prior=dp.priors.FanInPrior(), noise_multiplier=1.0).prior.exponent
        0.5
    """

    def _public_moments(self, variables):
        return [_everywhere(1.0 / math.prod(v.shape[:-1]), v) for v in variables]


@keras.saving.register_keras_serializable(package="tf_adadp")
class EqualLayersPrior(_Fixed):
    """Second moment 1/size for every weight of a variable.

    At exponent = 1/2 every variable gets the same share of the clipping set: one of n variables has
    ‖b‖ = C/√n, however many weights it has.

    Args:
        exponent, floor: see `Prior`.

    Example:
        >>> dp.ADADP(prior=dp.priors.EqualLayersPrior(), noise_multiplier=1.0).prior.exponent
        0.5
    """

    def _public_moments(self, variables):
        return [_everywhere(1.0 / math.prod(v.shape), v) for v in variables]


@keras.saving.register_keras_serializable(package="tf_adadp")
class FixedPrior(_Fixed):
    """Uses public scales: r ∝ the scale given for each variable.

    For public knowledge of the data, such as the units of columns or a spectrum that was released.
    Scales must not come from the private data otherwise: nothing here accounts for them.

    Args:
        scales: dict {variable path prefix: number or (nested list of) numbers > 0 that broadcast to
            the variable}; the longest prefix wins, and a variable without one has scale 1. The
            largest may be 10¹⁵ times the smallest.
        floor: see `Prior`.

    Example:
        >>> scales = {"dense/kernel": np.array([[1.0], [10.0]])}  # the second input has other units
        >>> dp.ADADP(prior=dp.priors.FixedPrior(scales), noise_multiplier=1.0).prior.exponent
        0.5
    """

    def __init__(self, scales: Any, *, floor: float = 0.0):
        super().__init__(floor=floor)
        check_instance("scales", scales, dict, "a dict {variable path prefix: scale}")
        self.scales = {}
        for prefix, scale in scales.items():
            try:
                values = np.asarray(scale, np.float64)
                fits = values.size > 0 and np.all(np.isfinite(values)) and np.all(values > 0)
            except (TypeError, ValueError):
                fits = False
            if not fits:
                raise ValueError(
                    f"scales[{prefix!r}]={scale!r}: give a number or an array of numbers, finite "
                    "and above 0."
                )
            self.scales[str(prefix)] = values.tolist()

    def _public_moments(self, variables):
        paths = [v.path for v in variables]
        for prefix in self.scales:
            if not any(path.startswith(prefix) for path in paths):
                raise ValueError(f"scales has {prefix!r}, and no variable does: {', '.join(paths)}")
        full = [self._scale(v) for v in variables]
        largest = max(np.max(scale) for scale in full)
        if min(np.min(scale) for scale in full) < 1e-15 * largest:
            raise ValueError(f"scales={self.scales!r} differ by more than a factor of 10¹⁵.")
        return [np.square(scale / largest) for scale in full]

    def _scale(self, variable):
        shape = tuple(variable.shape)
        matching = [prefix for prefix in self.scales if variable.path.startswith(prefix)]
        scale = np.asarray(self.scales[max(matching, key=len)] if matching else 1.0)
        try:
            return np.broadcast_to(scale, shape)
        except ValueError:
            raise ValueError(
                f"scales for {variable.path!r} have shape {scale.shape}, the variable has {shape}. "
                "Give scales that broadcast to it."
            ) from None

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {"scales": self.scales, "floor": self.floor}


def _everywhere(value, variable):
    """Returns an array of a variable's rank with this one value."""
    return np.full([1] * len(variable.shape), value)
