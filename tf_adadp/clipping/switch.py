"""One of two sets, by released state."""

import tensorflow as tf

from tf_adadp.clipping.base import ClippedSums, ClippingSet, Gradients


class Switch(ClippingSet):
    """`if_true` where `predicate` holds, else `if_false`; a warm-up, for instance.

    Args:
        predicate: scalar boolean, a function of RELEASED state and public constants only: which
            set was used can be read off the noise.
        if_true: a ClippingSet.
        if_false: a ClippingSet for the same variables. Only the chosen one clips.
    """

    def __init__(self, predicate: bool | tf.Tensor, if_true: ClippingSet, if_false: ClippingSet):
        self._predicate = tf.convert_to_tensor(predicate, tf.bool)
        self._if_true = if_true
        self._if_false = if_false

    @property
    def center(self) -> list[tf.Tensor] | None:
        """Returns that of the chosen set; 0 where it has none and the other has one."""
        first, second = self._if_true.center, self._if_false.center
        if first is None and second is None:
            return None
        first = first or [tf.zeros_like(a) for a in second]
        second = second or [tf.zeros_like(a) for a in first]
        return self._choose(first, second)

    def clip(self, grads: Gradients) -> list[tf.Tensor]:
        """Clips each row into the chosen set."""
        return tf.cond(
            self._predicate, lambda: self._if_true.clip(grads), lambda: self._if_false.clip(grads)
        )

    def clipped_sum(self, grads: Gradients, mask: tf.Tensor) -> ClippedSums:
        """Sums the rows clipped into the chosen set."""
        sums = tf.cond(
            self._predicate,
            lambda: list(self._if_true.clipped_sum(grads, mask)),
            lambda: list(self._if_false.clipped_sum(grads, mask)),
        )
        return ClippedSums(sums, self)

    def noise_stddev(
        self, noise_multiplier: float | tf.Tensor, num_variables: int
    ) -> list[tf.Tensor]:
        """Returns the noise of the chosen set."""
        return self._choose(
            self._if_true.noise_stddev(noise_multiplier, num_variables),
            self._if_false.noise_stddev(noise_multiplier, num_variables),
        )

    def _choose(self, first, second):
        return [tf.where(self._predicate, a, b) for a, b in zip(first, second, strict=True)]
