"""Joins many small tensors into few long vectors, so that one operation serves many variables."""

import math

import numpy as np
import tensorflow as tf

LARGEST_GROUP = 2**18  # entries of a shared vector: two copies of it fit into a cache


class FlatGroups:
    """Converts a list of tensors, one per variable, into vectors, and back.

    A deep network has hundreds of small variables. Updating each of them separately makes a graph
    of thousands of operations, whose overhead takes longer than their arithmetic. Consecutive
    tensors share a vector while it has at most `LARGEST_GROUP` entries; a larger tensor has one of
    its own, so nothing large is copied together.

    Args:
        shapes: static shapes of the tensors.

    Attributes:
        shapes, sizes: of the tensors.
        ranges: per vector, which tensors are in it.
    """

    def __init__(self, shapes):
        self.shapes = [tuple(tf.TensorShape(shape)) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.ranges, filled = [], 0
        for i, size in enumerate(self.sizes):
            if self.ranges and filled + size <= LARGEST_GROUP:
                self.ranges[-1] = range(self.ranges[-1].start, i + 1)
            else:
                self.ranges.append(range(i, i + 1))
                filled = 0
            filled += size

    def lengths(self):
        """Returns the number of entries of each vector."""
        return [sum(self.sizes[i] for i in members) for members in self.ranges]

    def pack(self, tensors):
        """Returns the vectors, of tensors of these shapes."""
        flat = [t if t.shape.rank == 1 else tf.reshape(t, [-1]) for t in tensors]
        return [
            flat[members.start] if len(members) == 1 else tf.concat([flat[i] for i in members], 0)
            for members in self.ranges
        ]

    def split(self, vectors):
        """Returns each tensor as a vector."""
        parts = []
        for vector, members in zip(vectors, self.ranges, strict=True):
            alone = len(members) == 1
            parts += [vector] if alone else tf.split(vector, [self.sizes[i] for i in members])
        return parts

    def unpack(self, vectors):
        """Returns the tensors, in their shapes."""
        return [
            part if len(shape) == 1 else tf.reshape(part, shape)
            for part, shape in zip(self.split(vectors), self.shapes, strict=True)
        ]

    def spread(self, values):
        """Repeats one number per tensor at all of its entries: per vector a vector, or a scalar.

        Args:
            values: a list of floats, or a tensor [number of tensors].
        """
        values = tf.convert_to_tensor(values, tf.float32)
        spread = []
        for members, length in zip(self.ranges, self.lengths(), strict=True):
            if len(members) == 1:
                spread.append(values[members.start])
                continue
            # Computed in the graph: constants would take as much memory as the model.
            ends = np.cumsum([self.sizes[i] for i in members])
            tensor = tf.searchsorted(tf.constant(ends, tf.int32), tf.range(length), side="right")
            spread.append(tf.gather(values[members.start : members.stop], tensor))
        return spread

    def means(self, vectors):
        """Returns the mean of each tensor, [number of tensors]; 0 of an empty one."""
        return tf.stack(
            [
                tf.reduce_mean(part) if size else tf.zeros([])
                for part, size in zip(self.split(vectors), self.sizes, strict=True)
            ]
        )
