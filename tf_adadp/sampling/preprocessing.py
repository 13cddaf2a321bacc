"""Applies a model's own preprocessing to its records, one at a time and once.

keras_hub's tasks take raw strings and images: their `preprocess_samples` makes tensors of a batch
of records. Here every batch has one record, so that no record can decide about another's tensors,
for any function.
"""

import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.gradients.proof.obstacles import first_line
from tf_adadp.sampling.datasets.columns import Columns
from tf_adadp.sampling.datasets.reading import dataset_leaves, shapes_differ
from tf_adadp.sampling.datasets.steps import draws_random_numbers, keeps_state
from tf_adadp.sampling.sources import (
    ArraySource,
    Spec,
    batch_spec,
    leaf_dtype,
    leaf_names,
    with_absent,
)
from tf_adadp.sampling.tokenizers import SENTENCE_PIECE, chooses_best_pieces, without_caches

_READ_AT_ONCE = 256  # raw records; images may be large
_SILENT_SECONDS = 2.0  # after which the progress bar is shown
_OWN = (
    "Preprocess the records yourself, each independently of the others, and set "
    "`preprocessor = None` on the task."
)
_IN_PARTS = (
    "Preprocess them in parts into NumPy files, give those, np.load(file, mmap_mode='r'), and set "
    "`preprocessor = None` on the task."
)
_FIXED = "Give the preprocessor one length, sequence_length=128, or one image_size."


def preprocesses(model: keras.Model) -> bool:
    """Tells whether a model makes its own inputs of raw records, as keras_hub's tasks do.

    Such a model has a method `preprocess_samples(x, y, sample_weight)`. A task whose `preprocessor`
    is None takes its inputs as they are.
    """
    if getattr(model, "preprocessor", model) is None:
        return False
    return callable(getattr(model, "preprocess_samples", None))


def preprocessed(
    model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None, verbose: bool = True
) -> tuple[Any, Any, Any]:
    """Applies `model.preprocess_samples` to arrays of raw records.

    Row i of the result is `preprocess_samples` of a batch that holds record i alone. Neighbouring
    datasets of raw records therefore give neighbouring datasets of tensors, and training on these
    has the same guarantee. Tables of the function (a vocabulary) count as public, and Python
    that it calls through `tf.py_function` is taken as it is.

    Args:
        model: the plain model. One that does not preprocess gets its data back.
        x, y, sample_weight: raw records. As in keras_hub, tuples and dicts are structures of
            arrays, and a list is one array.
        verbose: whether to show a progress bar where the work takes longer than 2 seconds.

    Returns:
        `(x, y, sample_weight)`, structures of arrays with one row per record; None where absent.

    Raises:
        TypeError, ValueError: data are not arrays; a function that fails on them, draws random
            numbers, keeps state, gives tensors whose shape depends on the record, or another number
            of rows than one for a record.
    """
    if not preprocesses(model):
        return x, y, sample_weight
    source = raw_source(x, y, sample_weight)
    one = _OneRecord(model, source.spec)
    dtypes = [spec.dtype.as_numpy_dtype for spec in one.specs]
    columns = Columns(one.names, dtypes, fix=_IN_PARTS)
    bar, begun, seen = keras.utils.Progbar(len(source), unit_name="record"), time.monotonic(), 0
    for leaves in _batches(source, one):
        columns.append(leaves)
        seen += len(leaves[0])
        if verbose and time.monotonic() - begun > _SILENT_SECONDS:
            bar.update(seen)
    return one.pack(columns.finish())


def raw_source(x: Any, y: Any = None, sample_weight: Any = None) -> ArraySource:
    """Returns the source of raw records, in the forms that `preprocessed` takes.

    Raises:
        TypeError, ValueError: the data are not arrays of one length, or have no rows.
    """
    if isinstance(x, keras.utils.PyDataset):
        raise TypeError(
            f"x is a {type(x).__name__}, and the model preprocesses its records: give arrays, "
            "lists of strings, or a finite tf.data.Dataset."
        )
    parts = {"x": x, "y": y, "sample_weight": sample_weight}
    if y is None:
        _refuse_lists_of_arrays(x)
    source = ArraySource(*(_lists_to_arrays(part, name) for name, part in parts.items()))
    if len(source) == 0:
        raise ValueError("x has no rows. Give at least one record.")
    return source


def preprocessed_spec(model: keras.Model, spec: Spec) -> Spec:
    """Returns TensorSpecs of batches of preprocessed records, for TensorSpecs of raw ones.

    Raises:
        ValueError: as `preprocessed`, where that is known without the records.
    """
    if not preprocesses(model):
        return spec
    one = _OneRecord(model, spec)
    return one.pack([tf.TensorSpec([None, *s.shape[1:]], s.dtype) for s in one.specs])


