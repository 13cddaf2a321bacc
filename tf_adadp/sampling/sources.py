"""Sources: random access to single examples, in arrays or in objects with `__getitem__`."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.sampling.grain_steps import check_grain
from tf_adadp.utils.silence import silent

Spec = tuple[Any, Any, Any]  # (x, y, sample_weight) of nested tf.TensorSpecs, or of None
Rows = tuple[int, list[np.ndarray]]  # their number, and one padded array per leaf of a Spec

_NOT_DENSE = (tf.RaggedTensor, tf.SparseTensor)  # refused as leaves of structures are


class Source(Protocol):
    """Random access to examples. Reading a lot costs work in proportion to the lot, not the data.

    Attributes:
        spec: `(x, y, sample_weight)` of `tf.TensorSpec`s of a batch of unknown size, None where a
            part is absent.
    """

    spec: Spec

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray, multiple: int) -> Rows:
        """Reads the examples at `indices` (int64 array), padded to a multiple of `multiple`.

        Returns:
            Their number, and one array per leaf of `spec` that is not None, in the order of
            `keras.tree.flatten`.
        """


def as_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    transform: Callable[[Any], tuple] | None = None,
) -> Source:
    """Wraps `x` (and `y`, `sample_weight`) as a source.

    Args:
        x: an array, a nested dict, tuple or list of arrays (lists become tuples), or a
            random-access source: an object with `__len__` and `__getitem__` that is not an array.
        y, sample_weight: arrays or structures of arrays; None for a random-access source.
        transform: for a random-access source only, a function from one item to `(x, y)` or
            `(x, y, sample_weight)`.

    Raises:
        TypeError: data without random access, or of a type that is not a tensor.
        ValueError: empty data, unequal lengths, an argument that does not go with `x`, or a
            `grain.MapDataset` whose elements are not one record each.
    """
    _refuse_streams(x)
    if keras.tree.is_nested(x) or hasattr(x, "__array__") or isinstance(x, _NOT_DENSE):
        if transform is not None:
            raise ValueError(
                f"transform={transform!r} applies to the items of a random-access source, but x "
                "holds arrays. Transform the arrays beforehand, or put the transformation into the "
                "model."
            )
        source = ArraySource(x, y, sample_weight)
        if len(source) == 0:
            raise ValueError("x has no rows. Lots need at least one example.")
        return source
    if hasattr(x, "toarray"):
        raise TypeError(f"x is a sparse {_type_name(x)}: make it dense, x.toarray().")
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise ValueError(
                f"{name} must be None when x is a random-access source, got a {_type_name(value)}: "
                "the items of x must be (x, y) or (x, y, sample_weight). Use transform= to make "
                "them so."
            )
    return ItemSource(_Rows(x) if isinstance(x, keras.utils.PyDataset) else x, transform)


def leaf_dtype(dtype: Any, name: str) -> tf.DType:
    """Returns the TensorFlow type of a numpy or TensorFlow type: floats become Keras's floatx."""
    try:
        tensor_dtype = tf.as_dtype(dtype)
    except TypeError:
        raise TypeError(
            f"{name} has dtype {dtype}, which is not a TensorFlow type. Convert it to floats, "
            "integers, booleans or strings."
        ) from None
    return tf.as_dtype(keras.config.floatx()) if tensor_dtype.is_floating else tensor_dtype


def batch_spec(leaves: list[tuple[tuple, tf.DType] | None], structure: Spec) -> Spec:
    """Returns TensorSpecs [None, ...] in `structure` for `leaves` of (inner shape, dtype).

    Weights multiply losses, so integer weights become floatx too.

    Raises:
        TypeError: weights that are not real numbers.
    """
    x, y, sample_weight = keras.tree.pack_sequence_as(
        structure,
        [None if leaf is None else tf.TensorSpec((None, *leaf[0]), leaf[1]) for leaf in leaves],
    )

    def weight_spec(spec):
        if spec is None:
            return None
        if not (spec.dtype.is_floating or spec.dtype.is_integer or spec.dtype.is_bool):
            raise TypeError(
                f"sample_weight has dtype {spec.dtype.name}: give real numbers. The third part of "
                "a record (x, y, sample_weight) is its weight; what else it has belongs into x, a "
                "dict of features."
            )
        return tf.TensorSpec(spec.shape, keras.config.floatx())

    return x, y, keras.tree.map_structure(weight_spec, sample_weight)


