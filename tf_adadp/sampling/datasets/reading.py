"""Reads a finite `tf.data.Dataset` once, from its first record to its last."""

import os
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.sampling.datasets.columns import Columns, FolderColumns
from tf_adadp.sampling.datasets.pipelines import Pipeline, judge
from tf_adadp.sampling.sources import Spec, batch_spec, leaf_dtype, leaf_names, with_absent
from tf_adadp.utils.checks import check_bool, check_instance

_BATCH = 1024  # records that are read at once
_COMPARED = 64  # records that tell whether a folder holds another dataset
_in_memory = weakref.WeakKeyDictionary()  # {dataset: {batched: arrays}}
_pipelines = (
    weakref.WeakKeyDictionary()
)  # {dataset: Pipeline}; its graph holds its arrays once more


def read_dataset(
    dataset: tf.data.Dataset,
    batched: bool | None = None,
    cache_dir: str | os.PathLike | None = None,
    verbose: bool = True,
) -> tuple[Any, Any, Any]:
    """Reads all records of a dataset into arrays, with a progress bar.

    The unit of privacy is one record: one element of the dataset, after batches are taken apart.
    `pipelines.judge` proves that the dataset's steps keep records apart, and refuses others.

    In memory, a dataset that is given again is not read again. With `cache_dir` the records are
    kept there in NumPy files, and the arrays are memory-mapped: they may be larger than memory. A
    read that was interrupted goes on after its last complete records, and those before are compared
    with the dataset as they are passed (a dataset that shuffles is read anew). A folder that is
    complete is opened again without reading, after the dataset's first records were found in it.

    Args:
        dataset: a `tf.data.Dataset` of elements `x`, `(x, y)` or `(x, y, sample_weight)` of dense
            tensors. Every record must have the same shapes.
        batched: whether an element is a batch of records; None to find it in the dataset's graph.
            True for a generator that yields batches.
        cache_dir: a folder for the records of this dataset alone; None for memory.
        verbose: whether to show the progress bar.

    Returns:
        `(x, y, sample_weight)`, structures of arrays with one row per record; None where absent.

    Raises:
        TypeError: dataset is no `tf.data.Dataset`, or batched no boolean.
        ValueError: the dataset has no end, no records, ragged or sparse tensors, records of unequal
            shapes, or a step that joins or repeats records; more records than fit into memory; a
            folder with another dataset.
    """
    check_instance("dataset", dataset, tf.data.Dataset, "a tf.data.Dataset")
    pipeline = _judged(dataset, batched)
    if cache_dir is None:
        known = _in_memory.setdefault(dataset, {})
        if pipeline.batched not in known:
            known[pipeline.batched] = _read(dataset, pipeline, None, verbose)
        return known[pipeline.batched]
    return _read(dataset, pipeline, cache_dir, verbose)


def record_spec(dataset: tf.data.Dataset, batched: bool | None = None) -> Spec:
    """Returns `(x, y, sample_weight)` of TensorSpecs of batches of a dataset, without reading it.

    Raises:
        ValueError: as for `read_dataset`, if it can be known before reading.
    """
    pipeline = _judged(dataset, batched)
    structure, names, specs = dataset_leaves(dataset)
    leaves = []
    for spec, name in zip(specs, names, strict=True):
        shape = spec.shape[1:] if pipeline.batched else spec.shape
        leaves.append((tuple(shape), leaf_dtype(spec.dtype, name)))
    return batch_spec(with_absent(structure, leaves), structure)


def _judged(dataset, batched):
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "The dataset has no end: leave repeat() out. Lots draw records again by themselves."
        )
    if dataset not in _pipelines:
        _pipelines[dataset] = judge(dataset)
    pipeline = _pipelines[dataset]
    if batched is None:
        return pipeline
    return Pipeline(check_bool("batched", batched, wrong_type=TypeError), pipeline.ordered)


def _read(dataset, pipeline, cache_dir, verbose):
    structure, names, specs = dataset_leaves(dataset)
    dtypes = [_numpy_type(spec, name) for spec, name in zip(specs, names, strict=True)]
    batches = _batches(dataset, pipeline, names)
    if cache_dir is None:
        columns = Columns(names, dtypes)
        arrays = _fill(columns, batches, 0, _bar(dataset, pipeline, verbose))
    else:
        columns = FolderColumns(cache_dir, names, dtypes, int(dataset.cardinality()))
        try:
            if not columns.complete:
                columns.begin(pipeline.ordered)
            if columns.complete:
                arrays = columns.arrays()
                _check_same(arrays, batches, pipeline, cache_dir)
            else:
                kept = columns.arrays() if columns.rows else None
                batches = _compared(batches, kept, cache_dir)
                arrays = _fill(columns, batches, columns.rows, _bar(dataset, pipeline, verbose))
        finally:
            columns.close()
    if not arrays or not len(arrays[0]):
        raise ValueError("The dataset has no records. Lots need at least one.")
    return keras.tree.pack_sequence_as(structure, with_absent(structure, arrays))


def dataset_leaves(dataset: tf.data.Dataset) -> tuple[Any, list[str], list[tf.TensorSpec]]:
    """Returns the structure of `(x, y, sample_weight)`, and its leaves' names and TensorSpecs.

    Raises:
        ValueError: a leaf is ragged or sparse.
    """
    parts = keras.utils.unpack_x_y_sample_weight(dataset.element_spec)
    structure = keras.tree.lists_to_tuples((*parts, None, None)[:3])
    found = [
        (name, spec)
        for name, spec in zip(leaf_names(structure), keras.tree.flatten(structure), strict=True)
        if spec is not None
    ]
    for name, spec in found:
        if not isinstance(spec, tf.TensorSpec):
            kind = type(spec).__name__.removesuffix("Spec")
            raise ValueError(
                f"{name} is a {kind}, and records need dense tensors of one shape: pad ragged "
                "tensors with to_tensor(shape=...), make sparse ones dense, in a map() of the "
                "dataset."
            )
    return structure, [name for name, _ in found], [spec for _, spec in found]


