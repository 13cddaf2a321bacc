"""Second moments of noisy vectors: debiased, pooled over groups, shrunk."""

import math

import tensorflow as tf

POOLINGS = ("coordinate", "row", "column", "both", "layer")


class PooledMoments:
    """The second moments of a vector known with noise, one per group of coordinates.

    For a released vector g̃ with known noise std τ, per group of n coordinates:

        u ← d·u + (1 − d)·mean over the group of (g̃² − τ²)          unbiased for its mean g²
        V ← d²·V + (1 − d)²·mean over the group of Var(g̃²) / n      its known estimation variance

    with bias correction, and Var(g̃²) = 2τ⁴ + 4g²τ².

    Groups, for a variable with axes (…, o): "row" pools over the last axis (all weights that leave
    one input), "column" over all others (all weights into one unit), "layer" over all,
    "coordinate" over none; "both" keeps rows and columns and takes their product over the mean, as
    for a matrix of rank one. A vector (a bias) is one group but for "coordinate".

    Shrinkage: differences between the groups of a variable are shrunk towards the variable's mean
    by the share of their variance that V does not explain (as in James and Stein), then the
    variables' means towards the overall mean in the same way. Where the releases cannot tell groups
    apart, they come out equal.
    """

    def __init__(self, pooling, shrinkage):
        self._pooling = pooling
        self._shrinkage = shrinkage

    def build(self, add_variable, shapes):
        """Creates u and V of every group, and the weight of the bias correction."""
        self._shapes = shapes
        self._groups = []  # per variable, a list of (pooled axes, u, V)
        for i, shape in enumerate(shapes):
            self._groups.append([])
            for side, axes in enumerate(_pooled_axes(shape, self._pooling)):
                kept = [1 if a in axes else n for a, n in enumerate(shape)]
                u = add_variable(kept, f"prior_moment_{i}_{side}")
                v = add_variable(kept, f"prior_variance_{i}_{side}")
                self._groups[-1].append((axes, u, v))
        self._weight = add_variable((), "prior_weight")

    def update(self, vectors, stddevs, decay):
        """Takes in one vector and the std of its noise (lists, per variable)."""
        self._weight.assign(decay * self._weight.value + (1.0 - decay))
        for g, std, groups in zip(vectors, stddevs, self._groups, strict=True):
            noise = tf.square(std)
            for axes, u, v in groups:
                count = g.shape.num_elements() / u.shape.num_elements()
                mean_noise = _mean(noise, axes)
                debiased = tf.reduce_mean(tf.square(g), axes, keepdims=True) - mean_noise
                spread = 2.0 * _mean(tf.square(noise), axes)
                spread += 4.0 * tf.maximum(debiased, 0.0) * mean_noise
                u.assign(decay * u.value + (1.0 - decay) * debiased)
                v.assign(decay**2 * v.value + (1.0 - decay) ** 2 * spread / count)

    def estimates(self):
        """List of tensors that broadcast to the variables; they may be negative."""
        weight = tf.maximum(self._weight.value, 1e-12)
        found = [
            [(u.value / weight, v.value / weight**2) for _, u, v in groups]
            for groups in self._groups
        ]
        means = tf.stack([tf.reduce_mean(groups[0][0]) for groups in found])
        errors = tf.stack(
            [tf.reduce_mean(v) / tf.cast(tf.size(v), tf.float32) for ((_, v), *_) in found]
        )
        sizes = [float(math.prod(shape)) for shape in self._shapes]
        share = tf.constant(sizes) / sum(sizes)
        shrunk_means = self._shrink(means, tf.reduce_sum(share * means), errors, share)
        return [
            self._joined(groups, means[i]) + shrunk_means[i] - means[i]
            for i, groups in enumerate(found)
        ]

    def _joined(self, groups, mean):
        """One estimate per coordinate from those of the groups it is in."""
        sides = [self._shrink(u, mean, v, 1.0 / u.shape.num_elements()) for u, v in groups]
        if len(sides) == 1:
            return sides[0]
        rows, columns = (tf.maximum(side, 0.0) for side in sides)
        return tf.where(mean > 0.0, rows * columns / tf.maximum(mean, 1e-30), mean)

    def _shrink(self, values, mean, variances, share):
        """mean + ρ·(values − mean), ρ the share of their spread that is no estimation error."""
        if not self._shrinkage:
            return values
        between = tf.reduce_sum(share * tf.square(values - mean))
        error = tf.reduce_sum(share * variances)
        rho = tf.maximum(1.0 - tf.math.divide_no_nan(error, between), 0.0)
        return mean + tf.where(between > 0.0, rho, 0.0) * (values - mean)


def _pooled_axes(shape, pooling):
    """For each grouping of a variable, the axes that one group is a mean over."""
    every = tuple(range(len(shape)))
    if pooling == "coordinate":
        return [()]
    if pooling == "layer" or len(shape) < 2:
        return [every]
    row, column = every[-1:], every[:-1]
    return {"row": [row], "column": [column], "both": [row, column]}[pooling]


def _mean(values, axes):
    """The mean over axes of values that broadcast to a variable: a scalar, or of its rank."""
    return tf.reduce_mean(values, axes, keepdims=True) if values.shape.rank else values
