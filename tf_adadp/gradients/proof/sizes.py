"""Follows sizes that may be a multiple of the number of examples, and computations with them.

A model reshapes by shapes that it reads from tensors. With B, the number of examples in the batch,
unknown, such a shape has entries c·Bᵏ. They are followed exactly, or not at all: with NumPy arrays
of Python numbers and `Size`s. Arithmetic is followed for whole numbers that the dtype can hold.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

LARGEST = 4096  # numbers in a tensor that is followed by value
_LARGEST_FLOAT, _LARGEST_HALF = 2**24, 2**8  # whole numbers up to here are exact


class NotFollowed(Exception):
    """A number that is not c·Bᵏ."""


@dataclasses.dataclass(frozen=True)
class Size:
    """The number c·Bᵏ for a batch of B ≥ 1 examples, c not 0 and k at least 1."""

    factor: int
    power: int = 1

    def __mul__(self, other):
        other = _size(other)
        return _number(self.factor * other.factor, self.power + other.power)

    __rmul__ = __mul__

    def __floordiv__(self, other):
        return _quotient(self, other)

    def __rfloordiv__(self, other):
        return _quotient(other, self)

    def __add__(self, other):
        if isinstance(other, Size) and other.power == self.power:
            return _number(self.factor + other.factor, self.power)
        if not isinstance(other, Size) and other == 0:
            return self
        raise NotFollowed

    __radd__ = __add__

    def __neg__(self):
        return Size(-self.factor, self.power)

    def __sub__(self, other):
        return self + -other

    def __rsub__(self, other):
        return -self + other


def _size(value):
    return value if isinstance(value, Size) else Size(_whole(value), 0)


def _whole(value):
    """Returns a number without a fraction, as an integer."""
    if isinstance(value, float) and not value.is_integer():
        raise NotFollowed
    return int(value)


def _number(factor, power):
    return factor if power == 0 or factor == 0 else Size(factor, power)


def _quotient(a, b):
    """Divides without remainder, for every B."""
    a, b = _size(a), _size(b)
    if b.factor == 0:
        raise NotFollowed
    if a.power == b.power == 0:
        return a.factor // b.factor
    if a.factor % b.factor or a.power < b.power:
        raise NotFollowed
    return _number(a.factor // b.factor, a.power - b.power)


def product(sizes: Sequence) -> Any:
    """Multiplies sizes."""
    return math.prod(sizes, start=1)


def depends_on_batch(value: np.ndarray) -> bool:
    """Tells whether one of the numbers is a multiple of B."""
    return any(isinstance(v, Size) for v in value.flat)


def array(values: Any) -> np.ndarray:
    """Makes an object array of Python integers and Sizes."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        values = values.tolist()
    result = np.empty(np.shape(values) if not isinstance(values, Size) else (), dtype=object)
    if result.ndim == 0:
        result[()] = values if not isinstance(values, np.ndarray) else values.item()
    else:
        result[...] = values
    return result


def integers(value: np.ndarray | None) -> list:
    """Returns flat Python integers; raises `NotFollowed` where they depend on B."""
    if value is None or depends_on_batch(value):
        raise NotFollowed
    return [_whole(v) for v in value.flat]


# --- operations on such numbers -----------------------------------------------------------------


