"""Proves that a function of a batch treats its records independently."""

import copy
from collections.abc import Sequence

import tensorflow as tf

from tf_adadp.gradients.proof.follow import Follower, inputs_of_rows
from tf_adadp.gradients.proof.values import Mixed, Mixes, Rows
from tf_adadp.utils.keras_compat import function_def_to_graph

# They parse each of the strings they are given by itself.
_PARSE = {
    "AsString", "DecodeCSV", "DecodeRaw", "ParseExampleV2", "RegexReplace", "StaticRegexReplace",
    "StringLower", "StringStrip", "StringToNumber", "StringUpper",
}  # fmt: skip


def mixing_reason(function: object, shapes: Sequence) -> str | None:
    """Returns why a function of a pipeline may mix the records of a batch; None where it cannot.

    By the rules that prove a model's examples independent (`gradients.proof`): row i of every
    output depends on row i of the inputs alone.

    Args:
        function: a FunctionDef; its first arguments are the components of a batch, those after
            them are captured.
        shapes: the components' shapes, TensorShapeProtos.
    """
    captured = len(function.signature.input_arg) - len(shapes)
    known = [tf.TensorShape(shape) for shape in shapes]
    if any(shape.rank == 0 for shape in known):
        return "one of its arguments has no rows"
    # For any number of records, also where batch() was told to drop a short last batch.
    free = [s if s.rank is None else tf.TensorShape([None, *s[1:]]) for s in known]
    function = copy.deepcopy(function)
    for number in range(len(shapes)):
        function.arg_attr[number].attr.pop("_output_shapes", None)
    graph = function_def_to_graph(function, input_shapes=[*free, *[None] * captured])
    follower = Follower()
    try:
        for tensor in graph.inputs[: len(shapes)]:
            follower.set(tensor, inputs_of_rows(tensor))
    except Mixes as mixes:
        return f"an argument {mixes}"
    for op in graph.get_operations():
        if op.type in _PARSE and not _has_other_results(op):
            follower.trust(op)
    follower.advance(graph.get_operations(), uses=False)
    if follower.effects:
        return f"{follower.effects[0].type} keeps state or calls Python"
    for tensor in graph.outputs:
        value = follower.of(tensor)
        if isinstance(value, Mixed):
            return f"{value.op.type} {value.reason}"
        if not isinstance(value, Rows) or (value.axis, value.stride) != (0, 1):
            return "a result does not have one row for each record"
    return None


def _has_other_results(op):
    """Tells whether an operation gives sparse or ragged tensors, which have no rows."""
    if op.type != "ParseExampleV2":
        return False
    names = ("num_sparse", "ragged_value_types", "ragged_split_types")
    return any(op.get_attr(name) for name in names)
