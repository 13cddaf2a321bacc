"""The sets K that one example's contribution is clipped into, and the noise that fits them.

Each example contributes one vector v of a set K that is fixed before the step's data is looked at,
and Σ v + N(0, diag(s²)) is released. Under add-or-remove neighbours a step costs at most one
Gaussian mechanism of multiplier σ* if

    sup over v in K of Σ_i v_i² / s_i² ≤ 1/σ*²                                                  (R)

(Lemma 1 of ADADP, Xu et al. 2019, for any K). Every set below meets (R) with equality, up to a
float32 margin on the safe side; replace-one neighbours double the sensitivity, so they cost σ*/2.

| set | K | s |
|---|---|---|
| `L2Ball` | ‖v‖₂ ≤ C | σ*·C |
| `LayerBalls` | ‖v_l‖₂ ≤ C_l | σ*·√(Σ C_k²), or σ*·√groups·C_l |
| `Box` | abs(v_i) ≤ c_i | three choices, see there |
| `Ellipsoid` | ‖v/b‖₂ ≤ 1 | σ*·b |
| `Normalized` | ‖v‖₂ < 1 | σ* |
| `Switch` | one of two sets | that set's |

**Float32.** Each vector is clipped by an upper bound of its norm (see `row_gradients`): for
materialised gradients of 10⁶ coordinates a vector may end 5·10⁻⁶ short of the bound, and ‖v/s‖₂
never passes 1/σ*. What is left is the rounding of the float32 sum over examples, which no choice of
K covers.

**Automatic clipping** (AUTO-S, Bu et al. 2022, "Automatic clipping"): with `gamma`, the balls and
the ellipsoid divide every row by its norm plus γ, in place of scaling down those outside K alone.
Small gradients are scaled up, and the clip norm becomes a factor of the rate. K and s are the same.
"""

import abc
import math
import numbers

import tensorflow as tf

from tf_adadp.clipping.row_gradients import (
    ROUNDOFF,
    SMALLEST_SCALE,
    AxisScales,
    as_rows,
    sum_of_squares,
)

# Squares of entries below 1e-19 are lost to underflow; above this bound they cannot matter.
_SMALLEST_BOUND, _LARGEST_BOUND = 1e-10, 1e10
# A smaller share of the largest weight is raised to this: its noise would be without bound.
_SMALLEST_WEIGHT = 1e-6


class ClippedSums(list):
    """The tensors of a clipped sum, with the set that they were clipped to and their lot.

    The noise has to fit that set, whatever an adaptive optimizer releases in between; and a lot
    allows as many releases as it was charged for. A copy of the list, or what a `tf.function`
    returns of it, has neither.

    Args:
        sums: float32 tensors, one per trainable variable.
        clipping_set: the `ClippingSet` that every example was clipped to.
        lot: `((x, y, sample_weight), mask)` that they are the sum over; None where that is not
            known, and on you.
    """

    def __init__(self, sums=(), clipping_set=None, lot=None):
        super().__init__(sums)
        self.clipping_set = clipping_set
        self.lot = lot
        self._made = None if clipping_set is None else tuple(self)

    @property
    def intact(self):
        """Whether the tensors are those that were clipped."""
        made = self._made
        return made is None or (
            len(made) == len(self) and all(a is b for a, b in zip(made, self, strict=True))
        )