def evaluate(op: tf.Operation, values: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Computes an operation on followed numbers: per output an array, or None for unknown."""
    function = _OPERATIONS.get(op.type)
    known = all(v is not None for v in values)
    try:
        if function is None or not known:
            return [None] * len(op.outputs)
        found = function(op, *values)
    except (NotFollowed, IndexError, ValueError):  # some are of graphs that cannot run
        return [None] * len(op.outputs)
    found = found if isinstance(found, list) else [found]
    return [_held(v, t.dtype) for v, t in zip(found, op.outputs, strict=True)]


def selected(op: tf.Operation, values: Sequence) -> list[np.ndarray]:
    """Returns the outputs of an operation that selects entries, for any array of entries.

    Raises:
        NotFollowed: where it selects is not known.
    """
    found = _OPERATIONS[op.type](op, *values)
    return found if isinstance(found, list) else [found]


def _held(found, dtype):
    """Returns the numbers, where a dtype holds all of them exactly."""
    if np.size(found) > LARGEST:
        return None
    found = array(found)
    return found if all(_is_exact(v, dtype) for v in found.flat) else None


def _is_exact(value, dtype):
    if value is None:
        return False
    if isinstance(value, Size):
        return dtype in (tf.int32, tf.int64, tf.float32, tf.float64) and _is_exact(
            value.factor, dtype
        )
    if dtype.is_integer:
        return isinstance(value, int) and dtype.min <= value <= dtype.max
    if dtype.is_floating:
        is_fraction = isinstance(value, float) and not value.is_integer()  # of a constant, moved
        return is_fraction or abs(value) <= (_LARGEST_FLOAT if dtype.size > 2 else _LARGEST_HALF)
    return dtype.is_bool


def _elementwise(function: Callable):
    def applied(op, *values):
        _check_whole(values)
        return np.frompyfunc(function, len(values), 1)(*values)

    return applied


def _check_whole(values):
    """Refuses fractions: TensorFlow rounds them differently from Python."""
    for number in (n for v in values for n in v.flat):
        if isinstance(number, float):
            _whole(number)


def _maximum(a, b):
    sizes = [v for v in (a, b) if isinstance(v, Size)]
    if len(sizes) == 2 or not sizes:
        if len(sizes) == 2 and sizes[0].power != sizes[1].power:
            raise NotFollowed
        return a if _size(a).factor >= _size(b).factor else b
    number, factor = (b if isinstance(a, Size) else a), sizes[0].factor
    if 0 < factor >= number:  # B ≥ 1
        return sizes[0]
    if 0 > factor <= number:
        return number
    raise NotFollowed


def _remainder(a, b):
    if b == 0:
        raise NotFollowed
    if isinstance(a, Size):
        if isinstance(b, Size) or a.factor % b:
            raise NotFollowed
        return 0
    if isinstance(b, Size):
        raise NotFollowed
    return a % b


def _compared(function):
    def applied(a, b):
        if isinstance(a, Size) or isinstance(b, Size):
            if a == b and function(0, 0):
                return True
            a, b = _size(a), _size(b)
            # Against numbers that no batch has: below 1.
            if b.power == 0 and a.factor > 0 and b.factor < 1:
                return function(1, b.factor)
            if a.power == 0 and b.factor > 0 and a.factor < 1:
                return function(a.factor, 1)
            raise NotFollowed
        return function(a, b)

    return applied


def _strided(op, value, begin, end, strides):
    if value.ndim == 0 and begin.size:
        raise NotFollowed
    return value[strided_index(op, value.ndim, begin, end, strides)]


def strided_index(op: tf.Operation, rank: int, begin, end, strides) -> tuple:
    """Returns the index, as Python writes it, of a StridedSlice with constant bounds."""
    begin, end, strides = (integers(v) for v in (begin, end, strides))
    masks = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    index = []
    for i in range(len(begin)):
        has = {name: bool(mask >> i & 1) for name, mask in masks.items()}
        if has["ellipsis"]:
            index.append(Ellipsis)
        elif has["new_axis"]:
            index.append(None)
        elif has["shrink_axis"]:
            index.append(begin[i])
        else:
            index.append(
                slice(
                    None if has["begin"] else begin[i],
                    None if has["end"] else end[i],
                    strides[i],
                )
            )
    return tuple(index)


def _reduced(function):
    def applied(op, value, axes):
        axes = tuple(integers(axes))
        _check_whole([value])
        return function.reduce(value, axis=axes, keepdims=op.get_attr("keep_dims"))

    return applied


def _concatenated(op, *values):
    (axis,) = integers(values[-1])
    return np.concatenate(values[:-1], axis=axis)


def _gathered(op, params, indices, axis):
    (axis,) = integers(axis)
    if op.get_attr("batch_dims"):
        raise NotFollowed
    return np.take(params, np.array(integers(indices)).reshape(indices.shape).astype(int), axis)


def _stitched(op, *values):
    count = len(values) // 2
    indices, data = values[:count], values[count:]
    size = 1 + max((max(integers(i)) for i in indices if i.size), default=-1)
    result = np.empty([size, *data[0].shape[indices[0].ndim :]], dtype=object)
    for index, part in zip(indices, data, strict=True):
        rows = part.reshape([-1, *result.shape[1:]])
        for place, number in zip(integers(index), rows, strict=True):
            result[place] = number
    return result


def _gradient_axes(op, *shapes):
    """Returns the axes that the gradients of a broadcast are summed over.

    Where a shape has one entry because B = 1, the sum over it changes nothing.
    """
    rank = max(len(s) for s in shapes)
    padded = ([1] * (rank - len(s)) + list(s) for s in shapes)
    return [np.array([a for a in range(rank) if s[a] == 1], dtype=object) for s in padded]


def _broadcast_shape(op, *shapes):
    first, second = (list(s) for s in shapes)
    rank = max(len(first), len(second))
    first, second = ([1] * (rank - len(s)) + s for s in (first, second))
    if any(a != b and 1 not in (a, b) for a, b in zip(first, second, strict=True)):
        raise NotFollowed
    return array([b if a == 1 else a for a, b in zip(first, second, strict=True)])


def _offsets(op, axis, *shapes):
    """Returns where the parts of a concatenation begin."""
    (axis,) = integers(axis)
    found, place = [], 0
    for shape in shapes:
        offset = np.zeros(len(shape), dtype=object)
        offset[axis] = place
        found.append(offset)
        place = place + shape[axis]
    return found


def _filled(op, dims, value):
    return np.full(integers(dims), value.item(), dtype=object)


def _sliced(op, value, begin, size):
    index = tuple(
        slice(b, None if s == -1 else b + s)
        for b, s in zip(integers(begin), integers(size), strict=True)
    )
    return value[index]


def _split(op, axis, value):
    return list(np.split(value, op.get_attr("num_split"), axis=integers(axis)[0]))


def _squeezed(op, value):
    return np.squeeze(value, tuple(op.get_attr("squeeze_dims")) or None)


def _range(op, start, limit, delta):
    (start,), (limit,), (delta,) = integers(start), integers(limit), integers(delta)
    return np.arange(start, limit, delta)


def _cast(op, value):
    dtype = tf.as_dtype(op.get_attr("DstT"))
    return np.frompyfunc(lambda number: _as_dtype(number, dtype), 1, 1)(value)


def _as_dtype(number, dtype):
    if dtype.is_bool:
        return True if isinstance(number, Size) else bool(number)
    if isinstance(number, Size):
        return number
    return _whole(number) if dtype.is_integer else float(_whole(number))


def _argument(function):
    return lambda op, *values: function(*values)


_OPERATIONS = {
    "Identity": _argument(lambda v: v),
    "StopGradient": _argument(lambda v: v),
    "PreventGradient": _argument(lambda v: v),
    "EnsureShape": _argument(lambda v: v),
    "Cast": _cast,
    "Mul": _elementwise(lambda a, b: a * b),
    "AddV2": _elementwise(lambda a, b: a + b),
    "Add": _elementwise(lambda a, b: a + b),
    "Sub": _elementwise(lambda a, b: a - b),
    "Neg": _elementwise(lambda a: -a),
    "FloorDiv": _elementwise(_quotient),
    "FloorMod": _elementwise(_remainder),
    "Maximum": _elementwise(_maximum),
    "Equal": _elementwise(_compared(lambda a, b: a == b)),
    "NotEqual": _elementwise(_compared(lambda a, b: a != b)),
    "Less": _elementwise(_compared(lambda a, b: a < b)),
    "LessEqual": _elementwise(_compared(lambda a, b: a <= b)),
    "Greater": _elementwise(_compared(lambda a, b: a > b)),
    "GreaterEqual": _elementwise(_compared(lambda a, b: a >= b)),
    "SelectV2": _elementwise(lambda c, a, b: a if c else b),
    "LogicalAnd": _elementwise(lambda a, b: a and b),
    "LogicalOr": _elementwise(lambda a, b: a or b),
    "LogicalNot": _elementwise(lambda a: not a),
    "Pack": lambda op, *values: np.stack(values, axis=op.get_attr("axis")),
    "Unpack": lambda op, value: list(np.moveaxis(value, op.get_attr("axis"), 0)),
    "ConcatV2": _concatenated,
    "ConcatOffset": _offsets,
    "StridedSlice": _strided,
    "Slice": _sliced,
    "Split": _split,
    "GatherV2": _gathered,
    "Reshape": lambda op, value, shape: value.reshape(integers(shape)),
    "ExpandDims": lambda op, value, axis: np.expand_dims(value, integers(axis)[0]),
    "Squeeze": _squeezed,
    "Transpose": lambda op, value, order: np.transpose(value, integers(order)),
    "Prod": _reduced(np.multiply),
    "Sum": _reduced(np.add),
    "All": _reduced(np.logical_and),
    "Any": _reduced(np.logical_or),
    "Range": _range,
    "Fill": _filled,
    "Tile": lambda op, value, multiples: np.tile(value, integers(multiples)),
    "ReverseV2": lambda op, value, axes: np.flip(value, tuple(integers(axes))),
    "DynamicStitch": _stitched,
    "InvertPermutation": lambda op, value: np.argsort(integers(value)),
    "BroadcastGradientArgs": _gradient_axes,
    "BroadcastArgs": _broadcast_shape,
    "ZerosLike": lambda op, value: np.zeros(value.shape, int),
    "OnesLike": lambda op, value: np.ones(value.shape, int),
}
