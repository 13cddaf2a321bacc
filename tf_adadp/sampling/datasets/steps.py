"""Holds the rules of single steps of a `tf.data.Dataset`, each applied to the step before."""

import os
import re
from collections.abc import Callable

import numpy as np

from tf_adadp.sampling.datasets.graphs import DATASET, Elements, Graph
from tf_adadp.sampling.datasets.row_maps import mixing_reason
from tf_adadp.utils.keras_compat import op_def_registry

_TENSORS = {"List", "SparseTensorSlice", "Tensor", "TensorSlice"}
_SOURCES = _TENSORS | {
    "CSV", "FixedLengthRecord", "Generator", "Load", "Range", "Sql", "TFRecord", "TextLine",
}  # fmt: skip
_RANDOM = re.compile(r"Random|TruncatedNormal|Multinomial")
# TensorFlow marks them as stateful; no record changes what they read, or they are user's Python.
_HARMLESS = {
    "Assert", "Case", "CheckNumerics", "EagerPyFunc", "HashTableV2", "If", "LookupTableFindV2",
    "LookupTableSizeV2", "PartitionedCall", "PrintV2", "PyFunc", "PyFuncStateless", "ReadFile",
    "ReadVariableOp", "StatefulPartitionedCall", "VarHandleOp", "While",
}  # fmt: skip


def elements_of(graph: Graph, name: str) -> Elements:
    """Returns the judged elements of the dataset in a tensor.

    Raises:
        ValueError: naming a step that does not keep one record in one element.
    """
    step = graph.step(name)
    if step is None:
        raise ValueError(
            "The dataset makes datasets of windows of its records, so one record is in several "
            "elements. Make one element of each record, without window()."
        )
    names = graph.inputs(step)
    if step.kind == "DirectedInterleave":
        _check_choice(step, names[0])
        names = names[1:]
    inputs = [elements_of(graph, name) for name in names]
    if step.kind in _SOURCES:
        return _source(step)
    if step.kind not in _RULES:
        step.refuse(
            "is not known to keep records apart",
            "Leave it out, or read the records yourself and give arrays.",
        )
    return _RULES[step.kind](step, inputs)


def _source(step):
    if step.kind == "Range":
        return Elements(direct=True)  # numbers, no records
    if step.graph.arguments and step.kind != "Generator":
        return _opened(step)
    if step.kind == "Load":
        return _loaded(step)
    if step.kind in _TENSORS:
        return Elements((step,), direct=True)
    files = () if step.kind == "Generator" else _files(step, step.constant(0))
    return Elements((step,), frozenset(files), read=True, direct=True)


def _opened(step):
    """Judges a source inside flat_map(): it must read, or list, the argument of the function."""
    if step.graph.argument(step.node.input[0]) is None:
        step.refuse(
            "is opened inside of another step by something else than the name that is given "
            "there, so its records could be read several times",
            "Open each file of a list once: files.interleave(tf.data.TextLineDataset).",
        )
    return Elements((step,), read=step.kind not in _TENSORS, direct=True)


def _loaded(step):
    """Judges a dataset that save() wrote; its reader may put the shards in any order, once."""
    kinds = {DATASET.sub("", op) for op in step.operations() if DATASET.search(op)}
    if not kinds <= {"FlatMap", "Interleave", "ParallelInterleave", "Prefetch", "Shuffle"}:
        step.refuse("has a reader_func with steps of its own", "Leave reader_func out.")
    files = _files(step, step.constant(0))
    return Elements((step,), frozenset(files), ordered="Shuffle" not in kinds, read=True)


def _files(step, names):
    """Returns the files that an array of names tells; refuses one that is named twice."""
    if names is None or names.dtype != object:
        return ()
    paths = [os.path.realpath(os.fsdecode(name)) for name in np.reshape(names, -1).tolist()]
    if len(set(paths)) < len(paths):
        step.refuse(
            "reads a file twice, so its records may count twice",
            "Name each file once, and take one slice of it.",
        )
    return paths


def _check_choice(step, name):
    """Refuses to choose between datasets by records."""
    if not set(step.graph.sources(name)) <= {"Random", "Range"}:
        step.refuse(
            "chooses between datasets by the elements of another one, so those decide which "
            "records come",
            "Use sample_from_datasets(), or concatenate().",
        )


def _pass_on(step, inputs):
    return inputs[0]


def _shuffle(step, inputs):
    return inputs[0].but(ordered=False)


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
                "Put it before batch(), or after unbatch().",
            )
    _check_function(step)
    return elements.but(direct=False, ordered=elements.ordered and _keeps_order(step))


def _filter(step, inputs):
    if inputs[0].batched:
        step.refuse("drops whole batches, by all of their records", "Put it before batch().")
    if step.kind == "Filter":
        _check_function(step)
    return inputs[0].but(thinned=True)


def _shard(step, inputs):
    _check_places(step, inputs[0])
    return inputs[0]


def _check_places(step, elements):
    """Refuses a step that goes by the places of records, where some were left out before."""
    if elements.thinned:
        step.refuse(
            "goes by the places of records after filter() or ignore_errors(), so a record that is "
            "left out moves all after it",
            "Put filter() after it.",
        )


