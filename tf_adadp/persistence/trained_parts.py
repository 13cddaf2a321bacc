"""Keeps in a model's files which of its weights are trained, and LoRA's adapters.

Keras's files lose both. A layer that makes its parts when it is built (`MultiHeadAttention`, layers
of keras_hub) comes back with all of them trainable, and without adapters. Where adapters are there,
Keras stores kernel + A·B as the kernel, and loads A = B = 0, from where no gradient moves them.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import keras
import numpy as np

from tf_adadp.utils.keras_compat import KerasSaveable, layers_of, lora_weights, own_variables


def model_config(model: keras.Model) -> dict[str, Any]:
    """Returns the configuration of a plain model, and which of its weights are trained."""
    config = {"model": keras.saving.serialize_keras_object(model)}
    return {**config, "trained_parts": _trained_parts(model) if model.built else None}


def with_model(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns a configuration with a `model_config` in it, with the model made of that."""
    rest = {name: value for name, value in config.items() if name != "trained_parts"}
    model = keras.saving.deserialize_keras_object(config["model"], custom_objects=custom_objects)
    if model.built and config.get("trained_parts"):  # older files have none
        _restore_trained_parts(model, config["trained_parts"])
    return {**rest, "model": model}


def _trained_parts(model):
    """Returns, for each layer, its class, which of its weights are trained, and its adapter."""
    return [
        {
            "class": type(layer).__name__,
            "trainable": layer.trainable,
            "variables": {v.name: v.trainable for v in own_variables(layer)},
            "lora": _lora_arguments(layer),
        }
        for layer in _layers_with_weights(model)
    ]


def _layers_with_weights(model):
    """Returns the layers with weights; others, as preprocessors, may make their parts late."""
    return [layer for layer in layers_of(model) if layer.weights]


def _lora_arguments(layer):
    """Returns the rank and α of a layer's adapter, or None."""
    if lora_weights(layer) is None:
        return None
    return {"rank": layer.lora_rank, "alpha": getattr(layer, "lora_alpha", layer.lora_rank)}


def _restore_trained_parts(model, parts):
    """Enables the adapters, and freezes the weights, of a model that was made anew.

    A model with other layers is left as Keras made it: layers of the user's own may make their
    parts later.
    """
    layers = _layers_with_weights(model)
    if [type(layer).__name__ for layer in layers] != [part["class"] for part in parts]:
        return
    for layer, part in zip(layers, parts, strict=True):
        if part["lora"] and lora_weights(layer) is None:
            layer.enable_lora(part["lora"]["rank"])
        if part["lora"]:
            layer.lora_alpha = part["lora"]["alpha"]  # Keras takes the rank for it when it builds
    for layer, part in zip(layers, parts, strict=True):  # a layer before the layers inside it
        layer.trainable = part["trainable"]
    for layer, part in zip(layers, parts, strict=True):
        for variable in own_variables(layer):
            variable.trainable = part["variables"].get(variable.name, variable.trainable)


class Adapters(KerasSaveable):
    """The adapters A and B of a `DPModel`, as a part of its files that is loaded last.

    Loading undoes Keras's merging up to its rounding: kernel ← merged kernel − A·B. From a file
    without adapters of the same shapes, each A is drawn anew with B = 0, as for a new adapter.

    Args:
        layers: a function that returns the layers of the model, all levels. Keras would follow the
            model itself, in a circle.
    """

    def __init__(self, layers: Callable[[], Iterable[keras.layers.Layer]]):
        self._layers_of_model = layers

    def _obj_type(self):
        return "Loss"  # one of the types that Keras knows: it skips the attributes of such objects

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Writes A and B of each layer that has them."""
        for number, (_, a, b, _) in enumerate(self._found()):
            store[f"{number}_a"] = keras.ops.convert_to_numpy(a)
            store[f"{number}_b"] = keras.ops.convert_to_numpy(b)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Takes A and B out of the kernels that Keras has loaded."""
        names = set(store.keys())
        for number, (kernel, a, b, merged) in enumerate(self._found()):
            if np.any(keras.ops.convert_to_numpy(a)):  # not loaded by Keras
                continue
            stored = [store[n] for n in (f"{number}_a", f"{number}_b") if n in names]
            if [tuple(s.shape) for s in stored] != [tuple(a.shape), tuple(b.shape)]:
                a.assign(keras.initializers.HeUniform()(a.shape))
                continue
            a.assign(stored[0])
            b.assign(stored[1])
            kernel.assign(kernel - (merged() - kernel))

    def _found(self):
        """Returns `lora_weights` of the layers with adapters, quantized ones excepted."""
        layers = {id(layer): layer for layer in self._layers_of_model()}.values()
        found = [lora_weights(layer) for layer in layers]
        return [each for each in found if each is not None and "float" in each[0].dtype]
