"""The compiled metrics of one example at a time."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.utils.keras_compat import (
    CompileMetrics,
    flat_metrics,
    flatten_outputs,
    metric_direction,
    metric_function,
    metric_values,
    reduce_to_samplewise_values,
)


class ExampleMetrics:
    """Computes compiled Keras metrics for one example alone.

    Args:
        compiled: a built Keras `CompileMetrics`, or None.
        names: the metrics, by their names in the logs; None for all.

    Attributes:
        names: the names, in the order of the values.

    Raises:
        ValueError: a name is not compiled; a metric is not a mean of a function over examples.
    """

    def __init__(self, compiled: CompileMetrics | None, names: Sequence[str] | None = None):
        known = {} if compiled is None else _by_name(compiled)
        self.names = tuple(known if names is None else names)
        for name in self.names:
            if name not in known:
                raise ValueError(
                    f"released_metrics: {name!r} is none of the compiled metrics "
                    f"{', '.join(map(repr, known)) or '(there are none)'}."
                )
            _check_is_mean(name, known[name][1], known)
        self._compiled = compiled
        self._chosen = [known[name] for name in self.names]

    @property
    def modes(self) -> tuple[str | None, ...]:
        """Returns "min" per name where less is better, "max" where more is, None where unknown."""
        directions = (metric_direction(metric) for _, metric, _ in self._chosen)
        return tuple({"up": "max", "down": "min"}.get(direction) for direction in directions)

    def ahead(self, y: Any, y_pred: Any) -> list[tf.Tensor | None]:
        """Returns values [B, ...] of metrics that keep rows apart; None for the others."""
        if not self._chosen:
            return []
        y, y_pred = flatten_outputs(self._compiled, y), flatten_outputs(self._compiled, y_pred)
        return [
            metric_values(metric, y[output], y_pred[output])
            if _keeps_rows_apart(metric, y[output], y_pred[output])
            else None
            for output, metric, _ in self._chosen
        ]

    def __call__(
        self, y: Any, y_pred: Any, sample_weight: Any, ahead: list[tf.Tensor | None]
    ) -> list[tf.Tensor]:
        """Returns float32 scalars, one per name, for a batch of ONE example (leaves [1, ...]).

        A metric with parts (timesteps) is its mean over them, a weighted one the mean of the
        products with the weights.

        Args:
            y, y_pred, sample_weight: the example.
            ahead: the example's rows of the result of `ahead`.
        """
        if not self._chosen:
            return []
        y, y_pred = flatten_outputs(self._compiled, y), flatten_outputs(self._compiled, y_pred)
        weights = [None]
        if sample_weight is not None:
            weights = flatten_outputs(self._compiled, sample_weight)
        if len(weights) < len(y):  # as Keras does: the weight of the example, for all outputs
            weights = weights[:1] * len(y)
        values = []
        for (output, metric, weighted), value in zip(self._chosen, ahead, strict=True):
            if value is None:
                value = metric_values(metric, y[output], y_pred[output])
            value, _ = reduce_to_samplewise_values(
                value,
                weights[output] if weighted else None,
                reduce_fn=keras.ops.mean,
                dtype="float32",
            )
            values.append(tf.reduce_mean(value))
        return values


def _keeps_rows_apart(metric, y, y_pred):
    """Tells whether a metric is Keras's own accuracy, on labels and outputs that fit each other.

    They compare the argmax over the LAST axis, which on these ranks is not the batch's, with labels
    of the same rank, entry by entry. Mapping them would be slow: `tf.vectorized_map` cannot convert
    Keras's argmax, and loops over the rows.
    """
    function, arguments = metric_function(metric)
    if arguments:
        return False
    labels, classes = len(y.shape), len(y_pred.shape)
    if function is keras.metrics.sparse_categorical_accuracy:
        return classes >= 2 and (labels == classes - 1 or (labels == classes and y.shape[-1] == 1))
    return function is keras.metrics.categorical_accuracy and labels == classes >= 2


def _by_name(compiled):
    """Returns {name in the logs: (number of the output, metric, whether it is weighted)}."""
    found = flat_metrics(compiled)
    return dict(zip(compiled.result(), found, strict=True))  # results come in this order


def _is_mean(metric):
    wrapper = keras.metrics.MeanMetricWrapper
    return (
        isinstance(metric, wrapper)
        and type(metric).update_state is wrapper.update_state
        and type(metric).result is wrapper.result
    )


def _check_is_mean(name, metric, known):
    if _is_mean(metric):
        return
    others = [name for name, (_, metric, _) in known.items() if _is_mean(metric)]
    raise ValueError(
        f"released_metrics: {name!r} is a {type(metric).__name__}, not a mean of a function "
        "over examples, so its sensitivity has no bound. Name those to release, "
        f"ReleasedMetrics(…, metrics={others}); it stays available on validation data."
    )
