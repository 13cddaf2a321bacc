"""Sums per-example gradients of `tf.vectorized_map` after clipping: the plain engine.

One graph serves a lot. A `tf.while_loop` runs over its physical batches, so memory depends on the
physical batch and time on the lot. Only the body of the loop is ever compiled by XLA: the number of
physical batches differs from lot to lot, and XLA compiles anew for every shape.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_adadp.clipping import ClippingSet
from tf_adadp.distribution import replicas
from tf_adadp.gradients import microbatch
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.gradients.mapping import (
    TRACING_ERRORS,
    map_examples,
    output_specs,
    without_log_of_pfor,
)

# XLA's CPU compiler unrolls and vectorises a sum over up to a dozen rows; over more it leaves a
# scalar loop that takes twice as long.
_ROWS_PER_SUM = 12


class VectorizedEngine:
    """Sums clipped per-example gradients, materialised one physical batch at a time.

    Args:
        example_loss: an `ExampleLoss`.
        jit_compile: whether XLA compiles the body of the loop.
        sequential: map over examples one after the other instead of vectorising; for models that
            `tf.vectorized_map` cannot convert (recurrent layers with a mask).
        loss_scale: fixed factor on the loss, undone on each float32 gradient before clipping, so
            that float16 gradients do not underflow.
    """

    joins_batches = False  # it computes on each physical batch separately
    max_rows = None

    def __init__(
        self,
        example_loss: ExampleLoss,
        *,
        jit_compile: bool = False,
        sequential: bool = False,
        loss_scale: float = 1.0,
    ):
        self.example_loss = example_loss
        self._jit_compile = jit_compile
        self._sequential = sequential
        self._loss_scale = loss_scale

    @tf.autograph.experimental.do_not_convert
    def clipped_sum(
        self,
        lot: Any,
        clipping_set: ClippingSet,
        seed: tf.Tensor,
        *,
        on_batch: Callable | None = None,
        microbatch_size: int = 1,
        num_slots: tf.Tensor | None = None,
        augmentation_multiplicity: int = 1,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums clip(gradient of one example) over the lot, and the examples' losses.

        Args:
            lot: `((x, y, sample_weight), mask)`, every leaf `[P, B, ...]` with static B.
            clipping_set: the set K, fixed before this lot was read.
            seed: int64 `[2]`, distinct for every step; source of the examples' own seeds and slots.
            on_batch: called in the graph with `(y, y_pred, sample_weight, mask, losses)` of every
                physical batch. No guarantee of this function covers it.
            microbatch_size: k > 1 clips the sum over the examples of one slot divided by k, where
                each example draws one of `num_slots` slots for itself.
            num_slots: scalar int tensor, round(expected lot size / k), of a replica's share; needed
                where k > 1.
            augmentation_multiplicity: K > 1 takes the mean of an example's gradient over K draws
                of its random layers before it is clipped.

        Returns:
            `(sums, loss)`: list of float32 tensors of the shapes that `clipping_set` returns, and
            the sum of the real examples' losses (a raw statistic).

        Under a `tf.distribute` strategy each replica gives its share of the lot, and all get the
        sums over the whole of it.

        Formal guarantee: with microbatch_size = 1, adding or removing one example changes `sums`
        by one vector of K. With k > 1 it changes the vector of one slot, from one in K to another.
        """
        (x, y, sample_weight), mask = lot
        num_batches = tf.shape(mask)[0]
        batch_size = mask.shape[1] or tf.shape(mask)[1]  # static until B changes
        trainable = self.example_loss.trainable_values()
        if microbatch_size > 1:
            slots, (x, y, sample_weight, mask) = microbatch.sort_by_slot(
                seed,
                num_slots,
                (x, y, sample_weight, mask),
            )
            summing = microbatch.SlotSums(clipping_set, microbatch_size, num_slots)
        else:
            slots = None
            summing = _RowSums(clipping_set)

        run = self._batch_function(summing, trainable, batch_size)

        def body(p, sums, carry, total_loss):
            x_p, y_p, weight_p, mask_p, slots_p = tf.nest.map_structure(
                lambda t: None if t is None else t[p], (x, y, sample_weight, mask, slots)
            )
            seeds = self.example_loss.draw_seeds(seed, p, batch_size, augmentation_multiplicity)
            new, carry, losses, y_pred = run(x_p, y_p, weight_p, mask_p, slots_p, seeds, carry)
            if on_batch is not None:
                on_batch(y_p, y_pred, weight_p, mask_p, losses)
            sums = [a + b for a, b in zip(sums, new, strict=True)]
            return p + 1, sums, carry, total_loss + tf.reduce_sum(tf.where(mask_p > 0, losses, 0.0))

        _, sums, carry, total_loss = tf.while_loop(
            lambda p, *_: p < num_batches,
            body,
            (
                tf.constant(0),
                clipping_set.zero_sums([v.shape for v in trainable]),
                summing.initial_carry(trainable),
                tf.zeros([]),
            ),
            parallel_iterations=1,
        )
        return replicas.all_reduced((summing.finish(sums, carry), total_loss))

    def _batch_function(self, summing, trainable, batch_size):
        """Returns a function of a physical batch that gives sums, carry, losses and predictions."""

        def of_rows(x, y, sample_weight, mask, slots, seeds, carry):
            losses, y_pred, grads = self._per_example(trainable, x, y, sample_weight, seeds)
            sums, carry = summing.add(grads, losses, mask, slots, carry)
            return sums, carry, losses, y_pred

        def of_groups(x, y, sample_weight, mask, slots, seeds, carry):
            rows = (x, y, sample_weight, mask, slots, seeds)

            def sums_of_group(*group):
                sums, _, losses, y_pred = of_rows(*group, ())
                return sums, (losses, y_pred)

            sums, (losses, y_pred) = _sum_over_groups(sums_of_group, rows, batch_size)
            return sums, carry, losses, y_pred

        if not self._jit_compile:
            return of_rows
        in_groups = (
            isinstance(batch_size, int)
            and isinstance(summing, _RowSums)
            and not tf.config.list_physical_devices("GPU")
        )
        return tf.function(of_groups if in_groups else of_rows, jit_compile=True, autograph=False)

    def _per_example(self, trainable, x, y, sample_weight, seeds):
        """Returns losses [B], predictions [B, ...] and float32 gradients [B, *shape]."""

        def one_example(x, y, sample_weight, seeds):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(trainable)
                draws = [
                    self.example_loss(trainable, x, y, sample_weight, s) for s in tf.unstack(seeds)
                ]
                loss = tf.add_n([loss for loss, _ in draws]) / len(draws)
                y_pred = draws[0][1]
                scaled = loss * self._loss_scale
            grads = tape.gradient(scaled, trainable, unconnected_gradients="zero")
            grads = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in grads]
            if self._loss_scale != 1.0:
                grads = [g / self._loss_scale for g in grads]
            return loss, y_pred, grads

        return map_examples(one_example, (x, y, sample_weight), seeds, self._sequential)

    def why_not_vectorized(self, example: Any) -> str | None:
        """Returns why `tf.vectorized_map` cannot convert an example's gradient, or None.

        Traces the gradient to find out.

        Args:
            example: `(x, y, sample_weight)` of TensorSpecs of one example.
        """
        rows = tf.nest.map_structure(
            lambda s: None if s is None else tf.TensorSpec([2, *s.shape], s.dtype), example
        )
        seeds = tf.TensorSpec([2, 1, self.example_loss.num_seed_generators, 2], tf.uint32)
        trainable = self.example_loss.trainable_values()

        def per_example(x, y, sample_weight, seeds):
            return self._per_example(trainable, x, y, sample_weight, seeds)

        try:
            with without_log_of_pfor():
                tf.function(per_example, autograph=False).get_concrete_function(*rows, seeds)
        except TRACING_ERRORS as error:
            return str(error).strip().split("\n")[0] or type(error).__name__
        return None

    def batch_losses(self) -> Callable:
        """Returns a function for the losses of a batch at given weights, each example by itself.

        Returns:
            `(trainable, x, y, sample_weight, seed, number) ↦ (losses [B], predictions [B, ...])`
            for the batch of that number in a lot; seed as in `clipped_sum`.
        """

        def losses(trainable, x, y, sample_weight, seeds):
            one_example = functools.partial(self.example_loss, trainable)
            return map_examples(one_example, (x, y, sample_weight), seeds, self._sequential)

        run = (
            tf.function(losses, jit_compile=True, autograph=False) if self._jit_compile else losses
        )

        def draw_and_run(trainable, x, y, sample_weight, seed, number):
            leaf = tf.nest.flatten(x)[0]
            seeds = self.example_loss.draw_seeds(seed, number, leaf.shape[0] or tf.shape(leaf)[0])
            return run(trainable, x, y, sample_weight, seeds)

        return draw_and_run


