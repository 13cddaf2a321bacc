"""Defines clipping sets, and the code that all of them share.

Each example contributes one vector v of a set K that is fixed before the step's data is looked at,
and Σ v + N(0, diag(s²)) is released. Under add-or-remove neighbours a step costs at most one
Gaussian mechanism of multiplier σ* if

    sup over v in K of Σ_i v_i² / s_i² ≤ 1/σ*²                                                  (R)

(Lemma 1 of ADADP, Xu et al. 2019, for any K). Every set of this package meets (R) with equality, up
to a float32 margin on the safe side; replace-one neighbours double the sensitivity, so they cost
σ*/2.

**Float32.** Each vector is clipped by an upper bound of its norm (see `row_gradients`): for
materialised gradients of 10⁶ coordinates a vector may end 5·10⁻⁶ short of the bound, and ‖v/s‖₂
never passes 1/σ*. There remains the rounding of the float32 sum over examples, which no choice of
K covers.
"""

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_adadp.clipping.row_gradients import ROUNDOFF, AxisScales, RowGradients, as_rows
from tf_adadp.utils.checks import check_number

Gradients = Sequence[tf.Tensor | RowGradients]

# Squares of entries below 1e-19 are lost to underflow; above this bound they cannot matter.
SMALLEST_BOUND, LARGEST_BOUND = 1e-10, 1e10


class ClippedSums(list):
    """Holds the tensors of a clipped sum, the set that they were clipped to, and their lot.

    The noise must fit that set, even if an adaptive optimizer makes releases in between; and a lot
    allows as many releases as it was charged for. A copy of the list, or what a `tf.function`
    returns of it, has neither.

    Args:
        sums: float32 tensors, one per trainable variable.
        clipping_set: the `ClippingSet` that every example was clipped to.
        lot: `((x, y, sample_weight), mask)`, the lot that was summed; None where it is not known.
            Then the caller must release from each lot only once.

    Example:
        >>> sums = dp.ClippedSums([tf.constant([3.0, 4.0])], dp.clipping.L2Ball(5.0))
        >>> sums[0].numpy().tolist()
        [3.0, 4.0]
    """

    def __init__(
        self,
        sums: Iterable[tf.Tensor] = (),
        clipping_set: "ClippingSet | None" = None,
        lot: Any = None,
    ):
        super().__init__(sums)
        self.clipping_set = clipping_set
        self.lot = lot
        self._made = None if clipping_set is None else tuple(self)

    @property
    def intact(self) -> bool:
        """Tells whether the tensors are those that were clipped."""
        made = self._made
        return made is None or (
            len(made) == len(self) and all(a is b for a, b in zip(made, self, strict=True))
        )


