"""Follows a batch of examples through a graph, operation by operation.

Guarantee: an output that is `Rows` has, for one example, entries that no other example's data, nor
their number, can change, for any values. It rests on the rule of each operation alone, not on
the layers and functions called. Operations without a rule, and all that use them, are `Mixed`.
"""

from collections.abc import Callable, Iterable

import tensorflow as tf

from tf_adadp.gradients.proof import sizes
from tf_adadp.gradients.proof.rules import RULES
from tf_adadp.gradients.proof.rules.registry import plain
from tf_adadp.gradients.proof.values import Dims, Mixed, Mixes, Public, Rows, Value, public, rows
from tf_adadp.utils.keras_compat import op_def_registry

# TensorFlow marks them as stateful, but they only read values that training does not change.
_READS = {
    "ReadVariableOp", "VarHandleOp", "HashTableV2", "LookupTableFindV2", "LookupTableSizeV2",
    "VarIsInitializedOp", "VariableShape", "StatelessRandomGetAlg",
    "StatelessRandomGetKeyCounterAlg",
}  # fmt: skip
_RANDOM = {
    "StatelessRandomUniform", "StatelessRandomUniformV2", "StatelessRandomNormal",
    "StatelessRandomNormalV2", "StatelessTruncatedNormal", "StatelessTruncatedNormalV2",
    "StatelessRandomUniformInt", "StatelessRandomUniformIntV2", "StatelessRandomUniformFullInt",
    "StatelessRandomUniformFullIntV2", "StatelessRandomGammaV2", "StatelessRandomGammaV3",
    "StatelessRandomBinomial", "StatelessRandomPoisson",
}  # fmt: skip
# How many of their last operands are parameters, broadcast to the shape.
_PARAMETERS = {
    "StatelessRandomGammaV2": 1, "StatelessRandomGammaV3": 1, "StatelessRandomPoisson": 1,
    "StatelessRandomBinomial": 2,
}  # fmt: skip
_LARGEST_CONSTANT = 64  # numbers of a constant that may be an argument


class Follower:
    """Holds the value of each tensor of a graph, and the places where weights meet examples.

    Attributes:
        uses: the operations that join trainable weights with examples.
        effects: the operations that keep state, call Python, or may raise; assertions that hold
            for every batch are none.
    """

    def __init__(self):
        # By name, which a graph gives once.
        self._values: dict[str, Value] = {}
        self._alone: dict[str, int] = {}
        self._done: set[str] = set()
        self.uses: list[tf.Operation] = []
        self.effects: list[tf.Operation] = []

    def set(self, tensor: tf.Tensor, value: Value) -> None:
        """Declares the value of an input of the graph."""
        self._values[tensor.name] = value

    def of(self, tensor: tf.Tensor) -> Value:
        """Returns the value of a tensor."""
        return self._values[tensor.name]

    def dims(self, tensor: tf.Tensor) -> Dims:
        """Returns the dimensions of a tensor; None where they are not known."""
        return getattr(self._values.get(tensor.name), "dims", None)

    def trust(self, op: tf.Operation, mapped: int | None = None) -> None:
        """Declares an operation to be a map over the rows of its operands.

        Args:
            mapped: how many of the operands, the first ones; None for all. What its function
                captures comes after them, whole, and may not depend on the examples.
        """
        self._alone[op.name] = len(op.inputs) if mapped is None else mapped

    def advance(self, operations: Iterable[tf.Operation], uses: bool = True) -> None:
        """Looks at the operations that it has not seen, in the order of the graph.

        Args:
            operations: a graph's, in the order of their creation.
            uses: whether to note where weights meet examples.
        """
        for op in operations:
            if op.name in self._done:
                continue
            self._done.add(op.name)
            for tensor, value in zip(op.outputs, self._outputs(op, uses), strict=True):
                self._values.setdefault(tensor.name, value)

    def _outputs(self, op, uses):
        if op.type == "Placeholder":
            return [public(t) for t in op.outputs]
        if op.name not in self._alone and _has_effect(op) and not self._holds(op):
            self.effects.append(op)
            return [Mixed(op, "keeps state or calls Python") for _ in op.outputs]
        values = [self._values[t.name] for t in op.inputs]
        for value in values:
            if isinstance(value, Mixed):
                return [self._clamped(op) or value] * len(op.outputs)
        try:
            if op.name in self._alone:
                found = _mapped(op, values, self._alone[op.name])
            elif all(isinstance(v, Public) for v in values):
                found = _public(op, values)
            elif op.type in RULES:
                found = RULES[op.type](op, values)
            else:
                raise Mixes("has no rule")
        except Mixes as mixes:
            found = [Mixed(op, str(mixes)) for _ in op.outputs]
        found = found if isinstance(found, list) else [found]
        joins = any(isinstance(v, Public) and v.weights for v in values)
        if uses and joins and any(isinstance(v, Rows) for v in found):
            self.uses.append(op)
        return found

    def _holds(self, op):
        """Tells whether an operation asserts a fact that holds for every batch."""
        value = self.of(op.inputs[0]) if op.type == "Assert" else None
        return isinstance(value, Public) and value.value is not None and value.value.item()

    def _clamped(self, op):
        """Returns the number c in min(c, max(m, x)) with c ≤ m, for any x; or None."""
        if op.type != "Minimum" or op.outputs[0].shape.rank != 0:
            return None
        for outer, inner in (op.inputs, reversed(op.inputs)):
            limits = inner.op.inputs if inner.op.type == "Maximum" else ()
            c, floors = self._integer(outer), [self._integer(t) for t in limits]
            if c is not None and any(m is not None and c <= m for m in floors):
                return public(op.outputs[0], self.of(outer).value)
        return None

    def _integer(self, tensor):
        value = self.of(tensor)
        known = isinstance(value, Public) and value.value is not None and tensor.dtype.is_integer
        number = value.value.item() if known and value.rank == 0 else None
        return number if isinstance(number, int) else None


