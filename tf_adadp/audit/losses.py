"""Computes the loss of every record, for membership attacks. Raw, not private."""

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.model import DPModel
from tf_adadp.sampling.packing import pack
from tf_adadp.sampling.sources import ArraySource
from tf_adadp.utils.keras_compat import compile_loss_of


def example_losses(model: keras.Model, x: object, y: object, batch_size: int = 256) -> np.ndarray:
    """Computes the compiled loss of each record, float64 [N], with the layers in inference mode.

    Args:
        model: a compiled `keras.Model` or `DPModel` that was trained, or called, at least once.
        x, y: the records, in the forms that `fit` takes.
        batch_size: how many are worked on at once.

    A RAW statistic of the records, which ε does not cover: do not publish it.

    Raises:
        ValueError: the model has no compiled loss, or it is not built.

    Example:
        >>> layer = keras.layers.Dense(1, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.Input((2,)), layer])
        >>> model.compile(loss="mse")
        >>> x, y = np.ones((2, 2)), np.array([[1.0], [2.0]])
        >>> loss = model.evaluate(x, y, verbose=0)
        >>> dp.audit.example_losses(model, x, y).tolist()
        [1.0, 4.0]
    """
    loss = compile_loss_of(model)
    if loss is None or not loss.built:
        raise ValueError(
            f"The loss of {model.name!r} is not there or not built: compile the model with a loss "
            "and train it, or call `evaluate` once."
        )
    plain = model.model if isinstance(model, DPModel) else model
    losses = ExampleLoss(plain, loss, training=False)
    seeds = tf.zeros([losses.num_seed_generators, 2], tf.uint32)
    source = ArraySource(x, y)

    def of_batch(x, y):
        y_pred, _ = losses.predictions(losses.trainable_values(), x, seeds)
        return losses.losses(y, y_pred, None, tf.shape(tf.nest.flatten(x)[0])[0])

    x_spec, y_spec, _ = source.spec
    traced = tf.function(of_batch, autograph=False).get_concrete_function(x_spec, y_spec)
    found = []
    for first in range(0, len(source), batch_size):
        rows = np.arange(first, min(first + batch_size, len(source)))
        _, leaves = source.rows(rows, 1)
        (x_rows, y_rows, _), _ = pack(source.spec, [*map(tf.constant, leaves), None])
        found.append(traced(x_rows, y_rows).numpy())
    return np.concatenate(found).astype(np.float64)