def refuse_raw(model: keras.Model, spec: Spec) -> None:
    """Refuses lots of raw records for a model that preprocesses, since lots are taken as they are.

    Records that the preprocessing would take count as raw.

    Args:
        model: the plain model.
        spec: `(x, y, sample_weight)` of TensorSpecs of batches of the lots.

    Raises:
        ValueError: the lots hold strings, or other records that the preprocessing takes.
    """
    if not preprocesses(model):
        return
    strings = any(s.dtype == tf.string for s in keras.tree.flatten(spec[0]))
    if strings or _takes(model, spec):
        raise ValueError(
            f"The lots hold {'strings' if strings else _form(spec)}, which {type(model).__name__} "
            "would preprocess, and lots are taken as they are: preprocess the records before the "
            "lots are made, x = task.preprocessor(x), and set `task.preprocessor = None`, or give "
            "arrays to fit."
        )


def _takes(model, spec):
    """Tells whether a model's preprocessing can be traced for records."""
    try:
        _OneRecord(model, spec)
    except ValueError as error:
        return error.__cause__ is None  # it was traced, and refused for its operations
    return True


def preprocessed_batches(model: keras.Model, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Preprocesses the batches of a dataset, each record alone, as `preprocessed` does arrays.

    Args:
        model: the plain model.
        dataset: its elements are batches `x`, `(x, y)` or `(x, y, sample_weight)` of raw records.

    Raises:
        ValueError: as `preprocessed`, where that is known without the records; the dataset holds
            single records, ragged or sparse tensors.
    """
    structure, names, specs = dataset_leaves(dataset)
    for name, spec in zip(names, specs, strict=True):
        if spec.shape.rank == 0:
            raise ValueError(
                f"The dataset holds single records ({name} is a scalar): batch it, "
                "dataset.batch(32)."
            )
    leaves = [
        (tuple(s.shape[1:]), leaf_dtype(s.dtype, n)) for n, s in zip(names, specs, strict=True)
    ]
    one = _OneRecord(model, batch_spec(with_absent(structure, leaves), structure))

    def of_record(leaves):
        made = one(*(leaf[tf.newaxis] for leaf in leaves))
        return [tf.ensure_shape(leaf, [1, *leaf.shape[1:]])[0] for leaf in made]

    def of_batch(*element):
        parts = [leaf for leaf in keras.tree.flatten(element) if leaf is not None]
        given = [
            tf.cast(leaf, s.dtype) if leaf.dtype != s.dtype else leaf
            for leaf, s in zip(parts, one.given_specs, strict=True)
        ]
        signature = [tf.TensorSpec(s.shape[1:], s.dtype) for s in one.specs]
        made = tf.map_fn(of_record, given, fn_output_signature=signature)
        return keras.utils.pack_x_y_sample_weight(*one.pack(made))

    return dataset.map(of_batch, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


class _OneRecord:
    """Holds the graph of `preprocess_samples` for a batch of one record.

    Args:
        model: a model that preprocesses.
        spec: `(x, y, sample_weight)` of TensorSpecs of raw records.

    Attributes:
        names, specs: of the leaves of its result.
    """

    def __init__(self, model: keras.Model, spec: Spec):
        self._model = type(model).__name__
        self._given = spec
        single = [tf.TensorSpec([1, *s.shape[1:]], s.dtype) for s in self.given_specs]

        def apply(*leaves):
            given = keras.tree.pack_sequence_as(self._given, with_absent(self._given, leaves))
            x, y, sample_weight = given
            made = model.preprocess_samples(x, y=y, sample_weight=sample_weight)
            made = keras.utils.unpack_x_y_sample_weight(made)
            self._structure = keras.tree.lists_to_tuples((*made, None, None)[:3])
            return [leaf for leaf in keras.tree.flatten(self._structure) if leaf is not None]

        try:
            with without_caches(model, getattr(model, "preprocessor", None)):
                self._function = tf.function(apply).get_concrete_function(*single)
        except Exception as error:  # any error of a tokenizer or layer
            raise ValueError(
                f"The preprocessing of {self._model} cannot take {_form(spec)}: "
                f"{first_line(error)}. Give raw records, as its own fit takes them. For records "
                "that are preprocessed already, set `preprocessor = None` on the task."
            ) from error
        flat = zip(leaf_names(self._structure), keras.tree.flatten(self._structure), strict=True)
        self.names = [name for name, leaf in flat if leaf is not None]
        self.specs = [tf.type_spec_from_value(leaf) for leaf in self._function.structured_outputs]
        self._check_results()
        self._check_operations()

    @property
    def given_specs(self) -> list[tf.TensorSpec]:
        """Returns the specs of the raw leaves that are there."""
        return [s for s in keras.tree.flatten(self._given) if s is not None]

    def __call__(self, *leaves: tf.Tensor) -> list[tf.Tensor]:
        return self._function(*leaves)

    def pack(self, leaves: list) -> tuple[Any, Any, Any]:
        """Puts leaves into the structure `(x, y, sample_weight)` of the result."""
        return keras.tree.pack_sequence_as(self._structure, with_absent(self._structure, leaves))

    def refuse(self, why: str, fix: str) -> None:
        """Raises a ValueError about the preprocessing."""
        raise ValueError(f"The preprocessing of {self._model} {why}. {fix}")

    def _check_results(self):
        if all(leaf is None for leaf in keras.tree.flatten(self._structure[0])):
            self.refuse(
                f"gives no tensor for x, but {self._structure[0]!r}",
                "Return x, (x, y) or (x, y, sample_weight) of tensors.",
            )
        for name, spec in zip(self.names, self.specs, strict=True):
            if not isinstance(spec, tf.TensorSpec):
                kind = type(spec).__name__.removesuffix("Spec")
                self.refuse(f"gives {name} as a {kind}, as long as the record is", _FIXED)
            if spec.shape.rank == 0:
                self._refuse_rows(name, "no row")

    def _refuse_rows(self, name, rows):
        self.refuse(
            f"gives {rows} in {name} for one record, so the unit of privacy would be lost",
            f"Make one row of each record (no packing, no splitting). {_OWN}",
        )

    def check_rows(self, leaves: list[np.ndarray]) -> None:
        """Refuses leaves [records, rows, ...] with another number of rows than 1."""
        for name, leaf in zip(self.names, leaves, strict=True):
            if leaf.ndim < 2:  # a result of unknown rank
                self._refuse_rows(name, "no row")
            if leaf.shape[1] != 1:
                self._refuse_rows(name, f"{leaf.shape[1]} rows")

    def _check_operations(self):
        graph = self._function.graph.as_graph_def()
        bodies = [graph.node, *(f.node_def for f in graph.library.function)]
        kinds = sorted({node.op for nodes in bodies for node in nodes})
        for kind in [kind for kind in kinds if draws_random_numbers(kind)]:
            self._refuse_random(kind)
        if not all(chooses_best_pieces(nodes) for nodes in bodies):
            self._refuse_random("SentencePiece with an nbest_size other than 0 and 1")
        for kind in kinds:
            if keeps_state(kind) and kind != SENTENCE_PIECE:
                self.refuse(f"keeps state from one record to the next ({kind})", _OWN)

    def _refuse_random(self, what):
        self.refuse(
            f"draws random numbers ({what}), and records are preprocessed once, so each would keep "
            "the same draw for good",
            f"Put random layers into the model, where they draw anew in every step. {_OWN}",
        )


def _batches(source: ArraySource, one: _OneRecord) -> Iterator[list[np.ndarray]]:
    """Yields the leaves of preprocessed records, some hundred rows at a time."""

    def raw():
        for start in range(0, len(source), _READ_AT_ONCE):
            indices = np.arange(start, min(start + _READ_AT_ONCE, len(source)))
            yield tuple(source.rows(indices, 1)[1])

    dataset = tf.data.Dataset.from_generator(raw, output_signature=tuple(one.given_specs))
    singles = dataset.unbatch().batch(1)
    made = singles.map(
        lambda *leaves: tuple(one(*leaves)),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    batches = made.batch(_READ_AT_ONCE).prefetch(2).as_numpy_iterator()
    done = 0
    while True:
        try:
            leaves = next(batches)
        except StopIteration:
            return
        except tf.errors.OpError as error:
            if shapes_differ(error):
                one.refuse("gives tensors of unequal shapes for different records", _FIXED)
            number, error = _failing(source, one, done, error)
            one.refuse(f"stops at record {number}: {first_line(error)}", "Clean the records.")
        one.check_rows(leaves)
        done += len(leaves[0])
        yield [leaf[:, 0] for leaf in leaves]


def _failing(source, one, start, error):
    """Returns the number of the first record from `start` on that fails, and its error."""
    for number in range(start, min(start + _READ_AT_ONCE, len(source))):
        try:
            one(*(tf.constant(leaf) for leaf in source.rows(np.array([number]), 1)[1]))
        except tf.errors.OpError as alone:
            return number, alone
    return f"{start} or after it", error


def _refuse_lists_of_arrays(part):
    """Refuses a list of which it is not known whether it is of records or of inputs."""
    is_list = isinstance(part, list) and len(part) > 0
    if is_list and any(isinstance(p, (list, tuple)) or np.ndim(p) > 0 for p in part):
        raise ValueError(
            f"x is a list of {len(part)} arrays without y: are they records, or inputs? For one "
            "array of records give np.stack(x), for several inputs of each record the tuple "
            "tuple(x)."
        )


def _lists_to_arrays(part: Any, name: str) -> Any:
    """Makes an array of every list; strings stay objects, as NumPy's own are of one length."""
    if isinstance(part, (str, bytes)):
        raise TypeError(f"{name} is one string, {part!r}: give a list of strings, [{part!r}].")
    if isinstance(part, tuple):
        return tuple(_lists_to_arrays(value, f"{name}[{i}]") for i, value in enumerate(part))
    if isinstance(part, dict):
        return {key: _lists_to_arrays(value, f"{name}[{key!r}]") for key, value in part.items()}
    if isinstance(part, list):
        strings = bool(part) and isinstance(part[0], (str, bytes))
        try:
            return np.array(part, dtype=object if strings else None)
        except ValueError as error:
            raise ValueError(
                f"{name} is a list of {len(part)} rows of unequal lengths: pad them to one shape."
            ) from error
    return part


def _form(spec):
    leaves = zip(leaf_names(spec), keras.tree.flatten(spec), strict=True)
    return ", ".join(f"{n} {s.dtype.name} {s.shape}" for n, s in leaves if s is not None)
