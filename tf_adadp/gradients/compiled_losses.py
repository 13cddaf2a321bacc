"""Copies Keras's compiled losses for single examples, and finds losses that mix examples.

A `CompileLoss` holds the losses of `compile` and reduces each over the batch. Private training
needs them for a batch of one, without state, and without the reduction.
"""

from typing import Any

import keras
import tensorflow as tf

from tf_adadp.gradients.indices import no_index_stops
from tf_adadp.gradients.patching import functions_inlined
from tf_adadp.gradients.proof import Follower, Mixed, inputs_of_rows
from tf_adadp.gradients.proof.obstacles import Obstacle, of_effect, of_error, of_value
from tf_adadp.utils.keras_compat import (
    CompileLoss,
    compute_output_spec,
    flat_losses,
    shallow_copy,
    unscale_loss_for_distribution,
    with_losses,
)
from tf_adadp.utils.problems import Problem, raise_first

PROBE_BATCH = 13  # a batch size that no axis of labels or predictions is likely to have


def probe(spec: Any, rows: int = PROBE_BATCH) -> Any:
    """Describes a batch of `rows` examples as KerasTensors; None stays None.

    Args:
        spec: structure of TensorSpecs of a batch.
        rows: how many examples.
    """

    def tensor(s):
        return keras.KerasTensor((rows, *s.shape[1:]), dtype=s.dtype.name)

    return tf.nest.map_structure(lambda s: None if s is None else tensor(s), spec)


def each_alone(loss: CompileLoss) -> CompileLoss:
    """Copies a built CompileLoss to give w·loss(y, y_pred) on a batch of one, without state."""
    return without_state(_map_losses(loss, _without_batch_reduction))


def without_state(loss: CompileLoss) -> CompileLoss:
    """Copies a built CompileLoss; its losses write no Keras variables and raise for no label.

    A running statistic of raw predictions, kept by a loss, would reach the gradients of later lots.
    For labels out of range, see `indices`.
    """

    def isolated(single):
        def call(y_true, y_pred, sample_weight=None):
            with keras.StatelessScope(), no_index_stops():
                value = single(y_true, y_pred, sample_weight)
            # Keras divides means by the number of replicas, for gradients that it adds up.
            if single.reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight"):
                value = unscale_loss_for_distribution(value)
            return value

        return call

    return _map_losses(loss, isolated)


def update_metrics(
    loss: CompileLoss, y: Any, y_pred: Any, sample_weight: Any, count: tf.Tensor
) -> None:
    """Updates the metrics that Keras keeps for each of several losses, with `count` rows.

    They become means of w·loss(y, y_pred) over the examples. Keras updates them when it calls the
    losses, but where the number of rows is not static, batches of all sizes weigh the same.
    """
    if not loss.metrics:
        return
    sums = [_without_batch_reduction(e.loss).reduction == "sum" for e in flat_losses(loss)]
    each = zip(loss.metrics, sums, strict=True)

    def noted(single):
        metric, is_sum = next(each)

        def call(*rows):
            value = single(*rows)
            mean = tf.math.divide_no_nan(value, count) if is_sum else value
            metric.update_state(tf.where(count > 0, mean, 0.0), sample_weight=count)
            return value

        return call

    _map_losses(each_alone(loss), noted)(y, y_pred, sample_weight)


def check_reduces_no_batch(loss: CompileLoss, y: Any, y_pred: Any) -> None:
    """Raises ValueError for the first of `batch_reductions`."""
    raise_first(batch_reductions(loss, y, y_pred))


def batch_reductions(loss: CompileLoss, y: Any, y_pred: Any) -> list[Problem]:
    """Returns a `Problem` for every loss that reduces the batch axis, and so mixes examples.

    Args:
        loss: a built Keras `CompileLoss`.
        y, y_pred: structures of KerasTensors with batch size `PROBE_BATCH`.
    """
    problems = []
    fix = (
        "Return one value per example (shape [batch, ...]) from `call` and leave the reduction to "
        "Keras."
    )
    if any(len(output.shape) == 1 for output in keras.tree.flatten(y_pred)):
        fix = (
            "Let the model return [batch, 1] instead of [batch], and give labels of that shape: "
            "losses of Keras take the mean over the last axis."
        )

    def check(single, call):
        values = call()
        if len(values.shape) == 0 or values.shape[0] not in (PROBE_BATCH, None):
            problems.append(
                Problem(
                    f"The loss {single.name!r}",
                    f"returns shape {tuple(values.shape)} for a batch of {PROBE_BATCH}: it "
                    "reduces the batch axis, so the loss of one example depends on the others",
                    fix,
                )
            )
        return values

    compute_output_spec(_showing_rows(loss, check), y, y_pred)
    return list(dict.fromkeys(problems))  # Keras may call a loss twice


def loss_obstacles(loss: CompileLoss, y: Any, y_pred: Any) -> list[tuple[str, Obstacle]]:
    """Returns (name, obstacle) of each loss that is not proven to keep examples apart.

    A loss that cannot be traced for a batch is among them; it may work for single examples. For all
    other losses, the value of an example is a function of its own labels and predictions.

    Args:
        loss: a built Keras `CompileLoss`.
        y, y_pred: structures of TensorSpecs or KerasTensors, without axes of unknown size but for
            the first one.
    """
    follower, found = Follower(), []

    def see(single, call):
        try:
            values = tf.identity(call())
        except Exception as error:  # the user's code may raise anything
            found.append((single.name, of_error(error)))
            return 0.0
        follower.advance(values.graph.get_operations())
        value = follower.of(values)
        if follower.effects:
            found.append((single.name, of_effect(follower.effects[0])))
            follower.effects.clear()
        elif isinstance(value, Mixed):
            found.append((single.name, of_value(value)))
        return values

    def followed(y, y_pred):
        for tensor in tf.nest.flatten((y, y_pred)):
            if tensor is not None:
                follower.set(tensor, inputs_of_rows(tensor))
        with functions_inlined(), no_index_stops(), keras.StatelessScope():
            _showing_rows(loss, see)(y, y_pred)

    specs = tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec((None, *t.shape[1:]), t.dtype), (y, y_pred)
    )
    tf.function(followed, autograph=False).get_concrete_function(*specs)
    return list(dict.fromkeys(found))  # Keras may call a loss twice


def _showing_rows(loss, see):
    """Copies a CompileLoss to sum `see(single loss, function that computes its values)`."""

    def shown(single):
        def call(y_true, y_pred, sample_weight=None):
            y_true, y_pred = keras.tree.map_structure(
                lambda t: keras.ops.cast(t, single.dtype), (y_true, y_pred)
            )
            return keras.ops.sum(see(single, lambda: single.call(y_true, y_pred)))

        return call

    return _map_losses(loss, shown)


def _map_losses(compile_loss, function):
    """Copies a built CompileLoss with each of its losses replaced by function(loss).

    The copy has no metrics: inside a map over examples they would be updated once, and wrongly, for
    all examples of a physical batch.
    """
    losses = [function(entry.loss) for entry in flat_losses(compile_loss)]
    return with_losses(compile_loss, losses)


def _without_batch_reduction(loss):
    """Copies a loss so that its value on a batch of one is w·loss(y, y_pred)."""
    reductions = {"mean_with_sample_weight": "sum_over_batch_size", "none": "sum", None: "sum"}
    if loss.reduction in reductions:
        loss = shallow_copy(loss)
        loss.reduction = reductions[loss.reduction]
    return loss
