"""Detects layers that changed after the model was traced.

A model is traced once, when its engine is made. Its graph ignores later changes of a layer.
"""

import functools
import inspect

import keras

from tf_adadp.utils.keras_compat import layers_of

_MISSING = object()
_SET_BY_KERAS = {"build", "quantize", "loss"}  # on instances
_PLAIN = (bool, int, float, str, bytes, type(None))


class LayerSettings:
    """Remembers the layers of a model and their settings.

    Settings are the attributes that have the name of a constructor argument, of the layer's class
    or a parent class, and the methods that were replaced on the instance.

    Args:
        model: a built `keras.Model`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        # Keeps references, so that no other object gets the id of one seen before.
        self._seen = self._settings()

    @property
    def unchanged(self) -> bool:
        """Tells whether no layer was changed, added or removed."""
        try:
            self.check_unchanged()
        except ValueError:
            return False
        return True

    def check_unchanged(self) -> None:
        """Raises ValueError where a layer or its settings changed."""
        now = self._settings()
        for (layer, settings), (other, others) in zip(self._seen, now, strict=False):
            if layer is not other:
                break
            for name in {**settings, **others}:
                before = settings.get(name, _MISSING)
                after = others.get(name, _MISSING)
                if not _same(before, after):
                    raise ValueError(
                        f"Layer {layer.name!r} has {name}={_shown(after)}, and had "
                        f"{_shown(before)} when training was prepared. Compile again after "
                        "changing a layer."
                    )
        if [id(layer) for layer, _ in self._seen] != [id(layer) for layer, _ in now]:
            raise ValueError(
                f"The model {self._model.name!r} has other layers than when training was "
                "prepared. Compile again after adding, removing or replacing layers."
            )

    def _settings(self):
        return [(layer, _settings_of(layer)) for layer in layers_of(self._model)]


def _settings_of(layer):
    arguments = _arguments(type(layer))
    return {
        name: _frozen(value)
        for name, value in vars(layer).items()
        if name in arguments or (_is_method(layer, name) and name not in _SET_BY_KERAS)
    }


def _is_method(layer, name):
    return callable(vars(layer)[name]) and callable(getattr(type(layer), name, None))


@functools.cache
def _arguments(layer_class):
    """Returns the names of all arguments of the constructors of a class and its parents."""
    names = set()
    for parent in layer_class.__mro__:
        if "__init__" in vars(parent) and parent not in (keras.Layer, object):
            names |= set(inspect.signature(parent.__init__).parameters)
    return names - {"name", "trainable"}


def _frozen(value):
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    return value


def _same(before, after):
    if before is after:
        return True
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_same, before, after))
    if isinstance(before, (*_PLAIN, tuple)) or isinstance(after, (*_PLAIN, tuple)):
        return type(before) is type(after) and before == after
    # Other objects count only if they are callable, or were added or removed.
    return not (callable(before) or callable(after) or before is _MISSING or after is _MISSING)


def _shown(value):
    return "nothing" if value is _MISSING else getattr(value, "__name__", repr(value))
