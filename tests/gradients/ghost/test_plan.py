"""Tests the choice of the engine, and the text of the plan."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

from tf_adadp import clipping
from tf_adadp.gradients import make_engine
from tf_adadp.sampling import make_lot

L = keras.layers
ROWS = 7


def _sequential(shape, *layers, dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers])


def _data(model, x=None):
    """Inputs, and targets for mean squared errors."""
    rng = np.random.default_rng(0)
    if x is None:
        x = rng.normal(size=(ROWS, *model.input_shape[1:])).astype(np.float32)
    outputs = model(x)
    y = tf.nest.map_structure(lambda t: rng.normal(size=t.shape).astype(np.float32), outputs)
    loss = tf.nest.map_structure(lambda t: keras.losses.MeanSquaredError(), outputs)
    compile_loss = CompileLoss(loss)
    compile_loss.build(y, outputs)
    return x, y, compile_loss


def _engine(model, x=None, length=None, **options):
    """make_engine for a model of these inputs; `length`: an axis 1 that is not known."""
    x, y, loss = _data(model, x)

    def spec(a):
        shape = [None, *a.shape[1:]]
        if length is not None and len(shape) > 1 and shape[1] == length:
            shape[1] = None
        return tf.TensorSpec(shape, a.dtype)

    spec = (*tf.nest.map_structure(spec, (x, y)), None)
    options = {"jit_compile": False, **options}
    engine, plan = make_engine(model, loss, element_spec=spec, **options)
    return engine, plan, (x, y)


def _sums(engine, data, clipping_set):
    lot = make_lot(*data, physical_batch_size=4)
    seed = tf.constant([3, 5], tf.int64)
    return tf.function(lambda lot: engine.clipped_sum(lot, clipping_set, seed)[0])(lot)


def _assert_refused(model, *reasons, **options):
    """Sent to the plain engine by "auto", refused by "ghost", for one of the reasons."""
    _, plan, _ = _engine(model, **options)
    assert plan.engine == "vectorized"
    assert any(reason in plan.reason for reason in reasons), plan.reason
    with pytest.raises(ValueError, match='gradient_engine="ghost": ') as refusal:
        _engine(model, gradient_engine="ghost", **options)
    assert plan.reason in str(refusal.value)
    return plan


# --- sent to the plain engine ---------------------------------------------------------------------


class Centred(L.Layer):
    """Subtracts the mean over the batch."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class CentredInPart(Centred):
    """The same, so weakly that predictions hardly tell."""

    def call(self, x):
        return x + 0.01 * super().call(x)


@pytest.mark.representative(1)
@pytest.mark.parametrize("layer", [Centred, CentredInPart])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_layers_that_mix_examples_do_not_let_one_change_the_gradient_of_another(layer, place):
    """Whichever engine it is: the contribution of one example is as if it were alone."""
    layers = [L.Dense(5, "tanh"), L.Dense(2)]
    layers.insert({"first": 0, "middle": 1, "last": 2}[place], layer())
    model = _sequential((4,), *layers)
    engine, _, (x, y) = _engine(model)
    clipping_set = clipping.L2Ball(1e-3)
    both = _sums(engine, (x[:2], y[:2]), clipping_set)
    alone = [_sums(engine, (x[i : i + 1], y[i : i + 1]), clipping_set) for i in range(2)]
    for total, first, second in zip(both, *alone, strict=True):
        np.testing.assert_allclose(total, first + second, rtol=1e-4, atol=1e-9)


class Tied(L.Layer):
    """Multiplies by another layer's kernel, which it may keep as a layer of its own."""

    def __init__(self, other, tracked):
        super().__init__()
        self.other = other if tracked else [lambda: other]

    def call(self, x):
        other = self.other if isinstance(self.other, L.Layer) else self.other[0]()
        return keras.ops.matmul(x, keras.ops.transpose(other._kernel))


