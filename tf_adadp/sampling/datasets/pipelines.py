"""Proves that the elements of a `tf.data.Dataset` are one record each, or batches of records.

The graph of the dataset is read, step by step from its sources. A step without a rule is refused.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tf_adadp.sampling.datasets.row_maps import mixing_reason
from tf_adadp.utils.keras_compat import op_def_registry

_DATASET = re.compile(r"Dataset(V\d+)?$")
_RANDOM = re.compile(r"Random|TruncatedNormal|Multinomial")
# Stateful by TensorFlow's word; they read what no record changes, or are the user's own Python.
_HARMLESS = {
    "Assert", "EagerPyFunc", "HashTableV2", "LookupTableFindV2", "LookupTableSizeV2", "PrintV2",
    "PyFunc", "PyFuncStateless", "ReadFile", "ReadVariableOp", "VarHandleOp",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Describes the elements of a dataset.

    Attributes:
        batched: whether an element is a batch of records instead of one.
        ordered: whether every pass gives the same elements in the same order, as far as the steps
            tell. A generator or a function in Python may still change.
    """

    batched: bool
    ordered: bool


def judge(dataset: tf.data.Dataset) -> Pipeline:
    """Proves that the elements of a dataset are records, each at most once, or batches of them.

    A record is one element of a source: a row of `from_tensor_slices`, a line, a row of a CSV file,
    a serialized example of a TFRecord file, what a generator yields. Steps that choose, reorder,
    cache, filter or transform single records are fine. A function that is applied to batches must
    be proven to treat their records independently. The proof holds for the graph; what Python
    functions and generators do, and what a function looks up in arrays, is taken as it is.

    Raises:
        ValueError: naming the step, for one that repeats or joins records, makes several elements
            of one record, draws random numbers, keeps state, or has no rule.
    """
    graph = tf.compat.v1.GraphDef.FromString(
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=1
        ).numpy()
    )
    library = {function.signature.name: function for function in graph.library.function}
    last = graph.node[-1].input[0]
    elements = _Graph(graph.node, library).elements(last)
    ordered = elements.ordered and dataset.options().deterministic is not False
    return Pipeline(elements.batched, ordered)


@dataclasses.dataclass(frozen=True)
class _Elements:
    """What the elements are after a step.

    `origins` are the sources that their records are read from. `read` tells records that a file or
    a generator holds from those that are tensors in the graph.
    """

    origins: tuple["_Step", ...] = ()
    batched: bool = False
    ordered: bool = True
    read: bool = False

    def shuffled(self):
        return dataclasses.replace(self, ordered=False)


