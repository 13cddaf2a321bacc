"""Uses of operations on shapes, slices and single entries (see `cases`)."""

import functools

import tensorflow as tf

from tests.gradients.proof.cases import (
    CASES,
    Case,
    R,
    floating,
    keeps,
    mixes,
    ones,
    size,
    turned,
    with_key,
)
from tf_adadp.gradients.proof.rules import RULES, elementwise
from tf_adadp.utils.keras_compat import op_def_registry

# --- shapes ---------------------------------------------------------------------------------------

keeps("Reshape", lambda x: tf.reshape(x, [-1, 6]), (2, 3))
keeps("Reshape", lambda x: tf.reshape(x, [size(x) * 2, 3]), (2, 3))
keeps("Reshape", lambda x: tf.reshape(x, tf.concat([tf.shape(x)[:1], [3, 2]], 0)), (2, 3))
keeps("Reshape", lambda x: tf.reshape(turned(x), [2, -1]), (2, 3))
keeps("Reshape", lambda x: tf.reshape(turned(x), [2, size(x), 3, 1]), (2, 3))
keeps("Reshape", lambda x: tf.reshape(tf.reshape(x, [-1, 3]), [size(x), -1]), (2, 3))
keeps("Reshape", lambda x: tf.reshape(x, [tf.size(x) // 6, 6]), (2, 3))
mixes("Reshape", lambda x: tf.reshape(x, [-1, 2]), (3,))
mixes("Reshape", lambda x: tf.reshape(x, [3, -1]), (3,))
mixes("Reshape", lambda x: tf.reshape(x, [3, size(x)]), (3,))
mixes("Reshape", lambda x: tf.reshape(turned(x), [size(x), -1]), (2, 3))
mixes("Reshape", lambda x: tf.reshape(turned(x), [-1, 3]), (2, 3))
mixes("Reshape", lambda x: tf.reshape(x, tf.reverse(tf.shape(x), [0])), (3,))
mixes("Reshape", lambda x: tf.reshape(x, [size(x) // 2, -1]), (2, 3))
mixes("Reshape", lambda x: tf.reshape(turned(x), [-1]), (2,))
keeps("Transpose", lambda x: tf.transpose(x, [2, 0, 1]), (2, 3))
keeps("Transpose", lambda x: tf.transpose(tf.transpose(x, [2, 1, 0])), (2, 3))
keeps("ExpandDims", lambda x: tf.expand_dims(tf.expand_dims(x, 0), -2), (2, 3))
keeps("Squeeze", lambda x: tf.squeeze(x[:, :, None], [2]), (2, 3))
keeps("Squeeze", lambda x: tf.squeeze(x[None, ..., None], [0, -1]), (3,))
mixes("Squeeze", lambda x: tf.squeeze(x), (2, 1))
mixes("Squeeze", lambda x: tf.squeeze(x, [0]), (2, 1))
keeps("Pack", lambda x: tf.stack([x, 2 * x], 0), (2, 3))
keeps("Pack", lambda x: tf.stack([turned(x), turned(x)], -1), (2, 3))
mixes("Pack", lambda x: tf.stack([x, tf.transpose(x)]), (3,))
mixes("Pack", lambda x: tf.stack([x, ones(4, 3)], 1), (3,))
keeps("Unpack", lambda x: tf.unstack(x, axis=-2), (2, 3))
keeps("Unpack", lambda x: tf.unstack(turned(x)), (2, 3))
mixes("Unpack", lambda x: tf.unstack(x, 2), (3,))
keeps("Tile", lambda x: tf.tile(x, [1, 2]), (3,))
mixes("Tile", lambda x: tf.tile(x, [2, 1]), (3,))
mixes("Tile", lambda x: tf.tile(x, [1, size(x)]), (3,))
keeps("BroadcastTo", lambda x: tf.broadcast_to(x[:, None], [4, size(x), 2, 3]), (3,))
keeps("BroadcastTo", lambda x: tf.broadcast_to(x, tf.broadcast_dynamic_shape(tf.shape(x), [1, 1])),
      (3,))  # fmt: skip
mixes("BroadcastTo", lambda x: tf.broadcast_to(x, [size(x), size(x), 3]), (3,))
mixes("BroadcastTo", lambda x: tf.broadcast_to(x, tf.cast(x, tf.int32)), ())
mixes("BroadcastTo", lambda x: tf.broadcast_to(x[:, None], [5, 3]), ())
keeps("OneHot", lambda x: tf.one_hot(x, 3, axis=1), (2,), dtypes=[tf.int32])
keeps("OneHot", lambda x: tf.one_hot(x, 3, axis=0), (2,), dtypes=[tf.int32])
mixes("OneHot", lambda x: tf.one_hot(x, size(x)), (2,), dtypes=[tf.int32])
mixes("OneHot", lambda x: tf.one_hot(x, 3, floating(size(x))), (2,), dtypes=[tf.int32])
# Shapes are public: in themselves, and of rows that meet.
keeps("Shape", lambda x: x * floating(tf.shape(x)[1]), (3,))
keeps("ShapeN", lambda x: x * floating(R.ShapeN(input=[x, x])[0][1]), (3,))
keeps("Size", lambda x: x * floating(tf.size(x) // size(x)), (3,))
keeps("Rank", lambda x: x * floating(R.Rank(input=x)), (3,))
mixes("Mul", lambda x: x * floating(tf.shape(x)[0]), (3,))
mixes("Mul", lambda x: x * (0.5 * floating(tf.shape(x)[0])), (3,))
mixes("Mul", lambda x: x * floating(R.ShapeN(input=[x, x])[1][0]), (3,))
mixes("RealDiv", lambda x: x / floating(tf.size(x)), (3,))
mixes("Mul", lambda x: x * floating(tf.maximum(size(x), 2)), (3,))
mixes("AddV2", lambda x: x + floating(size(x) // 2), (3,))
mixes("AddV2", lambda x: x + floating(size(x) % 2), (3,))
mixes("Range", lambda x: x + floating(tf.range(size(x))), ())
mixes("Range", lambda x: tf.gather(x, tf.range(size(x)) - 1), (3,))
keeps("Fill", lambda x: x + tf.fill([size(x), 1], 0.5), (3,))
mixes("Fill", lambda x: x + tf.fill([size(x)], floating(size(x))), ())
keeps("Tile", lambda x: x + tf.tile(ones(1, 3), [size(x), 1]), (3,))
keeps("Tile", lambda x: tf.reshape(x, [-1, 3]) + tf.tile(ones(2, 3), [size(x), 1]), (2, 3))
keeps("BroadcastTo", lambda x: x + tf.broadcast_to(ones(3), [size(x), 3]), (3,))

# --- random numbers -------------------------------------------------------------------------------

_uniform = tf.random.stateless_uniform
_OWN = {"keeps": True, "moves": False}
with_key("StatelessRandomUniformV2", lambda key, x: x * _uniform(tf.shape(x), key), (3,), **_OWN)
with_key("StatelessRandomUniformV2", lambda key, x: turned(x) * _uniform([2, size(x), 1], key),
         (2, 3), **_OWN)  # fmt: skip
with_key("StatelessRandomNormalV2", lambda key, x: tf.reshape(x, [-1, 3]) * (
    tf.random.stateless_normal([2 * size(x), 3], key)), (2, 3), **_OWN)  # fmt: skip
with_key("StatelessRandomGammaV3", lambda key, x: x * (
    tf.random.stateless_gamma([size(x), 3], key, ones(3))), (3,), **_OWN)  # fmt: skip
for _shape in (lambda x: [3], lambda x: [1, 3], lambda x: [], lambda x: tf.shape(x)[1:]):
    with_key("StatelessRandomUniformV2", lambda key, x, s=_shape: x * _uniform(s(x), key), (3,))
mixes("StatelessRandomUniformV2", lambda x: x * _uniform(tf.shape(x), [1, 2]), (3,))
with_key("StatelessRandomUniformV2", lambda key, x: x * _uniform([size(x), size(x)], key), ())
with_key("StatelessRandomUniformV2", lambda key, x: x * _uniform([size(x)], key + size(x)), ())
with_key("StatelessRandomGammaV3", lambda key, x: x * (
    tf.random.stateless_gamma([size(x)], key, ones(4))), ())  # fmt: skip
with_key("Mul", lambda key, x: x * floating(key[0]), (3,))

# --- slices ---------------------------------------------------------------------------------------

keeps("ConcatV2", lambda x: tf.concat([x, 2 * x], -1), (2, 3))
keeps("ConcatV2", lambda x: tf.concat([turned(x), turned(x)], 0), (2, 3))
mixes("ConcatV2", lambda x: tf.concat([x, x], -2), (3,))
mixes("ConcatV2", lambda x: tf.concat([x, ones(4, 3)], 1), (3,))
keeps("Split", lambda x: tf.split(x, 3, -1), (2, 3))
mixes("Split", lambda x: tf.split(x, 2, 0), (2, 3))
keeps("SplitV", lambda x: tf.split(x, [1, 2], -1), (2, 3))
mixes("SplitV", lambda x: tf.split(x, [1, -1], -3, num=2), (2, 3))
mixes("SplitV", lambda x: tf.split(x, [size(x), -1], 1, num=2), (9, 3))
mixes("SplitV", lambda x: R.SplitV(value=x, size_splits=tf.cast(x[:, 0], tf.int32), axis=1,
                                   num_split=2), (3,))  # fmt: skip
keeps("Slice", lambda x: tf.slice(x, [0, 1, 0], [-1, 1, 2]), (2, 3))
keeps("Slice", lambda x: tf.slice(x, [0, 1, 0], [size(x), -1, 2]), (2, 3))
mixes("Slice", lambda x: tf.slice(x, [0, 1], [1, -1]), (3,))
mixes("Slice", lambda x: tf.slice(x, [1, 1], [-1, -1]), (3,))
mixes("Slice", lambda x: tf.slice(x, [0, 0], [-1, size(x)]), (9,))
mixes("Slice", lambda x: tf.slice(x, [0, size(x)], [-1, 1]), (9,))
keeps("StridedSlice", lambda x: x[:, 1:, ::-1], (2, 3))
keeps("StridedSlice", lambda x: x[..., tf.newaxis, 1], (2, 3))
keeps("StridedSlice", lambda x: x[tf.newaxis, :, 0, ..., tf.newaxis], (2, 3))
keeps("StridedSlice", lambda x: x[0 : size(x), 0:2], (3,))
keeps("StridedSlice", lambda x: turned(x)[1, :, 0], (2, 3))
keeps("StridedSlice", lambda x: turned(x)[..., 1], (2, 3))
mixes("StridedSlice", lambda x: x[0], (2, 3))
mixes("StridedSlice", lambda x: x[1:], (2, 3))
mixes("StridedSlice", lambda x: x[:4], (2, 3))
mixes("StridedSlice", lambda x: x[: size(x) - 1], (2, 3))
mixes("StridedSlice", lambda x: x[::-1], (2, 3))
mixes("StridedSlice", lambda x: x[::2], (2, 3))
mixes("StridedSlice", lambda x: x[tf.newaxis, 1:], (2, 3))
mixes("StridedSlice", lambda x: x[1:, ...], (2, 3))
mixes("StridedSlice", lambda x: turned(x)[..., 1:, :], (2, 3))
mixes("StridedSlice", lambda x: turned(x)[..., 0, 1], (2, 3))
mixes("StridedSlice", lambda x: x[:, : size(x)], (9,))
mixes("StridedSlice", lambda x: x[:, size(x) :], (9,))
mixes("StridedSlice", lambda x: x[:, :: size(x)], (9,))
with_key("StridedSlice", lambda key, x: x[:, key[0] % 3 :], (9,))
_BOUNDS = {"begin": [1], "end": [2], "strides": [1]}
keeps("StridedSliceGrad", lambda x: R.StridedSliceGrad(
    shape=tf.stack([size(x), 3, 5]), begin=[0, 1, 0], end=[0, 2, 5], strides=[1, 1, 2], dy=x,
    begin_mask=1, end_mask=1), (1, 3))  # fmt: skip
mixes("StridedSliceGrad", lambda x: R.StridedSliceGrad(
    shape=tf.stack([size(x) + 1, 3]), begin=[1, 0], end=[0, 3], strides=[1, 1], dy=x,
    begin_mask=0, end_mask=1), (3,))  # fmt: skip
mixes("StridedSliceGrad", lambda x: R.StridedSliceGrad(
    shape=tf.stack([size(x), 3]), begin=[0, 0], end=[0, 3], strides=[-1, 1], dy=x,
    begin_mask=1, end_mask=1), (3,))  # fmt: skip
mixes("StridedSliceGrad", lambda x: R.StridedSliceGrad(
    shape=tf.stack([size(x), 9]), begin=[0, size(x)], end=[0, size(x) + 3], strides=[1, 1], dy=x,
    begin_mask=1, end_mask=1), (3,))  # fmt: skip
for _name, _pad in {
    "Pad": lambda x, widths: R.Pad(input=x, paddings=widths),
    "PadV2": lambda x, widths: R.PadV2(input=x, paddings=widths, constant_values=0.5),
    "MirrorPad": lambda x, widths: R.MirrorPad(input=x, paddings=widths, mode="SYMMETRIC"),
    "MirrorPadGrad": lambda x, widths: R.MirrorPadGrad(input=x, paddings=widths, mode="SYMMETRIC"),
}.items():
    keeps(
        _name,
        lambda x, f=_pad: f(x, [[0, 0], [1, 1]]),
        (4,),
        differentiable=_name != "MirrorPadGrad",
    )
    mixes(_name, lambda x, f=_pad: f(x, [[0, 1], [1, 1]]), (4,))
mixes("Pad", lambda x: tf.pad(x, tf.stack([[0, 0], [0, size(x)]])), (4,))
mixes("PadV2", lambda x: R.PadV2(input=x, paddings=[[0, 0], [1, 0]],
                                 constant_values=floating(size(x))), (4,))  # fmt: skip
_INTEGERS = {"dtypes": [tf.float32, tf.int32]}
keeps("GatherV2", lambda i: tf.gather(ones(3, 2), i), (2,), dtypes=[tf.int32])
keeps("GatherV2", lambda i: tf.gather(ones(2, 3), i, axis=-1), (2,), dtypes=[tf.int32])
keeps("GatherV2", lambda i: tf.gather(ones(2, 3), turned(i), axis=1), (2,), dtypes=[tf.int32])
keeps("GatherV2", lambda x: tf.gather(x, [[1, 0]], axis=1), (2, 3))
keeps("GatherV2", lambda x: tf.gather(turned(x), [[1, 0]], axis=0), (2, 3))
keeps("GatherV2", lambda x, i: tf.gather(x, i, batch_dims=1), (3,), (2,), **_INTEGERS)
keeps("GatherV2", lambda x, i: tf.gather(x, i, axis=-1, batch_dims=1), (2, 3), (2,), **_INTEGERS)
mixes("GatherV2", lambda x, i: tf.gather(x, i), (3,), (), **_INTEGERS)
mixes("GatherV2", lambda x, i: tf.gather(x, i, axis=1), (3,), (2,), **_INTEGERS)
mixes("GatherV2", lambda x: tf.gather(x, [0, 0]), (3,))
mixes("GatherV2", lambda x: tf.gather(turned(x), [0, 0], axis=-2), (2, 3))
mixes("GatherV2", lambda i: tf.gather(ones(4, 3), i, batch_dims=1), (2,), dtypes=[tf.int32])
mixes("GatherV2", lambda x: tf.gather(x, tf.constant([[0], [1]]), batch_dims=1), (3,))
mixes("GatherV2", lambda i: tf.gather(ones(3) * floating(size(i)), i), (2,), dtypes=[tf.int32])
mixes("GatherV2", lambda x: tf.gather(x, size(x), axis=1), (9,))
keeps("GatherNd", lambda i: tf.gather_nd(ones(3, 3, 2), i), (4, 2), dtypes=[tf.int32])
keeps("GatherNd", lambda i: tf.gather_nd(ones(3, 3, 2), turned(i)), (4, 2), dtypes=[tf.int32])
mixes("GatherNd", lambda x, i: tf.gather_nd(x, i), (3,), (1,), **_INTEGERS)
mixes("GatherNd", lambda x: tf.gather_nd(x, [[0, 1]]), (3,))
mixes("GatherNd", lambda i: tf.gather_nd(ones(3, 3), tf.transpose(i)), (1,), dtypes=[tf.int32])

# --- entries --------------------------------------------------------------------------------------

keeps("IdentityN", lambda x: tf.identity_n([x, turned(x)]), (2, 3))
keeps("Select", lambda x: R.Select(condition=x > 0, x=x, y=-x), (3,))
keeps("Select", lambda x: R.Select(condition=x[:, 0] > 0, x=x, y=-x), (3,))
mixes("Select", lambda x: R.Select(condition=x[:, 0] > 0, x=tf.transpose(x), y=-tf.transpose(x)),
      (3,))  # fmt: skip
mixes("Select", lambda x: R.Select(condition=[True, False, True], x=x, y=-x), (3,))
mixes("Select", lambda x: R.Select(condition=x[:, 0] > 0, x=x, y=ones(4, 3)), (3,))
for _name in ("BiasAdd", "BiasAddV1"):
    _add = getattr(R, _name)
    keeps(_name, lambda x, f=_add: f(value=x, bias=ones(3)), (2, 3))
    keeps(_name, lambda x, f=_add: f(value=turned(x), bias=ones(3)), (2, 3))
    mixes(_name, lambda x, f=_add: f(value=tf.transpose(x), bias=ones(3)), (3,))
    mixes(_name, lambda x, f=_add: f(value=ones(3, 3), bias=x), ())
    mixes(_name, lambda x, f=_add: f(value=x, bias=ones(3) * floating(size(x))), (3,))
keeps("BiasAdd", lambda x: tf.nn.bias_add(x, ones(2), "NCHW"), (2, 3, 3))
mixes("BiasAdd", lambda x: tf.nn.bias_add(turned(x), ones(3), "NCHW"), (2, 3, 3))


@functools.cache
def _made_table():
    """Makes a table once, and outside of every graph: a graph does not fill tables it makes."""
    with tf.init_scope():
        keys, values = tf.constant([0, 1]), tf.constant([5, 7])
        return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1)


def _table(x, default=-1):
    handle = _made_table().resource_handle
    return R.LookupTableFindV2(table_handle=handle, keys=x, default_value=default)


keeps("LookupTableFindV2", _table, (3,), dtypes=[tf.int32])
mixes("LookupTableFindV2", lambda x: _table(x, size(x)), (3,), dtypes=[tf.int32])

# What operations take, where their types do not say it.
_SPECIAL = {
    "Cast": lambda xs: R.Cast(x=xs[0], DstT=tf.float64),
    "Bucketize": lambda xs: R.Bucketize(input=xs[0], boundaries=[0.3, 0.6]),
    "AddN": lambda xs: R.AddN(inputs=[xs[0], *xs]),
    "EnsureShape": lambda xs: tf.ensure_shape(xs[0], [None] * xs[0].shape.rank),
    "ClipByValue": lambda xs: R.ClipByValue(
        t=xs[0], clip_value_min=tf.constant(0.3), clip_value_max=tf.constant(0.6)),
}  # fmt: skip
_ELSEWHERE = ("LookupTableFindV2",)
_FIRST = (tf.float32, tf.int32, tf.complex64, tf.bool)


def _dtype(definition, attribute):
    allowed = next(a for a in definition.attr if a.name == attribute).allowed_values.list.type
    names = [tf.as_dtype(t) for t in allowed]
    return next((t for t in _FIRST if t in names), names[0] if names else tf.float32)


def _operands(name):
    """The names and dtypes of an operation's operands."""
    definition = op_def_registry.get(name)
    if name == "AddN":
        return ["a", "b"], [tf.float32] * 2
    names = [given.name for given in definition.input_arg]
    dtypes = [
        _dtype(definition, given.type_attr) if given.type_attr else tf.as_dtype(given.type)
        for given in definition.input_arg
    ]
    return names, dtypes


def _applied(name):
    """The operation as a function of a list of operands."""
    if name in _SPECIAL:
        return _SPECIAL[name]
    names, _ = _operands(name)
    return lambda xs: getattr(R, name)(**dict(zip(names, xs, strict=True)))


def _constant(shape, dtype):
    return tf.ones(shape, dtype) if not dtype.is_bool else tf.fill(shape, True)


def _add_entries(name):
    names, dtypes = _operands(name)
    apply = _applied(name)
    low, high = (1, 4) if dtypes[-1].is_integer else (0.1, 0.9)
    options = {"low": low, "high": high, "differentiable": False}

    def use(good, function, operands=None, key=False):
        operands = dtypes if operands is None else operands
        CASES.append(Case(name, function, good, ((3,),) * len(operands), operands, **options))

    use(True, lambda key, *xs: apply(list(xs)))
    use(True, lambda key, *xs: apply([tf.transpose(x) for x in xs]))
    if len(names) == 1 or name in ("ClipByValue", "AddN"):
        return
    first = dtypes[:1]

    def others(make):
        return lambda key, x: apply([x, *(make(key, x, t) for t in dtypes[1:])])

    def pairs(key, *xs):
        return apply([xs[0][:, None], *(x[None] for x in xs[1:])])

    if RULES[name] is elementwise.paired:
        use(False, lambda key, *xs: apply([turned(xs[0][:, None]), turned(xs[1][:, :, None])]))
    if _broadcasts(name):
        use(True, others(lambda key, x, t: _constant([3], t)), first)
        use(True, others(lambda key, x, t: _constant([2, 1, 1], t)), first)
        use(False, pairs)
        use(dtypes[-1].is_bool, others(lambda key, x, t: tf.cast(size(x), t)), first)  # B is true
        use(False, others(lambda key, x, t: tf.cast(key[0], t)), first)
    use(False, others(lambda key, x, t: _constant([4, 3], t)), first)


def _broadcasts(name):
    """Tells whether operands of other shapes than the first one's are allowed."""
    _, dtypes = _operands(name)
    try:
        _applied(name)([_constant([2, 3], dtypes[0]), *(_constant([], t) for t in dtypes[1:])])
    except tf.errors.InvalidArgumentError:
        return False
    return True


ENTRIES = [name for name in RULES if RULES[name] in (elementwise.broadcast, elementwise.paired)]
for _name in ENTRIES:
    if _name not in _ELSEWHERE:
        _add_entries(_name)
