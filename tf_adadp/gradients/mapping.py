"""Maps over examples, the rows of lots, and the specs of what functions return."""

import contextlib
import logging
import threading

import tensorflow as tf

# What tracing raises where `tf.vectorized_map`, or a ghost pass, cannot follow a model or a loss;
# the last by `tf.vectorized_map` where the loop's body is a function of the C++ runtime (CTC).
TRACING_ERRORS = (
    tf.errors.OpError,
    ValueError,
    TypeError,
    NotImplementedError,
    AttributeError,
)


def output_specs(function, *arguments):
    """The TensorSpecs of what a function of TensorSpecs returns, by tracing it."""
    traced = tf.function(function, autograph=False).get_concrete_function(*arguments)
    return tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs
    )


def map_rows(function, elements, *, sequential, signature=None):
    """Maps a function over the rows of a structure of tensors.

    Args:
        function: one row of `elements` ↦ structure of tensors.
        elements: structure of tensors [B, ...].
        sequential: one row after the other, for what `tf.vectorized_map` cannot follow.
        signature: the TensorSpecs of what `function` returns, where they are known; else it is
            traced once more to find them, where rows are mapped one after the other.
    """
    if not sequential:
        # Where it falls back to loops for an operation (random draws, the gradients of convolutions
        # inside of loops), the result is the same.
        with without_log_of_pfor(logging.WARNING):
            return tf.vectorized_map(function, elements, warn=False)
    if signature is None:
        rows = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), elements)
        signature = output_specs(function, rows)
    return tf.map_fn(function, elements, fn_output_signature=signature, parallel_iterations=1)


@contextlib.contextmanager
def without_log_of_pfor(level=logging.ERROR):
    """Leaves out of TensorFlow's log what `tf.vectorized_map` writes there while it converts.

    Errors are left out where a failure is caught and seen to: it writes pages before it raises.
    What other threads, and other modules, write is not touched.

    Args:
        level: the highest level that is left out.
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


def map_examples(function, structure, seeds, sequential):
    """Maps a function over the rows of a structure of tensors and of their seeds.

    Args:
        function: `(*structure of one example, its seeds)` ↦ structure of tensors.
        structure: a tuple of tensors [B, ...] and structures of them; None leaves stay None.
        seeds: tensor [B, ...].
        sequential: one example after the other, for what `tf.vectorized_map` cannot follow.
    """
    leaves = tf.nest.flatten(structure)
    present = [i for i, leaf in enumerate(leaves) if leaf is not None]

    def one_example(example):
        parts, seeds = example
        flat = [None] * len(leaves)
        for i, part in zip(present, parts, strict=True):
            flat[i] = part
        return function(*tf.nest.pack_sequence_as(structure, flat), seeds)

    return map_rows(one_example, ([leaves[i] for i in present], seeds), sequential=sequential)


def join_batches(tensor):
    """[P, B, ...] as [P·B, ...]; None stays None."""
    if tensor is None:
        return None
    shape = tf.concat([[-1], tf.shape(tensor)[2:]], 0)
    return tf.ensure_shape(tf.reshape(tensor, shape), [None, *tensor.shape[2:]])