class _RowSums:
    """Sums one clipped vector per row: the case of microbatch_size = 1."""

    def __init__(self, clipping_set):
        self._clipping_set = clipping_set

    def initial_carry(self, trainable):
        return ()

    def add(self, grads, losses, mask, slots, carry):
        return list(self._clipping_set.sums_beside(grads, mask, losses)), carry

    def finish(self, sums, carry):
        return sums


def _sum_over_groups(function, rows, batch_size):
    """Runs `function` on groups of at most `_ROWS_PER_SUM` rows, one group after the other.

    Args:
        function: rows of one group ↦ `(sums, outputs)`, lists or structures of tensors; outputs
            have one row per row of the group.
        rows: structure of tensors [batch_size, ...]; None leaves stay None.
        batch_size: a Python int.

    Returns:
        The sums over all groups, and the outputs of all rows.
    """
    groups = math.ceil(batch_size / _ROWS_PER_SUM)
    size = math.ceil(batch_size / groups)

    def split(t):
        if t is None:
            return None
        padding = [[0, groups * size - batch_size]] + [[0, 0]] * (t.shape.rank - 1)
        return tf.reshape(tf.pad(t, padding), [groups, size, *t.shape[1:]])

    rows = tf.nest.map_structure(split, rows)

    def group(i):
        return tf.nest.map_structure(lambda t: None if t is None else t[i], rows)

    sums_spec, outputs_spec = output_specs(
        lambda i: function(*group(i)), tf.TensorSpec([], "int32")
    )
    flat_spec = tf.nest.flatten(outputs_spec)
    arrays = [tf.TensorArray(s.dtype, groups, element_shape=s.shape) for s in flat_spec]

    def body(i, sums, arrays):
        new, outputs = function(*group(i))
        arrays = [a.write(i, t) for a, t in zip(arrays, tf.nest.flatten(outputs), strict=True)]
        return i + 1, [a + b for a, b in zip(sums, new, strict=True)], arrays

    _, sums, arrays = tf.while_loop(
        lambda i, *_: i < groups,
        body,
        (tf.constant(0), [tf.zeros(s.shape, s.dtype) for s in sums_spec], arrays),
        maximum_iterations=groups,
    )
    flat = [
        tf.reshape(a.stack(), [groups * size, *s.shape[1:]])[:batch_size]
        for a, s in zip(arrays, flat_spec, strict=True)
    ]
    return sums, tf.nest.pack_sequence_as(outputs_spec, flat)