def inputs_of_rows(tensor: tf.Tensor) -> Rows:
    """Describes an input with one row per example."""
    return rows(tensor, 0, 1)


def _has_effect(op):
    if op.type in _READS:
        return False
    definition = op_def_registry.get(op.type)
    if definition is None:  # a function called by its name
        return True
    return definition.is_stateful or any(given.is_ref for given in definition.input_arg)


def _mapped(op, values, mapped):
    """Returns the outputs of a map over the rows of its first operands."""
    for number, value in enumerate(values):
        if number >= mapped or not isinstance(value, Rows):
            plain(value)
        elif (value.axis, value.stride) != (0, 1):
            raise Mixes("maps over another axis than that of the examples")
    return [rows(t, 0, 1) for t in op.outputs]


def _public(op, values):
    """Returns the outputs of an operation that no example reaches."""
    weights = frozenset().union(*(v.weights for v in values))
    secret = any(v.secret for v in values)
    sized = any(v.sized for v in values)
    if op.type == "Const":
        return [_constant(op)]
    if op.type in ("Shape", "ShapeN"):
        return RULES[op.type](op, values)
    if op.type in _RANDOM:
        return [_random(op, values)]
    if op.type in _SPREAD and sized:
        return [_spread(op, values)]
    numbers = sizes.evaluate(op, [v.value for v in values])
    found = []
    for tensor, number in zip(op.outputs, numbers, strict=True):
        unknown = tensor.shape.rank is None or None in tensor.shape.as_list()
        if number is None and sized and unknown:
            raise Mixes("makes a tensor of the size of the batch that may differ by place")
        if number is not None:
            # Numbers that follow B exactly are as public as it is; constants do not.
            value = public(tensor, number, weights=weights, secret=secret)
        else:
            value = public(tensor, weights=weights, secret=secret, sized=sized)
        found.append(value)
    return found


def _constant(op):
    (tensor,) = op.outputs
    value = None
    if tensor.shape.num_elements() is not None and tensor.shape.num_elements() <= _LARGEST_CONSTANT:
        known = tf.get_static_value(tensor)
        if known is not None and known.dtype.kind in "iufb":
            value = sizes.array(known)
    return public(tensor, value)


def _random(op, values):
    """Follows random numbers: rows where each example has its own and the key is secret."""
    shape = values[0].value
    if shape is None:
        raise Mixes("draws random numbers of a shape that is not known")
    if not any(v.secret for v in values):
        raise Mixes("draws random numbers that are the same for every batch")
    found = _batch_shaped(op, list(shape.flat), "draws random numbers once for all examples")
    parameters = values[len(values) - _PARAMETERS.get(op.type, 0) :]
    for value in values[1:]:
        if value.sized:
            raise Mixes("uses the number of examples")
    for value in parameters:
        if plain(value).rank is None or value.rank >= found.rank - found.axis:
            raise Mixes("has a constant with entries of its own for every place in the batch")
    return found


_SPREAD: dict[str, Callable] = {"Fill": 0, "BroadcastTo": 1, "Tile": 1}


def _spread(op, values):
    """Returns a public tensor that is repeated for every example."""
    shape = values[_SPREAD[op.type]]
    others = [v for i, v in enumerate(values) if i != _SPREAD[op.type]]
    if shape.value is None or any(v.sized or v.secret for v in others):
        raise Mixes("has a shape that is not known")
    new = list(shape.value.flat)
    if op.type == "Fill":
        return _batch_shaped(op, new, "")
    (given,) = others
    if given.dims is None or None in given.dims:
        raise Mixes("has a shape that is not known")
    old = [1] * (len(new) - len(given.dims)) + list(given.dims)
    if op.type == "Tile":
        new = [a * m for a, m in zip(old, new, strict=True)]
    found = _batch_shaped(op, new, "")
    if op.type == "BroadcastTo" and old[found.axis] != 1:
        raise Mixes("has entries of its own for every place in the batch")
    return found


def _batch_shaped(op, dims, otherwise):
    """Returns the rows of a tensor of these dims, one of them c·B."""
    axes = [a for a, d in enumerate(dims) if isinstance(d, sizes.Size)]
    if len(axes) != 1 or dims[axes[0]].power != 1:
        raise Mixes(otherwise or "has the number of examples in its shape more than once")
    return rows(op.outputs[0], axes[0], dims[axes[0]].factor, tuple(dims))
