"""Priors: what past steps say about the size of each gradient coordinate.

A prior decides the SHAPE of the clipping set and of the noise, never the total scale. With scale
and feedback together a prior that sees its own noise diverges: the noise it asked for raises it.
"""

import math

import tensorflow as tf

FLOOR = 0.1  # no coordinate's scale falls below this fraction of the root mean square scale


class ReleasedPrior:
    """Second moments of released gradients: debiased, pooled by row, shrunk, normalised, floored.

    For a released vector g̃ with known noise std τ (both per coordinate, divided by the lot size):

        u ← d·u + (1 − d)·mean over the row of (g̃² − τ²)          unbiased for the row's mean g²
        V ← d²·V + (1 − d)²·mean over the row of Var(g̃²) / n      its known estimation variance

    with bias correction, rows being all axes of a variable but the last (the input of a unit), and
    n their length. Differences between the rows of a variable are shrunk towards the variable's
    mean by the share of their variance that V does not explain (as in James and Stein), then
    the variables' means towards the overall mean in the same way. With v the result,

        r ∝ max(v, 0)^exponent,  mean(r²) = 1,  r² ← f² + (1 − f²)·r²,  f = 0.1.

    Where the releases cannot tell the coordinates apart, r ≡ 1: plain DP-SGD's noise.
    Everything here is computed from released vectors, so it costs no privacy; r is bounded by √m
    whatever the releases are, so it cannot run away.

    Args:
        decay: d in [0, 1).
        exponent: p > 0; 1/2 makes the scale proportional to the root mean square gradient.
    """

    def __init__(self, decay, exponent):
        self._decay = decay
        self._exponent = exponent

    def build(self, add_variable, variables):
        """Creates the state: per variable one moment and one variance per row, and their weight."""
        self._shapes = [tuple(v.shape) for v in variables]
        self._sizes = [float(math.prod(shape)) for shape in self._shapes]
        rows = [shape[:-1] if len(shape) > 1 else () for shape in self._shapes]
        self._moments = [add_variable(r, f"prior_moment_{i}") for i, r in enumerate(rows)]
        self._variances = [add_variable(r, f"prior_variance_{i}") for i, r in enumerate(rows)]
        self._weight = add_variable((), "prior_weight")

    def update(self, released, stddevs):
        """Takes in one released vector and the std of its noise (lists, per variable)."""
        d = self._decay
        self._weight.assign(d * self._weight.value + (1.0 - d))
        for g, std, moment, variance in zip(
            released, stddevs, self._moments, self._variances, strict=True
        ):
            axes = _pooled_axes(g)
            count = tf.cast(tf.size(g), tf.float32) / tf.cast(tf.size(moment.value), tf.float32)
            noise = tf.square(std)
            mean_noise = _mean(noise, axes)
            debiased = tf.reduce_mean(tf.square(g), axes) - mean_noise
            # Var(g̃²) = 2τ⁴ + 4μ²τ² for g̃ ~ N(μ, τ²).
            spread = 2.0 * _mean(tf.square(noise), axes)
            spread += 4.0 * tf.maximum(debiased, 0.0) * mean_noise
            moment.assign(d * moment.value + (1.0 - d) * debiased)
            variance.assign(d**2 * variance.value + (1.0 - d) ** 2 * spread / count)

    def shape(self):
        """r: list of float32 tensors broadcastable to the variables, mean(r²) = 1."""
        weight = tf.maximum(self._weight.value, 1e-12)
        moments = [m.value / weight for m in self._moments]
        variances = [v.value / weight**2 for v in self._variances]

        means = tf.stack([tf.reduce_mean(u) for u in moments])
        mean_variances = tf.stack(
            [tf.reduce_mean(v) / tf.cast(tf.size(v), tf.float32) for v in variances]
        )
        share = tf.constant(self._sizes) / sum(self._sizes)
        overall = tf.reduce_sum(share * means)
        shrunk_means = _shrink(means, overall, mean_variances, share)
        shrunk = [
            shrunk_means[i]
            + _shrink(u, means[i], v, 1.0 / tf.cast(tf.size(u), tf.float32))
            - means[i]
            for i, (u, v) in enumerate(zip(moments, variances, strict=True))
        ]
        scale = tf.maximum(overall, 1e-30)
        powers = [tf.maximum(v / scale, 0.0) ** self._exponent for v in shrunk]
        mean_square = tf.add_n(
            [share[i] * tf.reduce_mean(tf.square(p)) for i, p in enumerate(powers)]
        )
        known = tf.logical_and(overall > 0.0, mean_square > 0.0)
        normal = tf.math.rsqrt(tf.where(known, mean_square, 1.0))
        return [
            _over_rows(
                tf.where(known, tf.sqrt(FLOOR**2 + (1 - FLOOR**2) * tf.square(p * normal)), 1.0),
                shape,
            )
            for p, shape in zip(powers, self._shapes, strict=True)
        ]


class RawPrior:
    """ADADP's prior as printed, of the RAW gradient: E'[g²] ← γ'·E'[g²] + (1 − γ')·g²   (eq. 4).

    Not private: it puts a raw statistic of the lot into the noise scale and into the switch of
    line 7 of Algorithm 1. For research; an optimizer that uses it is charged ε = ∞.
    """

    def __init__(self, decay):
        self._decay = decay

    def build(self, add_variable, variables):
        """Creates E', one value per coordinate."""
        self._moments = [
            add_variable(tuple(v.shape), f"raw_prior_moment_{i}") for i, v in enumerate(variables)
        ]

    def update(self, raw):
        """Takes in the raw mean gradient of a lot."""
        d = self._decay
        for g, moment in zip(raw, self._moments, strict=True):
            moment.assign(d * moment.value + (1.0 - d) * tf.square(g))

    def root(self):
        """√E', list of tensors of the variables' shapes."""
        return [tf.sqrt(m.value) for m in self._moments]


def variance(tensors):
    """The variance over all entries of a list of tensors."""
    flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
    return tf.math.reduce_variance(flat)


def _shrink(values, mean, variances, share):
    """mean + ρ·(values − mean), ρ the share of their spread that is no estimation error."""
    between = tf.reduce_sum(share * tf.square(values - mean))
    error = tf.reduce_sum(share * variances)
    rho = tf.maximum(1.0 - tf.math.divide_no_nan(error, between), 0.0)
    return mean + tf.where(between > 0.0, rho, 0.0) * (values - mean)


def _pooled_axes(g):
    """The axes that one row is averaged over: the last, or all of a vector or scalar."""
    return [-1] if g.shape.rank > 1 else list(range(g.shape.rank))


def _mean(values, axes):
    """The mean over axes of values that broadcast to a variable: a scalar, or of its rank."""
    return tf.reduce_mean(values, axes) if values.shape.rank else values


def _over_rows(r, shape):
    """r with an axis of 1 where the row was pooled, so that it broadcasts to `shape`."""
    return tf.expand_dims(r, -1) if len(shape) > 1 else r
