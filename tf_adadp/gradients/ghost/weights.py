"""The per-example gradients of weights, in parts, where an operation joins them with examples.

For an operation z = f(P, x) of a public tensor P and rows x, and d = ∂L/∂z: the gradient of one
example with respect to P follows from its rows of x and d alone. `chains` takes it from P back to
the weights.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tf_adadp.clipping.row_gradients import RowGradients, Rows
from tf_adadp.gradients.forms import Lookups, MatrixLayout, products
from tf_adadp.gradients.forms.common import rows_of, with_shape
from tf_adadp.gradients.ghost import windows
from tf_adadp.gradients.proof.rules.products import labels_of
from tf_adadp.gradients.proof.values import Public
from tf_adadp.gradients.proof.values import Rows as RowsValue

_FORMS: dict[str, Callable] = {}


class NoForm(Exception):
    """An operation joins a weight with examples in a way that has no form."""


def gradients_of(
    op: tf.Operation, values: list, output: RowsValue, d: tf.Tensor
) -> Iterator[tuple[tf.Tensor, RowGradients]]:
    """Yields the per-example gradients of an operation's public operands that weights reach.

    Args:
        op: an operation that joins weights with examples.
        values: the `Value`s of its inputs.
        output: that of its first output.
        d: ∂L/∂(first output), float32.

    Raises:
        NoForm: for other operations.
    """
    use = _Use(op, values, output, d)
    for place, value in enumerate(values):
        if isinstance(value, Public) and value.weights:
            if op.type not in _FORMS:
                raise NoForm(f"the operation {op.type} joins weights with examples and has no form")
            yield op.inputs[place], _FORMS[op.type](use, place)


def has_own_gradient(op: tf.Operation) -> bool:
    """Tells whether a gradient was declared for this very operation (`tf.custom_gradient`)."""
    try:
        op.get_attr("_gradient_op_type")
    except ValueError:
        return False
    return True


class _Use:
    """Holds an operation and the proven facts about its operands."""

    def __init__(self, op, values, output, d):
        self.op, self.values = op, values
        self.output, self._d = output, d

    def d(self):
        """Returns the output's gradient with the examples first, [B, (stride,) ...]."""
        return batch_first(self._d, self.output)

    def x(self, place):
        """Returns an operand of rows, with the examples first."""
        return batch_first(self.op.inputs[place], self.values[place])

    def shape(self, place):
        """Returns the static shape of a public operand."""
        shape = self.op.inputs[place].shape
        if not shape.is_fully_defined():
            raise NoForm(f"the operation {self.op.type} has a weight of unknown shape")
        return tuple(shape.as_list())


def _form(*operations):
    def decorate(function):
        for name in operations:
            _FORMS[name] = function
        return function

    return decorate


def batch_first(tensor: tf.Tensor, value: RowsValue) -> tf.Tensor:
    """Moves the axis of the examples to the front: [B, ...], or [B, m, ...] with stride m."""
    others = [a for a in range(value.rank) if a != value.axis]
    if value.axis:
        tensor = tf.transpose(tensor, [value.axis, *others])
    rest = [value.dims[a] for a in others]
    if any(not isinstance(n, int) for n in rest):
        raise NoForm("a tensor has axes of unknown size")
    if value.stride > 1:
        tensor = tf.reshape(tensor, [-1, value.stride, *rest])
        rest = [value.stride, *rest]
    return with_shape(tensor, [None, *rest])


