"""Replaces layers that private training refuses, in their configurations."""

from typing import Any

import keras

_L = keras.layers
_MOST_GROUPS = 32  # the default of Wu & He (2018), arXiv:1803.08494
# For single positions, as in vectors, a group of one channel becomes 0, and one of two ±1.
_FEWEST_CHANNELS = 4


def is_refused(layer: keras.Layer) -> bool:
    """Tells whether private training refuses a layer for which there is a replacement."""
    if isinstance(layer, _L.BatchNormalization):
        return layer.trainable
    if isinstance(layer, _L.RNN):
        return layer.stateful
    return isinstance(layer, _L.SpectralNormalization)


def groups_of(channels: int) -> int:
    """Returns the largest divisor of the channels within the limits on groups, or 1."""
    most = min(_MOST_GROUPS, channels // _FEWEST_CHANNELS)
    return next((g for g in range(most, 1, -1) if channels % g == 0), 1)


def group_normalization(layer: keras.layers.BatchNormalization) -> str:
    """Spells out the GroupNormalization that takes the place of a BatchNormalization."""
    shape = getattr(layer.moving_mean, "shape", None) if layer.built else None
    arguments = [f"groups={groups_of(shape[0])}" if shape else "groups=..."]
    if layer.axis != -1:
        arguments.append(f"axis={layer.axis}")
    if layer.epsilon != 1e-3:  # the default of both
        arguments.append(f"epsilon={layer.epsilon:g}")
    arguments += [f"{name}=False" for name in ("center", "scale") if not getattr(layer, name)]
    return f"keras.layers.GroupNormalization({', '.join(arguments)})"


def replaced(entry: Any, group: bool) -> Any:
    """Replaces layers everywhere in the result of `keras.saving.serialize_keras_object`.

    Each `build_config` is left out: calling the copy builds it, as for the given layer, so that its
    variables get the same paths.

    Args:
        entry: a serialized layer, or a part of one.
        group: whether BatchNormalization becomes GroupNormalization.
    """
    if isinstance(entry, list):
        return [replaced(part, group) for part in entry]
    if not isinstance(entry, dict):
        return entry
    is_object = "class_name" in entry
    parts = {
        name: replaced(part, group)
        for name, part in entry.items()
        if not (is_object and name == "build_config")
    }
    config = parts.get("config")
    if not is_object or not isinstance(config, dict):
        return parts
    if config.get("stateful") is True:
        config["stateful"] = False
    if entry.get("module") == "keras.layers":
        if entry["class_name"] == "SpectralNormalization":
            inner = config["layer"]
            outer = {name: config[name] for name in ("name", "trainable")}
            return {**inner, "config": {**inner["config"], **outer}}
        if entry["class_name"] == "BatchNormalization" and group and config["trainable"]:
            return _as_group_normalization(parts, entry.get("build_config"))
    return parts


def _as_group_normalization(entry, build_config):
    config = entry["config"]
    name, shape = config["name"], (build_config or {}).get("input_shape")
    if shape is None:
        raise ValueError(
            f"Layer {name!r} is a BatchNormalization that is not built, so its number of channels "
            "is not known. Begin the model with keras.Input(...), or call model.build(input_shape)."
        )
    channels = shape[config["axis"]]
    if channels == 1 and len(shape) == 2:
        raise ValueError(
            f"Layer {name!r} is a BatchNormalization of one number per example, which "
            "GroupNormalization would make 0. Leave the layer out, or call make_compatible(model, "
            'batch_normalization="freeze").'
        )
    if "inbound_nodes" in entry:  # in a functional model: how the layer is called
        calls = [
            {**node, "kwargs": {k: v for k, v in node["kwargs"].items() if k != "mask"}}
            for node in entry["inbound_nodes"]
        ]
        entry = {**entry, "inbound_nodes": calls}
    common = _L.GroupNormalization().get_config().keys() & config.keys()
    return {
        **entry,
        "class_name": "GroupNormalization",
        "config": {**{name: config[name] for name in common}, "groups": groups_of(channels)},
    }