class ClippingSet(abc.ABC):
    """A set K of vectors, one block per trainable variable, fixed before the step's data.

    Its tensors come from public constants and past releases only; a set is immutable, and is made
    anew for each step inside the graph that uses it. The methods work eagerly, in `tf.function`, in
    `tf.while_loop` and under `jit_compile=True`, with a static or a dynamic number of rows, and do
    the same work whatever the gradients are.

    Formal guarantee: for any gradients, adding or removing one row changes `clipped_sum` by a
    vector u with ‖u/s‖₂ ≤ 1/σ*, s = `noise_stddev(σ*, …)`.
    """

    @property
    def center(self):
        """None, or the list of tensors a (one per variable) that K is centred at.

        With a centre, rows contribute clip(g − a), absent rows 0, and whoever releases the sum adds
        (expected lot size)·a back after the noise.
        """
        return None

    @abc.abstractmethod
    def clip(self, grads):
        """Clips each row into K.

        Args:
            grads: list of tensors [B, *shape_v] of any float dtype, or of `RowGradients`, one per
                variable.

        Returns:
            list of float32 tensors [B, *shape_v]. The terms of `clipped_sum`: a readable form for
            tests and inspection that holds all rows in memory.
        """

    @abc.abstractmethod
    def clipped_sum(self, grads, mask):
        """Sums the clipped rows.

        Args:
            grads: list of tensors [B, *shape_v] of any float dtype, or of `RowGradients`, one per
                variable; B may be 0.
            mask: float32 [B], multiplies each CLIPPED row: 1 for a real row, 0 for padding. Values
                outside [0, 1], NaN included, are pulled in: a larger one would be a sensitivity.

        Returns:
            `ClippedSums` of this set: float32 tensors [*shape_v], Σ_x mask_x · clip(g_x). A row
            with a non-finite entry in any variable contributes exactly 0, and so does one whose
            norm, of g or for an ellipsoid of (g − a)/b, overflows float32 (its square does, above
            1.8·10¹⁹).
        """

    @abc.abstractmethod
    def noise_stddev(self, noise_multiplier, num_variables):
        """The noise s that meets (R).

        Args:
            noise_multiplier: σ* ≥ 0, a float or scalar tensor.
            num_variables: the length of `grads`.

        Returns:
            list of `num_variables` float32 tensors, scalars or of shapes that broadcast to shape_v.

        Raises:
            ValueError: where the set was made for another number of variables.
        """


class _ScaledRows(ClippingSet):
    """A set whose clip is: row ↦ (row − a) / divisor, the divisor from the row's norms."""

    @abc.abstractmethod
    def _divisors(self, squares):
        """Of per-variable squared norms [B] (upper bounds), one divisor [B] per variable."""

    def _axis_scales(self, num_variables):
        """Per variable the metric of the norms, an `AxisScales` or None."""
        return [None] * num_variables

    def clip(self, grads):
        grads = [as_rows(g).materialize() for g in grads]
        weights, _ = self._weights_and_sums(grads, 1.0)
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

    def clipped_sum(self, grads, mask):
        weights, sums = self._weights_and_sums(grads, _clean(mask))
        return ClippedSums((f(w) for w, f in zip(weights, sums, strict=True)), self)

    def _weights_and_sums(self, grads, mask):
        """mask/divisor (0 for a row that is not finite), and functions that sum weighted rows."""
        scales = self._axis_scales(len(grads))
        measured = [as_rows(g).measure(s) for g, s in zip(grads, scales, strict=True)]
        squares = [square for square, _ in measured]
        ok = tf.math.is_finite(tf.add_n(squares))
        # The quotient comes last: XLA stores the results of divisions, and would work out anything
        # cheaper again for every entry of every row.
        weights = [
            tf.where(ok, mask, 0.0) / tf.where(ok, divisor, 1.0)
            for divisor in self._divisors(squares)
        ]
        return weights, [weighted_sum for _, weighted_sum in measured]


class L2Ball(_ScaledRows):
    """‖v‖₂ ≤ C over all variables: v = g·min(1, C/‖g‖₂), s = σ*·C.

    DP-SGD (Abadi et al. 2016, Algorithm 1). For a radius that is a tensor, use
    `Ellipsoid([radius] * num_variables)`.

    Args:
        l2_norm_clip: C, a number in [1e-10, 1e10].
        gamma: None, or γ in [1e-10, 1e10] for v = C·g/(‖g‖₂ + γ).
    """

    def __init__(self, l2_norm_clip, gamma=None):
        self._l2_norm_clip = _bound("l2_norm_clip", l2_norm_clip)
        self._gamma = _gamma(gamma)

    def _divisors(self, squares):
        return [_divisor(_upper_norm(squares), self._l2_norm_clip, self._gamma)] * len(squares)

    def noise_stddev(self, noise_multiplier, num_variables):
        """σ*·C for each variable."""
        return [_times(noise_multiplier, self._l2_norm_clip)] * num_variables


