"""Operations that cut tensors, put them together, and look entries up."""

from tf_adadp.gradients.proof import sizes
from tf_adadp.gradients.proof.rules.along_axes import off
from tf_adadp.gradients.proof.rules.registry import (
    constants,
    normal_axis,
    one_place,
    plain,
    rule,
)
from tf_adadp.gradients.proof.values import Mixes, Public, Rows, rows


@rule("ConcatV2")
def concatenate(op, values):
    """Joins tensors along another axis."""
    *parts, axis = values
    if not all(isinstance(v, Rows) for v in parts):
        raise Mixes("has a constant with entries of its own for every place in the batch")
    value = one_place(parts)
    (axis,) = off(value, constants(axis, "axes"))
    ends = [v.dims[axis] for v in parts]
    total = None if any(not isinstance(e, int) for e in ends) else sum(ends)
    dims = tuple(total if a == axis else d for a, d in enumerate(value.dims))
    return rows(op.outputs[0], value.axis, value.stride, dims)


@rule("Split")
def split(op, values):
    """Cuts along another axis into equal parts."""
    axis, value = values
    return _parts(op, value, axis)


@rule("SplitV")
def split_sizes(op, values):
    """Cuts along another axis."""
    value, ends, axis = values
    plain(ends)
    return _parts(op, value, axis)


def _parts(op, value, axis):
    if not isinstance(value, Rows):
        raise Mixes("is cut where examples say")
    off(value, constants(axis, "axes"))
    return [rows(t, value.axis, value.stride) for t in op.outputs]


@rule("Slice")
def slice_(op, values):
    """Takes all of the axis of the examples."""
    value, begin, ends = values
    if not isinstance(value, Rows) or not isinstance(begin, Public) or not isinstance(ends, Public):
        raise Mixes("is cut where examples say")
    if begin.value is None or ends.value is None:
        raise Mixes("is cut at places that are not known")
    first, count = begin.value[value.axis], ends.value[value.axis]
    if first != 0 or (count != -1 and count != value.dims[value.axis]):
        raise Mixes("takes some of the examples")
    for bounds in (begin, ends):
        _same_for_all(bounds, [a for a in range(value.rank) if a != value.axis])
    dims = tuple(None if count == -1 else count for count in ends.value.flat)
    return rows(op.outputs[0], value.axis, value.stride, dims)


def _same_for_all(bounds, places):
    """Checks that bounds along other axes than that of the examples do not depend on B."""
    if bounds.value is None:
        plain(bounds)
    elif sizes.depends_on_batch(bounds.value[places]):
        raise Mixes("uses the number of examples")


@rule("StridedSlice")
def strided_slice(op, values):
    """Takes the whole axis of the examples, and any part of the others."""
    value, *bounds = values
    if not isinstance(value, Rows):
        raise Mixes("is cut where examples say")
    return rows(op.outputs[0], _strided_axis(op, value, value.axis, bounds), value.stride)


@rule("StridedSliceGrad")
def strided_slice_gradient(op, values):
    """Puts gradients where a slice was taken: (shape, begin, end, strides, gradients)."""
    shape, *bounds, gradients = values
    if not isinstance(gradients, Rows) or not isinstance(shape, Public) or shape.value is None:
        raise Mixes("has a shape that is not known")
    dims = tuple(shape.value.flat)
    axes = [a for a, d in enumerate(dims) if d == gradients.dims[gradients.axis]]
    if len(axes) != 1:
        raise Mixes("has a shape of another number of examples")
    whole = Rows(axes[0], gradients.stride, dims)
    if _strided_axis(op, whole, axes[0], bounds) != gradients.axis:
        raise Mixes("takes some of the examples")
    return rows(op.outputs[0], axes[0], gradients.stride, dims)


