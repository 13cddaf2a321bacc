"""What a DPModel refuses, each with the way out."""

import keras
import numpy as np
import tensorflow as tf

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


def check_trainable_state(model):
    """Refuses layers frozen or unfrozen since compile: sets and optimizer state would not fit."""
    for layer, trainable in model._compiled_trainable_state.items():
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
        if not monitor.startswith("val_") and monitor != "epsilon":
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


def check_class_labels(loss, y, y_pred):
    """Refuses class indices without an output, on which TensorFlow would stop in mid-run.

    Args:
        loss: a built Keras `CompileLoss`, or None.
        y: array of labels, or a structure or None, which are let pass.
        y_pred: the KerasTensor (or structure) of the model's output.
    """
    if loss is None or y is None or keras.tree.is_nested(y) or keras.tree.is_nested(y_pred):
        return
    loss = loss._flat_losses[0].loss
    if getattr(loss, "fn", None) is not keras.losses.sparse_categorical_crossentropy:
        return
    if getattr(loss, "ignore_class", None) is not None:
        return
    labels, classes = np.asarray(y), y_pred.shape[-1]
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"y has labels from {labels.min():g} to {labels.max():g}, and the model {classes} "
            f"outputs: number the classes 0..{classes - 1}."
        )
