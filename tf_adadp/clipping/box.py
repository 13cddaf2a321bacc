"""Boxes: every coordinate clipped by itself."""

from collections.abc import Sequence

import tensorflow as tf

from tf_adadp.clipping.base import (
    ClippedSums,
    ClippingSet,
    Gradients,
    check_length,
    cleaned_mask,
    stddev,
    upper_norm,
)
from tf_adadp.clipping.row_gradients import SMALLEST_SCALE, RowGradients, as_rows, sum_of_squares

# A smaller share of the largest weight is raised to this: its noise would be without bound.
_SMALLEST_WEIGHT = 1e-6


class Box(ClippingSet):
    """abs(v_i) ≤ c_i for each coordinate: v_i = max(−c_i, min(c_i, g_i)).

    The noise is s_i = σ*·t_i·√(Σ_j (c_j/t_j)²) for a shape t of choice, sums over the m coordinates
    with c > 0; so (R) holds with equality (at a corner of the box) for every shape:

    - `"adadp"`: t = c, s_i = σ*·c_i·√m (ADADP's local clipping, Xu et al. 2019, Algorithm 1);
    - `"least_squares"`: t = √c, s_i² = σ*²·c_i·Σ_j c_j, the least Σ s_i²;
    - a list of weights w: t_i = c_i^(2/3)·abs(w_i)^(−1/3), the least Σ abs(w_i)·s_i,
      s_i = σ*·(Σ_j (c_j·abs(w_j))^(2/3))^(1/2)·t_i (DPOPT's objective). Weights below 1e-6 of the
      largest are raised to that, and all-zero weights count as equal.

    A coordinate with c_i = 0 (or below 2⁻¹⁰⁰) gets v_i = 0 and s_i = 0.

    Args:
        bounds: c, per variable a tensor of exactly the variable's shape.
        allocation: "adadp", "least_squares", or w: per variable a tensor of that shape too.
    """

    def __init__(
        self, bounds: Sequence[tf.Tensor], allocation: str | Sequence[tf.Tensor] = "adadp"
    ):
        self._bounds = tuple(_without_tiny(c) for c in bounds)
        self._weights = None
        if not isinstance(allocation, str):
            self._weights = tuple(tf.cast(w, tf.float32) for w in allocation)
            shapes = [tuple(c.shape) for c in self._bounds]
            if [tuple(w.shape) for w in self._weights] != shapes:
                raise ValueError(
                    f"allocation has weights of shapes {[tuple(w.shape) for w in self._weights]} "
                    f"for bounds of shapes {shapes}: give one weight per coordinate."
                )
        elif allocation not in ("adadp", "least_squares"):
            raise ValueError(
                f"allocation={allocation!r}: give 'adadp', 'least_squares' or a list of weights."
            )
        self._allocation = allocation

    def clip(self, grads: Gradients) -> list[tf.Tensor]:
        """Clips each row, coordinate by coordinate."""
        rows, ok = self._checked(grads)
        clipped = []
        for r, c in zip(rows, self._bounds, strict=True):
            g = r.materialize()
            keep = tf.reshape(ok, [-1] + [1] * (g.shape.rank - 1))
            clipped.append(tf.where(keep, tf.clip_by_value(g, -c, c), 0.0))
        return clipped

    def clipped_sum(self, grads: Gradients, mask: tf.Tensor) -> ClippedSums:
        """See `ClippingSet.clipped_sum`."""
        rows, ok = self._checked(grads)
        weights = tf.where(ok, cleaned_mask(mask), 0.0)
        sums = (r.clipped_sum(c, weights) for r, c in zip(rows, self._bounds, strict=True))
        return ClippedSums(sums, self)

    def noise_stddev(
        self, noise_multiplier: float | tf.Tensor, num_variables: int
    ) -> list[tf.Tensor]:
        """Returns one tensor of the variable's shape each, see `allocation`."""
        check_length("bounds", self._bounds, num_variables)
        shape = self._noise_shape()
        ratios = [
            tf.math.divide_no_nan(c, t)[None] for c, t in zip(self._bounds, shape, strict=True)
        ]
        norm = upper_norm([sum_of_squares(r)[0] for r in ratios])
        return [stddev(noise_multiplier, norm) * t for t in shape]

    def _checked(self, grads: Gradients) -> tuple[list[RowGradients], tf.Tensor]:
        """Returns the rows, and for each whether it is finite in all variables."""
        check_length("bounds", self._bounds, len(grads))
        rows = [as_rows(g) for g in grads]
        for c, r in zip(self._bounds, rows, strict=True):
            if tuple(c.shape) != r.shape:
                # A bound that stood for several coordinates would be counted once in the noise.
                raise ValueError(
                    f"bounds of shape {tuple(c.shape)} for a variable of shape {r.shape}: give one "
                    "bound per coordinate."
                )
        return rows, tf.math.is_finite(tf.add_n([r.measure()[0] for r in rows]))

    def _noise_shape(self):
        if self._weights is None:
            return [c if self._allocation == "adadp" else tf.sqrt(c) for c in self._bounds]
        weights = [tf.abs(w) for w in self._weights]
        largest = tf.reduce_max([tf.reduce_max(w) for w in weights])
        weights = [tf.where(largest > 0.0, w / largest, 1.0) for w in weights]
        return [
            tf.pow(c, 2 / 3) * tf.pow(tf.maximum(w, _SMALLEST_WEIGHT), -1 / 3)
            for c, w in zip(self._bounds, weights, strict=True)
        ]


def _without_tiny(values):
    values = tf.cast(values, tf.float32)
    return tf.where(values < SMALLEST_SCALE, 0.0, values)
