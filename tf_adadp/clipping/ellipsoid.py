"""Ellipsoids: one norm over all variables, in a metric per coordinate and around a centre."""

from collections.abc import Sequence

import tensorflow as tf

from tf_adadp.clipping.base import (
    ScaledRows,
    check_gamma,
    check_length,
    divisor,
    stddev,
    upper_norm,
)
from tf_adadp.clipping.row_gradients import AxisScales


class Ellipsoid(ScaledRows):
    """‖v/b‖₂ ≤ 1 with v = b∘w·min(1, 1/‖w‖₂), w = (g − a)/b, and s = σ*·b.

    AdaCliP (Pichapati et al. 2019, Algorithm 1); ADADP's set with a = 0. w is formed for each row
    and coordinate before its norm, so nothing cancels however large a/b is, and the guarantee does
    not depend on the rounding of w. A coordinate with b_i = 0 (or below 2⁻¹⁰⁰) gets v_i = s_i = 0;
    b_i above 2¹²⁵ counts as 2¹²⁵.

    Args:
        scales: b ≥ 0, per variable a tensor that broadcasts to the variable's shape, or a tuple of
            such tensors whose product b is; see `AxisScales`.
        center: a, per variable a tensor that broadcasts likewise, or None for 0.
        gamma: None, or γ in [1e-10, 1e10] for v = b∘w/(‖w‖₂ + γ): relative to the ellipsoid.
    """

    def __init__(
        self,
        scales: Sequence[tf.Tensor | tuple[tf.Tensor, ...]],
        center: Sequence[tf.Tensor] | None = None,
        gamma: float | None = None,
    ):
        center = [None] * len(scales) if center is None else center
        check_length("center", center, len(scales))
        self._blocks = tuple(AxisScales(b, a) for b, a in zip(scales, center, strict=True))
        self.gamma = check_gamma(gamma)

    @property
    def center(self) -> list[tf.Tensor] | None:
        """Returns the tensors a, or None."""
        centers = [block.center for block in self._blocks]
        return None if any(a is None for a in centers) else centers

    def _axis_scales(self, num_variables):
        check_length("scales", self._blocks, num_variables)
        return self._blocks

    def _divisors(self, squares):
        return [divisor(upper_norm(squares), 1.0, self.gamma)] * len(squares)

    def noise_stddev(
        self, noise_multiplier: float | tf.Tensor, num_variables: int
    ) -> list[tf.Tensor]:
        """Returns σ*·b, of the shapes of `scales` (of the products)."""
        check_length("scales", self._blocks, num_variables)
        return [stddev(noise_multiplier, block.scale) for block in self._blocks]
