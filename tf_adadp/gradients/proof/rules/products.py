"""Matrix products and sums of products, as Einsum writes them."""

import itertools

import tensorflow as tf

from tf_adadp.gradients.proof.rules.registry import plain, rule
from tf_adadp.gradients.proof.values import Mixes, Rows, rows

Labels = list[str]


def labels_of(op: tf.Operation, ranks: list[int], dims: list) -> tuple[list[Labels], Labels]:
    """Names the axes of a product's operands and of its output.

    Args:
        op: a MatMul, BatchMatMul or Einsum.
        ranks: of its operands.
        dims: their shapes; an axis with one entry that is broadcast gets a name of its own.

    Raises:
        Mixes: operands other than these.
    """
    if op.type == "Einsum":
        return _einsum(op, ranks, dims)
    first, second = op.inputs
    names = iter(_names())
    inner, left, right = next(names), next(names), next(names)
    transposed = _transposed(op)
    x = [inner, left] if transposed[0] else [left, inner]
    y = [right, inner] if transposed[1] else [inner, right]
    depth = max(ranks) - 2
    out = []
    for place in range(-depth - 2, -2):
        name = next(names)
        out.append(name)
        for labels, rank, shape in ((x, ranks[0], dims[0]), (y, ranks[1], dims[1])):
            if rank >= -place:
                other = dims[1] if shape is dims[0] else dims[0]
                alone = shape[place] == 1 and len(other) >= -place and other[place] != 1
                labels.insert(len(labels) - 2, next(names) if alone else name)
    return [x, y], [*out, left, right]


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
def product(op, values):
    """Keeps an axis of examples that is in the output, and not summed over."""
    if len(values) > 2:
        raise Mixes("is a product of more than two tensors")
    for value in values:
        if not isinstance(value, Rows):
            plain(value)
            if value.rank is None:
                raise Mixes("has an operand of unknown rank")
    sides, out = labels_of(op, [v.rank for v in values], [v.dims for v in values])
    found = {
        (labels[v.axis], v.stride)
        for v, labels in zip(values, sides, strict=True)
        if isinstance(v, Rows)
    }
    if len(found) > 1:
        raise Mixes("combines every example with every other one")
    ((label, stride),) = found
    if out.count(label) != 1 or any(labels.count(label) > 1 for labels in sides):
        raise Mixes("sums over the examples")
    for value, labels in zip(values, sides, strict=True):
        if not isinstance(value, Rows) and label in labels:
            raise Mixes("has a constant with entries of its own for every place in the batch")
    sizes = {}
    for value, labels in zip(values, sides, strict=True):
        for name, dim in zip(labels, value.dims, strict=True):
            if name not in sizes or (dim != 1 and sizes[name] in (None, 1)):
                sizes[name] = dim
    return rows(op.outputs[0], out.index(label), stride, tuple(sizes.get(n) for n in out))


def _transposed(op):
    if op.type == "MatMul":
        return op.get_attr("transpose_a"), op.get_attr("transpose_b")
    return op.get_attr("adj_x"), op.get_attr("adj_y")


def _einsum(op, ranks, dims):
    equation = op.get_attr("equation").decode()
    left, out = equation.replace(" ", "").split("->")
    sides = left.split(",")
    hidden = max(
        (rank - (len(side) - 3) for side, rank in zip(sides, ranks, strict=True) if "..." in side),
        default=0,
    )
    dots = [f".{n}" for n in range(hidden)]

    def spelled(side, rank=None):
        if "..." not in side:
            return list(side)
        before, after = side.split("...")
        count = hidden if rank is None else rank - len(before) - len(after)
        return [*before, *dots[hidden - count :], *after]

    labels = [spelled(side, rank) for side, rank in zip(sides, ranks, strict=True)]
    for i, (own, shape) in enumerate(zip(labels, dims, strict=True)):
        for place, name in enumerate(own):
            others = [d[o.index(name)] for o, d in zip(labels, dims, strict=True) if name in o]
            if name in dots and shape[place] == 1 and any(d != 1 for d in others):
                own[place] = f"{name}.{i}"
    return labels, spelled(out)


def _names():
    return (f"n{i}" for i in itertools.count())
