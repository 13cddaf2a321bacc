"""Replaces attributes of layers and modules while a graph is traced."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# Two threads that trace must not see each other's patches.
PATCHING = threading.RLock()


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replaces attributes of a layer or a module inside of this context, past Keras's tracking."""
    missing = object()
    before = {name: owner.__dict__.get(name, missing) for name in attributes}
    owner.__dict__.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = value


@contextlib.contextmanager
def functions_inlined(inlined: bool = True) -> Iterator[None]:
    """Makes the operations of functions that are called part of the graph that is traced, or not.

    Python's `if` and `while` on tensors work in functions that are not, by AutoGraph.
    """
    with PATCHING:  # the switch is one for all threads
        eagerly = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(inlined)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(eagerly)
