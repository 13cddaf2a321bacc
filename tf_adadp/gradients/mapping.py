"""Maps over examples, one after the other, and the specs of what functions return."""

import tensorflow as tf


def output_specs(function, *arguments):
    """The TensorSpecs of what a function of TensorSpecs returns, by tracing it."""
    traced = tf.function(function, autograph=False).get_concrete_function(*arguments)
    return tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs
    )


def sequential_map(function, elements):
    """`tf.map_fn` with the output signature found by tracing the function once."""
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), elements)
    signature = output_specs(function, specs)
    return tf.map_fn(function, elements, fn_output_signature=signature, parallel_iterations=1)
