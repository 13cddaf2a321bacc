"""Refuses arguments of compile and fit that break privacy, each with a fix."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.accounting import SamplingLaw
from tf_adadp.metrics.settings import PREFIX
from tf_adadp.persistence.files import refuse_legacy_format
from tf_adadp.utils.keras_compat import CompileLoss, flat_losses, learning_rate_of
from tf_adadp.utils.problems import Problem, raise_first

_SET_RATES = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
_Schedule = keras.optimizers.schedules.LearningRateSchedule
_STEERED = (
    "Raw training metrics are statistics that no ε covers. Monitor a validation metric, e.g. "
    "monitor='val_{}', or a released one, {}."
)


def check_trainable_state(trainable_state: Mapping[keras.Layer, bool]) -> None:
    """Refuses layers frozen or unfrozen since compile: the optimizer's state would not fit.

    Args:
        trainable_state: {layer: its `trainable` when the model was compiled}.
    """
    for layer, trainable in trainable_state.items():
        if layer.trainable != trainable:
            raise ValueError(
                f"Layer {layer.name!r} has trainable={layer.trainable}, and had {trainable} when "
                "the model was compiled. Compile again after changing `trainable`, or adding LoRA "
                "adapters."
            )


def check_callbacks(
    callbacks: Iterable[keras.callbacks.Callback],
    released: Sequence[str] = (),
    optimizer: keras.optimizers.Optimizer | None = None,
) -> None:
    """Refuses callbacks that steer training by a raw statistic, or that are sure to fail.

    The latter would fail when they first act, after part of the budget is spent.

    Args:
        callbacks: a list.
        released: names in the logs that were released with noise.
        optimizer: the one that trains.
    """
    for callback in callbacks:
        name = type(callback).__name__
        rate = learning_rate_of(optimizer)
        if isinstance(callback, _SET_RATES) and isinstance(rate, _Schedule):
            raise ValueError(
                f"{name} sets the learning rate, and {type(optimizer).__name__} follows a "
                f"schedule, {type(rate).__name__}, which cannot be set. Give the optimizer a "
                f"number, {type(optimizer).__name__}(learning_rate=0.01, ...), or leave {name} out."
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and not callback.save_weights_only:
            refuse_legacy_format(callback.filepath)
        if isinstance(callback, keras.callbacks.TerminateOnNaN):
            raise ValueError(
                f"{name} stops on the training loss, which is a raw statistic. Leave it out: "
                "non-finite gradients contribute nothing to a private sum."
            )
        monitor = getattr(callback, "monitor", None)
        if not isinstance(monitor, str):
            continue
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and not callback.save_best_only:
            continue
        if not monitor.startswith(("val_", "epsilon_at_")) and monitor not in (
            "epsilon",
            *released,
        ):
            way_out = (
                f"one of {', '.join(released)}"
                if released
                else ("which compile(released_metrics=...) puts into the logs")
            )
            raise ValueError(
                f"{name}(monitor={monitor!r}) steers training by a training metric. "
                + _STEERED.format(monitor.removeprefix(PREFIX), way_out)
            )


def check_data_source(x: object) -> None:
    """Refuses data whose sampling law is unknown."""
    if isinstance(x, tf.distribute.DistributedDataset) or hasattr(x, "__next__"):
        raise TypeError(
            f"x is a {type(x).__name__}: how it samples its batches is unknown, so its privacy "
            "cannot be accounted. Give arrays or a tf.data.Dataset with batch_size, or "
            "PoissonLots(...) over a random-access source."
        )
    if x is None:
        raise TypeError("x=None: give arrays or a tf.data.Dataset with batch_size, or lots.")


def label_problems(y: object) -> Iterator[Problem]:
    """Yields a `Problem` for each label of a type that no numeric loss takes.

    Args:
        y: a structure of KerasTensors, or None.
    """
    for label in keras.tree.flatten(y) if y is not None else ():
        if label is not None and label.dtype in ("string", "complex64", "complex128"):
            yield Problem(
                "y",
                f"has dtype {label.dtype}",
                "Encode labels as integers or floats first, e.g. with keras.layers.StringLookup "
                "outside the model.",
            )


def check_labels(y: object, sample_weight: object = None) -> None:
    """Raises ValueError for the first of `label_problems`, and for weights of other outputs."""
    raise_first(label_problems(y))
    if isinstance(y, dict) and isinstance(sample_weight, dict) and y.keys() != sample_weight.keys():
        raise ValueError(
            f"sample_weight is for the outputs {sorted(sample_weight)}, and y for {sorted(y)}: "
            "give weights of all outputs of y, ones where an output needs none."
        )


def check_metric_names(names: Iterable[str], of_optimizer: Iterable[str] = ()) -> None:
    """Refuses metric names that look like released or validation metrics.

    Args:
        names: of the raw metrics.
        of_optimizer: names under which the optimizer logs its releases.
    """
    taken = {"epsilon", *of_optimizer}
    for name in names:
        if name.startswith(("val_", "epsilon_at_", PREFIX)) or name in taken:
            raise ValueError(
                f"The metric name {name!r} is taken: `val_*` are validation metrics, `epsilon` and "
                f"`epsilon_at_*` the privacy cost, `{PREFIX}*` metrics with noise, and "
                "optimizers log what they released under names of their own. Rename the metric."
            )


def declared_law(law: SamplingLaw, batch_rows: int) -> SamplingLaw:
    """Returns the law that a user states for a batch, validated against its size."""
    if not (isinstance(law, SamplingLaw) and law.can_be_declared):
        raise TypeError(f"law={law!r}: give a PoissonSampling or a FixedSizeSampling.")
    if law.max_lot_size is not None and law.lot_size_probability(batch_rows) == 0:
        raise ValueError(
            f"law says that every lot has {law.max_lot_size} records, and this batch has "
            f"{batch_rows}."
        )
    if batch_rows > law.num_examples:
        raise ValueError(
            f"law says that there are {law.num_examples} records, and this batch alone has "
            f"{batch_rows}."
        )
    if law.lot_size_probability(batch_rows) == 0:
        raise ValueError(
            f"law gives lots of {batch_rows} records, as this batch has, probability 0: "
            f"{law.describe()}."
        )
    return law.as_declared()


def check_class_labels(
    loss: CompileLoss | None, y: object, y_pred: object, name: str = "y"
) -> None:
    """Refuses class labels out of range, at which TensorFlow would stop during training.

    Args:
        loss: a built Keras `CompileLoss`, or None.
        y: the labels, or None where they are in lots, which are not checked.
        y_pred: the model's output as KerasTensors.
        name: the argument that holds them.
    """
    if loss is None or y is None:
        return
    for path, single, *_ in flat_losses(loss):
        labels, outputs = y, y_pred
        try:
            for key in path:
                labels, outputs = labels[key], outputs[key]
        except (KeyError, IndexError, TypeError):
            continue  # outputs and labels in different structures; Keras matches them by name
        if keras.tree.is_nested(labels) or keras.tree.is_nested(outputs):
            continue
        if getattr(single, "fn", None) is not keras.losses.sparse_categorical_crossentropy:
            continue
        if getattr(single, "ignore_class", None) is not None:
            continue
        labels, classes = np.asarray(labels), outputs.shape[-1]
        if not (labels.min() >= 0 and labels.max() < classes):  # NaN is no class either
            raise ValueError(
                f"{name} has labels from {labels.min():g} to {labels.max():g}, and the model "
                f"{classes} outputs: number the classes 0..{classes - 1}."
            )
