"""Attributes of layers, replaced while a graph is traced."""

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