class LayerBalls(_ScaledRows):
    """‖v_l‖₂ ≤ C_l for each group l of variables, each clipped by its own norm.

    The noise is s = σ*·√(Σ_k C_k²) everywhere (`allocation="global"`, the L2 sensitivity of the
    whole vector), or s_l = σ*·√(number of groups)·C_l (`"proportional"`: the same ratio of noise to
    bound in each group).

    Args:
        bounds: one number C_l in [1e-10, 1e10] per group.
        groups: per variable, the index of its group in `bounds`. None: each variable is a group.
        allocation: "global" or "proportional".
        gamma: None, or γ in [1e-10, 1e10] for v_l = C_l·g_l/(‖g_l‖₂ + γ).
    """

    def __init__(self, bounds, groups=None, allocation="global", gamma=None):
        self._bounds = tuple(_bound(f"bounds[{i}]", b) for i, b in enumerate(bounds))
        self._groups = tuple(range(len(self._bounds)) if groups is None else groups)
        if set(self._groups) != set(range(len(self._bounds))):
            raise ValueError(
                f"groups={list(self._groups)} for {len(self._bounds)} bounds: give each variable "
                f"the index (0 to {len(self._bounds) - 1}) of its group, and leave no group empty."
            )
        if allocation not in ("global", "proportional"):
            raise ValueError(f"allocation={allocation!r}: give 'global' or 'proportional'.")
        self._allocation = allocation
        self._gamma = _gamma(gamma)

    def _divisors(self, squares):
        _check_length("groups", self._groups, len(squares))
        divisors = []
        for group, bound in enumerate(self._bounds):
            members = [s for s, of in zip(squares, self._groups, strict=True) if of == group]
            divisors.append(_divisor(_upper_norm(members), bound, self._gamma))
        return [divisors[group] for group in self._groups]

    def noise_stddev(self, noise_multiplier, num_variables):
        """One scalar per variable, see `allocation`."""
        _check_length("groups", self._groups, num_variables)
        if self._allocation == "global":
            return [_times(noise_multiplier, math.hypot(*self._bounds))] * num_variables
        root = math.sqrt(len(self._bounds))
        return [_times(noise_multiplier, root * self._bounds[group]) for group in self._groups]


class Box(ClippingSet):
    """abs(v_i) ≤ c_i for each coordinate: v_i = max(−c_i, min(c_i, g_i)).

    The noise is s_i = σ*·t_i·√(Σ_j (c_j/t_j)²) for a shape t of choice, sums over the m coordinates
    with c > 0; so (R) holds with equality (at a corner of the box) whatever the shape:

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

    def __init__(self, bounds, allocation="adadp"):
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

    def clip(self, grads):
        """The rows clipped coordinate by coordinate."""
        rows, ok = self._checked(grads)
        clipped = []
        for r, c in zip(rows, self._bounds, strict=True):
            g = r.materialize()
            keep = tf.reshape(ok, [-1] + [1] * (g.shape.rank - 1))
            clipped.append(tf.where(keep, tf.clip_by_value(g, -c, c), 0.0))
        return clipped

    def clipped_sum(self, grads, mask):
        """The sum of the rows clipped coordinate by coordinate."""
        rows, ok = self._checked(grads)
        weights = tf.where(ok, _clean(mask), 0.0)
        sums = (r.clipped_sum(c, weights) for r, c in zip(rows, self._bounds, strict=True))
        return ClippedSums(sums, self)

    def _checked(self, grads):
        """The rows, and which of them are finite in all variables."""
        _check_length("bounds", self._bounds, len(grads))
        rows = [as_rows(g) for g in grads]
        for c, r in zip(self._bounds, rows, strict=True):
            if tuple(c.shape) != r.shape:
                # A bound that stood for several coordinates would be counted once in the noise.
                raise ValueError(
                    f"bounds of shape {tuple(c.shape)} for a variable of shape {r.shape}: give one "
                    "bound per coordinate."
                )
        return rows, tf.math.is_finite(tf.add_n([r.measure()[0] for r in rows]))

    def noise_stddev(self, noise_multiplier, num_variables):
        """One tensor of the variable's shape each, see `allocation`."""
        _check_length("bounds", self._bounds, num_variables)
        shape = self._noise_shape()
        ratios = [
            tf.math.divide_no_nan(c, t)[None] for c, t in zip(self._bounds, shape, strict=True)
        ]
        norm = _upper_norm([sum_of_squares(r)[0] for r in ratios])
        return [_times(noise_multiplier, norm) * t for t in shape]

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


