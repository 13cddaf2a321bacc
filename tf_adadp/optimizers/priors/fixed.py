"""Priors from public facts: the shape of the model, or scales that the user knows."""

import math

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.optimizers.priors.base import Prior


class _Fixed(Prior):
    """Moments that no release changes."""

    def _build(self, add_variable, variables):
        self._fixed = [tf.constant(self._moment(v), tf.float32) for v in variables]

    def _moment(self, variable):
        raise NotImplementedError

    def update(self, released, stddevs):
        """Nothing: the shape depends on public facts only."""

    def moments(self):
        """See `Prior.moments`."""
        return self._fixed


@keras.saving.register_keras_serializable(package="tf_adadp")
class FanInPrior(_Fixed):
    """Second moment 1/fan-in for every weight of a variable: r ∝ fan_in^(−exponent).

    Weights are initialised with a variance of about 1/fan-in, so at exponent = 1/2 the noise is in
    proportion to the weights. The fan-in is the product of all axes but the last; 1 for a bias.

    Args:
        exponent, floor: see `Prior`.
    """

    def __init__(self, *, exponent=0.5, **kwargs):
        super().__init__(exponent=exponent, **kwargs)

    def _moment(self, variable):
        shape = tuple(variable.shape)
        return np.full([1] * len(shape), 1.0 / math.prod(shape[:-1]))


@keras.saving.register_keras_serializable(package="tf_adadp")
class EqualLayersPrior(_Fixed):
    """Second moment 1/size for every weight of a variable.

    At exponent = 1/2 every variable gets the same share of the clipping set: one of n variables has
    ‖b‖ = C/√n, however many weights it has.

    Args:
        exponent, floor: see `Prior`.
    """

    def __init__(self, *, exponent=0.5, **kwargs):
        super().__init__(exponent=exponent, **kwargs)

    def _moment(self, variable):
        shape = tuple(variable.shape)
        return np.full([1] * len(shape), 1.0 / math.prod(shape))


@keras.saving.register_keras_serializable(package="tf_adadp")
class FixedPrior(_Fixed):
    """Scales that are known beforehand: r ∝ the scale given for each variable.

    For public knowledge of the data, such as the units of columns or a spectrum that was released.
    Scales must not come from the private data otherwise: nothing here accounts for them.

    Args:
        scales: dict {variable path prefix: number or (nested list of) numbers > 0 that broadcast to
            the variable}; the longest prefix wins, and a variable without one has scale 1.
        floor: see `Prior`.
    """

    def __init__(self, scales, *, floor=0.0, exponent=0.5):
        super().__init__(exponent=exponent, floor=floor)
        if not isinstance(scales, dict):
            raise TypeError(f"scales={scales!r}: give a dict {{variable path prefix: scale}}.")
        self.scales = {str(k): np.asarray(v, np.float64).tolist() for k, v in scales.items()}
        for prefix, scale in self.scales.items():
            values = np.asarray(scale)
            if not (np.all(np.isfinite(values)) and np.all(values > 0)):
                raise ValueError(f"scales[{prefix!r}] has values that are not finite and above 0.")

    def _build(self, add_variable, variables):
        paths = [v.path for v in variables]
        for prefix in self.scales:
            if not any(path.startswith(prefix) for path in paths):
                raise ValueError(f"scales has {prefix!r}, and no variable does: {', '.join(paths)}")
        super()._build(add_variable, variables)

    def _moment(self, variable):
        shape = tuple(variable.shape)
        matching = [prefix for prefix in self.scales if variable.path.startswith(prefix)]
        scale = np.asarray(self.scales[max(matching, key=len)] if matching else 1.0)
        try:
            full = np.broadcast_to(scale, shape)
        except ValueError:
            raise ValueError(
                f"scales for {variable.path!r} have shape {scale.shape}, the variable has {shape}: "
                "give what broadcasts to it."
            ) from None
        return full ** (1.0 / self.exponent)

    def get_config(self):
        """The arguments of the constructor."""
        return {**super().get_config(), "scales": self.scales}
