"""Forms microbatches of more than one example, by independent slots.

Cutting a Poisson lot into consecutive groups is not sound: one inserted record shifts every later
group, so that a sum of 100 clipped groups can move by 99 clip norms instead of 2. Here every
sampled example draws one of M = round(L/k) slots by itself. One record then changes the vector of
one slot, from one vector of K to another: the sensitivity is twice that of single examples, and no
more.

Slots have as many examples as draw them, so a lot's rows are sorted by slot and walked through in
physical batches of fixed size; the slot that a batch leaves open is carried into the next.

The record moves where batches are cut as well. So the sum of a slot must not depend on the cuts,
not even by rounding: gradients of 1e10 and −1e10 beside one of 3 come to 0 or 3 in another order,
and all slots could move at once. Rows are added in their order, one by one, as long as a segment
sum of the device does so; a CPU does.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_adadp.clipping import ClippingSet


def sort_by_slot(seed: tf.Tensor, num_slots: tf.Tensor, rows: Any) -> tuple[tf.Tensor, Any]:
    """Draws a slot in 0..num_slots−1 for every row and sorts the rows by it.

    Args:
        seed: int64 [2].
        num_slots: scalar int32 tensor M.
        rows: structure of tensors [P, B, ...] whose last leaf is the mask; None leaves stay None.

    Returns:
        `(slots, rows)`: int32 [P, B], ascending, padded rows last with slot M; the rows likewise.
    """
    mask = rows[-1]
    flat_mask = tf.reshape(mask, [-1])
    drawn = tf.random.stateless_uniform(
        tf.shape(flat_mask), seed, minval=0, maxval=num_slots, dtype=tf.int32
    )
    slots = tf.where(flat_mask > 0, drawn, num_slots)
    order = tf.argsort(slots, stable=True)

    def reorder(t):
        if t is None:
            return None
        flat = tf.reshape(t, tf.concat([[-1], tf.shape(t)[2:]], 0))
        result = tf.reshape(tf.gather(flat, order), tf.shape(t))
        return tf.ensure_shape(result, t.shape)

    return tf.reshape(tf.gather(slots, order), tf.shape(mask)), tf.nest.map_structure(reorder, rows)


class SlotSums:
    """Sums clip(Σ of the slot's gradients / k) over slots.

    Args:
        clipping_set: the set K.
        microbatch_size: k, the expected number of examples in a slot.
        num_slots: M; rows of slot M are padding.
    """

    def __init__(self, clipping_set: ClippingSet, microbatch_size: int, num_slots: tf.Tensor):
        self._clipping_set = clipping_set
        self._microbatch_size = microbatch_size
        self._num_slots = num_slots

    def initial_carry(self, trainable: Sequence[tf.Tensor]) -> tuple:
        """Returns slot −1, zero gradients and no loss: no slot is open."""
        return tf.constant(-1), [*(tf.zeros(v.shape) for v in trainable), tf.zeros([])]

    def add(
        self,
        grads: list[tf.Tensor],
        losses: tf.Tensor,
        mask: tf.Tensor,
        slots: tf.Tensor,
        carry: tuple,
    ) -> tuple[list[tf.Tensor], tuple]:
        """Clips the slots that end in this batch; returns their sum and the slot left open."""
        open_slot, open_sums = carry
        num_segments = tf.shape(slots)[0] + 1
        before = tf.concat([[open_slot], slots[:-1]], 0)
        segments = tf.cumsum(tf.cast(slots != before, tf.int32))
        keep = tf.logical_and(mask > 0, _finite_rows(grads))

        def sum_segments(g, open_g):
            weight = [-1] + [1] * (len(g.shape) - 1)
            g = tf.where(tf.reshape(keep, weight), g, 0.0) / self._microbatch_size
            # The open slot first: each slot is added up in order, wherever batches are cut.
            rows, of = tf.concat([open_g[None], g], 0), tf.concat([[0], segments], 0)
            return tf.math.unsorted_segment_sum(rows, of, num_segments)

        # As for single examples, a loss of ∞ counts as large, and a loss of NaN as 0.
        losses = tf.clip_by_value(tf.cast(losses, tf.float32), -1e30, 1e30)
        rows = [*grads, tf.where(tf.math.is_nan(losses), 0.0, losses)]
        sums = [sum_segments(g, o) for g, o in zip(rows, open_sums, strict=True)]
        last = segments[-1]
        index = tf.range(num_segments)
        # Segment 0 is the slot carried in; before the first batch there is none.
        ended = tf.logical_and(index < last, tf.logical_or(index > 0, self._is_real(open_slot)))
        left_open = slots[-1], [tf.gather(s, last) for s in sums]
        return self._clipped(sums, tf.cast(ended, tf.float32)), left_open

    def finish(self, sums: list[tf.Tensor], carry: tuple) -> list[tf.Tensor]:
        """Adds the slot that the last batch left open."""
        open_slot, open_sums = carry
        mask = tf.cast(self._is_real(open_slot), tf.float32)[None]
        last = self._clipped([s[None] for s in open_sums], mask)
        return [a + b for a, b in zip(sums, last, strict=True)]

    def _clipped(self, sums, mask):
        """Returns the clipped sum of slots, from sums of gradients and losses."""
        *grads, losses = sums
        return list(self._clipping_set.sums_beside(grads, mask, losses))

    def _is_real(self, slot):
        return tf.logical_and(slot >= 0, slot < self._num_slots)


def _finite_rows(grads):
    """Returns bool [B]: whether a row is finite in every variable."""
    finite = tf.ones([tf.shape(grads[0])[0]], tf.bool)
    for g in grads:
        flat = tf.reshape(g, [tf.shape(g)[0], -1])
        finite = tf.logical_and(finite, tf.reduce_all(tf.math.is_finite(flat), axis=1))
    return finite
