"""Random public data of a given form, on which a model is tried before it sees private data."""

from typing import Any

import numpy as np
import tensorflow as tf

ROWS = 3
_LENGTH = 4  # of axes of unknown size, such as sequences


def random_batches(element_spec: Any) -> tuple[Any, Any]:
    """Draws two batches of `ROWS` examples that agree in their first one.

    Args:
        element_spec: `(x, y, sample_weight)` of TensorSpecs of a batch, or None for a leaf.
    """
    rng = np.random.default_rng(0)
    x_spec, y_spec, weight_spec = element_spec

    def draw(spec, kind):
        if spec is None:
            return None
        shape = [ROWS, *(_LENGTH if n is None else n for n in spec.shape[1:])]
        if spec.dtype == tf.string:
            return tf.fill(shape, "")
        if spec.dtype == tf.bool:
            return tf.constant(rng.integers(0, 2, shape), tf.bool)
        if spec.dtype.is_integer:
            # Zero and one are likely to be tokens; zero, to be a class.
            values = rng.integers(0, 2, shape) if kind == "x" else np.zeros(shape)
            return tf.cast(tf.constant(values), spec.dtype)
        values = rng.normal(size=shape) if kind == "x" else rng.uniform(0.1, 0.9, size=shape)
        return tf.cast(tf.constant(values), spec.dtype)

    def batch():
        parts = ((x_spec, "x"), (y_spec, "y"), (weight_spec, "weight"))
        return tuple(
            tf.nest.map_structure(lambda spec, kind=kind: draw(spec, kind), part)
            for part, kind in parts
        )

    first, others = batch(), batch()
    second = tf.nest.map_structure(
        lambda a, b: None if a is None else tf.concat([a[:1], b[1:]], 0), first, others
    )
    return first, second
