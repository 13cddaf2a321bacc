"""Serves gradients known as products, of any number of terms per example."""

from typing import Self

import tensorflow as tf

from tf_adadp.clipping.row_gradients import RowGradients
from tf_adadp.gradients.forms.common import with_shape
from tf_adadp.gradients.forms.layout import MatrixLayout


class Factored(RowGradients):
    """Holds gradients as a and d, [B, (T,) i] and [B, (T,) o].

    Args:
        inputs: a, float.
        outputs: d, float.
        layout: the `MatrixLayout` of the variable.

    Attributes:
        layout: as given.
    """

    terms: tuple[None, ...]  # the axes between the batch and the factors

    def __init__(self, inputs: tf.Tensor, outputs: tf.Tensor, layout: MatrixLayout):
        lead = [None, *self.terms]
        self._a = with_shape(tf.cast(inputs, tf.float32), [*lead, layout.num_rows])
        self._d = with_shape(tf.cast(outputs, tf.float32), [*lead, layout.num_columns])
        self.layout = layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the variable's shape."""
        return self.layout.shape

    @property
    def factors(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a and d."""
        return self._a, self._d

    def scaled(self, factor: float | tf.Tensor) -> Self:
        """See `RowGradients.scaled`."""
        return type(self)(self._a, factor * self._d, self.layout)

    def with_layout(self, layout: MatrixLayout) -> Self:
        """Returns the same products as gradients of a variable of another shape."""
        return type(self)(self._a, self._d, layout)

    def with_factors(self, a: tf.Tensor, d: tf.Tensor, layout: MatrixLayout) -> Self:
        """Returns products of other factors."""
        return type(self)(a, d, layout)
