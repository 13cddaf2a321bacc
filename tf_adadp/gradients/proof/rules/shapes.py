"""Operations that change a tensor's shape and keep its entries, and those that read a shape."""

from tf_adadp.gradients.proof import sizes
from tf_adadp.gradients.proof.rules.registry import constants, normal_axis, one_place, plain, rule
from tf_adadp.gradients.proof.values import Mixes, Public, Rows, public, rows


@rule("Reshape")
def reshape(op, values):
    """Finds the axis at which the entries of an example still follow on each other.

    In [P, B·m, Q], as row-major memory has it, an example's entries are P runs of m·Q. The new
    shape must have an axis B·m' behind P entries: then m'·Q' = m·Q. [B, 3] as [−1, 2] has none.
    """
    value, shape = values
    if not isinstance(value, Rows):
        raise Mixes("has a shape that depends on examples")
    return reshaped(op.outputs[0], value, shape)


def reshaped(tensor, value, shape):
    """Returns the rows of a tensor of rows after a reshape to a public shape."""
    if not isinstance(shape, Public) or shape.value is None or None in value.dims:
        raise Mixes("has a shape that is not known")
    new = list(shape.value.flat)
    total = sizes.product(value.dims)
    try:
        if -1 in new:
            place = new.index(-1)
            rest = sizes.product(n for i, n in enumerate(new) if i != place)
            new[place] = total // rest
        whole = sizes.product(new)
    except (sizes.NotFollowed, ZeroDivisionError):
        raise Mixes("has a shape that divides examples") from None
    # FloorDiv of numbers drops a remainder, and so would −1.
    if whole != total:
        raise Mixes("has a shape that divides examples")
    axes = [i for i, n in enumerate(new) if isinstance(n, sizes.Size)]
    if len(axes) != 1 or new[axes[0]].power != 1:
        raise Mixes("merges or divides the axis of the examples")
    (axis,) = axes
    if sizes.product(new[:axis]) != sizes.product(value.dims[: value.axis]):
        raise Mixes("moves entries from one example to another")
    return rows(tensor, axis, new[axis].factor, tuple(new))


@rule("Transpose")
def transpose(op, values):
    """Moves the axis of the examples."""
    value, order = values
    order = [normal_axis(a, len(value.dims)) for a in constants(order, "axes")]
    dims = tuple(value.dims[a] for a in order)
    return rows(op.outputs[0], order.index(value.axis), value.stride, dims)


@rule("ExpandDims")
def expand_dims(op, values):
    """Adds an axis."""
    value = values[0]
    (axis,) = constants(values[1], "axes")
    axis = normal_axis(axis, value.rank + 1)
    dims = (*value.dims[:axis], 1, *value.dims[axis:])
    return rows(op.outputs[0], value.axis + (axis <= value.axis), value.stride, dims)


@rule("Squeeze")
def squeeze(op, values):
    """Drops named axes; without names it would drop a batch of one."""
    (value,) = values
    axes = [normal_axis(a, value.rank) for a in op.get_attr("squeeze_dims")]
    if not axes or value.axis in axes:
        raise Mixes("drops the axis of the examples where there is one of them")
    dims = tuple(d for a, d in enumerate(value.dims) if a not in axes)
    return rows(op.outputs[0], value.axis - sum(a < value.axis for a in axes), value.stride, dims)


@rule("Shape")
def shape(op, values):
    """Reads the shape, which is public but for B."""
    return shape_of(op.outputs[0], values[0])


@rule("ShapeN")
def shapes(op, values):
    """Reads several shapes."""
    return [shape_of(t, v) for t, v in zip(op.outputs, values, strict=True)]


@rule("Size")
def size(op, values):
    """Reads the number of entries."""
    dims = values[0].dims
    known = None if None in dims else sizes.array(sizes.product(dims))
    return public(op.outputs[0], known, sized=True)


@rule("Rank")
def rank(op, values):
    """Reads the number of axes."""
    return public(op.outputs[0], sizes.array(values[0].rank))


def shape_of(tensor, value):
    """Returns the shape of a value as a public tensor."""
    known = value.dims is not None and None not in value.dims
    return public(tensor, sizes.array(list(value.dims)) if known else None, sized=not known)


@rule("Pack")
def pack(op, values):
    """Stacks tensors along a new axis."""
    value = _all_rows(values)
    axis = normal_axis(op.get_attr("axis"), value.rank + 1)
    dims = (*value.dims[:axis], len(values), *value.dims[axis:])
    return rows(op.outputs[0], value.axis + (axis <= value.axis), value.stride, dims)


@rule("Unpack")
def unpack(op, values):
    """Takes a tensor apart along another axis."""
    (value,) = values
    axis = normal_axis(op.get_attr("axis"), value.rank)
    if axis == value.axis:
        raise Mixes("takes the batch apart")
    dims = tuple(d for a, d in enumerate(value.dims) if a != axis)
    return [rows(t, value.axis - (axis < value.axis), value.stride, dims) for t in op.outputs]


@rule("Tile")
def tile(op, values):
    """Repeats entries along other axes."""
    value, multiples = values
    multiples = constants(multiples, "multiples")
    if not isinstance(value, Rows) or multiples[value.axis] != 1:
        raise Mixes("repeats the batch")
    dims = tuple(None if d is None else d * m for d, m in zip(value.dims, multiples, strict=True))
    return rows(op.outputs[0], value.axis, value.stride, dims)


@rule("BroadcastTo")
def broadcast_to(op, values):
    """Repeats entries along axes of one entry."""
    value, shape = values
    if not isinstance(value, Rows) or not isinstance(shape, Public) or shape.value is None:
        raise Mixes("has a shape that is not known")
    dims = list(shape.value.flat)
    axis = value.axis + len(dims) - value.rank
    if dims[axis] != value.dims[value.axis] or sum(isinstance(d, sizes.Size) for d in dims) > 1:
        raise Mixes("repeats the batch")
    return rows(op.outputs[0], axis, value.stride, tuple(dims))


@rule("OneHot")
def one_hot(op, values):
    """Adds an axis of classes."""
    value = values[0]
    if not isinstance(value, Rows) or any(isinstance(v, Rows) for v in values[1:]):
        raise Mixes("has classes that depend on examples")
    for other in values[2:]:
        plain(other)
    (depth,) = constants(values[1], "classes")
    axis = op.get_attr("axis")
    axis = value.rank if axis == -1 else axis
    dims = (*value.dims[:axis], depth, *value.dims[axis:])
    return rows(op.outputs[0], value.axis + (axis <= value.axis), value.stride, dims)


def _all_rows(values):
    if not all(isinstance(v, Rows) for v in values):
        raise Mixes("has a constant with entries of its own for every place in the batch")
    return one_place(values)
