"""Operations along some axes: they keep examples apart where those are along another one."""

from tf_adadp.gradients.proof.rules.registry import (
    constants,
    normal_axis,
    one_place,
    plain,
    rule,
    static_rank,
)
from tf_adadp.gradients.proof.values import Mixes, Public, Rows, rows


def off(value, axes):
    """Checks that no axis is that of the examples."""
    axes = [normal_axis(a, value.rank) for a in axes]
    if value.axis in axes:
        raise Mixes("works along the axis of the examples")
    return axes


@rule("Sum", "Mean", "Max", "Min", "Prod", "Any", "All", "EuclideanNorm")
def reduction(op, values):
    """Reduces other axes."""
    value = _rows(values[0])
    axes = off(value, constants(values[1], "axes"))
    keep = op.get_attr("keep_dims")
    dims = [1 if a in axes else d for a, d in enumerate(value.dims) if keep or a not in axes]
    axis = value.axis if keep else value.axis - sum(a < value.axis for a in set(axes))
    return rows(op.outputs[0], axis, value.stride, tuple(dims))


@rule("ArgMax", "ArgMin")
def argument(op, values):
    """Finds places along another axis."""
    value = _rows(values[0])
    (axis,) = off(value, constants(values[1], "axes"))
    dims = tuple(d for a, d in enumerate(value.dims) if a != axis)
    return rows(op.outputs[0], value.axis - (axis < value.axis), value.stride, dims)


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2")
def same_shape(op, values):
    """Works along another axis and keeps the shape."""
    value = _rows(values[0])
    off(value, constants(values[1], "axes"))
    return rows(op.outputs[0], value.axis, value.stride, value.dims)


@rule("Roll")
def roll(op, values):
    """Shifts along another axis, by as much for all."""
    value = _rows(values[0])
    plain(values[1])
    off(value, constants(values[2], "axes"))
    return rows(op.outputs[0], value.axis, value.stride, value.dims)


@rule("Softmax", "LogSoftmax")
def last(op, values):
    """Works along the last axis."""
    value = _rows(values[0])
    off(value, [-1])
    return rows(op.outputs[0], value.axis, value.stride, value.dims)


@rule("TopKV2")
def largest(op, values):
    """Sorts along the last axis."""
    value = _rows(values[0])
    off(value, [-1])
    for other in values[1:]:
        plain(other)
    return [rows(t, value.axis, value.stride) for t in op.outputs]


@rule("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def segments(op, values):
    """Reduces its first axes, in segments that are the same for all."""
    value, places, count = values
    value = _rows(value)
    if plain(places).rank is None or plain(count).rank != 0:
        raise Mixes("has an operand of unknown rank")
    off(value, range(places.rank))
    number = None if count.value is None else count.value.item()
    dims = (number, *value.dims[places.rank :])
    return rows(op.outputs[0], value.axis - places.rank + 1, value.stride, dims)


@rule("DenseBincount")
def counts(op, values):
    """Counts the numbers of each row, up to a size that is the same for all.

    They must come from a `where`, as `no_index_stops` has it: on a GPU a negative number may be
    counted in another row.
    """
    value, size, factors = values
    if op.inputs[0].op.type != "SelectV2":
        raise Mixes("counts numbers that may be negative")
    off(_rows(value), [-1])
    if isinstance(factors, Rows):
        one_place([value, factors])
    elif plain(factors).dims != (0,):
        raise Mixes("has a constant with entries of its own for every place in the batch")
    number = None if plain(size).value is None else size.value.item()
    return rows(op.outputs[0], value.axis, value.stride, (None, number))


@rule("MatrixBandPart", "MatrixInverse", "MatrixDeterminant", "Cholesky", "CholeskyGrad", "FFT",
      "IFFT", "FFT2D", "IFFT2D", "RFFT", "IRFFT", "RFFT2D", "IRFFT2D")  # fmt: skip
def last_two(op, values):
    """Works on the last two axes, or on the last one."""
    value = one_place(values)
    for other in values:
        if isinstance(other, Public):
            plain(other)
        else:
            off(other, [-1, -2] if other.rank > 1 else [-1])
    return rows(op.outputs[0], value.axis, value.stride)


@rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def cross_entropy(op, values):
    """Works on every row by itself."""
    value = one_place(values)
    if value.axis != 0 or not all(isinstance(v, Rows) for v in values):
        raise Mixes("compares examples with constants")
    return [rows(t, 0, value.stride, (None,) * static_rank(t)) for t in op.outputs]


def _rows(value):
    if not isinstance(value, Rows):
        raise Mixes("has an operand that depends on examples where it must not")
    return value
