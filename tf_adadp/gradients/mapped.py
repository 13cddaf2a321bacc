"""Traces maps over the rows of a batch, vectorised where TensorFlow can."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_adadp.gradients.example_graph import shaped_by_values
from tf_adadp.gradients.mapping import (
    TRACING_ERRORS,
    map_rows,
    present_leaves,
    without_log_of_pfor,
)


def traced_map(
    function: Callable, structure: tuple, signature: Any = None
) -> tuple[Callable, bool]:
    """Traces a map over the rows of a structure, one after the other where it must be.

    A vectorised map raises where a shape differs between two examples, e.g. words in a text.

    Args:
        function: `(*structure of one row)` ↦ structure of tensors.
        structure: a tuple of tensors [B, ...] and structures of them; None leaves stay None.
        signature: the TensorSpecs of the function's result, where they are known.

    Returns:
        `(call, sequential)`: `call()` maps the structure, by one operation of the graph that it
        is called in, whose first operands are `num_mapped(structure)` tensors of rows and all
        others captured; `sequential` tells whether the rows are mapped one after the other.
    """
    tensors, packed = present_leaves(structure)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]

    def traced(sequential):
        def run(*batch):
            return map_rows(
                lambda row: function(*packed(row)),
                batch,
                sequential=sequential,
                signature=signature,
            )

        made = tf.function(run, autograph=False).get_concrete_function(*specs)
        return functools.partial(made, *tensors), made.graph

    try:
        with without_log_of_pfor():
            call, graph = traced(sequential=False)
        if shaped_by_values(graph) is None:
            return call, False
    except TRACING_ERRORS:
        pass
    return traced(sequential=True)[0], True


def num_mapped(structure: tuple) -> int:
    """Returns how many tensors of a structure `traced_map` maps: those that are not None."""
    return len(present_leaves(structure)[0])