def _strided_axis(op, value, axis, bounds):
    """Returns the place of an axis after a StridedSlice that takes all of it."""
    begin, end, strides = bounds
    if not all(isinstance(b, Public) for b in bounds):
        raise Mixes("is cut where examples say")
    # At the axis of the examples only masks count: its bounds may be any number.
    masks = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    count = next((b.dims[0] for b in bounds if b.dims is not None), None)
    if count is None or (masks["ellipsis"] & (masks["ellipsis"] - 1)):
        raise Mixes("is cut at places that are not known")
    has = [{name: bool(mask >> i & 1) for name, mask in masks.items()} for i in range(count)]
    named = sum(not h["new_axis"] and not h["ellipsis"] for h in has)
    old, new, found = 0, 0, None
    for i, flags in enumerate(has):
        if flags["ellipsis"]:
            hidden = value.rank - named
            if old <= axis < old + hidden:
                found = new + axis - old
            old, new = old + hidden, new + hidden
        elif flags["new_axis"]:
            new += 1
        else:
            if old == axis:
                if flags["shrink_axis"] or not _takes_all(flags, i, value.dims[axis], bounds):
                    raise Mixes("takes some of the examples")
                found = new
            else:
                _same_for_all(begin, [] if flags["begin"] and not flags["shrink_axis"] else [i])
                _same_for_all(end, [] if flags["end"] or flags["shrink_axis"] else [i])
                _same_for_all(strides, [i])
            old, new = old + 1, new + (not flags["shrink_axis"])
    return new + axis - old if found is None else found


def _takes_all(flags, i, dim, bounds):
    begin, end, strides = ([None] if b.value is None else list(b.value.flat) for b in bounds)
    if strides[0] is None or strides[i] != 1:
        return False
    from_start = flags["begin"] or (begin[0] is not None and begin[i] == 0)
    to_end = flags["end"] or (end[0] is not None and end[i] == dim)
    return from_start and to_end


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(op, values):
    """Adds entries along other axes."""
    value, paddings, *others = values
    if not isinstance(value, Rows):
        raise Mixes("is padded where examples say")
    for other in others:
        plain(other)
    widths = constants(paddings, "paddings")
    before, after = widths[2 * value.axis : 2 * value.axis + 2]
    if before or after:
        raise Mixes("adds rows to the batch")
    sign = -1 if op.type == "MirrorPadGrad" else 1
    dims = tuple(
        None if d is None else d if a == value.axis else d + sign * sum(widths[2 * a : 2 * a + 2])
        for a, d in enumerate(value.dims)
    )
    return rows(op.outputs[0], value.axis, value.stride, dims)


@rule("GatherV2")
def gather(op, values):
    """Looks entries up: of a public tensor, at public places, or within each example."""
    params, indices, axis = values
    (axis,) = constants(axis, "axes")
    batch_dims = op.get_attr("batch_dims")
    if params.rank is None or indices.rank is None:
        raise Mixes("has an operand of unknown rank")
    axis = normal_axis(axis, params.rank)
    batch_dims = batch_dims + indices.rank if batch_dims < 0 else batch_dims
    dims = (*params.dims[:axis], *indices.dims[batch_dims:], *params.dims[axis + 1 :])
    both = isinstance(params, Rows) and isinstance(indices, Rows)
    if both:
        value = one_place([params, indices])
        if value.axis >= batch_dims:
            raise Mixes("looks up entries of every example for every other one")
        return rows(op.outputs[0], value.axis, value.stride, dims)
    if isinstance(params, Rows):
        plain(indices)
        if params.axis == axis:
            raise Mixes("looks up examples by their place in the batch")
        if params.axis < batch_dims:
            raise Mixes("looks up entries by their place in the batch")
        moved = indices.rank - batch_dims - 1 if params.axis > axis else 0
        return rows(op.outputs[0], params.axis + moved, params.stride, dims)
    plain(params)
    if indices.axis < batch_dims:
        raise Mixes("looks up entries by their place in the batch")
    return rows(op.outputs[0], axis + indices.axis - batch_dims, indices.stride, dims)


@rule("GatherNd")
def gather_nd(op, values):
    """Looks entries of a public tensor up."""
    params, indices = values
    if isinstance(params, Rows):
        raise Mixes("looks up examples by their place in the batch")
    plain(params)
    if indices.axis == indices.rank - 1 or not isinstance(indices.dims[-1], int):
        raise Mixes("has its places along the axis of the examples")
    dims = (*indices.dims[:-1], *params.dims[indices.dims[-1] :])
    return rows(op.outputs[0], indices.axis, indices.stride, dims)
