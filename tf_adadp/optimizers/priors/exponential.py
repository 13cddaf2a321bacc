"""The exponential prior: a running mean of squared releases. The default of ADADP and ADAN."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.clipping.row_gradients import product
from tf_adadp.optimizers.priors.base import Prior
from tf_adadp.optimizers.priors.moments import POOLINGS, PooledMoments
from tf_adadp.utils.checks import check_bool, check_choice, check_number


@keras.saving.register_keras_serializable(package="tf_adadp")
class ExponentialPrior(Prior):
    """E'[g²] ← d·E'[g²] + (1 − d)·(g̃² − τ²), pooled and shrunk: ADADP's eq. 4 from releases.

    The sound form of the prior of Xu et al., "An Adaptive and Fast Convergent Approach to
    Differentially Private Deep Learning": theirs averages RAW gradients. g̃ is the released vector,
    τ the known std of its noise; see `PooledMoments` for groups and shrinkage and `Prior` for the
    shape that is made of it.

    The shape of "both" is a product as well, r² = V·R·K of variables, rows and columns (columns per
    unit of a matrix), each of mean 1 and floored by itself: V ← f² + (1 − f²)·V, R ← f + (1 − f)·R
    and K likewise. Within a variable r² is then at least f² of its mean, as with rows alone. K is 1
    for the last matrix, whose columns are the outputs.

    Args:
        decay: d in [0, 1); about 1/(1 − d) releases count.
        pooling: "row", "column", "both", "layer" or "coordinate".
        shrinkage: whether differences that the noise explains are removed.
        exponent, floor: see `Prior`.

    Example:
        >>> prior = dp.priors.ExponentialPrior(decay=0.99)
        >>> dp.ADADP(prior=prior, noise_multiplier=1.0).prior.decay
        0.99
    """

    def __init__(
        self,
        *,
        decay: float = 0.995,
        pooling: str = "row",
        shrinkage: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.decay = check_number("decay", decay, at_least=0, below=1)
        self.pooling = check_choice("pooling", pooling, POOLINGS)
        self.shrinkage = check_bool("shrinkage", shrinkage)

    def _build(self, add_variable, variables):
        self._moments = PooledMoments(self.pooling, self.shrinkage)
        self._moments.build(add_variable, self._shapes)

    def update(self, released: Sequence[tf.Tensor], stddevs: Sequence[tf.Tensor]) -> None:
        """See `Prior.update`."""
        self._moments.update(released, stddevs, self.decay)

    def moments(self) -> list[tf.Tensor]:
        """See `Prior.moments`."""
        return self._moments.estimates()

    def shape(self) -> list[tf.Tensor]:
        """See `Prior.shape`."""
        if self.pooling != "both":
            return super().shape()
        return [product(of) for of in self.factors()]

    def factors(self) -> list[tuple[tf.Tensor, ...]]:
        """See `Prior.factors`; with "both" a matrix has one for rows and one for columns."""
        if self.pooling != "both":
            return super().factors()
        return self._moments.shape_factors(self.exponent, self.floor)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        config = {"decay": self.decay, "pooling": self.pooling, "shrinkage": self.shrinkage}
        return {**super().get_config(), **config}