def _numpy_type(spec, name):
    dtype = leaf_dtype(spec.dtype, name)
    return np.dtype(object) if dtype == tf.string else np.dtype(dtype.as_numpy_dtype)


def _batches(dataset, pipeline, names) -> Iterator[list[np.ndarray]]:
    """Yields the leaves of batches of records, all of one shape."""
    shapes = None
    source = dataset if pipeline.batched else dataset.batch(_BATCH)
    elements = source.prefetch(2).as_numpy_iterator()
    while True:
        try:
            element = next(elements)
        except StopIteration:
            return
        except tf.errors.InvalidArgumentError as error:
            if not shapes_differ(error):
                raise
            raise ValueError(
                f"The dataset's records have unequal shapes ({error.message.splitlines()[0]}). "
                "Resize or pad them to one shape in a map() before batch()."
            ) from error
        leaves = [leaf for leaf in keras.tree.flatten(element) if leaf is not None]
        for leaf, name in zip(leaves, names, strict=True):
            if np.ndim(leaf) == 0:
                raise ValueError(
                    f"batched=True, but {name} is a scalar in an element. Leave batched=True out."
                )
            if len(leaf) != len(leaves[0]):
                raise ValueError(
                    f"{name} has {len(leaf)} rows in a batch where {names[0]} has "
                    f"{len(leaves[0])}: every record needs one row in each."
                )
        found = [leaf.shape[1:] for leaf in leaves]
        shapes = shapes or found
        if found != shapes:
            raise ValueError(
                f"The dataset's records have unequal shapes, {shapes} and {found}. Resize or pad "
                "them to one shape in a map() before batch()."
            )
        yield leaves


def shapes_differ(error: Exception) -> bool:
    """Tells whether elements of unequal shapes could not be batched, also by fused steps."""
    text = str(error)
    return "Cannot batch tensors with different shapes" in text or "to the batch:" in text


def _fill(columns, batches, skip, bar):
    """Appends the records to columns but for the first `skip`."""
    seen = 0
    for leaves in batches:
        count = len(leaves[0])
        new = max(0, seen + count - skip)
        if new:
            columns.append([leaf[count - new :] for leaf in leaves])
        seen += count
        if bar is not None:
            bar.update(seen)
    if bar is not None:
        bar.update(seen, finalize=True)
    return columns.finish()


def _bar(dataset, pipeline, verbose):
    if not verbose:
        return None
    count = int(dataset.cardinality())
    known = count >= 0 and not pipeline.batched
    return keras.utils.Progbar(count if known else None, unit_name="record")


def _compared(batches, kept, cache_dir):
    """Passes batches on; those records that are kept already must be the same."""
    seen = 0
    for leaves in batches:
        if kept is not None and seen < len(kept[0]):
            for array, leaf in zip(kept, leaves, strict=True):
                there = array[seen : seen + len(leaf)]
                if not _equal(there, leaf[: len(there)]):
                    raise ValueError(
                        "The dataset changes between passes, or cache_dir="
                        f"{os.fspath(cache_dir)!r} was begun with another one: records after "
                        f"{seen:,} differ. Delete the folder to read the dataset anew."
                    )
        seen += len(leaves[0])
        yield leaves
    if kept is not None and seen < len(kept[0]):
        raise ValueError(
            f"The dataset has {seen:,} records, and cache_dir={os.fspath(cache_dir)!r} holds "
            f"{len(kept[0]):,} of a read that was interrupted. Delete the folder to read it anew."
        )


def _check_same(arrays, batches, pipeline, cache_dir):
    """Refuses a complete folder in which the dataset's first records are not found."""
    first, seen = [], 0
    for leaves in batches:
        first.append(leaves)
        seen += len(leaves[0])
        if seen >= _COMPARED:
            break
    first = [np.concatenate(parts)[:_COMPARED] for parts in zip(*first, strict=True)]
    same = bool(first) and all(
        a.shape[1:] == b.shape[1:] for a, b in zip(arrays, first, strict=True)
    )
    if same and pipeline.ordered:
        same = all(_equal(a[: len(b)], b) for a, b in zip(arrays, first, strict=True))
        same = same and (seen >= _COMPARED or seen == len(arrays[0]))
    elif same:
        same = all(_found(arrays, [leaf[i] for leaf in first]) for i in range(len(first[0][:8])))
    if not same:
        raise ValueError(
            f"cache_dir={os.fspath(cache_dir)!r} holds {len(arrays[0]):,} records of another "
            "dataset. Give each dataset a folder of its own, or delete the folder to read this one."
        )


def _equal(stored, given):
    """Tells whether arrays are equal once they have the type in which they are stored."""
    given = given.astype(stored.dtype, copy=False)
    nan = stored.dtype.kind in "fc"
    return np.array_equal(stored, given, equal_nan=nan)


def _found(arrays, record, rows=65536):
    """Tells whether a record is one of the rows."""
    for start in range(0, len(arrays[0]), rows):
        found = np.arange(start, min(start + rows, len(arrays[0])))
        for array, leaf in zip(arrays, record, strict=True):
            if not len(found):
                break
            part = array[found].reshape(len(found), -1)
            wanted = np.asarray(leaf).astype(array.dtype, copy=False).reshape(1, -1)
            equal = part == wanted
            if array.dtype.kind in "fc":
                equal |= np.isnan(part) & np.isnan(wanted)
            found = found[equal.all(1)]
        if len(found):
            return True
    return False
