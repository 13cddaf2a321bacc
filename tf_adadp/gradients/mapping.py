"""Maps over examples."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# Errors of tracing where `tf.vectorized_map`, or a ghost pass, cannot follow a model or a loss.
# `tf.vectorized_map` raises the last one where a loop's body is a function of the C++ runtime
# (CTC).
TRACING_ERRORS = (
    tf.errors.OpError,
    ValueError,
    TypeError,
    NotImplementedError,
    AttributeError,
)


def output_specs(function: Callable, *arguments: Any) -> Any:
    """Returns the TensorSpecs of a function's result, by tracing it."""
    traced = tf.function(function, autograph=False).get_concrete_function(*arguments)
    return tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs
    )


def map_rows(function: Callable, elements: Any, *, sequential: bool, signature: Any = None) -> Any:
    """Maps a function over the rows of a structure of tensors.

    Args:
        function: one row of `elements` ↦ structure of tensors.
        elements: structure of tensors [B, ...].
        sequential: one row after the other, for functions that `tf.vectorized_map` cannot follow.
        signature: the TensorSpecs of the result of `function`, where they are known. Otherwise a
            sequential map traces it once more to find them.
    """
    if not sequential:
        # The result does not change where TensorFlow falls back to a loop for an operation (random
        # draws, the gradients of convolutions inside of loops).
        with without_log_of_pfor(logging.WARNING):
            return tf.vectorized_map(function, elements, warn=False)
    if signature is None:
        rows = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), elements)
        signature = output_specs(function, rows)
    return tf.map_fn(function, elements, fn_output_signature=signature, parallel_iterations=1)


@contextlib.contextmanager
def without_log_of_pfor(level: int = logging.ERROR) -> Iterator[None]:
    """Drops the messages that `tf.vectorized_map` logs while it converts.

    Its errors may be dropped where the failure is caught: it logs long messages before it raises.
    Messages of other threads and other modules are kept.

    Args:
        level: the highest level that is dropped.
    """
    thread = threading.get_ident()

    def passes(record):
        return (
            record.filename != "pfor.py"
            or record.levelno > level
            or threading.get_ident() != thread
        )

    logger = tf.get_logger()
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def map_examples(function: Callable, structure: tuple, seeds: tf.Tensor, sequential: bool) -> Any:
    """Maps a function over the rows of a structure of tensors and of their seeds.

    Args:
        function: `(*structure of one example, its seeds)` ↦ structure of tensors.
        structure: a tuple of tensors [B, ...] and structures of them; None leaves stay None.
        seeds: tensor [B, ...].
        sequential: one example after the other, if `tf.vectorized_map` cannot follow.
    """
    present, packed = present_leaves(structure)

    def one_example(example):
        parts, seeds = example
        return function(*packed(parts), seeds)

    return map_rows(one_example, (present, seeds), sequential=sequential)


def present_leaves(structure: Any) -> tuple[list[tf.Tensor], Callable]:
    """Returns the leaves that are not None, and a function that packs others in their places."""
    leaves = tf.nest.flatten(structure)

    def packed(parts):
        parts = iter(parts)
        flat = [None if leaf is None else next(parts) for leaf in leaves]
        return tf.nest.pack_sequence_as(structure, flat)

    return [leaf for leaf in leaves if leaf is not None], packed


def join_batches(tensor: tf.Tensor | None) -> tf.Tensor | None:
    """Reshapes [P, B, ...] to [P·B, ...]; None stays None."""
    if tensor is None:
        return None
    shape = tf.concat([[-1], tf.shape(tensor)[2:]], 0)
    return tf.ensure_shape(tf.reshape(tensor, shape), [None, *tensor.shape[2:]])
