"""Chooses the form of a product, and adds forms up."""

from collections.abc import Sequence

import tensorflow as tf

from tf_adadp.clipping.row_gradients import RowGradients, Rows
from tf_adadp.gradients.forms.factored import Factored
from tf_adadp.gradients.forms.layout import MatrixLayout
from tf_adadp.gradients.forms.lookups import Lookups
from tf_adadp.gradients.forms.outer import OuterProducts
from tf_adadp.gradients.forms.sequence import SequenceProducts


def add(parts: Sequence[RowGradients]) -> RowGradients:
    """Adds several gradients of one variable, as of a layer that is used more than once."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(p, Factored) for p in parts):
        layout = parts[0].layout
        if all(p.layout in (layout, layout.swapped) for p in parts):
            # Of a matrix and its transpose, a and d change places.
            pairs = [p.factors if p.layout == layout else p.factors[::-1] for p in parts]
            a, d = (_end_to_end(side) for side in zip(*pairs, strict=True))
            return SequenceProducts(a, d, layout)
    if all(isinstance(p, Lookups) for p in parts):
        indices = tf.concat([p._indices for p in parts], axis=1)
        return Lookups(indices, tf.concat([p._d for p in parts], axis=1), parts[0].shape)
    return Rows(tf.add_n([p.materialize() for p in parts]))


def products(
    inputs: tf.Tensor, outputs: tf.Tensor, layout: MatrixLayout
) -> OuterProducts | SequenceProducts:
    """Makes the gradient of a matrix from inputs [B, ..., i] and output gradients [B, ..., o]."""
    if inputs.shape.rank == 2:
        return OuterProducts(inputs, outputs, layout)
    length = inputs.shape[1:-1].num_elements()
    if length == 1:
        return OuterProducts(
            tf.reshape(inputs, [-1, layout.num_rows]),
            tf.reshape(outputs, [-1, layout.num_columns]),
            layout,
        )
    if inputs.shape.rank > 3:
        length = -1 if length is None else length
        batch = tf.shape(inputs)[0]
        inputs = tf.reshape(inputs, [batch, length, layout.num_rows])
        outputs = tf.reshape(outputs, [batch, length, layout.num_columns])
    return SequenceProducts(inputs, outputs, layout)


def _end_to_end(factors):
    """Joins factors [B, n] or [B, T, n] to sequences."""
    if all(f.shape.rank == 2 for f in factors):
        return tf.stack(factors, axis=1)
    return tf.concat([tf.expand_dims(f, 1) if f.shape.rank == 2 else f for f in factors], axis=1)
