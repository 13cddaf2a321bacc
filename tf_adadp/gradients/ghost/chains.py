"""Takes per-example gradients from a public tensor back to the weights that it is computed from.

Between a weight and the examples stand a cast, a reshape, a transposition, or what makes a kernel
of several weights (W + s·A·B). Where such an operation is linear the gradient keeps its form; else
it is formed, and goes through TensorFlow's own gradient.
"""

import math
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tf_adadp.clipping.row_gradients import RowGradients, Rows
from tf_adadp.gradients.forms import Factored, Lookups, MatrixLayout
from tf_adadp.gradients.forms.common import rows_of, with_shape
from tf_adadp.gradients.ghost.weights import NoForm, has_own_gradient, summed_to
from tf_adadp.gradients.mapping import map_rows
from tf_adadp.gradients.proof import sizes
from tf_adadp.gradients.proof.follow import Follower

_PASSES_ON = ("Identity", "EnsureShape", "PreventGradient")
_RESHAPES = ("Reshape", "ExpandDims", "Squeeze")


def pulled_back(
    tensor: tf.Tensor, rows: RowGradients, follower: Follower, weights: list[tf.Tensor]
) -> Iterator[tuple[int, RowGradients]]:
    """Yields pairs (number of a weight, its gradients) from the gradients of a public tensor.

    Args:
        tensor: the public tensor.
        rows: the gradients with respect to it.
        follower: knows which tensors weights reach.
        weights: the tensors of the trainable weights.
    """
    number = next((i for i, weight in enumerate(weights) if weight.name == tensor.name), None)
    if number is not None:
        yield number, rows
        return
    if not follower.of(tensor).weights:
        return
    step = None if has_own_gradient(tensor.op) else _STEPS.get(tensor.op.type)
    pairs = NotImplemented if step is None else step(tensor.op, rows, tensor.value_index)
    if pairs is NotImplemented:
        yield from _by_gradient(tensor, rows, follower, weights)
        return
    for inner, part in pairs:
        if follower.of(inner).weights:
            yield from pulled_back(inner, part, follower, weights)


def _by_gradient(tensor, rows, follower, weights):
    """Returns TensorFlow's gradient of the tensor, example by example."""
    numbers = sorted(follower.of(tensor).weights)
    found = [weights[i] for i in numbers]

    def one_example(row):
        back = tf.gradients(tensor, found, grad_ys=tf.cast(row, tensor.dtype))
        if any(b is None for b in back):
            raise NoForm(f"no gradient goes from {tensor.op.type} to a weight")
        return [tf.cast(tf.convert_to_tensor(b), tf.float32) for b in back]

    parts = map_rows(one_example, rows.materialize(), sequential=False)
    for number, weight, part in zip(numbers, found, parts, strict=True):
        yield number, Rows(with_shape(part, [None, *weight.shape]))


# --- one step back --------------------------------------------------------------------------------


def _same(op, rows, _):
    return [(op.inputs[0], rows)]


def _cast(op, rows, _):
    """Stops gradients at integers."""
    return [(op.inputs[0], rows)] if op.inputs[0].dtype.is_floating else []


def _no_gradient(op, rows, _):
    return []


def _reshaped(op, rows, _):
    shape = _shape(op.inputs[0])
    if isinstance(rows, Factored):
        layout = rows.layout.reshaped(shape)
        if layout is not None:
            return [(op.inputs[0], rows.with_layout(layout))]
    if isinstance(rows, Lookups) and shape == rows.shape:
        return [(op.inputs[0], rows)]
    return [(op.inputs[0], Rows(tf.reshape(rows.materialize(), [-1, *shape])))]


def _transposed(op, rows, _):
    order = tf.get_static_value(op.inputs[1])
    if order is None:
        return NotImplemented
    order = [int(a) for a in order]
    if isinstance(rows, Factored):
        layout = rows.layout.transposed(order)
        return [(op.inputs[0], rows.with_layout(layout))]
    inverse = np.argsort(order)
    formed = tf.transpose(rows.materialize(), [0, *(1 + a for a in inverse)])
    return [(op.inputs[0], Rows(formed))]


def _sum(op, rows, _):
    return [(t, _folded(t, rows)) for t in op.inputs]


def _difference(op, rows, _):
    first, second = op.inputs
    return [(first, _folded(first, rows)), (second, _folded(second, rows.scaled(-1.0)))]


def _negated(op, rows, _):
    return [(op.inputs[0], rows.scaled(-1.0))]