@_form("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
def _product(use, place):
    other = 1 - place
    value = use.values[other]
    sides, out = labels_of(use.op, [v.rank for v in use.values], [v.dims for v in use.values])
    x_labels, weight, z_labels = list(sides[other]), sides[place], list(out)
    batch = x_labels[value.axis]
    if len(set(weight)) < len(weight) or len(set(x_labels)) < len(x_labels):
        raise NoForm("a product takes a diagonal")
    stride = ["stride"] if value.stride > 1 else []
    x_labels = ["batch", *stride, *(n for n in x_labels if n != batch)]
    z_labels = ["batch", *stride, *(n for n in z_labels if n != batch)]
    x, d = use.x(other), use.d()
    alone = [n for n in x_labels if n not in z_labels and n not in weight]
    if alone:
        x = tf.reduce_sum(x, [x_labels.index(n) for n in alone])
        x_labels = [n for n in x_labels if n not in alone]
    shape = use.shape(place)
    spread = [n for n in weight if n not in x_labels and n not in z_labels]
    if any(shape[weight.index(n)] != 1 for n in spread):
        raise NoForm("a product sums a weight over an axis that examples do not have")
    shared = [n for n in weight if n in x_labels and n in z_labels]
    repeated = [n for n in z_labels[1:] if n not in x_labels and n not in weight]
    if shared or repeated:
        return Rows(_contracted(x, x_labels, d, z_labels, weight, shape))
    rows = [n for n in weight if n in x_labels]
    columns = [n for n in weight if n in z_labels]
    positions = [n for n in z_labels[1:] if n not in weight]
    row_axes = [i for i, n in enumerate(weight) if n in rows]
    a = _grouped(x, x_labels, positions, rows)
    b = _grouped(d, z_labels, positions, columns)
    return products(a, b, MatrixLayout(shape, row_axes))


def _contracted(x, x_labels, d, z_labels, weight, shape):
    """Returns Σ x·d over the axes that the weight lacks: [B, *shape]."""
    letters = {}
    for name in (*x_labels, *z_labels):
        letters.setdefault(name, chr(ord("a") + len(letters)))
    sides = ["".join(letters[n] for n in labels) for labels in (x_labels, z_labels)]
    kept = [n for n in weight if n in letters]
    result = tf.einsum(
        f"{sides[0]},{sides[1]}->" + "".join(letters[n] for n in ["batch", *kept]),
        tf.cast(x, tf.float32),
        d,
    )
    return tf.reshape(result, [-1, *shape])


def _grouped(values, labels, positions, features):
    """Reshapes [B, ...] to [B, positions..., product of the features]."""
    order = [0, *(labels.index(n) for n in positions + features)]
    if order != sorted(order):
        values = tf.transpose(values, order)
    shape = values.shape.as_list()
    head = shape[1 : 1 + len(positions)]
    count = int(np.prod(shape[1 + len(positions) :], dtype=int))
    return rows_of(values, [*head, count])


@_form("Conv2D", "Conv3D")
def _convolution(use, place):
    x, d, shape = _images_of(use, place, 0)
    x, window = _window(use.op, x, shape[:-2])
    unfolded = windows.unfold(window, x)
    groups = x.shape[-1] // shape[-2]
    if groups > 1:
        return Rows(windows.grouped(unfolded, d, groups, use.output.stride))
    return _products_of_windows(use, unfolded, d, shape)


@_form("DepthwiseConv2dNative")
def _depthwise_convolution(use, place):
    x, d, shape = _images_of(use, place, 0)
    x, window = _window(use.op, x, shape[:2])
    return Rows(windows.depthwise(windows.unfold(window, x), d, shape, use.output.stride))


@_form("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def _transposed_convolution(use, place):
    """Swaps x and d: the operation is the gradient of a convolution of d."""
    x, d, shape = _images_of(use, place, 2)
    d, window = _window(use.op, d, shape[:-2])
    return _products_of_windows(use, windows.unfold(window, d), x, shape)


def _images_of(use, place, images):
    """Returns x and d [B·m, *space, channels], x the operand `images`, and the filters' shape."""
    if place != 1:
        raise NoForm("a convolution of a weight with examples as filters")
    x, d = (_channels_last(use.op, t) for t in (use.x(images), use.d()))
    if use.output.stride > 1:
        x, d = (tf.reshape(t, [-1, *t.shape[2:]]) for t in (x, d))
    return x, d, use.shape(1)


def _products_of_windows(use, unfolded, others, shape):
    """Returns Σ over positions of window ⊗ others."""
    pair = windows.joined(unfolded), others
    if use.output.stride > 1:
        pair = (tf.reshape(t, [-1, use.output.stride, *t.shape[1:]]) for t in pair)
    return products(*pair, MatrixLayout(shape, range(len(shape) - 1)))


def _window(op, x, size):
    """Returns the padded images and the `Window` of a convolution."""
    first = op.get_attr("data_format").startswith((b"NC",))
    strides, dilation = (
        tuple(values[2:] if first else values[1:-1])
        for values in (op.get_attr("strides"), op.get_attr("dilations"))
    )
    padding = op.get_attr("padding").decode()
    if padding == "EXPLICIT":
        pairs = np.reshape(op.get_attr("explicit_paddings"), [-1, 2]).tolist()
        pairs = [pairs[0], *pairs[2:], pairs[1]] if first else pairs
        x, padding = tf.pad(x, pairs), "VALID"
    if len(size) == 3 and max(dilation) > 1:
        raise NoForm("TensorFlow unfolds no dilated volumes")
    return x, windows.Window(tuple(size), strides, dilation, padding)


def _channels_last(op, values):
    if not op.get_attr("data_format").startswith(b"NC"):
        return values
    rank, lead = values.shape.rank, values.shape.rank - len(op.get_attr("strides"))
    order = [*range(lead + 1), *range(lead + 2, rank), lead + 1]
    return tf.transpose(values, order)


@_form("AddV2", "Add", "AddN")
def _added(use, place):
    return _entries(use, place, use.d())


@_form("BiasAdd", "BiasAddV1")
def _bias(use, place):
    d, value = use.d(), use.output
    channels = value.rank - 1
    if use.op.type == "BiasAdd" and use.op.get_attr("data_format") == b"NCHW":
        channels = 1
    kept = _axis_after(value, channels)
    axes = [a for a in range(1, d.shape.rank) if a != kept]
    return Rows(tf.reduce_sum(d, axes) if axes else d)


def _axis_after(value, axis):
    """Returns the place of an axis in `batch_first`."""
    moved = axis + (axis < value.axis)
    return moved + (value.stride > 1)


@_form("Sub")
def _subtracted(use, place):
    return _entries(use, place, use.d() if place == 0 else -use.d())


@_form("Mul")
def _multiplied(use, place):
    return _entries(use, place, use.d() * _float(_spread(use, 1 - place)))


@_form("RealDiv", "DivNoNan")
def _divided(use, place):
    d = use.d()
    divide = tf.math.divide_no_nan if use.op.type == "DivNoNan" else tf.divide
    if place == 0:
        return _entries(use, 0, divide(d, _float(_spread(use, 1))))
    numerator = _float(_spread(use, 0))
    denominator = tf.cast(use.op.inputs[1], tf.float32)
    if use.values[1].rank > -use.output.from_end or use.output.stride > 1 or use.output.axis:
        raise NoForm("a weight divides examples along several axes")
    return _entries(use, 1, divide(-d * numerator, tf.square(denominator)))


def _float(tensor):
    return tf.cast(tensor, tf.float32)


def _spread(use, place):
    """Returns an operand of rows with the axes of the output, examples first."""
    value, missing = use.values[place], use.output.rank - use.values[place].rank
    if not isinstance(value, RowsValue):
        raise NoForm("two weights in one operation with examples")
    x = use.x(place)
    if not missing:
        return x
    lead = 1 + (value.stride > 1)
    # Axes that it lacks stand before its own, which batch_first has put behind the examples.
    return tf.reshape(x, [-1, *x.shape[1:lead], *[1] * missing, *x.shape[lead:]])


def _entries(use, place, d):
    """Sums gradients [B, (m,) ...] of a broadcast operand over its broadcast axes."""
    shape, value = use.shape(place), use.output
    if value.stride > 1:
        d = tf.reduce_sum(d, 1)
    others = [a for a in range(value.rank) if a != value.axis]
    padded = [1] * (value.rank - len(shape)) + list(shape)
    d = summed_to(d, [padded[a] for a in others])
    return Rows(rows_of(d, shape))


def summed_to(values: tf.Tensor, dims: Sequence[int]) -> tf.Tensor:
    """Sums values [B, ...] to [B, *dims], over the axes that have one entry in dims."""
    axes = [1 + i for i, n in enumerate(dims) if n == 1 and values.shape[1 + i] != 1]
    return tf.reduce_sum(values, axes, keepdims=True) if axes else values


@_form("BroadcastTo")
def _broadcast(use, place):
    return _entries(use, 0, use.d())


@_form("Tile")
def _tiled(use, place):
    shape, value = use.shape(0), use.output
    if value.stride != shape[value.axis]:
        raise NoForm("a weight is repeated several times per example")
    d = use.d()
    dims = [value.dims[a] for a in range(value.rank) if a != value.axis]
    own = [shape[a] for a in range(value.rank) if a != value.axis]
    lead = 1 + (value.stride > 1)
    split = [n for old, new in zip(own, dims, strict=True) for n in (new // old, old)]
    d = tf.reshape(d, [-1, *d.shape[1:lead], *split])
    d = tf.reduce_sum(d, [lead + 2 * i for i in range(len(dims))])
    if value.stride > 1 and value.axis:
        d = tf.transpose(d, [0, *range(2, 2 + value.axis), 1, *range(2 + value.axis, d.shape.rank)])
    return Rows(rows_of(d, shape))


@_form("GatherV2")
def _looked_up(use, place):
    shape = use.shape(0)
    if place != 0 or use.op.get_attr("batch_dims") or int(use.values[2].value.item()) != 0:
        raise NoForm("a weight is looked up along another axis than its first")
    indices, d = use.x(1), use.d()
    count = int(np.prod(indices.shape[1:], dtype=int))
    width = int(np.prod(shape[1:], dtype=int))
    indices = rows_of(tf.cast(indices, tf.int32), [count])
    rows = rows_of(d, [count, width])
    found = Lookups(indices, rows, (shape[0], width))
    if len(shape) == 2:
        return found
    return Rows(tf.reshape(found.materialize(), [-1, *shape]))
