"""The ghost engine: clipped sums of per-example gradients that are never formed.

For each chunk of a lot one batched forward and backward pass, as in ordinary training, gives every
layer's inputs and output gradients; from them come upper bounds of the examples' norms and the
clipped sum (see `forms`). Work and memory are near those of an ordinary step.
"""

import tensorflow as tf

from tf_adadp.clipping.row_gradients import grouped
from tf_adadp.distribution import replicas
from tf_adadp.gradients.mapping import join_batches


class GhostEngine:
    """Clipped sums of per-example gradients from one batched pass per chunk of a lot.

    Args:
        trace: a `Trace`.
        jit_compile: whether XLA compiles the pass over one chunk.
        max_rows: rows of the lot that are worked on at once, at most (and at least one physical
            batch). A chunk is a whole number of physical batches.
    """

    def __init__(self, trace, *, jit_compile=False, max_rows=None):
        self.example_loss = trace.example_loss
        self._trace = trace
        self._jit_compile = jit_compile
        self.max_rows = max_rows

    @property
    def joins_batches(self):
        """Tells whether physical batches are put together, so that small ones are best."""
        return not self._jit_compile

    @tf.autograph.experimental.do_not_convert
    def clipped_sum(
        self,
        lot,
        clipping_set,
        seed,
        *,
        on_batch=None,
        microbatch_size=1,
        num_slots=None,
        augmentation_multiplicity=1,
    ):
        """Returns Σ over the lot of clip(gradient of one example), and Σ of the examples' losses.

        Arguments, result and guarantee are those of `VectorizedEngine.clipped_sum`, for
        microbatch_size = 1 alone: a slot's gradient is the sum of several examples', which has
        no norm that their parts give. Dropout and the like draw other numbers for every example,
        but not those that the plain engine draws.
        """
        if microbatch_size != 1:
            raise ValueError(
                f"microbatch_size={microbatch_size}: the ghost engine clips every example by "
                'itself; use gradient_engine="auto" or "vectorized".'
            )
        del num_slots
        copies = augmentation_multiplicity
        (x, y, sample_weight), mask = lot
        rows = tf.nest.map_structure(join_batches, (x, y, sample_weight, mask))
        batch_size = mask.shape[1] or tf.shape(mask)[1]
        num_batches = tf.shape(mask)[0]
        batches_at_once = 1
        if self.max_rows is not None and not self._jit_compile:
            batches_at_once = tf.maximum(self.max_rows // (copies * batch_size), 1)
        # Chunks of equal size, up to one physical batch: a last chunk of few rows costs a whole
        # pass over the weights.
        num_chunks = -(-num_batches // batches_at_once)
        per_chunk = -(-num_batches // tf.maximum(num_chunks, 1))
        trainable = self.example_loss.trainable_values()

        def work(x, y, sample_weight, mask, seeds):
            rows = (x, y, sample_weight)
            if copies > 1:
                rows = tf.nest.map_structure(
                    lambda t: None if t is None else tf.repeat(t, copies, axis=0), rows
                )
            losses, y_pred, gradients = self._trace(trainable, *rows, seeds)
            if copies > 1:
                losses = tf.reduce_mean(grouped(losses, copies), axis=1)
                y_pred = tf.nest.map_structure(lambda t: grouped(t, copies)[:, 0], y_pred)
                gradients = [g.group_means(copies) for g in gradients]
            return list(clipping_set.sums_beside(gradients, mask, losses)), losses, y_pred

        run = work
        if not tf.executing_eagerly():
            run = tf.function(work, jit_compile=self._jit_compile or None, autograph=False)

        def chunk_sums(c):
            first = c * per_chunk * batch_size
            last = tf.minimum(first + per_chunk * batch_size, num_batches * batch_size)
            if self._jit_compile:  # one static shape: a chunk is one physical batch
                chunk = tf.nest.map_structure(
                    lambda t: None if t is None else t[c], (x, y, sample_weight, mask)
                )
            else:
                chunk = tf.nest.map_structure(lambda t: None if t is None else t[first:last], rows)
                chunk = _at_least_two_rows(chunk)
            x_c, y_c, weight_c, mask_c = chunk
            seeds = self.example_loss.draw_seeds(seed, c)
            new, losses, y_pred = run(x_c, y_c, weight_c, mask_c, seeds)
            if on_batch is not None:
                on_batch(y_c, y_pred, weight_c, mask_c, losses)
            return new, tf.reduce_sum(tf.where(mask_c > 0, losses, 0.0))

        def body(c, sums, total_loss):
            new, loss = chunk_sums(c)
            return c + 1, [a + b for a, b in zip(sums, new, strict=True)], total_loss + loss

        _, sums, total_loss = tf.while_loop(
            lambda c, *_: c < num_chunks,
            body,
            # The first chunk in the loop as well: outside, its graph would be there, and be
            # prepared, twice.
            (tf.constant(0), clipping_set.zero_sums([v.shape for v in trainable]), tf.zeros([])),
            parallel_iterations=1,
        )
        return replicas.all_reduced((sums, total_loss))

    def batch_losses(self):
        """Returns a function for the losses of a batch at weights of choice, in one forward pass.

        As `VectorizedEngine.batch_losses`; the pass keeps layers that it does not know, and
        activity regularisers, to single examples.
        """

        def losses(trainable, x, y, sample_weight, seeds):
            # A graph drops the gradients, which nothing needs.
            found, y_pred, _ = self._trace(trainable, x, y, sample_weight, seeds)
            return found, y_pred

        run = (
            tf.function(losses, jit_compile=True, autograph=False) if self._jit_compile else losses
        )

        def draw_and_run(trainable, x, y, sample_weight, seed, number):
            seeds = self.example_loss.draw_seeds(seed, number)
            return run(trainable, x, y, sample_weight, seeds)

        return draw_and_run


def _at_least_two_rows(chunk):
    """Returns a structure of tensors [n, ...] with rows of zeros up to two; None stays None.

    Some of TensorFlow's kernels give no rows at all the wrong shape (a separable convolution loses
    a channel, with oneDNN), and `tf.vectorized_map` cannot follow an LSTM over a single one.
    """
    leaves = tf.nest.flatten(chunk)
    present = [leaf for leaf in leaves if leaf is not None]
    missing = 2 - tf.shape(present[0])[0]

    def padded():
        return [
            tf.concat([t, tf.zeros(tf.concat([[missing], tf.shape(t)[1:]], 0), t.dtype)], 0)
            for t in present
        ]

    filled = iter(tf.cond(missing > 0, padded, lambda: [tf.identity(t) for t in present]))
    flat = [
        None if t is None else tf.ensure_shape(next(filled), [None, *t.shape[1:]]) for t in leaves
    ]
    return tf.nest.pack_sequence_as(chunk, flat)