def padding(spec: tf.TensorSpec, count: int, multiple: int) -> np.ndarray:
    """Makes zeros (empty strings) for `count` rows of a leaf, up to a multiple of `multiple`."""
    shape = (-(-count // multiple) * multiple, *spec.shape[1:])
    if spec.dtype == tf.string:
        return np.full(shape, b"", object)
    return np.zeros(shape, spec.dtype.as_numpy_dtype)


def with_absent(structure: Spec, leaves: Iterable) -> list:
    """Puts the leaves that are there into the flat form of a structure, None where it has None."""
    left = iter(leaves)
    return [None if leaf is None else next(left) for leaf in keras.tree.flatten(structure)]


def leaf_names(structure: Spec) -> list[str]:
    """Returns names like `x['image']` for the leaves of `(x, y, sample_weight)`."""
    names = []
    for (part, *path), _ in keras.tree.flatten_with_path(structure):
        names.append(("x", "y", "sample_weight")[part] + "".join(f"[{key!r}]" for key in path))
    return names


class ArraySource:
    """Rows of arrays in memory or memory-mapped; the arrays are never copied whole."""

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None):
        structure = keras.tree.lists_to_tuples((x, y, sample_weight))
        names = leaf_names(structure)
        arrays = [
            None if leaf is None else _as_array(leaf, name)
            for leaf, name in zip(keras.tree.flatten(structure), names, strict=True)
        ]
        if all(leaf is None for leaf in keras.tree.flatten(structure[0])):
            raise ValueError(
                f"x holds no array, got {x!r}. Pass an array or a structure of arrays."
            )
        self._arrays = [array for array in arrays if array is not None]
        present = [name for name, array in zip(names, arrays, strict=True) if array is not None]
        for name, array in zip(present, self._arrays, strict=True):
            if len(array) != len(self):
                raise ValueError(
                    f"{name} has {len(array)} rows, but {present[0]} has {len(self)}. All arrays "
                    "must have one row per example."
                )
        self.spec = batch_spec(
            [
                None if array is None else (array.shape[1:], leaf_dtype(array.dtype, name))
                for name, array in zip(names, arrays, strict=True)
            ],
            structure,
        )
        self._leaf_specs = [s for s in keras.tree.flatten(self.spec) if s is not None]

    def __len__(self):
        return len(self._arrays[0])

    def rows(self, indices: np.ndarray, multiple: int) -> Rows:
        """Reads the rows of every array; see `Source`."""
        count = len(indices)
        leaves = []
        for array, spec in zip(self._arrays, self._leaf_specs, strict=True):
            leaf = padding(spec, count, multiple)
            if array.dtype == leaf.dtype and array.flags.c_contiguous:
                # One pass. Only here: take() would copy the WHOLE of an array of another layout.
                np.take(array, indices, axis=0, out=leaf[:count], mode="clip")
            else:
                with silent():
                    leaf[:count] = array[indices]
            leaves.append(leaf)
        return count, leaves


class ItemSource:
    """Items of a random-access source, one Python call each, or one for all by `__getitems__`.

    Item 0 is read at once; all items must have its structure, shapes and types. An item that
    differs raises when it is first drawn, which reveals the draw: check sources in advance.
    """

    def __init__(self, items: Any, transform: Callable[[Any], tuple] | None = None):
        try:
            self._length = len(items)
            items.__getitem__  # noqa: B018
        except (TypeError, AttributeError):
            raise TypeError(
                f"x is a {_type_name(items)}, which has no random access to single examples. Pass "
                "dense arrays, a structure of arrays, or an object with __len__ and __getitem__."
            ) from None
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of one item, got {transform!r}.")
        if self._length == 0:
            raise ValueError(
                f"x, a {_type_name(items)}, has no items. Lots need at least one example."
            )
        self._items = items
        self._read_in_the_end = check_grain(items)
        self._lengths = self._lengths_now()
        self._transform = transform
        first = self._structure(items[0], 0)
        self._names = leaf_names(first)
        leaves = [
            None if leaf is None else _item_leaf(leaf, name)
            for leaf, name in zip(keras.tree.flatten(first), self._names, strict=True)
        ]
        self.spec = batch_spec(
            [
                None if leaf is None else (leaf.shape, leaf_dtype(leaf.dtype, name))
                for leaf, name in zip(leaves, self._names, strict=True)
            ],
            first,
        )
        self._leaf_specs = keras.tree.flatten(self.spec)

    def __len__(self):
        return self._length

    def rows(self, indices: np.ndarray, multiple: int) -> Rows:
        """Reads items and stacks them leaf by leaf; see `Source`."""
        if self._lengths_now() != self._lengths:
            raise ValueError(
                f"x, a {_type_name(self._items)}, has another number of items than when the lots "
                "were made. Make new lots, and leave their source as it is."
            )
        indices = indices.tolist()
        stacked = [
            None if spec is None else padding(spec, len(indices), multiple)
            for spec in self._leaf_specs
        ]
        for row, (index, item) in enumerate(zip(indices, self._read(indices), strict=True)):
            item = self._structure(item, index)
            try:
                keras.tree.assert_same_structure(self.spec, item)
            except ValueError:
                raise ValueError(
                    f"item {index} of x has another structure than item 0, {self.spec}. All items "
                    "must agree."
                ) from None
            for out, leaf, name in zip(stacked, keras.tree.flatten(item), self._names, strict=True):
                self._store(out, row, leaf, f"{name} of item {index}")
        return len(indices), [out for out in stacked if out is not None]

    def _lengths_now(self):
        return [len(self._items), *map(len, self._read_in_the_end)]

    def _read(self, indices):
        if indices and hasattr(self._items, "__getitems__"):
            return self._items.__getitems__(indices)
        return (self._items[index] for index in indices)

    def _structure(self, item, index):
        if self._transform is not None:
            item = self._transform(item)
        if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
            raise TypeError(
                f"item {index} of x must be (x, y) or (x, y, sample_weight), got a "
                f"{_type_name(item)}. "
                'Use transform=, for example transform=lambda item: (item["image"], item["label"]).'
            )
        return keras.tree.lists_to_tuples((*item, None)[:3])

    @staticmethod
    def _store(out, row, leaf, name):
        if out is None or leaf is None:
            if out is not leaf:
                raise ValueError(f"{name} is {_type_name(leaf)}: None in all items or in no item.")
            return
        leaf = _item_leaf(leaf, name)
        if leaf.shape != out.shape[1:]:
            raise ValueError(
                f"{name} has shape {leaf.shape}, but item 0 has {out.shape[1:]}. All items must "
                "have one shape: resize or pad them in transform=."
            )
        if leaf.dtype != out.dtype and not _fits(leaf.dtype, out.dtype):
            raise ValueError(
                f"{name} has dtype {leaf.dtype}, which does not fit {out.dtype}, the type of item "
                "0. Convert it in transform=."
            )
        with silent():
            out[row] = leaf[()] if out.dtype == object else leaf


def _as_array(leaf, name):
    if not hasattr(leaf, "__array__"):
        raise TypeError(
            f"{name} is a {_type_name(leaf)}, not an array. Convert it with np.asarray (make "
            "sparse data dense, pad ragged data)."
        )
    array = np.asarray(leaf)
    if array.ndim == 0:
        raise ValueError(f"{name} is a scalar, {array!r}. Pass an array with one row per example.")
    if array.dtype == object:
        if hasattr(leaf, "columns"):
            _check_one_kind(leaf, name)
        _check_strings(array, name)
    return array


def _item_leaf(leaf, name):
    if isinstance(leaf, (str, bytes)):
        # numpy's own bytes type would cut trailing zero bytes off.
        return np.array(leaf, dtype=object)
    array = np.asarray(leaf)
    if array.dtype.kind in "US":
        array = array.astype(object)
    if array.dtype == object:
        _check_strings(array, name)
    return array


def _fits(dtype, into):
    # Every number may become a float; anything else must keep its value.
    if tf.as_dtype(into).is_floating:
        return dtype.kind != "O"
    return np.can_cast(dtype, into, "safe")


def _check_one_kind(frame, name):
    """Names the columns of a pandas DataFrame that are not numbers, if others are."""
    columns = [c for c in frame.columns if np.asarray(frame[c]).dtype.kind not in "biuf"]
    if len(columns) < len(frame.columns):
        raise TypeError(
            f"{name} is a {_type_name(frame)} of numbers with other columns, {columns}. Encode "
            "those as numbers, or pass them as inputs of their own."
        )


def _check_strings(array, name):
    for value in array.flat:
        if not isinstance(value, (str, bytes)):
            raise TypeError(
                f"{name} has dtype object and holds a {_type_name(value)}. Objects must be "
                "strings; convert anything else to an array of numbers of one shape."
            )


def _refuse_streams(x):
    if isinstance(x, tf.data.Dataset):
        raise TypeError(
            "x is a tf.data.Dataset, whose records cannot be read one by one. Read it once: "
            "PoissonLots.from_dataset(x, expected_size=...), or UserLots.from_dataset(x, "
            "user_ids='name of a feature', ...)."
        )
    if isinstance(x, tf.distribute.DistributedDataset):
        raise TypeError(
            f"x is a {_type_name(x)}: the law by which it samples is unknown. Give the dataset "
            "that it was made of, PoissonLots.from_dataset(dataset, expected_size=...)."
        )
    if hasattr(x, "__next__"):
        raise TypeError(
            f"x is a {_type_name(x)}, an iterator: sampling needs random access to the examples. "
            "Pass arrays, or an object with __len__ and __getitem__."
        )


class _Rows:
    """The rows of a `keras.utils.PyDataset`, whose items are batches.

    All batches but the last one have the same number of rows. Nothing is copied or kept: reading
    rows reads each batch that holds one of them.
    """

    def __init__(self, batches):
        number = batches.num_batches
        if not number:
            raise ValueError(
                f"x, a {_type_name(batches)}, has num_batches={number}. Lots need a finite number "
                "of batches, at least 1."
            )
        self._batches = batches
        self._size = self._count(batches[0])
        last = self._size if number == 1 else self._count(batches[number - 1])
        self._length = (number - 1) * self._size + last

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        read, rows = {}, []
        for index in indices:
            number, row = divmod(index, self._size)
            if number not in read:
                read = {number: self._batches[number]}  # indices are sorted
                expected = min(self._size, self._length - number * self._size)
                if self._count(read[number]) != expected:
                    raise ValueError(
                        f"batch {number} of x has {self._count(read[number])} rows, and "
                        f"{expected} were expected: all batches but the last must have one size."
                    )
            rows.append(keras.tree.map_structure(lambda a, r=row: a[r], read[number]))
        return rows

    @staticmethod
    def _count(batch):
        return len(keras.tree.flatten(batch)[0])


def _type_name(value):
    return type(value).__name__
