"""Copies graphs of layers with weights and flags, each layer by its configuration."""

from collections.abc import Iterable, Iterator

import keras

from tf_adadp.utils.keras_compat import (
    Functional,
    copied_lambda,
    layers_of,
    own_layers,
    own_variables,
    uncompiled,
)
from tf_adadp.validation.replacements import is_refused, replaced

Pairs = Iterable[tuple[keras.Layer, keras.Layer]]


def is_graph(model: object) -> bool:
    """Tells whether a model is Sequential or functional, without its own `call`."""
    for kind in (keras.Sequential, Functional):
        if isinstance(model, kind):
            return type(model).call is kind.call
    return False


class Copies:
    """Holds the copies of the layers of one model, by `keras.models.clone_model`.

    Args:
        group: whether BatchNormalization becomes GroupNormalization.
    """

    def __init__(self, group: bool):
        self._group = group
        self._made: dict[int, tuple[keras.Layer, keras.Layer]] = {}

    def of_model(self, model: keras.Model) -> keras.Model:
        """Returns the copy of a graph of layers."""
        self._made[id(model)] = model, None  # its place: before its layers
        # `clone_model` would compile the copy as well, with losses that may have no configuration.
        call = {} if isinstance(model, keras.Sequential) else {"call_function": _call}
        made = keras.models.clone_model(uncompiled(model), clone_function=self._of_layer, **call)
        self._made[id(model)] = model, made
        return made

    def pairs(self) -> Iterator[tuple[keras.Layer, keras.Layer]]:
        """Yields (layer, its copy) for all layers, outer ones before those inside of them."""
        for old, new in self._made.values():
            if isinstance(old, keras.Layer):
                yield old, new
                if not is_graph(old):  # its layers were copied one by one
                    yield from _inside(old, new)

    def _of_layer(self, layer):
        if id(layer) not in self._made:
            if is_graph(layer):
                self.of_model(layer)
            else:
                self._made[id(layer)] = layer, self._rebuilt(layer)
        return self._made[id(layer)][1]

    def _rebuilt(self, layer):
        if isinstance(layer, keras.layers.Lambda):
            return copied_lambda(layer)
        parts = layers_of(layer) if isinstance(layer, keras.Layer) else []  # or an operation
        if not any(map(is_refused, parts)):
            return type(layer).from_config(layer.get_config())
        return keras.saving.deserialize_keras_object(
            replaced(keras.saving.serialize_keras_object(layer), self._group),
            custom_objects={type(part).__name__: type(part) for part in parts},
            safe_mode=False,  # reads its own output alone
        )

    @staticmethod
    def keep_trainable(pairs: Pairs) -> None:
        """Gives copies the `trainable` of their layers: setting a container's sets its layers'."""
        for containers in (True, False):
            for old, new in pairs:
                if bool(own_layers(old)) == containers and new.trainable != old.trainable:
                    new.trainable = old.trainable

    @staticmethod
    def keep_weights(pairs: Pairs) -> None:
        """Gives copies the weights of their layers.

        Raises:
            ValueError: where a copy has other variables than its layer, or layers share some that
                the copies do not.
        """
        copied = {}
        for old, new in pairs:
            if isinstance(old, keras.layers.SpectralNormalization) and type(new) is not type(old):
                continue  # its kernel is that of the layer inside
            if isinstance(new, keras.layers.GroupNormalization) and type(new) is not type(old):
                variables = [(old.gamma, new.gamma), (old.beta, new.beta)]
                variables = [(a, b) for a, b in variables if b is not None]
            else:
                ours, theirs = own_variables(old), own_variables(new)
                if len(ours) != len(theirs):
                    raise ValueError(
                        f"Layer {old.name!r} has {len(ours)} variables and its copy "
                        f"{len(theirs)}: let `build` of {type(old).__name__}, or of the layer that "
                        "holds it, make all of them, and `get_config` return all arguments."
                    )
                variables = list(zip(ours, theirs, strict=True))
            for a, b in variables:
                if copied.setdefault(id(a), b) is not b:
                    raise ValueError(
                        f"The variable {a.path!r} is shared by several layers, and their copies "
                        "would have one each. Share a layer instead of a variable: call it twice."
                    )
                b.assign(a)
                b.trainable = a.trainable  # which may differ from the layer's
            if isinstance(new, keras.layers.Normalization) and new.built:
                new.finalize_state()


def _call(layer, *args, **kwargs):
    """Calls a copy as its layer was called; GroupNormalization takes no mask."""
    if isinstance(layer, keras.layers.GroupNormalization):
        kwargs.pop("mask", None)
    return layer(*args, **kwargs)


def _inside(old, new):
    """Yields pairs of the layers inside a layer that was copied whole."""
    if isinstance(old, keras.layers.SpectralNormalization) and type(new) is not type(old):
        yield old.layer, new
        yield from _inside(old.layer, new)
        return
    olds, news = own_layers(old), own_layers(new)
    if is_graph(old):  # matched by name: the order may differ
        by_name = {layer.name: layer for layer in news}
        news = [by_name[layer.name] for layer in olds]
    if len(olds) != len(news):
        raise ValueError(
            f"Layer {old.name!r} has {len(olds)} layers and its copy {len(news)}: let the "
            f"constructor or `build` of {type(old).__name__} make all of them."
        )
    for a, b in zip(olds, news, strict=True):
        yield a, b
        yield from _inside(a, b)