class ClippingSet(abc.ABC):
    """A set K of vectors, one block per trainable variable, fixed before the step's data.

    A subclass defines `clip` and `noise_stddev`. It may override `clipped_sum` with a faster way to
    the same sum, and `center`.

    Its tensors come from public constants and past releases only. A set is immutable, and is made
    anew for each step inside the graph that uses it. The methods work eagerly, in `tf.function`, in
    `tf.while_loop` and under `jit_compile=True`, with a static or a dynamic number of rows, and do
    the same work for all gradients.

    Formal guarantee: for any gradients, adding or removing one row changes `clipped_sum` by a
    vector u with ‖u/s‖₂ ≤ 1/σ*, s = `noise_stddev(σ*, …)`.
    """

    @property
    def center(self) -> list[tf.Tensor] | None:
        """Returns the centre of K, a list of one tensor a per variable, or None for 0.

        With a centre, rows contribute clip(g − a), absent rows 0, and the releasing code adds
        (expected lot size)·a back after the noise.
        """
        return None

    @abc.abstractmethod
    def clip(self, grads: Gradients) -> list[tf.Tensor]:
        """Clips each row into K.

        Args:
            grads: list of tensors [B, *shape_v] of any float dtype, or of `RowGradients`, one per
                variable; B may be 0.

        Returns:
            list of float32 tensors [B, *shape_v].
        """

    @abc.abstractmethod
    def noise_stddev(
        self, noise_multiplier: float | tf.Tensor, num_variables: int
    ) -> list[tf.Tensor]:
        """Returns the noise's standard deviation s, which meets (R).

        Args:
            noise_multiplier: σ* ≥ 0, a float or scalar tensor.
            num_variables: the length of `grads`.

        Returns:
            list of `num_variables` float32 tensors, scalars or of shapes that broadcast to shape_v.

        Raises:
            ValueError: the set was made for another number of variables.
        """

    def clipped_sum(self, grads: Gradients, mask: tf.Tensor) -> ClippedSums:
        """Sums the clipped rows.

        This default forms every row. The sets of this package override it: a norm and a weighted
        sum often follow from the factors of a gradient.

        Args:
            grads: list of tensors [B, *shape_v] of any float dtype, or of `RowGradients`, one per
                variable; B may be 0.
            mask: float32 [B], multiplies each CLIPPED row: 1 for a real row, 0 for padding. Values
                outside [0, 1], NaN included, are pulled in: a larger one would raise the
                sensitivity.

        Returns:
            `ClippedSums` of this set: float32 tensors [*shape_v], Σ_x mask_x · clip(g_x). A row
            with a non-finite entry in any variable contributes exactly 0, and so does one whose
            norm, of g or for an ellipsoid of (g − a)/b, overflows float32 (its square does, above
            1.8·10¹⁹).
        """
        rows = [as_rows(as_rows(g).materialize()) for g in grads]
        clipped = [as_rows(v) for v in self.clip([r.materialize() for r in rows])]
        squares, sums = zip(*(v.measure() for v in clipped), strict=True)
        finite = tf.math.is_finite(tf.add_n([*squares, *(r.measure()[0] for r in rows)]))
        weights = tf.where(finite, cleaned_mask(mask), 0.0)
        return ClippedSums([weighted_sum(weights) for weighted_sum in sums], self)

    def sums_beside(self, grads: Gradients, mask: tf.Tensor, losses: tf.Tensor) -> ClippedSums:
        """Returns `clipped_sum`, and the set's statistics of the rows' losses.

        The engines call this one.

        Args:
            grads, mask: see `clipped_sum`.
            losses: float [B], the loss of each row, of which the row is the gradient.
        """
        del losses
        return self.clipped_sum(grads, mask)

    def zero_sums(self, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
        """Returns `clipped_sum` of no rows, for variables of these shapes."""
        return [tf.zeros(shape) for shape in shapes]


class ScaledRows(ClippingSet):
    """A set that clips by a divisor: row ↦ (row − a) / divisor, the divisor from the row's norms.

    **Automatic clipping** (AUTO-S, Bu et al. 2022, "Automatic clipping"): with `gamma`, every row
    is divided by its norm plus γ, instead of scaling down only the rows outside of K. Small
    gradients are scaled up, and the clip norm becomes a factor of the rate. K and s are the same.
    """

    @abc.abstractmethod
    def _divisors(self, squares: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns one divisor [B] per variable, from upper bounds [B] of its squared norms."""

    def _axis_scales(self, num_variables: int) -> Sequence[AxisScales | None]:
        """Returns the metric of the norms per variable, an `AxisScales` or None."""
        return [None] * num_variables

    def clip(self, grads: Gradients) -> list[tf.Tensor]:
        """See `ClippingSet.clip`: the terms of `clipped_sum`, for tests and inspection."""
        grads = [as_rows(g).materialize() for g in grads]
        weights, _ = self.weights_and_sums(grads, 1.0)
        clipped = []
        for g, weight, axis_scales in zip(
            grads, weights, self._axis_scales(len(grads)), strict=True
        ):
            rows = tf.cast(g, tf.float32)
            weight = tf.reshape(weight, [-1] + [1] * (rows.shape.rank - 1))
            if axis_scales is not None:
                if axis_scales.center is not None:
                    rows -= axis_scales.center
                rows = rows * axis_scales.inverse * axis_scales.scale
            clipped.append(tf.where(weight > 0.0, rows, 0.0) * weight)
        return clipped

    def clipped_sum(self, grads: Gradients, mask: tf.Tensor) -> ClippedSums:
        """See `ClippingSet.clipped_sum`; no row is formed that its form can do without."""
        weights, sums = self.weights_and_sums(grads, cleaned_mask(mask))
        return ClippedSums((f(w) for w, f in zip(weights, sums, strict=True)), self)

    def weights_and_sums(
        self, grads: Gradients, mask: tf.Tensor | float
    ) -> tuple[list[tf.Tensor], list[Callable[[tf.Tensor], tf.Tensor]]]:
        """Returns mask/divisor (0 for a row that is not finite), and functions of weighted sums."""
        scales = self._axis_scales(len(grads))
        measured = [as_rows(g).measure(s) for g, s in zip(grads, scales, strict=True)]
        squares = [square for square, _ in measured]
        ok = tf.math.is_finite(tf.add_n(squares))
        # The quotient comes last: XLA stores results of divisions, and would compute a cheaper
        # operation again for every entry of every row.
        weights = [
            tf.where(ok, mask, 0.0) / tf.where(ok, divisor, 1.0)
            for divisor in self._divisors(squares)
        ]
        return weights, [weighted_sum for _, weighted_sum in measured]


def check_bound(name: str, value: float) -> float:
    """Returns a norm bound as a float, or raises ValueError."""
    return check_number(
        name,
        value,
        f"a number in [{SMALLEST_BOUND:g}, {LARGEST_BOUND:g}] (float32 cannot square norms beyond)",
        at_least=SMALLEST_BOUND,
        at_most=LARGEST_BOUND,
    )


def check_gamma(value: float | None) -> float | None:
    """Returns the γ of automatic clipping as a float or None, or raises ValueError."""
    return None if value is None else check_bound("gamma", value)


def check_length(name: str, values: Sequence, num_variables: int) -> None:
    """Raises ValueError where an argument is for another number of variables."""
    if len(values) != num_variables:
        raise ValueError(f"{name} is for {len(values)} variables: got {num_variables}.")


def cleaned_mask(mask: tf.Tensor) -> tf.Tensor:
    """Pulls a mask into [0, 1]; NaN becomes 0. A larger value would raise the sensitivity."""
    mask = tf.cast(mask, tf.float32)
    return tf.where(mask > 0.0, tf.minimum(mask, 1.0), 0.0)


def upper_norm(squares: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns an upper bound of a norm over several variables, from those of their squares."""
    # The 8 are the roundings of the root, bound, quotient and product that follow.
    return tf.sqrt(tf.add_n(squares)) * (1.0 + (len(squares) / 2 + 8) * ROUNDOFF)


def divisor(norm: tf.Tensor, bound: float, gamma: float | None) -> tf.Tensor:
    """Returns the divisor that shortens rows of these norms to `bound`."""
    return tf.maximum(norm / bound, 1.0) if gamma is None else (norm + gamma) / bound


def stddev(noise_multiplier: float | tf.Tensor, scale: float | tf.Tensor) -> tf.Tensor:
    """Returns σ*·scale, float32."""
    if noise_multiplier is None:
        raise ValueError("noise_multiplier=None: give a number of at least 0.")
    product = tf.cast(noise_multiplier, tf.float32) * scale
    # Keeps TensorFlow from multiplying in another order with the noise: on several devices it chose
    # one for each, and their weights differed in the last bits.
    return tf.ensure_shape(product, product.shape)
