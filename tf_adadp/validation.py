"""What a DPModel refuses, each with the way out."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.accounting import FixedSizeSampling, PoissonSampling

# Per preprocessing layer: whether its state was given to the constructor, and as which arguments.
_GIVEN_STATE = {
    keras.layers.Normalization: (lambda x: x.input_mean is not None, "mean and variance"),
    keras.layers.Discretization: (lambda x: x.num_bins is None, "bin_boundaries"),
    keras.layers.StringLookup: (lambda x: x._has_input_vocabulary, "vocabulary"),
    keras.layers.IntegerLookup: (lambda x: x._has_input_vocabulary, "vocabulary"),
    keras.layers.TextVectorization: (lambda x: x._has_input_vocabulary, "vocabulary"),
}
_STEERED = "Training metrics are raw statistics that no ε covers. Monitor a validation metric, {}."


def check_layers(model):
    """Refuses layers that mix examples or keep statistics of raw data."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            raise ValueError(
                f"Layer {layer.name!r} is a BatchNormalization in training mode: it mixes the "
                "examples of a batch and stores their raw statistics. Use "
                "keras.layers.GroupNormalization instead, or freeze it (trainable=False)."
            )
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"Layer {layer.name!r} is stateful: it carries one example's state into the next. "
                "Use stateful=False."
            )
        for kind, (is_given, arguments) in _GIVEN_STATE.items():
            if not isinstance(layer, kind) or is_given(layer):
                continue
            raise ValueError(
                f"Layer {layer.name!r} is a {type(layer).__name__} without given {arguments}: what "
                "`adapt` learns are raw statistics of its data, and they would be saved with the "
                f"model. Pass public constants as {arguments}, or preprocess outside of the model."
            )


def check_overrides(model):
    """Refuses models with a training step of their own, which a DPModel would pass by."""
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ValueError(
                f"{type(model).__name__} overrides {name}, which a DPModel does not call. Give the "
                "loss to compile, or add losses that depend on the data with `add_loss`."
            )


def check_trainable_state(trainable_state):
    """Refuses layers frozen or unfrozen since compile: sets and optimizer state would not fit.

    Args:
        trainable_state: {layer: its `trainable` when the model was compiled}.
    """
    for layer, trainable in trainable_state.items():
        if layer.trainable != trainable:
            raise ValueError(
                f"Layer {layer.name!r} has trainable={layer.trainable}, and had {trainable} when "
                "the model was compiled. Compile again after changing `trainable`."
            )


def check_callbacks(callbacks):
    """Refuses callbacks that let a raw training statistic steer the training."""
    for callback in callbacks:
        name = type(callback).__name__
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
        if not monitor.startswith(("val_", "epsilon_at_")) and monitor != "epsilon":
            raise ValueError(
                f"{name}(monitor={monitor!r}) steers training by a training metric. "
                + _STEERED.format(f"e.g. monitor='val_{monitor}'")
            )


def check_data_source(x):
    """Refuses data whose sampling law is unknown."""
    if isinstance(x, (tf.data.Dataset, tf.distribute.DistributedDataset)):
        raise TypeError(
            "x is a tf.data.Dataset: how it samples its batches is unknown, so its privacy cannot "
            "be accounted. Give arrays, or PoissonLots(...) over a random-access source; or "
            "declare the law of the batches: DeclaredLots(dataset, law=PoissonSampling(N, L))."
        )
    if isinstance(x, keras.utils.PyDataset) or hasattr(x, "__next__"):
        raise TypeError(
            f"x is a {type(x).__name__}: how it samples its batches is unknown, so its privacy "
            "cannot be accounted. Give arrays, or PoissonLots(...) over a random-access source."
        )
    if x is None:
        raise TypeError("x=None: give arrays with batch_size, or lots.")


def check_labels(y):
    """Refuses labels that no loss of numbers can take."""
    for label in keras.tree.flatten(y) if y is not None else ():
        if label is not None and label.dtype in ("string", "complex64", "complex128"):
            raise ValueError(
                f"y has dtype {label.dtype}: encode labels as integers or floats first, e.g. with "
                "keras.layers.StringLookup outside the model."
            )


def check_metric_names(names):
    """Refuses names by which a training metric would pass for a released or validation one."""
    for name in names:
        if name.startswith(("val_", "epsilon_at_")) or name == "epsilon":
            raise ValueError(
                f"The metric name {name!r} is taken: `val_*` are validation metrics, `epsilon` and "
                "`epsilon_at_*` the privacy cost. Rename the metric."
            )


def declared_law(law, batch_rows):
    """A law as its user states it, checked against the batch it is stated of."""
    if not isinstance(law, (PoissonSampling, FixedSizeSampling)):
        raise TypeError(f"law={law!r}: give a PoissonSampling or a FixedSizeSampling.")
    if isinstance(law, FixedSizeSampling) and law.size != batch_rows:
        raise ValueError(
            f"law says that every lot has {law.size} records, and this batch has {batch_rows}."
        )
    if batch_rows > law.num_examples:
        raise ValueError(
            f"law says that there are {law.num_examples} records, and this batch alone has "
            f"{batch_rows}."
        )
    return dataclasses.replace(law, declared=True)


def check_class_labels(loss, y, y_pred):
    """Refuses class indices without an output, on which TensorFlow would stop in mid-run.

    Args:
        loss: a built Keras `CompileLoss`, or None.
        y: the labels, or None where they are in lots, which are let pass.
        y_pred: the model's output as KerasTensors.
    """
    if loss is None or y is None:
        return
    for path, single, *_ in loss._flat_losses:
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
                f"y has labels from {labels.min():g} to {labels.max():g}, and the model {classes} "
                f"outputs: number the classes 0..{classes - 1}."
            )