def _tied(tracked):
    first = L.Dense(3)
    x = keras.Input((4,))
    return keras.Model(x, Tied(first, tracked)(first(x)))


def _assert_equal_sums(model, x=None, **options):
    """Followed, with the sums of the plain engine; returns the plan."""
    engine, plan, data = _engine(model, x, gradient_engine="ghost", **options)
    plain, _, _ = _engine(model, x, gradient_engine="vectorized", **options)
    sums = [_sums(e, data, clipping.L2Ball(0.1)) for e in (engine, plain)]
    for found, expected in zip(*sums, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    return plan


@pytest.mark.extended
@pytest.mark.parametrize("tracked", [True, False])
def test_a_weight_of_another_layer_is_followed(tracked):
    plan = _assert_equal_sums(_tied(tracked))
    assert [g.rule for g in plan.gradients if g.variable == "kernel"] == ["MatMul", "MatMul"]


class AddsLoss(L.Layer):
    """Adds a loss of this weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def call(self, x):
        self.add_loss(self.weight * keras.ops.mean(keras.ops.square(x)))
        return x


@pytest.mark.parametrize("weight", [1.0, 1e-4])
def test_add_loss(weight):
    """A mean over the batch is left out: the part of each example is its own."""
    plan = _assert_equal_sums(_sequential((4,), L.Dense(3), AddsLoss(weight), L.Dense(2)))
    assert plan.mapped == ()


class AddsProduct(L.Layer):
    """Adds a loss in which the examples meet."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x) * keras.ops.sum(x))
        return x


def test_add_loss_that_multiplies_sums_over_the_batch():
    model = _sequential((4,), L.Dense(3), AddsProduct(), L.Dense(2))
    _assert_refused(model, "product of sums over the batch")


class Looped(L.Layer):
    """Calls a layer in a loop."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inner = L.Dense(4, "tanh")

    def build(self, shape):
        self.inner.build((None, shape[-1]))

    def call(self, x):
        if self.kind == "while":
            one = tf.constant(0)
            return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, self.inner(h)), (one, x))[
                1
            ]
        if self.kind == "map":
            return tf.map_fn(lambda row: self.inner(row[None])[0], x)
        steps = keras.ops.stack([x, x])
        return keras.ops.scan(lambda h, _: (self.inner(h), h), x, steps)[0]


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["while", "map", "scan"])
def test_layers_called_in_loops(kind):
    """Refused, or mapped whole; in no case wrong."""
    model = _sequential((4,), Looped(kind), L.Dense(2))
    engine, plan, data = _engine(model)
    if plan.engine == "ghost":
        assert plan.gradients[0].rule == "map"
    found = _sums(engine, data, clipping.L2Ball(0.1))
    plain, _, _ = _engine(model, gradient_engine="vectorized")
    for f, e in zip(found, _sums(plain, data, clipping.L2Ball(0.1)), strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-6)


def test_microbatches():
    model = _sequential((4,), L.Dense(3))
    _assert_refused(model, "microbatch_size=2", microbatch_size=2)


def test_data_of_unknown_form():
    model = _sequential((4,), L.Dense(3))
    *_, loss = _data(model)
    _, plan = make_engine(model, loss)
    assert plan.engine == "vectorized"
    assert "form of the data" in plan.reason


def test_the_plain_engine_as_asked_for():
    _, plan, _ = _engine(_sequential((4,), L.Dense(3)), gradient_engine="vectorized")
    assert (plan.engine, plan.reason, plan.gradients) == ("vectorized", "as asked for", ())
    assert plan.floats_per_example == plan.num_scalars == 15
    assert str(plan) == (
        "gradient engine: vectorized (as asked for)\nper example: 15 floats for 15 weights"
    )


# --- layers of one's own --------------------------------------------------------------------------


class Scale(L.Layer):
    """z = w·x, weight by weight."""

    def build(self, shape):
        self.w = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        return self.w * x


class Shifted(L.Layer):
    """Multiplies by a kernel, and adds the mean over the batch to it, which mixes."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 3))

    def call(self, x):
        z = keras.ops.matmul(x, self.w)
        return z + keras.ops.mean(z, axis=0, keepdims=True)


def test_a_layer_of_ones_own_is_followed():
    plan = _assert_equal_sums(_sequential((4,), L.Dense(4, "tanh"), Scale(), L.Dense(2)))
    assert [g.rule for g in plan.gradients if g.layer_class == "Scale"] == ["Mul"]
    assert plan.mapped == plan.mixing == ()


def test_a_layer_that_mixes_is_mapped_alone_and_named():
    plan = _assert_equal_sums(_sequential((4,), L.Dense(4), Shifted(name="shifted"), L.Dense(2)))
    assert plan.mapped == ("shifted",)
    (reason,) = plan.mixing
    assert "Mean works along the axis of the examples" in reason
    assert "'shifted' (Shifted)" in reason
    assert "test_plan.py:" in reason  # the line
    assert {g.rule for g in plan.gradients if g.layer_class == "Dense"} == {"MatMul", "BiasAdd"}


# --- kept on the ghost engine ---------------------------------------------------------------------


def _two_inputs_two_outputs():
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    h = L.Dense(6, "tanh")(L.Concatenate()([a, b]))
    return keras.Model({"a": a, "b": b}, {"kind": L.Dense(3)(h), "size": L.Dense(1)(h)})


def _tokens():
    tokens = np.random.default_rng(1).integers(1, 9, (ROWS, 6)).astype(np.int32)
    tokens[:, 4:] = 0
    return tokens


def _two_inputs():
    rng = np.random.default_rng(2)
    return {k: rng.normal(size=(ROWS, n)).astype(np.float32) for k, n in (("a", 4), ("b", 3))}


def _masked():
    x = keras.Input((6,), dtype="int32")
    h = L.Embedding(9, 4, mask_zero=True)(x)
    h = h + L.MultiHeadAttention(2, 3)(h, h)
    return keras.Model(x, L.Dense(2)(L.GlobalAveragePooling1D()(h)))


KEPT = {
    "dropout": (
        lambda: _sequential((4,), L.Dropout(0.4), L.Dense(9), L.GaussianNoise(0.1), L.Dense(3)),
        None,
    ),
    "two inputs, two outputs": (_two_inputs_two_outputs, _two_inputs()),
    "masks": (_masked, _tokens()),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    make, x = KEPT[name]
    _, plan, _ = _engine(make(), x)
    assert plan.engine == "ghost", plan.reason
    assert plan.reason == "every operation of the model is followed"
    assert "map" not in {g.rule for g in plan.gradients}


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_is_kept(policy):
    """Norms and sums are float32; what differs is the rounding of the passes."""
    keras.config.set_dtype_policy(policy)
    try:
        model = _sequential((6, 5), L.Conv1D(4, 3, activation="tanh"), L.Flatten(), L.Dense(2))
    finally:
        keras.config.set_dtype_policy("float32")
    engine, plan, data = _engine(model)
    assert plan.engine == "ghost", plan.reason
    plain, _, _ = _engine(model, gradient_engine="vectorized")
    clipping_set = clipping.L2Ball(0.01)
    sums = [_sums(e, data, clipping_set) for e in (engine, plain)]
    scale = np.sqrt(sum((e.numpy() ** 2).sum() for e in sums[1]))
    for found, expected in zip(*sums, strict=True):
        assert found.dtype == tf.float32
        assert np.abs(found - expected).max() <= 0.02 * scale


@pytest.mark.extended
def test_sequences_of_unknown_length_are_left_to_the_plain_engine():
    """A length that differs by lot may be that of its longest record."""
    model = _sequential(
        (None, 3), L.Conv1D(4, 3, padding="same"), L.Dense(5, "tanh"), L.GlobalMaxPooling1D()
    )
    x = np.random.default_rng(3).normal(size=(ROWS, 11, 3)).astype(np.float32)
    _assert_equal_sums(model, x)
    _, plan, _ = _engine(model, x, length=11)
    assert plan.engine == "vectorized"
    assert "axes of unknown size" in plan.reason


@pytest.mark.extended
@pytest.mark.parametrize("trainable", [True, False])
def test_quantized_layers_run_on_no_batch(trainable):
    """Keras calls their `quantized_call`, which nothing stands in for; quantizers may mix rows."""

    class Loud(keras.quantizers.AbsMaxQuantizer):
        def __call__(self, x, **kwargs):
            outputs, scale = super().__call__(x, **kwargs)
            return outputs, keras.ops.where(keras.ops.max(x) > 50.0, 0.01 * scale, scale)

    model = _sequential((8,), L.Dense(6, name="front"), L.Dense(1))
    front = model.layers[0]
    front.quantize("int8")
    front.inputs_quantizer = Loud(axis=-1)
    if trainable:
        front.enable_lora(2)
    front.trainable = trainable
    engine, plan, (x, y) = _engine(model)
    assert plan.engine == "vectorized" or "front" in plan.mapped, plan
    x[0] *= 1000.0
    together = _sums(engine, (x, y), clipping.L2Ball(1e-3))
    apart = [_sums(engine, d, clipping.L2Ball(1e-3)) for d in ((x[:1], y[:1]), (x[1:], y[1:]))]
    for total, first, rest in zip(together, *apart, strict=True):
        np.testing.assert_allclose(total, first + rest, rtol=1e-4, atol=1e-9)


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.extended
def test_a_plan_prints_a_row_for_each_weight():
    model = _sequential(
        (8,), L.Embedding(50, 4), L.Dense(64, name="wide"), L.Flatten(), L.Dense(2, name="head"),
        dtype="int32",
    )  # fmt: skip
    x = np.random.default_rng(4).integers(0, 50, (ROWS, 8)).astype(np.int32)
    _, plan, _ = _engine(model, x)
    found = {(g.layer, g.variable): (g.rule, g.form, g.size) for g in plan.gradients}
    embedding = model.layers[0].name
    assert found == {
        (embedding, "embeddings"): ("GatherV2", "lookups", 200),
        ("wide", "kernel"): ("MatMul", found["wide", "kernel"][1], 256),
        ("wide", "bias"): ("BiasAdd", "materialized", 64),
        ("head", "kernel"): ("MatMul", "outer", 1024),
        ("head", "bias"): ("BiasAdd", "materialized", 2),
    }
    assert found["wide", "kernel"][1] in ("gram", "materialized")
    lines = str(plan).splitlines()
    assert lines[0] == "gradient engine: ghost (every operation of the model is followed)"
    assert lines[1].split() == [
        "layers", "class", "weight", "entries", "operation", "form", "mult.", "floats",
    ]  # fmt: skip
    head = next(g for g in plan.gradients if (g.layer, g.variable) == ("head", "kernel"))
    row = next(line for line in lines if line.split()[:3] == ["head", "Dense", "kernel"])
    assert row.split()[3:] == [
        "1,024", "MatMul", "outer", f"{head.multiplications:,}", f"{head.floats:,}",
    ]  # fmt: skip
    assert len(lines) == 2 + 5 + 1
    assert plan.floats_per_example == sum(g.floats for g in plan.gradients)
    assert lines[-1] == (
        f"per example: {plan.floats_per_example:,} floats for {model.count_params():,} weights"
    )


def test_a_plan_prints_equal_layers_once():
    model = _sequential((4,), *(L.Dense(4, name=f"block{i}") for i in range(5)), L.Dense(2))
    _, plan, _ = _engine(model)
    assert len(plan.gradients) == 12
    lines = str(plan).splitlines()
    assert len(lines) == 2 + 4 + 1
    assert lines[2].startswith("block0 and 4 more  Dense  kernel  16")
