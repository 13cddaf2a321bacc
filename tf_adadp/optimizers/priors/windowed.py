"""The windowed prior: releases are averaged before they are squared."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.optimizers.priors.exponential import ExponentialPrior
from tf_adadp.utils.checks import check_integer


@keras.saving.register_keras_serializable(package="tf_adadp")
class WindowedPrior(ExponentialPrior):
    """Squares of the MEAN of `window` releases, then as in `ExponentialPrior`.

    The noise variance of a mean of K releases is K times smaller, that of its square K² times, so
    directions that stay the same over K steps stand out; those that change sign do not count. The
    shape changes once per window. Costs two copies of the weights.

    Args:
        window: K ≥ 1 releases.
        decay: d in [0, 1), per window.
        pooling, shrinkage, exponent, floor: see `ExponentialPrior`.

    Example:
        >>> prior = dp.priors.WindowedPrior(window=5)
        >>> dp.ADADP(prior=prior, noise_multiplier=1.0).prior.window
        5
    """

    distributable = False  # a window is closed in a branch

    def __init__(self, *, window: int = 10, decay: float = 0.9, **kwargs: Any):
        super().__init__(decay=decay, **kwargs)
        self.window = check_integer("window", window, at_least=1)

    def _build(self, add_variable, variables):
        super()._build(add_variable, variables)
        shapes = list(enumerate(self._shapes))
        self._sums = [add_variable(shape, f"prior_sum_{i}") for i, shape in shapes]
        self._noise = [add_variable(shape, f"prior_noise_{i}") for i, shape in shapes]
        self._count = add_variable((), "prior_count")

    def update(self, released: Sequence[tf.Tensor], stddevs: Sequence[tf.Tensor]) -> None:
        """See `Prior.update`."""
        for total, g in zip(self._sums, released, strict=True):
            total.assign(total.value + g)
        for total, std in zip(self._noise, stddevs, strict=True):
            total.assign(total.value + tf.square(std))
        self._count.assign(self._count.value + 1.0)

        def close():
            super(WindowedPrior, self).update(
                [total.value / self.window for total in self._sums],
                [tf.sqrt(total.value) / self.window for total in self._noise],
            )
            for total in (*self._sums, *self._noise, self._count):
                total.assign(tf.zeros_like(total.value))
            return True

        # The number of releases is public.
        tf.cond(self._count.value >= self.window, close, lambda: False)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "window": self.window}
