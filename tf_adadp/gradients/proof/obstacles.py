"""Names obstacles to following a batch, each with operation, layer and line of code."""

import dataclasses
import os
import re
import traceback

import keras
import tensorflow as tf

from tf_adadp.gradients.proof.values import Mixed
from tf_adadp.utils.keras_compat import op_def_registry, original_operation

_NO_RULE = "has no rule"
_SITE = os.path.dirname(os.path.dirname(tf.__file__))
_LIBRARIES = (
    os.path.join(os.path.dirname(keras.__file__), ""),
    *(os.path.join(_SITE, name, "") for name in ("tensorflow", "optree", "tree", "wrapt")),
)
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")
_PACKAGE = os.path.join(os.path.abspath(__file__).rpartition("gradients")[0], "")
# Lines that TensorFlow puts above the error of a traced function, or of its run.
_FRAMES = re.compile(
    r"^\s*(in user code:|Graph execution error:|Detected at node .*|<stack frames unavailable>"
    r'|File ".*", line \d+, in .*\n.*)$',
    re.MULTILINE,
)
# They stand in for operations, so that the code that called for one is further out.
_REPLACING = ("dilation.py", "grouped_volumes.py", "indices.py")


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Tells where a batch could not be followed through a model, and why.

    Attributes:
        reason: the problem there, with the operation.
        layer: the name of the layer or model, or None.
        place: the same with its class and the line, for messages.
        line: file and line of the user's code that asks for the operation, or "" where Keras does.
        apart: True if examples are proven to stay apart: only the form of a gradient is missing.
        unknown: True if the operation has no rule; False if its rule finds that examples meet.
        by_keras: whether the operation is one of Keras's own code.
    """

    reason: str
    layer: str | None = None
    place: str = ""
    line: str = ""
    apart: bool = False
    unknown: bool = False
    by_keras: bool = False

    @property
    def is_announced(self) -> bool:
        """Tells whether training says so: not where Keras alone uses operations without a rule."""
        return not self.apart and not (self.unknown and self.by_keras)

    def __str__(self) -> str:
        return self.reason + self.place


def of_operation(
    op: tf.Operation, reason: str, layer: keras.Layer | None = None, **options: bool
) -> Obstacle:
    """Describes an operation as an obstacle; options are attributes of `Obstacle`."""
    return _placed([part.traceback for part in _with_originals(op)], reason, layer, **options)


def of_error(error: Exception, layer: keras.Layer | None = None) -> Obstacle:
    """Describes an error of the user's code while it is traced for a batch."""
    reason = f"it cannot be traced for a batch: {first_line(error)}"
    if isinstance(error, tf.errors.OperatorNotAllowedInGraphError):  # its advice does not help
        reason = "it branches, or loops, in Python on values of tensors"
    return _placed([traceback.extract_tb(error.__traceback__)], reason, layer)


def first_line(error: Exception) -> str:
    """Returns the first line of an error, with the one that Keras puts above it.

    Frames that TensorFlow puts above an error of traced code, each with its line, are left out.
    """
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    text = _FRAMES.sub("", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if "Exception encountered" in lines[0] else 1])


def of_value(value: Mixed, layer: keras.Layer | None = None) -> Obstacle:
    """Describes why a tensor is not one row per example."""
    reason = f"the operation {value.op.type} {value.reason}"
    return of_operation(value.op, reason, layer, unknown=value.reason == _NO_RULE)


def of_effect(op: tf.Operation, layer: keras.Layer | None = None) -> Obstacle:
    """Describes an operation that does more than to compute its outputs."""
    attributes = {a.name for a in getattr(op_def_registry.get(op.type), "attr", ())}
    if "seed2" in attributes or op.type.startswith("Rng"):
        what = "draws random numbers that no seed generator of the model gives"
        return of_operation(op, f"the operation {op.type} {what}", layer)
    what = "loops, branches, raises, keeps state or calls Python"
    return of_operation(op, f"the operation {op.type} {what}", layer, unknown=True)


def _placed(tracebacks, reason, layer, **options):
    """Returns the obstacle, at the first line of the user's that one of the tracebacks has."""
    lines = [_users_line(frames) for frames in tracebacks]
    line, is_users = next((found for found in lines if found[1]), lines[0])
    place = "" if layer is None else f" in the layer {layer.name!r} ({type(layer).__name__})"
    return Obstacle(
        reason,
        None if layer is None else layer.name,
        place + (f", {line}" if line else ""),
        line if is_users else "",
        by_keras=not is_users,
        **options,
    )


def _with_originals(op):
    """Yields an operation, and those of which it is the gradient."""
    while op is not None:
        yield op
        op = original_operation(op)


def _users_line(frames):
    """Returns `(line of the user's code, whether it is inside of what is traced)`."""
    inside = True
    for frame in reversed(frames):
        name = frame.filename
        if name.startswith(_PACKAGE):
            inside &= name.endswith(_REPLACING)
        elif name.startswith(_STANDARD) and "site-packages" not in name:
            continue
        elif not name.startswith(_LIBRARIES):
            return f"{name}:{frame.lineno}", inside
    return "", False
