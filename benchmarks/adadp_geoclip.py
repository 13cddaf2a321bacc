"""GeoClip: gradients are clipped and noised in the basis of past releases' covariance."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import tf_adadp as dp
from tf_adadp import clipping
from tf_adadp.clipping.base import Gradients
from tf_adadp.clipping.row_gradients import as_rows
from tf_adadp.optimizers.base import DPOptimizer


class RotatedBall(clipping.ClippingSet):
    """‖M(v − a)‖₂ ≤ 1, M⁻¹ = B = b₀·(I − UUᵀ) + U·diag(b)·Uᵀ, in the coordinates w = M(g − a).

    Rows, sums and noise are those of w, where the set is the unit ball and the noise is σ* for
    every coordinate; `leave_frame` takes a release back. M is symmetric: any rotation of w in front
    of it would change neither norms nor the law of the noise.

    Sensitivity: w is formed for every row before its norm is taken, and an `L2Ball` of radius 1
    clips it. So Σ_x w_x·min(1, 1/‖w_x‖) moves by at most 1 when a row comes or goes, whatever U, b₀
    and b are; that they come from past releases makes the set a fixed one. What `leave_frame` does
    is post-processing: if rounding made U less than orthonormal, the release would be a little off,
    and no less private.

    Args:
        directions: U [m, k], with orthonormal or zero columns, m the scalars of all variables.
        lengths: b > 0 [k].
        rest: b₀ > 0, a scalar.
        center: a, a list of tensors of the variables' shapes.
    """

    def __init__(
        self,
        directions: tf.Tensor,
        lengths: tf.Tensor,
        rest: tf.Tensor,
        center: Sequence[tf.Tensor],
    ):
        self._lengths = lengths
        self._rest = rest
        self._center = list(center)
        self._shapes = [tuple(a.shape) for a in center]
        sizes = [math.prod(shape) for shape in self._shapes]
        self._directions = tf.split(directions, sizes)
        self._ball = clipping.L2Ball(1.0)

    @property
    def center(self) -> list[tf.Tensor]:
        """The tensors a."""
        return self._center

    def enter_frame(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns M·row for rows [B, *shape] of every variable."""
        return self._stretched(rows, 1.0 / self._lengths, 1.0 / self._rest)

    def leave_frame(self, vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns B·vector for one vector, a list over the variables."""
        rows = self._stretched([v[None] for v in vectors], self._lengths, self._rest)
        return [r[0] for r in rows]

    def variances(self) -> list[tf.Tensor]:
        """Returns the diagonal of B²: the variance of white noise that left the frame."""
        apart = tf.square(self._lengths) - tf.square(self._rest)
        diagonals = [
            tf.square(self._rest) + tf.linalg.matvec(tf.square(u), apart) for u in self._directions
        ]
        return [tf.reshape(d, s) for d, s in zip(diagonals, self._shapes, strict=True)]

    def _stretched(self, rows, along, across):
        """Stretches rows by `along` in the directions and by `across` in what is orthogonal."""
        flat = [
            tf.reshape(r, [tf.shape(r)[0], u.shape[0]])
            for r, u in zip(rows, self._directions, strict=True)
        ]
        parts = tf.add_n([tf.matmul(r, u) for r, u in zip(flat, self._directions, strict=True)])
        parts *= along - across
        return [
            tf.reshape(across * r + tf.matmul(parts, u, transpose_b=True), [-1, *shape])
            for r, u, shape in zip(flat, self._directions, self._shapes, strict=True)
        ]

    def _in_frame(self, grads):
        rows = [as_rows(g).materialize() for g in grads]
        return self.enter_frame([r - a for r, a in zip(rows, self._center, strict=True)])

    def clip(self, grads: Gradients) -> list[tf.Tensor]:
        """See `ClippingSet.clip`; the rows are those of w."""
        return self._ball.clip(self._in_frame(grads))

    def clipped_sum(self, grads: Gradients, mask: tf.Tensor) -> clipping.ClippedSums:
        """See `ClippingSet.clipped_sum`; the sum is that of w."""
        # One entry that is not finite spoils its whole row, which then counts nothing.
        return clipping.ClippedSums(self._ball.clipped_sum(self._in_frame(grads), mask), self)

    def noise_stddev(
        self, noise_multiplier: float | tf.Tensor, num_variables: int
    ) -> list[tf.Tensor]:
        """Returns σ* for each variable: the noise of w."""
        return self._ball.noise_stddev(noise_multiplier, num_variables)


class GeoClipNoise(DPOptimizer):
    """Mixin: clips and adds noise in the eigenbasis of the covariance of past releases.

        w_x = M(g_x − a),   g̃ = B·(Σ_x w_x·min(1, 1/‖w_x‖) + N(0, σ*²I)) / L + a,   B = M⁻¹
        a ← β₁·a + (1 − β₁)·g̃,   Σ ← β₂·Σ + (1 − β₂)·(g̃ − a)(g̃ − a)ᵀ

    GeoClip (Gilani et al. 2025, arXiv 2506.06549), its form of rank k: U and λ are the k largest
    eigenvectors and eigenvalues of Σ, updated by one release at a time. B has the same
    eigenvectors, with lengths ∝ λ^(1/4): of all B that leave E‖w‖² the same they have the least
    noise, tr(B²).

    What differs from the paper. Its rank-k form keeps nothing but the k directions, and loses the
    gradient outside of them; here the orthogonal complement is one more eigenspace, of the mean
    eigenvalue λ₀ that the trace of Σ leaves to it (no less than the noise that it is known to
    have). The paper's B takes its scale from λ as well, and so from the noise of past releases,
    which feeds itself; here the mean of the squared lengths is C². λ is limited to [λ₀,
    `largest_ratio`·λ₀]. B = C·I at the first step, and every step has noise.

    Guarantee: a and B come from past releases alone, and `RotatedBall` shows that Σ_x changes by at
    most 1 under noise of σ*, which is (R). B and a after it are post-processing.

    Args:
        rank: k ≥ 1.
        center_decay: β₁ in [0, 1]; 1 keeps a = 0.
        covariance_decay: β₂ in (0, 1).
        largest_ratio: ≥ 1.
        **kwargs: those of the optimizer; l2_norm_clip C is a number.

    Raises:
        ValueError: another clip norm, or automatic clipping.
    """

    def __init__(
        self,
        *args: Any,
        rank: int = 32,
        center_decay: float = 0.9,
        covariance_decay: float = 0.98,
        largest_ratio: float = 1e4,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        if not isinstance(self.l2_norm_clip, float) or self.automatic_clipping is not None:
            raise ValueError(
                f"l2_norm_clip={self.l2_norm_clip!r}, automatic_clipping="
                f"{self.automatic_clipping!r}: GeoClip takes one number, and None."
            )
        self.rank = rank
        self.center_decay = center_decay
        self.covariance_decay = covariance_decay
        self.largest_ratio = largest_ratio

    def _build_private(self, variables):
        super()._build_private(variables)
        self._num_scalars = sum(math.prod(v.shape) for v in variables)
        rank = min(self.rank, self._num_scalars - 1)
        length = keras.initializers.Constant(self.l2_norm_clip)
        self._center = self._add_slots("center", variables)
        self._directions = self._add_state((self._num_scalars, rank), "directions")
        self._eigenvalues = self._add_state((rank,), "eigenvalues")
        self._lengths = self._add_state((rank,), "lengths", initializer=length)
        # Of the complement: the trace of Σ, the variance of its noise, and b₀.
        self._rest_trace = self._add_state((), "rest_trace")
        self._rest_noise = self._add_state((), "rest_noise")
        self._rest_length = self._add_state((), "rest_length", initializer=length)

    def clipping_set(self) -> clipping.ClippingSet:
        """Returns the unit ball of w."""
        return RotatedBall(
            tf.convert_to_tensor(self._directions.value),
            tf.convert_to_tensor(self._lengths.value),
            tf.convert_to_tensor(self._rest_length.value),
            [tf.convert_to_tensor(a.value) for a in self._center],
        )

    def _noisy_mean(self, clipping_set, sums, expected_lot_size):
        """Returns the noisy mean taken back from the frame, and the std of its noise."""
        released, stddevs = super()._noisy_mean(clipping_set, sums, expected_lot_size)
        stddevs = [
            s * tf.sqrt(tf.maximum(variance, 0.0))
            for s, variance in zip(stddevs, clipping_set.variances(), strict=True)
        ]
        return clipping_set.leave_frame(released), stddevs

    def _observe(self, released, stddevs):
        # What is released before a is added back: g̃ − a.
        super()._observe(released, stddevs)
        d = self.covariance_decay
        vector = tf.concat([tf.reshape(r, [-1]) for r in released], 0)
        directions, eigenvalues, dropped = next_eigenvectors(
            self._directions.value, self._eigenvalues.value, vector, d
        )
        # Noise of another std in a few directions is no matter in the mean over all coordinates.
        variances = tf.concat([tf.reshape(tf.square(s), [-1]) for s in stddevs], 0)
        noise = d * self._rest_noise.value + (1 - d) * tf.reduce_mean(variances)
        rest = d * self._rest_trace.value + dropped
        lengths, rest_length = shaped_lengths(
            eigenvalues,
            tf.maximum(rest / (self._num_scalars - eigenvalues.shape[0]), noise),
            self._num_scalars,
            self.largest_ratio,
        )
        for variable, value in (
            (self._directions, directions),
            (self._eigenvalues, eigenvalues),
            (self._rest_noise, noise),
            (self._rest_trace, rest),
            (self._lengths, self.l2_norm_clip * lengths),
            (self._rest_length, self.l2_norm_clip * rest_length),
        ):
            variable.assign(value)
        for center, r in zip(self._center, released, strict=True):
            center.assign_add((1.0 - self.center_decay) * r)


def next_eigenvectors(
    directions: tf.Tensor, eigenvalues: tf.Tensor, vector: tf.Tensor, decay: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the k largest eigenvectors [m, k] and eigenvalues of d·UΛUᵀ + (1 − d)·xxᵀ.

    Third comes the eigenvalue that is dropped: the matrix has at most k + 1. Zero columns of U, of
    eigenvalue 0, stand for directions that are not there yet.
    """
    inside = tf.linalg.matvec(directions, vector, transpose_a=True)
    outside = vector - tf.linalg.matvec(directions, inside)
    # Once more, for what rounding left of it in the directions: it would add up over the steps.
    again = tf.linalg.matvec(directions, outside, transpose_a=True)
    outside -= tf.linalg.matvec(directions, again)
    length = tf.norm(outside)
    parts = tf.concat([inside + again, length[None]], 0)
    core = decay * tf.linalg.diag(tf.concat([eigenvalues, [0.0]], 0))
    core += (1 - decay) * parts[:, None] * parts[None, :]
    values, vectors = tf.linalg.eigh(core)  # ascending
    turned = vectors[:, 1:]
    new = tf.matmul(directions, turned[:-1])
    new += tf.math.divide_no_nan(outside, length)[:, None] * turned[-1]
    values = tf.maximum(values, 0.0)
    return new, values[1:], values[0]


def shaped_lengths(
    eigenvalues: tf.Tensor, rest: tf.Tensor, num_scalars: int, largest_ratio: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns lengths ∝ λ^(1/4) [k], and that of the complement; their mean square is 1.

    Args:
        eigenvalues: λ ≥ 0 [k].
        rest: λ₀, of the other num_scalars − k directions.
        num_scalars: m.
        largest_ratio: above this λ/λ₀ is cut off; below 1 it is 1.
    """
    ratios = tf.clip_by_value(eigenvalues / tf.maximum(rest, 1e-30), 1.0, largest_ratio)
    squares = tf.sqrt(ratios)  # of the lengths, that of the complement being 1
    total = tf.reduce_sum(squares) + float(num_scalars - eigenvalues.shape[0])
    normal = tf.sqrt(num_scalars / total)
    return normal * tf.sqrt(squares), normal


class GeoClip(GeoClipNoise, keras.optimizers.SGD):
    """GeoClip with the SGD step of its paper, see `GeoClipNoise`."""


class GeoClipRMSprop(GeoClipNoise, dp.DPRMSprop):
    """GeoClip with ADADP's RMSprop step and its schedule, see `GeoClipNoise`.

    Its set is no ball and no ellipsoid in the weights' own axes, so no rate is found.
    """

    def __init__(self, learning_rate: Any = None, **kwargs: Any):
        super().__init__(learning_rate=learning_rate or dp.InverseSqrtDecay(), **kwargs)