class _Graph:
    """The nodes of a dataset's graph, or of a function that makes a dataset."""

    def __init__(self, nodes, library):
        self._nodes, self._library = {node.name: node for node in nodes}, library

    def step(self, name):
        """Returns the step that makes a tensor, or None for an argument of the function."""
        node = self._nodes.get(name.split(":")[0].removeprefix("^"))
        while node is not None and node.op == "Identity":
            node = self._nodes.get(node.input[0].split(":")[0])
        return None if node is None else _Step(node, self)

    def elements(self, name):
        """Returns the `_Elements` of the dataset that a tensor holds."""
        step = self.step(name)
        if step is None:
            raise ValueError(
                "The dataset makes datasets of windows of its records, so one record is in several "
                "elements. Make one element of each record, without window()."
            )
        names = [name for name in step.node.input if self._is_dataset(name)]
        if step.kind == "DirectedInterleave":
            names = names[1:]  # the first one chooses
        inputs = [self.elements(name) for name in names]
        if not inputs and step.kind not in _RULES:
            return _source(step)
        if step.kind not in _RULES:
            step.refuse(
                "is not known to keep records apart",
                "Leave it out, or read the records yourself and give arrays.",
            )
        return _RULES[step.kind](step, inputs)

    def _is_dataset(self, name):
        step = self.step(name)
        return step is not None and bool(_DATASET.search(step.node.op))

    def function(self, name):
        return self._library[name]


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """One operation of a graph that makes a dataset."""

    node: tf.compat.v1.NodeDef
    graph: _Graph

    @property
    def kind(self) -> str:
        """Its type, without "Dataset" and version."""
        return _DATASET.sub("", self.node.op)

    @property
    def name(self) -> str:
        """Its name as a method of `tf.data.Dataset`, more or less."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.kind).lower()

    def refuse(self, why: str, fix: str) -> None:
        """Raises a ValueError about this step."""
        raise ValueError(f"The dataset's step {self.name}() {why}. {fix}")

    def constant(self, index: int):
        """Returns an operand as an array, or None where it is not constant."""
        step = self.graph.step(self.node.input[index])
        if step is None or "value" not in step.node.attr:
            return None
        proto = step.node.attr["value"].tensor
        value = tf.io.parse_tensor(proto.SerializeToString(), tf.as_dtype(proto.dtype)).numpy()
        return np.array(value, object) if isinstance(value, bytes) else value

    def functions(self) -> Iterator[tf.compat.v1.GraphDef]:
        """Yields the functions that the step calls, as FunctionDefs."""
        for attribute in self.node.attr.values():
            if attribute.HasField("func"):
                yield self.graph.function(attribute.func.name)

    def operations(self) -> Iterator[str]:
        """Yields the type of every operation in its functions, and in those that they call."""
        todo, seen = list(self.functions()), set()
        while todo:
            function = todo.pop()
            if function.signature.name in seen:
                continue
            seen.add(function.signature.name)
            for node in function.node_def:
                yield node.op
                for value in node.attr.values():
                    called = [value.func] if value.HasField("func") else value.list.func
                    todo += [self.graph.function(f.name) for f in called if f.name]

    def is_same_source(self, other: "_Step") -> bool:
        """Tells whether two sources hold the same records, by what they are made of."""
        return self.node.op == other.node.op and self._made_of() == other._made_of()

    def _made_of(self):
        functions = [value.func.name for _, value in sorted(self.node.attr.items())]
        steps = [self.graph.step(name) for name in self.node.input]
        operands = [
            None if s is None else s.node.attr["value"].tensor if s.kind == "Const" else s.node.name
            for s in steps
        ]
        return functions, operands


def _source(step):
    if step.kind == "Range":
        return _Elements()  # numbers, no records
    if step.kind != "TensorSlice":
        _check_once(step, step)
    return _Elements((step,), read=step.kind not in ("Tensor", "TensorSlice", "SparseTensorSlice"))


def _check_once(step, source):
    """Refuses a step that reads the files which a source names, where one is named twice."""
    files = source.constant(0) if source.node.input else None
    if files is None or files.dtype != object:
        return
    names = np.reshape(files, -1).tolist()
    if len(set(names)) < len(names):
        step.refuse("reads a file twice, so its records would count twice", "Name each file once.")


def _pass_on(step, inputs):
    return inputs[0]


def _shuffle(step, inputs):
    return inputs[0].shuffled()


def _repeat(step, inputs):
    count = step.constant(-1)
    if count is None or count != 1:
        step.refuse(
            "gives its records several times, so one of them would be in several elements "
            "(timeseries_dataset_from_array repeats them for its windows)",
            "Leave it out: lots draw records again by themselves, for as many epochs as fit takes.",
        )
    return inputs[0]


def _map(step, inputs):
    (elements,) = inputs[:1]
    if elements.batched:
        (function,) = step.functions()
        source = step.graph.step(step.node.input[0])
        reason = mixing_reason(function, source.node.attr["output_shapes"].list.shape)
        if reason is not None:
            step.refuse(
                f"comes after batch(), and is not proven to treat each record by itself: {reason}",
                "Put it before batch().",
            )
    _check_function(step)
    return elements if _keeps_order(step) else elements.shuffled()


def _filter(step, inputs):
    if inputs[0].batched:
        step.refuse("drops whole batches, by all of their records", "Put it before batch().")
    _check_function(step)
    return inputs[0]


def _check_function(step):
    for op in step.operations():
        if _RANDOM.search(op) and "KeyCounter" not in op:
            step.refuse(
                f"draws random numbers ({op}), and records are read once, so each would keep "
                "the same augmentation for good",
                "Put random layers into the model, e.g. keras.layers.RandomFlip; they draw anew in "
                "every step (and augmentation_multiplicity averages several).",
            )
        definition = op_def_registry.get(op)
        stateful = definition is not None and definition.is_stateful
        if stateful and op not in _HARMLESS and not _DATASET.search(op):
            step.refuse(
                f"keeps state from one record to the next ({op})",
                "Make it a function of one record.",
            )


def _batch(step, inputs):
    if inputs[0].batched:
        step.refuse("makes batches of batches", "Batch once; unbatch() takes batches apart.")
    batched = dataclasses.replace(inputs[0], batched=True)
    return batched if _keeps_order(step) else batched.shuffled()


def _padded_batch(step, inputs):
    count = step.node.attr["N"].i or len(step.node.attr["Toutput_types"].list.type)
    shapes = [step.constant(2 + i) for i in range(count)]
    if any(shape is None or (shape < 0).any() for shape in shapes):
        step.refuse(
            "pads records to the longest of their batch, so the others decide about a record's "
            "length",
            "Give padded_shapes without None.",
        )
    return _batch(step, inputs)


def _unbatch(step, inputs):
    if not inputs[0].batched:
        step.refuse(
            "makes several elements of one",
            "Start from from_tensor_slices(), or batch() before it.",
        )
    return dataclasses.replace(inputs[0], batched=False)


def _rebatch(step, inputs):
    return inputs[0] if inputs[0].batched else _batch(step, inputs)


def _join(step, inputs):
    """Zips or concatenates."""
    if len({e.batched for e in inputs if e.origins}) > 1:
        step.refuse("joins batches with single records", "Batch after it.")
    found = []
    for elements in inputs:
        for origin in elements.origins:
            if any(origin.is_same_source(other) for other in found):
                step.refuse(
                    "joins records with others of the same source, so one record is in several "
                    "elements",
                    "Mix records (mixup) inside of the loss or the model of one record, or not at "
                    "all.",
                )
        found += elements.origins
    return _Elements(
        tuple(found),
        batched=any(e.batched for e in inputs),
        ordered=all(e.ordered for e in inputs) and step.kind != "DirectedInterleave",
        read=any(e.read for e in inputs),
    )


def _flat_map(step, inputs):
    """Reads files, or a generator; anything else would make several elements of one record."""
    if inputs[0].batched:
        step.refuse("comes after batch()", "unbatch() takes batches apart.")
    (body,) = step.functions()
    graph = _Graph(body.node_def, step.graph._library)
    inside = graph.elements(next(iter(body.ret.values())))
    if not inside.read:
        step.refuse(
            "makes several elements of one record",
            "Make one element of each record; only files and generators may be opened here.",
        )
    generates = any(origin.kind == "Generator" for origin in inside.origins)
    if not generates:
        for origin in inputs[0].origins:
            _check_once(step, origin)
    origins = inside.origins if generates else (inputs[0].origins or inside.origins)
    ordered = inputs[0].ordered and inside.ordered and _keeps_order(step)
    return _Elements(origins, inside.batched, ordered, read=True)


def _refuse_random(step, inputs):
    step.refuse(
        "gives random numbers, and records are read once",
        "Put random layers into the model, e.g. keras.layers.RandomFlip.",
    )


def _keeps_order(step):
    attributes = step.node.attr
    return attributes["deterministic"].s != b"false" and attributes["sloppy"].b is False


_RULES: dict[str, Callable] = {
    **dict.fromkeys(
        ("AssertCardinality", "AutoShard", "Cache", "IgnoreErrors", "MaxIntraOpParallelism",
         "Model", "Options", "Prefetch", "PrivateThreadPool", "Shard", "Skip", "Take"),
        _pass_on,
    ),
    **dict.fromkeys(("Map", "ParallelMap"), _map),
    **dict.fromkeys(("Batch", "ParallelBatch"), _batch),
    **dict.fromkeys(("Zip", "Concatenate", "DirectedInterleave"), _join),
    **dict.fromkeys(
        ("FlatMap", "Interleave", "ParallelInterleave", "LegacyParallelInterleave"), _flat_map
    ),
    "Filter": _filter,
    "PaddedBatch": _padded_batch,
    "Random": _refuse_random,
    "Rebatch": _rebatch,
    "Repeat": _repeat,
    "Shuffle": _shuffle,
    "Unbatch": _unbatch,
}  # fmt: skip
