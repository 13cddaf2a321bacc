"""Takes one step on one lot: clips and sums its gradients, releases, updates and logs."""

from typing import Any

import keras
import tensorflow as tf

from tf_adadp import validation
from tf_adadp.distribution import replicas
from tf_adadp.gradients.compiled_losses import update_metrics
from tf_adadp.gradients.example_loss import weight_regularization
from tf_adadp.gradients.indices import no_index_stops
from tf_adadp.training.compiled import Compiled
from tf_adadp.training.preparation import Prepared
from tf_adadp.utils.keras_compat import compile_loss_of, loss_tracker_of


class LotStep:
    """Takes the step of `DPModel.fit` on one lot, or on a replica's share of one.

    Args:
        model: the `DPModel`.
        compiled: the arguments of `compile`.
        prepared: the objects that its graphs are traced with.
        expected_size: L, a variable, since one graph serves lots of every law.
    """

    def __init__(
        self,
        model: keras.Model,
        compiled: Compiled,
        prepared: Prepared,
        expected_size: tf.Variable,
    ):
        self._model, self._compiled, self._prepared = model, compiled, prepared
        self._expected_size = expected_size

    def __call__(self, lot: tuple) -> dict[str, Any]:
        """Takes the step, and returns its logs."""
        released = self._prepared.released
        # This runs whenever a graph is traced: the layers must still be as the engine saw them.
        validation.check_layers(self._model.model)
        self._prepared.layers.check_unchanged()
        if released is not None:
            released.begin()
        regularization, gradients = regularization_of(self._model.model)
        losses = self._compiled.optimizer.step_on_lot(
            self._prepared.engine,
            lot,
            self._expected_size.value(),
            on_batch=self._on_batch,
            regularization_gradients=gradients,
        )
        return self._logs(lot, losses, regularization)

    def _logs(self, lot, losses, regularization):
        """Returns the logs: raw metrics if they are asked for, and released values."""
        model, released = self._model, self._prepared.released
        optimizer, logs = self._compiled.optimizer, {}
        if self._compiled.logs_raw_metrics:
            count = replicas.all_reduced(tf.reduce_sum(lot[1]))
            mean_loss = tf.math.divide_no_nan(losses, count)
            if regularization is not None:
                mean_loss += regularization
            loss_tracker_of(model).update_state(mean_loss, sample_weight=count)
            logs.update(model.get_metrics_result())
        if released is not None:
            step = optimizer.iterations.value
            logs.update(released.release(self._expected_size.value(), step))
        logs.update(optimizer.step_logs())
        return logs

    def _on_batch(self, *batch):
        """Updates metrics with a physical batch; see the engines' `clipped_sum`."""
        with no_index_stops():
            if self._compiled.logs_raw_metrics:
                self._update_raw_metrics(*batch)
            if self._prepared.released is not None:
                self._prepared.released.add(*batch)

    def _update_raw_metrics(self, y, y_pred, sample_weight, mask, losses):
        """Feeds real rows to the metrics: raw statistics, for the logs only, not covered by ε."""
        real, loss = mask > 0, compile_loss_of(self._model)
        y, y_pred, sample_weight = tf.nest.map_structure(
            lambda t: None if t is None else tf.boolean_mask(t, real), (y, y_pred, sample_weight)
        )
        if loss is not None:
            update_metrics(loss, y, y_pred, sample_weight, tf.reduce_sum(mask))
        self._model.compute_metrics(None, y, y_pred, sample_weight)


def regularization_of(model: keras.Model) -> tuple[tf.Tensor | None, list | None]:
    """Returns a model's weight regularisation loss and its gradients, or two Nones."""
    with tf.GradientTape() as tape:
        loss = weight_regularization(model)
    if loss is None:
        return None, None
    return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])