def _check_function(step, opens=False):
    for op in step.operations():
        if op == "ReduceDataset" or (DATASET.search(op) and not opens):
            step.refuse(
                f"reads a dataset for each record ({op}), so all of its records are in one element",
                "Make it a function of one record.",
            )
        if draws_random_numbers(op):
            step.refuse(
                f"draws random numbers ({op}), and records are read once, so each would keep "
                "the same augmentation for good",
                "Put random layers into the model, e.g. keras.layers.RandomFlip; they draw anew in "
                "every step (and augmentation_multiplicity averages several).",
            )
        if keeps_state(op) and not DATASET.search(op):
            step.refuse(
                f"keeps state from one record to the next ({op})",
                "Make it a function of one record.",
            )


def draws_random_numbers(op: str) -> bool:
    """Tells whether operations of this type draw random numbers."""
    return bool(_RANDOM.search(op)) and "KeyCounter" not in op


def keeps_state(op: str) -> bool:
    """Tells whether operations of this type may carry state from one record to the next."""
    definition = op_def_registry.get(op)
    return definition is not None and definition.is_stateful and op not in _HARMLESS


def _batch(step, inputs):
    (elements,) = inputs
    if elements.batched:
        step.refuse("makes batches of batches", "Batch once; unbatch() takes batches apart.")
    _check_remainder(step, elements)
    return elements.but(batched=True, direct=False, ordered=elements.ordered and _keeps_order(step))


def _check_remainder(step, elements):
    """Refuses to drop a short last batch where places tell of other records.

    The last boolean operand tells whether it is dropped; values of padding come before it.
    """
    for number in reversed(range(1, len(step.node.input))):
        value = step.constant(number)
        if value is not None and value.dtype == bool:
            if value:
                _check_places(step, elements)
            return


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
    return inputs[0].but(batched=False)


def _rebatch(step, inputs):
    if not inputs[0].batched:
        return _batch(step, inputs)
    _check_remainder(step, inputs[0])
    return inputs[0]


def _join(step, inputs):
    """Zips or concatenates."""
    if step.graph.arguments:
        step.refuse(
            "joins datasets inside of another step, where one file may be read several times",
            "Join them outside: Dataset.zip((features, labels)).",
        )
    if len({e.batched for e in inputs}) > 1:
        step.refuse("joins batches with single records", "Batch after it.")
    origins, files = [], set()
    for elements in inputs:
        if step.kind == "Zip":
            _check_places(step, elements)
        same = any(origin.is_same_source(other) for origin in elements.origins for other in origins)
        if same or files & elements.files:
            step.refuse(
                "joins records with others of the same source, so one record is in several "
                "elements",
                "Mix records (mixup) inside of the loss or the model of one record, or not at all.",
            )
        origins += elements.origins
        files |= elements.files
    return Elements(
        tuple(origins),
        frozenset(files),
        batched=inputs[0].batched,
        ordered=all(e.ordered for e in inputs) and step.kind != "DirectedInterleave",
        read=any(e.read for e in inputs),
        thinned=any(e.thinned for e in inputs),
    )


def _flat_map(step, inputs):
    """Opens the files of a list, or a generator; else it makes several elements of one record."""
    (outer,) = inputs[:1]
    if outer.batched:
        step.refuse("comes after batch()", "unbatch() takes batches apart.")
    _check_function(step, opens=True)
    (function,) = step.functions()
    body = step.graph.body(function)
    returned = next(iter(function.ret.values()))
    if set(body.sources(returned)) == {"Generator"}:
        return _generated(step, elements_of(body, returned))
    inside = elements_of(body, returned)
    if not inside.read:
        step.refuse(
            "makes several elements of one record",
            "Make one element of each record; only files and generators may be opened here.",
        )
    if outer.read or not outer.direct or len(outer.origins) != 1:
        step.refuse(
            "opens files that are not named by one list, so a file may be read several times",
            "Open them from a list of names: Dataset.from_tensor_slices(files) or list_files().",
        )
    (names,) = outer.origins
    (source,) = inside.origins
    number = source.graph.argument(source.node.input[0])
    if names.graph.arguments:  # a list that the function around this one is given
        origins, files = (names,), ()
    else:
        origins, files = (step,), _files(step, names.constant(number))
        origins = origins if not files else (names,)
    return Elements(
        origins,
        frozenset(files),
        inside.batched,
        outer.ordered and inside.ordered and _keeps_order(step),
        read=True,
        thinned=inside.thinned,
    )


def _generated(step, inside):
    """Accepts the step of `from_generator`, which opens one generator once."""
    source = step.graph.step(step.node.input[0])
    if source is None or source.kind != "Tensor":
        step.refuse("opens a generator for each of its elements", "Open it once.")
    return inside


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
        ("AssertCardinality", "Cache", "MaxIntraOpParallelism", "Model", "Options", "Prefetch",
         "PrivateThreadPool", "Skip", "Take"),
        _pass_on,
    ),
    **dict.fromkeys(("Filter", "IgnoreErrors"), _filter),
    **dict.fromkeys(("Map", "ParallelMap"), _map),
    **dict.fromkeys(("Batch", "ParallelBatch"), _batch),
    **dict.fromkeys(("Zip", "Concatenate", "DirectedInterleave"), _join),
    **dict.fromkeys(
        ("FlatMap", "Interleave", "ParallelInterleave", "LegacyParallelInterleave"), _flat_map
    ),
    "PaddedBatch": _padded_batch,
    "Random": _refuse_random,
    "Rebatch": _rebatch,
    "Repeat": _repeat,
    "Shard": _shard,
    "Shuffle": _shuffle,
    "Unbatch": _unbatch,
}  # fmt: skip
