"""Sums the clipped losses of a lot at given weights, by forward passes alone."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_adadp.distribution import replicas
from tf_adadp.gradients.mapping import join_batches


@tf.autograph.experimental.do_not_convert
def clipped_loss_sum(
    engine: Any,
    lot: Any,
    trainable: Sequence[tf.Tensor],
    seed: tf.Tensor,
    bound: float | tf.Tensor,
    *,
    on_batch: Callable | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums min(max(ℓ_x, 0), C) over the lot, for the loss ℓ that the engine takes gradients of.

    ℓ_x includes the example's weight and the losses that layers add for it, but no weight
    regularisers. It is the training loss: random layers are active, and the same `seed` gives the
    same draws.

    Args:
        engine: a gradient engine, see `tf_adadp.gradients`.
        lot: `((x, y, sample_weight), mask)`, every leaf [P, B, ...]. P = 0 is legal.
        trainable: list of tensors, the weights to take.
        seed: int64 [2], see the engine's `clipped_sum`.
        bound: C > 0. A loss that is not finite counts as C, for either sign.
        on_batch: see the engine's `clipped_sum`.

    Returns:
        `(sum, loss)`: the sum in float64, so that rounding is far below C; and the plain sum of
        the losses, float32, a raw statistic.

    Guarantee: adding one example changes `sum` by a value in [0, C], up to the float32 rounding of
    the losses: every loss is that of the example alone (see the engines), and padding contributes
    exactly 0.
    """
    work = engine.batch_losses()
    chunk, num_chunks = _chunks(engine, lot)

    def body(c, total, raw):
        x, y, sample_weight, mask = chunk(c)
        losses, y_pred = work(trainable, x, y, sample_weight, seed, c)
        if on_batch is not None:
            on_batch(y, y_pred, sample_weight, mask, losses)
        clipped = tf.where(tf.math.is_finite(losses), tf.clip_by_value(losses, 0.0, bound), bound)
        clipped = tf.where(mask > 0, clipped, 0.0)
        total += tf.reduce_sum(tf.cast(clipped, tf.float64))
        return c + 1, total, raw + tf.reduce_sum(tf.where(mask > 0, losses, 0.0))

    _, total, raw = tf.while_loop(
        lambda c, *_: c < num_chunks,
        body,
        (tf.constant(0), tf.zeros([], tf.float64), tf.zeros([])),
        parallel_iterations=1,
    )
    return replicas.all_reduced((total, raw))


def _chunks(engine, lot):
    """Returns `(c ↦ the c-th chunk, number of chunks)` of a lot; leaves are [rows, ...]."""
    (x, y, sample_weight), mask = lot
    parts = (x, y, sample_weight, mask)
    batch_size = mask.shape[1] or tf.shape(mask)[1]
    num_batches = tf.shape(mask)[0]
    if not engine.joins_batches:  # one static shape

        def batch(c):
            return tf.nest.map_structure(lambda t: None if t is None else t[c], parts)

        return batch, num_batches
    joined = tf.maximum((engine.max_rows or 1) // batch_size, 1)
    size = joined * batch_size
    rows = tf.nest.map_structure(join_batches, parts)

    def chunk(c):
        return tf.nest.map_structure(
            lambda t: None if t is None else t[c * size : (c + 1) * size], rows
        )

    return chunk, -(-num_batches // joined)
