"""Counts the operations in the graph of a step."""

import keras
import pytest
import tensorflow as tf

import tf_adadp as dp


def _operations(make, layers):
    """Counts those of `apply_private`, for weights and biases of so many layers."""
    shapes = [(8, 8), (8,)] * layers
    variables = [keras.Variable(tf.zeros(shape)) for shape in shapes]
    optimizer = make(noise_multiplier=1.0)
    optimizer.build(variables)

    def release(*sums):
        optimizer.apply_private(dp.ClippedSums(sums, optimizer.clipping_set()), 10.0)

    step = tf.function(release, autograph=False)
    specs = [tf.TensorSpec(shape) for shape in (*shapes, *([()] * len(optimizer.statistics)))]
    return len(step.get_concrete_function(*specs).graph.get_operations())


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("make", "most"),
    [(dp.DPSGD, 12), (lambda **k: dp.ADADP(0.01, **k), 100), (dp.ADADP, 134)],
    ids=["DPSGD", "ADADP", "ADADP that finds its rate"],
)
def test_a_variable_more_is_few_operations_more(make, most):
    """Hundreds of small variables share the work; Keras's own update takes 8 to 20 of these. A
    shape by rows and columns takes 30 more than one by rows."""
    per_variable = (_operations(make, 40) - _operations(make, 20)) / 40
    assert per_variable <= most
