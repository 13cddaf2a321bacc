"""Balls: one L2 norm over all variables, or one per group of variables."""

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_adadp.clipping.base import (
    LARGEST_BOUND,
    SMALLEST_BOUND,
    ScaledRows,
    check_bound,
    check_gamma,
    check_length,
    divisor,
    stddev,
    upper_norm,
)


class L2Ball(ScaledRows):
    """‖v‖₂ ≤ C over all variables: v = g·min(1, C/‖g‖₂), s = σ*·C.

    DP-SGD (Abadi et al. 2016, Algorithm 1).

    Args:
        l2_norm_clip: C, a number in [1e-10, 1e10]; or a scalar tensor, a function of released state
            and public constants only, which is pulled into that range.
        gamma: None, or γ in [1e-10, 1e10] for v = C·g/(‖g‖₂ + γ) (AUTO-S, see `ScaledRows`).
    """

    def __init__(self, l2_norm_clip: float | tf.Tensor, gamma: float | None = None):
        if tf.is_tensor(l2_norm_clip):
            # As it is now: a variable may change before the noise is drawn. And a radius below 0
            # would clip nothing.
            radius = tf.cast(tf.convert_to_tensor(l2_norm_clip), tf.float32)
            self._l2_norm_clip = tf.clip_by_value(radius, SMALLEST_BOUND, LARGEST_BOUND)
        else:
            self._l2_norm_clip = check_bound("l2_norm_clip", l2_norm_clip)
        self.gamma = check_gamma(gamma)

    def _divisors(self, squares):
        return [divisor(upper_norm(squares), self._l2_norm_clip, self.gamma)] * len(squares)

    def noise_stddev(
        self, noise_multiplier: float | tf.Tensor, num_variables: int
    ) -> list[tf.Tensor]:
        """Returns σ*·C for each variable."""
        return [stddev(noise_multiplier, self._l2_norm_clip)] * num_variables


class LayerBalls(ScaledRows):
    """‖v_l‖₂ ≤ C_l for each group l of variables, each clipped by its own norm.

    The noise is s = σ*·√(Σ_k C_k²) everywhere: the L2 sensitivity of the whole vector.

    Args:
        bounds: one number C_l in [1e-10, 1e10] per group; no tensors. For bounds that follow from
            releases take an `Ellipsoid`.
        groups: per variable, the index of its group in `bounds`. None: each variable is a group.
        gamma: None, or γ in [1e-10, 1e10] for v_l = C_l·g_l/(‖g_l‖₂ + γ).
    """

    def __init__(
        self,
        bounds: Sequence[float],
        groups: Sequence[int] | None = None,
        gamma: float | None = None,
    ):
        if any(tf.is_tensor(bound) for bound in bounds):
            raise ValueError(
                f"bounds={bounds!r}: LayerBalls take numbers. For bounds that follow from releases "
                "take clipping.Ellipsoid(bounds), whose noise follows them by layer."
            )
        self._bounds = tuple(check_bound(f"bounds[{i}]", b) for i, b in enumerate(bounds))
        self._groups = tuple(range(len(self._bounds)) if groups is None else groups)
        if set(self._groups) != set(range(len(self._bounds))):
            raise ValueError(
                f"groups={list(self._groups)} for {len(self._bounds)} bounds: give each variable "
                f"the index (0 to {len(self._bounds) - 1}) of its group, and leave no group empty."
            )
        self.gamma = check_gamma(gamma)

    def _divisors(self, squares):
        check_length("groups", self._groups, len(squares))
        divisors = []
        for group, bound in enumerate(self._bounds):
            members = [s for s, of in zip(squares, self._groups, strict=True) if of == group]
            divisors.append(divisor(upper_norm(members), bound, self.gamma))
        return [divisors[group] for group in self._groups]

    def noise_stddev(
        self, noise_multiplier: float | tf.Tensor, num_variables: int
    ) -> list[tf.Tensor]:
        """Returns σ*·√(Σ_k C_k²) for each variable."""
        check_length("groups", self._groups, num_variables)
        return [stddev(noise_multiplier, math.hypot(*self._bounds))] * num_variables


def bounds_for(
    variable_paths: Sequence[str], l2_norm_clip: float | dict[str, float]
) -> float | tuple[list[float], list[int]]:
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
        return check_bound("l2_norm_clip", l2_norm_clip)
    prefixes = list(l2_norm_clip)
    bounds = [check_bound(f"l2_norm_clip[{prefix!r}]", l2_norm_clip[prefix]) for prefix in prefixes]
    groups = []
    for path in variable_paths:
        matching = [prefix for prefix in prefixes if path.startswith(prefix)]
        if not matching:
            raise ValueError(
                f"l2_norm_clip has no bound for the variable {path!r}: its prefixes are {prefixes}."
                " Add one that this path starts with, or '' for all other variables."
            )
        groups.append(prefixes.index(max(matching, key=len)))
    unused = [prefix for i, prefix in enumerate(prefixes) if i not in groups]
    if unused:
        raise ValueError(
            f"l2_norm_clip has the prefixes {unused}, to which no variable is left: the paths are "
            f"{list(variable_paths)}. Remove or correct them."
        )
    return bounds, groups
