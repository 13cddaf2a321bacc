"""Second moments of noisy vectors: debiased, pooled over groups, shrunk."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_adadp.clipping.row_gradients import product
from tf_adadp.optimizers.priors.base import floored
from tf_adadp.utils.flat_groups import FlatGroups

_LARGEST_POWER = 1e18  # the product of those of rows and columns stays finite

POOLINGS = ("coordinate", "row", "column", "both", "layer")


class PooledMoments:
    """The second moments of a vector known with noise, one per group of coordinates.

    For a released vector g̃ with known noise std τ, per group of n coordinates:

        u ← d·u + (1 − d)·mean over the group of (g̃² − τ²)          unbiased for its mean g²
        V ← d²·V + (1 − d)²·mean over the group of Var(g̃²) / n      its known estimation variance

    with bias correction, and Var(g̃²) = 2τ⁴ + 4g²τ².

    Groups, for a variable with axes (…, o): "row" pools over the last axis (all weights that leave
    one input), "column" over all others (all weights into one unit), "layer" over all,
    "coordinate" over none; "both" keeps rows and columns, each relative to its mean, and takes
    the product: a matrix of rank one. A vector (a bias) is one group but for "coordinate".

    Of the last matrix "both" keeps rows alone. Its columns are the model's outputs, whose units the
    loss fixes: where one has large gradients, it is not learned yet, and small steps would keep it
    so. Hidden units have scales that mean nothing.

    Shrinkage: differences between the groups of a variable are shrunk towards the variable's mean
    by the share of their variance that V does not explain (as in James and Stein), then the
    variables' means towards the overall mean in the same way. Where the releases cannot tell groups
    apart, they come out equal.
    """

    def __init__(self, pooling: str, shrinkage: bool):
        self._pooling = pooling
        self._shrinkage = shrinkage

    def build(self, add_variable: Callable, shapes: Sequence[tuple[int, ...]]) -> None:
        """Creates u and V of every group, and the weight of the bias correction."""
        self._sizes = [math.prod(shape) for shape in shapes]
        matrices = [i for i, shape in enumerate(shapes) if len(shape) > 1]
        poolings = [self._pooling] * len(shapes)
        if self._pooling == "both" and matrices:
            poolings[matrices[-1]] = "row"  # the outputs: their units are the loss's
        # A side is one grouping of one variable: "both" has two of a matrix.
        self._sides = [
            (i, axes)
            for i, (shape, pooling) in enumerate(zip(shapes, poolings, strict=True))
            for axes in _pooled_axes(shape, pooling)
        ]
        self._first_sides = [
            next(side for side, (of, _) in enumerate(self._sides) if of == i)
            for i in range(len(shapes))
        ]
        self._layout = FlatGroups(
            [1 if a in axes else n for a, n in enumerate(shapes[i])] for i, axes in self._sides
        )
        self._means = [
            (add_variable((n,), f"prior_moment_{j}"), add_variable((n,), f"prior_variance_{j}"))
            for j, n in enumerate(self._layout.lengths())
        ]
        self._weight = add_variable((), "prior_weight")

    def update(
        self, vectors: Sequence[tf.Tensor], stddevs: Sequence[tf.Tensor], decay: float
    ) -> None:
        """Takes in one vector and the std of its noise (lists, per variable)."""
        self._weight.assign(decay * self._weight.value + (1.0 - decay))
        squares = [tf.square(g) for g in vectors]
        noise = [tf.square(std) for std in stddevs]
        counts = [
            self._sizes[i] / max(n, 1)
            for (i, _), n in zip(self._sides, self._layout.sizes, strict=True)
        ]
        for (u, v), square, mean_noise, mean_squared_noise, count in zip(
            self._means,
            self._pooled(squares),
            self._pooled(noise),
            self._pooled([tf.square(n) for n in noise]),
            self._layout.spread(counts),
            strict=True,
        ):
            debiased = square - mean_noise
            spread = 2.0 * mean_squared_noise + 4.0 * tf.maximum(debiased, 0.0) * mean_noise
            u.assign(decay * u.value + (1.0 - decay) * debiased)
            v.assign(decay**2 * v.value + (1.0 - decay) ** 2 * spread / count)

    def _pooled(self, values):
        """Returns the means over all groups of values that broadcast to the variables."""
        means = []
        for (i, axes), shape in zip(self._sides, self._layout.shapes, strict=True):
            mean = values[i] if self._sizes[i] else tf.zeros(shape)
            if mean.shape.rank and any(mean.shape[a] != 1 for a in axes):
                # A vector at once where one axis is left: `pack` wants vectors.
                mean = tf.reduce_mean(mean, axes, keepdims=len(axes) != len(shape) - 1)
            full = mean.shape.num_elements() == math.prod(shape)
            means.append(mean if full else tf.broadcast_to(mean, shape))
        return self._layout.pack(means)

    def estimates(self) -> list[tf.Tensor]:
        """Returns a list of tensors that broadcast to the variables; they may be negative."""
        means, shrunk_means, values = self._shrunk_groups()
        if len(self._sides) == len(self._sizes):
            shifts = self._layout.spread(shrunk_means - means)
            return self._layout.unpack([a + b for a, b in zip(values, shifts, strict=True)])
        factors = self._by_variable(self._relative(means, values))
        return [m * product(of) for m, of in zip(tf.unstack(shrunk_means), factors, strict=True)]

    def shape_factors(self, exponent: float, floor: float) -> list[tuple[tf.Tensor, ...]]:
        """Returns the shape r ∝ moment^exponent as a product of the groupings, floored in each.

        Per variable a tuple of one tensor for each grouping; mean(r²) = 1.
        """
        means, shrunk_means, values = self._shrunk_groups()
        powers = [
            tf.minimum(v ** (2.0 * exponent), _LARGEST_POWER) for v in self._relative(means, values)
        ]
        side_means = self._layout.means(powers)
        relative = [
            tf.math.divide_no_nan(p, m)
            for p, m in zip(powers, self._layout.spread(side_means), strict=True)
        ]
        # Over the largest, so that no power overflows.
        largest = tf.maximum(tf.reduce_max(shrunk_means), 1e-30)
        squares = tf.maximum(shrunk_means / largest, 0.0) ** (2.0 * exponent)
        of_side = [i for i, _ in self._sides]
        squares *= tf.math.unsorted_segment_prod(side_means, of_side, len(self._sizes))
        total = tf.reduce_sum(self._shares() * squares)
        squares = tf.where(total > 0.0, tf.math.divide_no_nan(squares, total), 1.0)
        squares = floored(squares, floor**2)
        first = np.isin(np.arange(len(of_side)), self._first_sides)
        at_first = self._layout.spread(tf.where(first, tf.gather(squares, of_side), 1.0))
        return self._by_variable(
            [
                tf.sqrt(floored(side, floor) * square)
                for side, square in zip(relative, at_first, strict=True)
            ]
        )

    def _relative(self, means, values):
        """Returns the groups' values over the mean of each grouping, flat where it shows none."""
        values = [tf.maximum(v, 0.0) for v in values]
        totals = self._layout.means(values)
        known = (tf.gather(means, [i for i, _ in self._sides]) > 0.0) & (totals > 1e-30)
        scales = self._layout.spread(tf.where(known, tf.math.reciprocal_no_nan(totals), 0.0))
        return [tf.where(s > 0.0, v * s, 1.0) for v, s in zip(values, scales, strict=True)]

    def _by_variable(self, vectors):
        """Returns a tuple of tensors per variable, one for each grouping."""
        sides = [[] for _ in self._sizes]
        for (i, _), side in zip(self._sides, self._layout.unpack(vectors), strict=True):
            sides[i].append(side)
        return [tuple(of) for of in sides]

    def _shrunk_groups(self):
        """Returns the variables' means, the same shrunk, and the groups' values (as kept)."""
        weight = tf.maximum(self._weight.value, 1e-12)
        values = [u.value / weight for u, _ in self._means]
        side_means = self._layout.means(values)
        side_variances = self._layout.means([v.value / weight**2 for _, v in self._means])
        # Rows and columns of one variable have the same mean, but for rounding.
        means = tf.gather(side_means, self._first_sides)
        shrunk_means = self._shrunk_means(means, tf.gather(side_variances, self._first_sides))
        if self._shrinkage:
            side_means = tf.gather(means, [i for i, _ in self._sides])
            values = self._shrunk(values, side_means, side_variances)
        return means, shrunk_means, values

    def _shares(self):
        return np.array(self._sizes, np.float32) / np.float32(sum(self._sizes))

    def _shrunk_means(self, means, variances):
        """Returns the variables' means, shrunk towards the overall mean."""
        if not self._shrinkage:
            return means
        share = self._shares()
        groups = np.array(
            [max(self._layout.sizes[side], 1) for side in self._first_sides], np.float32
        )
        overall = tf.reduce_sum(share * means)
        between = tf.reduce_sum(share * tf.square(means - overall))
        kept = _explained(between, tf.reduce_sum(share * variances / groups))
        return overall + kept * (means - overall)

    def _shrunk(self, values, means, variances):
        """Returns the groups' values, shrunk towards the mean of their variable."""
        centers = self._layout.spread(means)
        apart = [v - center for v, center in zip(values, centers, strict=True)]
        between = self._layout.means([tf.square(a) for a in apart])
        kept = self._layout.spread(_explained(between, variances))
        return [c + k * a for c, k, a in zip(centers, kept, apart, strict=True)]


def _explained(between, error):
    """Returns ρ, the share of a spread that is not estimation error; 0 for no spread."""
    rho = tf.maximum(1.0 - tf.math.divide_no_nan(error, between), 0.0)
    return tf.where(between > 0.0, rho, 0.0)


def _pooled_axes(shape, pooling):
    """Returns, for each grouping of a variable, the axes that one group is a mean over."""
    every = tuple(range(len(shape)))
    if pooling == "coordinate":
        return [()]
    if pooling == "layer" or len(shape) < 2:
        return [every]
    row, column = every[-1:], every[:-1]
    return {"row": [row], "column": [column], "both": [row, column]}[pooling]
