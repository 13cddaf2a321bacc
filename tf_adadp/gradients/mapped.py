"""Traces maps over the rows of a batch, vectorised where TensorFlow can."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_adadp.gradients.example_graph import shaped_by_values
from tf_adadp.gradients.mapping import TRACING_ERRORS, map_rows, without_log_of_pfor


def traced_map(
    function: Callable, tensors: Sequence[tf.Tensor], signature: Any = None
) -> tuple[tf.types.experimental.ConcreteFunction, bool]:
    """Traces a function of the rows of some tensors, one after the other where it must be.

    Vectorised, a batch would stop where two of its examples differ in the number of their words.

    Args:
        function: rows of the tensors, as arguments, ↦ structure of tensors.
        tensors: [B, ...] each.
        signature: the TensorSpecs of the function's result, where they are known.

    Returns:
        `(a function of the tensors, whether it goes through the rows one after the other)`.
    """
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]

    def traced(sequential):
        def run(*rows):
            return map_rows(
                lambda row: function(*row), rows, sequential=sequential, signature=signature
            )

        return tf.function(run, autograph=False).get_concrete_function(*specs)

    try:
        with without_log_of_pfor():
            vectorized = traced(sequential=False)
    except TRACING_ERRORS:
        return traced(sequential=True), True
    if shaped_by_values(vectorized.graph) is not None:
        return traced(sequential=True), True
    return vectorized, False
