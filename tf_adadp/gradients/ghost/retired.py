"""Names of 0.1 that do nothing any more."""

import warnings
from collections.abc import Callable
from typing import Any

_REASON = (
    "does nothing any more: the engine follows the operations of every layer by itself. "
    "Drop the call."
)


def declare_independent(*layer_classes: type) -> Any:
    """Does nothing; returns the class where it is given one, so that it stays a decorator."""
    warnings.warn(f"declare_independent {_REASON}", DeprecationWarning, stacklevel=2)
    return layer_classes[0] if len(layer_classes) == 1 else None


def register(*layer_classes: type) -> Callable:
    """Does nothing; returns a decorator that returns the rule."""
    del layer_classes
    warnings.warn(f"register {_REASON}", DeprecationWarning, stacklevel=2)
    return lambda rule: rule