def _product(op, rows, _):
    found = []
    for tensor, factor in zip(op.inputs, reversed(list(op.inputs)), strict=True):
        factor = tf.cast(factor, tf.float32)
        if _shape(factor) in ((), (1,) * factor.shape.rank) and _shape(tensor) == rows.shape:
            found.append((tensor, rows.scaled(tf.reshape(factor, []))))
        else:
            found.append((tensor, _folded(tensor, Rows(rows.materialize() * factor))))
    return found


def _quotient(op, rows, _):
    number, factor = op.inputs
    is_constant = tf.get_static_value(factor) is not None
    if _shape(number) != rows.shape or factor.shape.rank != 0 or not is_constant:
        return NotImplemented
    return [(number, rows.scaled(1.0 / tf.cast(factor, tf.float32)))]


def _matrix_product(op, rows, _):
    """Splits P = A·B: the gradient a ⊗ d of P is a ⊗ d·Bᵀ of A and Aᵀa ⊗ d of B."""
    plain = isinstance(rows, Factored) and rows.layout.is_plain
    names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    if not plain or len(rows.shape) != 2 or any(op.get_attr(n) for n in names):
        return NotImplemented
    first, second = op.inputs
    if first.shape.rank != 2 or second.shape.rank != 2:
        return NotImplemented
    left, right = (tf.cast(t, tf.float32) for t in (first, second))
    a, d = rows.factors
    return [
        (first, rows.with_factors(a, tf.linalg.matmul(d, right, transpose_b=True),
                                  MatrixLayout(_shape(first), [0]))),
        (second, rows.with_factors(tf.linalg.matmul(a, left), d,
                                   MatrixLayout(_shape(second), [0]))),
    ]  # fmt: skip


def _gathered(op, rows, _):
    """Entries of a table at public places."""
    params, indices, axis = op.inputs
    shape = _shape(params)
    if op.get_attr("batch_dims") or tf.get_static_value(axis) != 0 or len(shape) != 2:
        return NotImplemented
    if not indices.shape.is_fully_defined():
        return NotImplemented
    count = indices.shape.num_elements()
    formed = tf.reshape(rows.materialize(), [-1, count, shape[1]])
    places = tf.reshape(tf.cast(indices, tf.int32), [1, count])
    places = tf.tile(places, [tf.shape(formed)[0], 1])
    return [(params, Lookups(places, formed, shape))]


def _selected(op, rows, output):
    """Entries of a tensor at places that are known: zeros everywhere else."""
    place = 1 if op.type == "Split" else 0
    inner = op.inputs[place]
    shape = _shape(inner)
    entries = np.arange(math.prod(shape)).reshape(shape)
    known = [entries if i == place else _constant(t) for i, t in enumerate(op.inputs)]
    try:
        chosen = np.asarray(sizes.selected(op, known)[output])
    except sizes.NotFollowed:
        return NotImplemented
    source = np.full(entries.size, chosen.size)  # behind the last entry stands a zero
    source[chosen.ravel()] = np.arange(chosen.size)
    formed = tf.reshape(rows.materialize(), [-1, chosen.size])
    formed = tf.gather(tf.pad(formed, [[0, 0], [0, 1]]), source, axis=1)
    return [(inner, Rows(rows_of(formed, shape)))]


def _constant(tensor):
    value = tf.get_static_value(tensor)
    return None if value is None else sizes.array(value)


def _folded(tensor, rows):
    """Gradients of a tensor that may have been broadcast: summed along those axes."""
    shape = _shape(tensor)
    if shape == rows.shape:
        return rows
    padded = [1] * (len(rows.shape) - len(shape)) + list(shape)
    return Rows(tf.reshape(summed_to(rows.materialize(), padded), [-1, *shape]))


def _shape(tensor):
    if not tensor.shape.is_fully_defined():
        raise NoForm(f"the shape of {tensor.op.type} is not known")
    return tuple(tensor.shape.as_list())


_STEPS = {
    **dict.fromkeys(_PASSES_ON, _same),
    **dict.fromkeys(_RESHAPES, _reshaped),
    "Cast": _cast,
    **dict.fromkeys(("StridedSlice", "Slice", "Split", "Unpack"), _selected),
    "StopGradient": _no_gradient,
    "Transpose": _transposed,
    "AddV2": _sum,
    "Add": _sum,
    "AddN": _sum,
    "Sub": _difference,
    "Neg": _negated,
    "Mul": _product,
    "RealDiv": _quotient,
    "MatMul": _matrix_product,
    "BatchMatMulV2": _matrix_product,
    "GatherV2": _gathered,
}