class Ellipsoid(_ScaledRows):
    """‖v/b‖₂ ≤ 1 with v = b∘w·min(1, 1/‖w‖₂), w = (g − a)/b, and s = σ*·b.

    AdaCliP (Pichapati et al. 2019, Algorithm 1); ADADP's set with a = 0. w is formed for each row
    and coordinate before its norm, so nothing cancels however large a/b is, and the guarantee does
    not depend on the rounding of w. A coordinate with b_i = 0 (or below 2⁻¹⁰⁰) gets v_i = s_i = 0.

    Args:
        scales: b ≥ 0, per variable a tensor that broadcasts to the variable's shape.
        center: a, per variable a tensor that broadcasts likewise, or None for 0.
        gamma: None, or γ in [1e-10, 1e10] for v = b∘w/(‖w‖₂ + γ): relative to the ellipsoid.
    """

    def __init__(self, scales, center=None, gamma=None):
        center = [None] * len(scales) if center is None else center
        _check_length("center", center, len(scales))
        self._blocks = tuple(AxisScales(b, a) for b, a in zip(scales, center, strict=True))
        self._gamma = _gamma(gamma)

    @property
    def center(self):
        """The tensors a, or None."""
        centers = [block.center for block in self._blocks]
        return None if any(a is None for a in centers) else centers

    def _axis_scales(self, num_variables):
        _check_length("scales", self._blocks, num_variables)
        return self._blocks

    def _divisors(self, squares):
        return [_divisor(_upper_norm(squares), 1.0, self._gamma)] * len(squares)

    def noise_stddev(self, noise_multiplier, num_variables):
        """σ*·b, of the shapes of `scales`."""
        _check_length("scales", self._blocks, num_variables)
        return [_times(noise_multiplier, block.scale) for block in self._blocks]


class Normalized(L2Ball):
    """v = g/(‖g‖₂ + γ), so ‖v‖₂ < 1, and s = σ*: there is no clip norm to tune.

    AUTO-S (Bu et al. 2022, "Automatic clipping", eq. 4.1). The bound 1 is approached, not reached.

    Args:
        gamma: γ, a number in [1e-10, 1e10].
    """

    def __init__(self, gamma=0.01):
        super().__init__(1.0, _bound("gamma", gamma))


class Switch(ClippingSet):
    """`if_true` where `predicate` holds, else `if_false`; a warm-up, for instance.

    Args:
        predicate: scalar boolean, a function of RELEASED state and public constants only: which
            set was used can be read off the noise.
        if_true: a ClippingSet.
        if_false: a ClippingSet for the same variables. Only the chosen one clips.
    """

    def __init__(self, predicate, if_true, if_false):
        self._predicate = tf.convert_to_tensor(predicate, tf.bool)
        self._if_true = if_true
        self._if_false = if_false

    @property
    def center(self):
        """That of the chosen set; 0 where it has none and the other has one."""
        first, second = self._if_true.center, self._if_false.center
        if first is None and second is None:
            return None
        first = first or [tf.zeros_like(a) for a in second]
        second = second or [tf.zeros_like(a) for a in first]
        return self._choose(first, second)

    def clip(self, grads):
        """The rows clipped into the chosen set."""
        return tf.cond(
            self._predicate, lambda: self._if_true.clip(grads), lambda: self._if_false.clip(grads)
        )

    def clipped_sum(self, grads, mask):
        """The sum of the rows clipped into the chosen set."""
        sums = tf.cond(
            self._predicate,
            lambda: list(self._if_true.clipped_sum(grads, mask)),
            lambda: list(self._if_false.clipped_sum(grads, mask)),
        )
        return ClippedSums(sums, self)

    def noise_stddev(self, noise_multiplier, num_variables):
        """That of the chosen set."""
        return self._choose(
            self._if_true.noise_stddev(noise_multiplier, num_variables),
            self._if_false.noise_stddev(noise_multiplier, num_variables),
        )

    def _choose(self, first, second):
        return [tf.where(self._predicate, a, b) for a, b in zip(first, second, strict=True)]


