"""Releases statistics of the rows with their clipped sum, as one more coordinate each."""

import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tf_adadp.clipping.balls import L2Ball
from tf_adadp.clipping.base import (
    ClippedSums,
    ClippingSet,
    Gradients,
    ScaledRows,
    cleaned_mask,
    stddev,
)
from tf_adadp.clipping.ellipsoid import Ellipsoid
from tf_adadp.clipping.row_gradients import ROUNDOFF
from tf_adadp.utils.checks import check_number

# By how much a row more or less moves each.
_SENSITIVITIES = {"count": 0.5, "loss": 1.0}


class RowsBeside(ClippingSet):
    """K × intervals: the rows clipped into K, and statistics of each of them.

    With w ≤ 1 the factor by which K scales a row, ℓ its loss and C the clip norm, a row that is
    finite contributes

        "count":  1[w = 1] − ½, in {−½, ½}
        "loss":   min(max(w·ℓ/C, 0), 1), in [0, 1]: the loss whose gradient the clipped row is,
                  rounded to 2⁻⁸, so that float32 sums of up to 65,000 rows are exact

    and every other row, as a masked one, 0. `sums_beside` has one more entry than there are
    variables for each statistic, a scalar Σ_x mask_x·(…), in the order above.

    Formal guarantee: with the share ρ_j of the step's budget for statistic j of sensitivity Δ_j,

        noise of statistic j = σ*·Δ_j/√ρ_j,   noise of the sum = s(σ*/√(1 − Σρ_j)),   so that
        ‖Δ sum/noise‖² + Σ_j ρ_j/σ*² ≤ (1 − Σρ_j)/σ*² + Σ_j ρ_j/σ*² = 1/σ*²

    which is rule (R) of `base` for all together: one Gaussian mechanism of multiplier σ*.

    Args:
        clipping_set: K, an `L2Ball` or an `Ellipsoid`; for a count without automatic clipping.
        shares: {"count" or "loss": ρ in [1e-6, 0.5]}, of a sum below 1.
        clip_norm: C, a number or a scalar tensor that follows from releases.

    Raises:
        ValueError: on another set (a subclass may clip, or draw noise, differently), on
            another statistic, or a share out of range.
    """

    def __init__(
        self,
        clipping_set: ScaledRows,
        shares: Mapping[str, float],
        clip_norm: float | tf.Tensor = 1.0,
    ):
        if type(clipping_set) not in (L2Ball, Ellipsoid):
            raise ValueError(
                f"clipping_set={clipping_set!r}: statistics are released beside rows that an "
                "L2Ball or an Ellipsoid scales down, and no others."
            )
        if "count" in shares and clipping_set.gamma is not None:
            raise ValueError(
                f"clipping_set={clipping_set!r}: automatic clipping scales every row, so none are "
                "counted."
            )
        self._clipping_set = clipping_set
        unknown = set(shares) - set(_SENSITIVITIES)
        if unknown or sum(shares.values()) >= 1:
            raise ValueError(
                f"shares={shares}: give shares of a sum below 1 for {list(_SENSITIVITIES)}."
            )
        self._shares = {
            name: check_number(f"shares[{name!r}]", shares[name], at_least=1e-6, at_most=0.5)
            for name in _SENSITIVITIES
            if name in shares
        }
        self._clip_norm = clip_norm

    @property
    def statistics(self) -> tuple[str, ...]:
        """Returns the names of the released statistics, in order."""
        return tuple(self._shares)

    @property
    def center(self) -> list[tf.Tensor] | None:
        """See `ClippingSet.center`: that of K."""
        return self._clipping_set.center

    def clip(self, grads: Gradients) -> list[tf.Tensor]:
        """Clips each row into K, the statistics left out."""
        return self._clipping_set.clip(grads)

    def clipped_sum(self, grads: Gradients, mask: tf.Tensor) -> ClippedSums:
        """Returns K's clipped sum and the statistics, of rows without a loss."""
        return self.sums_beside(grads, mask, tf.zeros_like(cleaned_mask(mask)))

    def sums_beside(self, grads: Gradients, mask: tf.Tensor, losses: tf.Tensor) -> ClippedSums:
        """See `ClippingSet.sums_beside`: K's clipped sum, followed by the statistics."""
        mask = cleaned_mask(mask)
        weights, sums = self._clipping_set.weights_and_sums(grads, mask)
        clipped = [weighted_sum(w) for w, weighted_sum in zip(weights, sums, strict=True)]
        finite = tf.where(weights[0] > 0.0, mask, 0.0)
        of_rows = {
            # A row inside of K is divided by exactly 1. One that is not finite has weight 0.
            "count": finite * tf.where(weights[0] >= mask, 0.5, -0.5),
            "loss": _scaled_losses(weights[0], losses, self._clip_norm, finite),
        }
        statistics = [tf.reduce_sum(of_rows[name]) for name in self._shares]
        return ClippedSums([*clipped, *statistics], self)

    def noise_stddev(
        self, noise_multiplier: float | tf.Tensor, num_variables: int
    ) -> list[tf.Tensor]:
        """Returns s of the variables, then the noise of each statistic."""
        of_sum = stddev(noise_multiplier, 1 / math.sqrt(1 - sum(self._shares.values())))
        statistics = [
            # Rounded upwards, as norms are.
            stddev(noise_multiplier, _SENSITIVITIES[name] / math.sqrt(share) * (1 + 8 * ROUNDOFF))
            for name, share in self._shares.items()
        ]
        return [*self._clipping_set.noise_stddev(of_sum, num_variables), *statistics]

    def zero_sums(self, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
        """See `ClippingSet.zero_sums`."""
        return [*self._clipping_set.zero_sums(shapes), *(tf.zeros([]) for _ in self._shares)]


def _scaled_losses(weights, losses, clip_norm, largest):
    """Returns w·ℓ/C in [0, largest], largest ≤ 1; 0 for NaN."""
    scaled = weights * tf.cast(losses, tf.float32) / clip_norm
    bounded = tf.where(scaled > 0.0, tf.minimum(scaled, largest), 0.0)
    return tf.round(bounded * 256.0) / 256.0
