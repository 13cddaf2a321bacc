"""Refuses layers and methods of a model that break privacy, without running it."""

from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.utils.keras_compat import (
    has_given_vocabulary,
    layers_of,
    lora_weights,
    seed_generators,
)
from tf_adadp.utils.problems import Problem, raise_first

# Per preprocessing layer: whether its state was given to the constructor, and as which arguments.
_GIVEN_STATE = {
    keras.layers.Normalization: (lambda x: _has_public_statistics(x), "mean and variance"),
    keras.layers.Discretization: (lambda x: x.num_bins is None, "bin_boundaries"),
    keras.layers.StringLookup: (lambda x: has_given_vocabulary(x), "vocabulary"),
    keras.layers.IntegerLookup: (lambda x: has_given_vocabulary(x), "vocabulary"),
    keras.layers.TextVectorization: (lambda x: has_given_vocabulary(x), "vocabulary"),
}
_LOSS = "Give the loss to compile, or add losses that depend on the data with `add_loss`."
_METRICS = "Give the metrics to compile, or compile `.model` and call its `evaluate`."
_PREDICTION = "Do it in `call`, or call `predict` of `.model`."
# Per method of Keras's models that a DPModel does not call: advice and severity.
_NOT_CALLED = {
    "train_step": (_LOSS, "error"),
    "compute_loss": (_LOSS, "error"),
    "test_step": (_METRICS, "warning"),
    "compute_metrics": (_METRICS, "warning"),
    "predict_step": (_PREDICTION, "warning"),
}
_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup)


def _has_public_statistics(layer):
    """Tells whether a Normalization has given statistics, or those of a new layer."""
    if layer.input_mean is not None:
        return True
    if not layer.built:
        return False
    with tf.init_scope():  # also where a step is being traced
        mean, variance = (np.asarray(v) for v in (layer.adapt_mean, layer.adapt_variance))
    return not mean.any() and bool(np.all(variance == 1.0))


def layer_problems(model: keras.Model) -> Iterator[Problem]:
    """Yields a `Problem` for every layer of Keras's that private training refuses."""
    for layer in layers_of(model):
        yield from _problems_of(layer)


def check_layers(model: keras.Model) -> None:
    """Raises ValueError for the first error of `layer_problems`."""
    raise_first(layer_problems(model))


def _problems_of(layer):
    where, kind = f"Layer {layer.name!r}", type(layer).__name__
    if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
        yield Problem(
            where,
            "is a BatchNormalization in training mode: it mixes the examples of a batch and stores "
            "their raw statistics",
            "Use GroupNormalization in its place, as tf_adadp.make_compatible(model) does, or "
            "freeze it (trainable=False).",
        )
    if isinstance(layer, keras.layers.RNN) and layer.stateful:
        yield Problem(
            where,
            "is stateful: it carries one example's state into the next",
            "Use stateful=False, as tf_adadp.make_compatible(model) does.",
        )
    if isinstance(layer, keras.layers.SpectralNormalization):
        yield Problem(
            where,
            "is a SpectralNormalization: in training it normalises its kernel in place, which a "
            "private step drops, so that the trained model would use another kernel than its "
            "training",
            f"Use the layer {layer.layer.name!r} by itself, as tf_adadp.make_compatible(model) "
            "does; a kernel_constraint acts on released weights.",
        )
    if isinstance(layer, _LOOKUPS) and layer.num_oov_indices == 0 and not layer.invert:
        yield Problem(
            where,
            f"is a {kind} with num_oov_indices=0: it stops the training at a record with an "
            "unknown token, which tells of the record",
            "Use num_oov_indices=1.",
        )
    for preprocessing, (is_given, arguments) in _GIVEN_STATE.items():
        if isinstance(layer, preprocessing) and not is_given(layer):
            yield Problem(
                where,
                f"is a {kind} without given {arguments}: what `adapt` learns are raw statistics "
                "of its data, and they would be saved with the model",
                f"Pass public constants as {arguments}, or preprocess outside of the model.",
            )


def override_problems(model: keras.Model) -> Iterator[Problem]:
    """Yields a `Problem` for every method of its own of a model that a DPModel does not call."""
    for name, (fix, severity) in _NOT_CALLED.items():
        if getattr(type(model), name) is not getattr(keras.Model, name):
            what = f"overrides {name}, which a DPModel does not call"
            yield Problem(type(model).__name__, what, fix, severity)


def check_overrides(model: keras.Model) -> None:
    """Raises ValueError for the first error of `override_problems`."""
    raise_first(override_problems(model))


def weight_problems(model: keras.Model) -> Iterator[Problem]:
    """Yields a `Problem` where a built model has nothing to train."""
    if not model.trainable_variables:
        yield Problem(
            f"The model {model.name!r}",
            "has no trainable weights",
            "Set `trainable` of the layers to train before compile.",
        )


def check_weights(model: keras.Model) -> None:
    """Raises ValueError for the first of `weight_problems`."""
    raise_first(weight_problems(model))


def adapter_problems(model: keras.Model) -> Iterator[Problem]:
    """Yields a `Problem` for LoRA adapters that are frozen, and kernels that are not.

    Both come from setting `trainable` in another order than Keras needs.
    """
    for layer in layers_of(model):
        if lora_weights(layer) is None:
            continue
        kernel, a, b, _ = lora_weights(layer)
        fix = "Set trainable = True before `enable_lora`, not after it; see `trainable_variables`."
        if not (a.trainable and b.trainable):
            what = "has a LoRA adapter that is not trained, since the layer was frozen before"
            yield Problem(f"Layer {layer.name!r}", what, fix, "warning")
        if kernel.trainable:
            what = "trains its kernel beside its LoRA adapter, which is meant to spare that"
            yield Problem(f"Layer {layer.name!r}", what, fix, "warning")


def generator_problems(model: keras.Model) -> Iterator[Problem]:
    """Yields a `Problem` for every layer that shares another one's seed generator."""
    owners = {}
    for layer, generator in seed_generators(model):
        owner = owners.setdefault(id(generator), layer)
        if owner is not layer:
            yield Problem(
                f"Layer {layer.name!r}",
                f"shares the seed generator of layer {owner.name!r}: in private training both "
                "may draw the same numbers for an example",
                "Give each layer a seed of its own.",
                "warning",
            )