def bounds_for(variable_paths, l2_norm_clip):
    """Turns the argument `l2_norm_clip` of an optimizer into the bounds of a set.

    Args:
        variable_paths: paths of the trainable variables, such as "sequential/dense/kernel".
        l2_norm_clip: a number, or a dict {prefix: number}. A variable belongs to the longest prefix
            that its path starts with ("" starts them all; end a prefix with "/" to tell "dense_1/"
            from "dense_10/"), and the variables of one prefix form one group with one norm.

    Returns:
        a float (for `L2Ball`), or `(bounds, groups)`, the arguments of `LayerBalls`: a bound per
        prefix and the index of its prefix per variable.

    Raises:
        ValueError: a bound is not a number in [1e-10, 1e10], a variable starts with no prefix, or
            no variable is left to a prefix.
    """
    if not isinstance(l2_norm_clip, dict):
        return _bound("l2_norm_clip", l2_norm_clip)
    prefixes = list(l2_norm_clip)
    bounds = [_bound(f"l2_norm_clip[{prefix!r}]", l2_norm_clip[prefix]) for prefix in prefixes]
    groups = []
    for path in variable_paths:
        matching = [prefix for prefix in prefixes if path.startswith(prefix)]
        if not matching:
            raise ValueError(
                f"l2_norm_clip has no bound for the variable {path!r}: its prefixes are {prefixes}."
                " Add one that this path starts with, or '' for all that is left."
            )
        groups.append(prefixes.index(max(matching, key=len)))
    unused = [prefix for i, prefix in enumerate(prefixes) if i not in groups]
    if unused:
        raise ValueError(
            f"l2_norm_clip has the prefixes {unused}, to which no variable is left: the paths are "
            f"{list(variable_paths)}. Remove or correct them."
        )
    return bounds, groups


def _bound(name, value):
    """`value` as a float that is fit to be a norm bound."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not _SMALLEST_BOUND <= value <= _LARGEST_BOUND:
        raise ValueError(
            f"{name}={value!r}: give a number in [{_SMALLEST_BOUND:g}, {_LARGEST_BOUND:g}] "
            "(beyond, float32 cannot square what it bounds)."
        )
    return float(value)


def _gamma(value):
    return None if value is None else _bound("gamma", value)


def _divisor(norm, bound, gamma):
    """What a row of this norm is divided by: ends at most at norm `bound`."""
    return tf.maximum(norm / bound, 1.0) if gamma is None else (norm + gamma) / bound


def _check_length(name, values, num_variables):
    if len(values) != num_variables:
        raise ValueError(f"{name} is for {len(values)} variables: got {num_variables}.")


def _without_tiny(values):
    values = tf.cast(values, tf.float32)
    return tf.where(values < SMALLEST_SCALE, 0.0, values)


def _times(noise_multiplier, scale):
    if noise_multiplier is None:
        raise ValueError("noise_multiplier=None: give a number of at least 0.")
    return tf.cast(noise_multiplier, tf.float32) * scale


def _clean(mask):
    """The mask with everything outside [0, 1] pulled in: a larger one would be a sensitivity."""
    mask = tf.cast(mask, tf.float32)
    return tf.where(mask > 0.0, tf.minimum(mask, 1.0), 0.0)


def _upper_norm(squares):
    """An upper bound of the norm over several variables, from upper bounds of their squares."""
    # The 8 are the roundings of the root, bound, quotient and product that follow.
    return tf.sqrt(tf.add_n(squares)) * (1.0 + (len(squares) / 2 + 8) * ROUNDOFF)
