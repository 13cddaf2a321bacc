"""Attributes of Keras objects, replaced while a graph is traced, and copies to replace them in."""

import contextlib
import threading

# Two threads that trace must not see each other's patches.
PATCHING = threading.RLock()


@contextlib.contextmanager
def replaced(layer, **attributes):
    """Replaces attributes of a layer for the time of one call, past Keras's tracking."""
    missing = object()
    before = {name: layer.__dict__.get(name, missing) for name in attributes}
    layer.__dict__.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                del layer.__dict__[name]
            else:
                layer.__dict__[name] = value


def shallow_copy(keras_object):
    """`copy.copy` without Keras's detour over a saved file."""
    copied = object.__new__(type(keras_object))
    copied.__dict__.update(keras_object.__dict__)
    return copied
