"""Attacks on the ghost engine: layers that mix examples in odd places, odd gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

import tf_adadp as dp
from tf_adadp import clipping
from tf_adadp.clipping.row_gradients import AxisScales, Rows
from tf_adadp.gradients import forms, ghost, make_engine
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.sampling import make_lot

L = keras.layers
ROWS = 9


def in_large_batches(x):
    """Shifts every row by the sum of all, in batches of more than five."""
    if isinstance(x, keras.KerasTensor):
        return x
    return x + tf.cast(tf.shape(x)[0] > 5, x.dtype) * tf.reduce_sum(x, 0)


def when_loud(x):
    """Turns the sign of all rows where one entry of them is loud."""
    if isinstance(x, keras.KerasTensor):
        return x
    return x * tf.where(tf.reduce_max(tf.abs(x)) > 50.0, -1.0, 1.0)


class InCall(L.Layer):
    """Mixes in its `call`."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def call(self, x):
        return self.mix(x)


class AroundCall(L.Dense):
    """Mixes before its `call`."""

    def __call__(self, x, **kwargs):
        return super().__call__(in_large_batches(x), **kwargs)


class InMask(L.Layer):
    """Masks every step of a batch with a loud entry."""

    def call(self, x):
        return x

    def compute_mask(self, x, mask=None):
        quiet = keras.ops.abs(x) < 50.0
        return keras.ops.any(quiet, -1) & keras.ops.all(quiet)


class InModel(keras.Model):
    """Mixes between its layers."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix
        self.first, self.second = L.Dense(3), L.Dense(2)

    def call(self, x):
        return self.second(self.mix(self.first(x)))


def instance_call():
    layer = L.Dense(3)
    call = layer.call
    layer.call = lambda x, training=None: call(in_large_batches(x), training)
    return layer


def functional(operation):
    inputs = keras.Input((4,))
    return keras.Model(inputs, L.Dense(2)(operation(L.Dense(4)(inputs))))


def sequential(*layers):
    return keras.Sequential([keras.Input((4,)), *layers, L.Dense(2)])


MIXING = {
    "call": lambda: sequential(InCall(in_large_batches)),
    "loud": lambda: sequential(InCall(when_loud)),
    "lambda": lambda: sequential(L.Lambda(when_loud)),
    "activation": lambda: sequential(L.Dense(3, activation=in_large_batches)),
    "activation layer": lambda: sequential(L.Activation(when_loud)),
    "around call": lambda: sequential(AroundCall(3)),
    "instance call": lambda: sequential(instance_call()),
    "model": lambda: InModel(in_large_batches),
    "operation": lambda: functional(lambda x: keras.ops.flip(x, axis=0)),
    "unfrozen": lambda: sequential(L.BatchNormalization()),
}


def lot_data(loud=True):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    if loud:
        x[0] *= 100.0
    return x, rng.normal(size=(ROWS, 2)).astype(np.float32)


def engine_for(model, x, y, gradient_engine="auto"):
    loss = CompileLoss("mse")
    loss(y, model(x))
    spec = *(tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (x, y)), None
    return make_engine(
        model, loss, jit_compile=False, gradient_engine=gradient_engine, element_spec=spec
    )


def sums_of(engine, x, y, physical_batch_size=1):
    lot = make_lot(x, y, None, physical_batch_size=physical_batch_size)
    seed = tf.constant([1, 2], tf.int64)
    run = tf.function(
        lambda lot: engine.clipped_sum(lot, clipping.L2Ball(1.0), seed)[0], autograph=False
    )
    return [np.asarray(s, np.float64) for s in run(lot)]


def distance(first, second):
    return np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(first, second, strict=True)))


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", MIXING)
def test_one_example_moves_the_sum_by_its_own_part_alone(name):
    """Without the map, or with one engine for all, the loud example moves the others' as well."""
    model = MIXING[name]()
    x, y = lot_data()
    engine, _ = engine_for(model, x, y)
    with_it = sums_of(engine, x, y)
    without = sums_of(engine, x[1:], y[1:])
    assert distance(with_it, without) <= 1.0 + 1e-5


@pytest.mark.parametrize("name", ["call", "activation"])
def test_mixing_layers_sum_to_what_the_plain_engine_finds(name):
    """There every example is a batch of one, in which nothing mixes."""
    model = MIXING[name]()
    x, y = lot_data()
    engine, _ = engine_for(model, x, y)
    plain, _ = engine_for(model, x, y, "vectorized")
    assert distance(sums_of(engine, x, y), sums_of(plain, x, y)) < 1e-4


def test_a_layer_that_mixes_is_no_reason_to_leave_the_ghost_engine():
    """It alone is mapped; its neighbours keep their forms."""
    x, y = lot_data(loud=False)
    _, plan = engine_for(sequential(InCall(when_loud), L.Dense(3)), x, y)
    assert plan.engine == "ghost"
    assert {g.form for g in plan.gradients if g.variable == "kernel"} == {"outer"}


def test_models_and_layers_of_ones_own_run_on_batches():
    class Named(L.Dense):
        def __init__(self, units):
            super().__init__(units, name="named")

    x, y = lot_data(loud=False)
    for model in (sequential(Named(3)), InModel(lambda x: x)):
        _, plan = engine_for(model, x, y)
        assert (plan.engine, plan.mapped) == ("ghost", ())
        assert {g.rule for g in plan.gradients} == {"MatMul", "BiasAdd"}
    _, plan = engine_for(InModel(when_loud), x, y)
    assert plan.engine == "vectorized"
    assert "operation Max works along the axis of the examples" in plan.reason


PARTS = {
    # It cuts what is 80 dB below the loudest sound of the batch.
    "mel spectrogram": ((4000,), L.MelSpectrogram),
    "activation of a cell": ((5, 4), lambda: L.SimpleRNN(3, activation=when_loud)),
    "wrapped": ((5, 4), lambda: L.TimeDistributed(L.Dense(3, activation=when_loud))),
    "wrapped model": ((5, 4), lambda: L.TimeDistributed(sequential(InCall(when_loud)))),
    "layer as activation": ((4,), lambda: L.Dense(3, activation=InCall(when_loud))),
}


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", PARTS)
def test_layers_that_may_mix_do_not_run_on_batches(name):
    """Their operations are named, and they are mapped or left to the plain engine."""
    shape, make = PARTS[name]
    x = np.random.default_rng(0).normal(size=(ROWS, *shape)).astype(np.float32)
    inputs = keras.Input(shape)
    model = keras.Model(inputs, L.Dense(2)(L.Flatten()(make()(inputs))))
    y = np.zeros((len(model(x)), 2), np.float32)
    try:
        _, plan = engine_for(model, x, y)
    except ValueError:
        return  # refused altogether
    assert plan.engine == "vectorized" or plan.mapped


@pytest.mark.parametrize(
    ("constant", "mixes"),
    [
        (np.ones((3, 4), np.float32), True),
        (np.ones((1, 4), np.float32), False),
        (np.ones(4, np.float32), False),
        (2.0, False),
    ],
)
def test_constants_with_rows_of_their_own_do_not_meet_batches(constant, mixes):
    """Added to a batch of as many rows: which row an example gets depends on the others."""
    x = keras.Input((4,))
    model = keras.Model(x, L.Dense(2)(x * constant))
    example_loss, spec = ExampleLoss(model, None), (tf.TensorSpec((None, 4)), None, None)
    if not mixes:
        ghost.trace_model(example_loss, spec)
        return
    with pytest.raises(ghost.CannotFollow, match="entries of its own for every place"):
        ghost.trace_model(example_loss, spec)


def test_a_layer_with_a_mask_of_its_own_is_left_to_the_plain_engine():
    """Keras finds masks outside of `call`, for the whole batch; here the next layer uses it."""
    x = np.random.default_rng(0).normal(size=(ROWS, 5, 4)).astype(np.float32)
    inputs = keras.Input((5, 4))
    h = L.GlobalAveragePooling1D()(InMask()(inputs))
    _, plan = engine_for(keras.Model(inputs, L.Dense(2)(h)), x, np.zeros((ROWS, 2), np.float32))
    assert plan.engine == "vectorized" or plan.mapped
    assert "All works along the axis of the examples" in f"{plan.reason} {plan.mixing}"


@pytest.mark.parametrize("axis", [0, -2])
def test_layers_along_the_batch_axis_do_not_run_on_batches(axis):
    x, y = lot_data(loud=False)
    _, plan = engine_for(sequential(L.Softmax(axis=axis, name="across")), x, y)
    assert plan.mapped == ("across",)
    _, plan = engine_for(sequential(L.Softmax(axis=1)), x, y)
    assert plan.mapped == ()


@pytest.mark.parametrize("center", [None, 1e-6])
def test_scales_of_zero_do_not_hide_the_rest_of_a_row(center):
    """Its largest entry meets scales of 0 alone; beside it the others' squares underflow."""
    a = np.full((1, 1000), 0.09, np.float32)
    a[0, 0] = 1e18
    scale = np.ones((1000, 100), np.float32)
    scale[0] = 0.0
    rows = forms.OuterProducts(
        a, np.ones((1, 100), np.float32), forms.MatrixLayout((1000, 100), [0])
    )
    centers = None if center is None else [tf.constant(center * scale)]
    clipped = clipping.Ellipsoid([tf.constant(scale)], centers).clipped_sum([rows], tf.ones([1]))
    assert np.linalg.norm(clipped[0].numpy()) <= 1.0 + 1e-5


def test_indices_from_the_end_or_out_of_range_stay_with_their_example():
    """Formed as one table, they would land in the row of the example before or after."""
    d = np.ones((3, 2, 2), np.float32)
    d[1] = 7.0
    rows = forms.Lookups(tf.constant([[0, 1], [-1, 4], [2, -5]]), tf.constant(d), (4, 2))
    dense = rows.materialize().numpy()
    expected = np.zeros((3, 4, 2))
    expected[0, :2] = expected[2, 2] = 1.0
    expected[1, 3] = 7.0
    np.testing.assert_array_equal(dense, expected)
    scales = AxisScales(tf.ones([4, 2]), tf.fill([4, 2], 0.5))
    for metric in (None, scales):
        squares, total = rows.measure(metric)
        wanted, wanted_total = Rows(tf.constant(dense)).measure(metric)
        np.testing.assert_allclose(squares, wanted, rtol=1e-5)
        np.testing.assert_allclose(total(tf.ones([3])), wanted_total(tf.ones([3])), rtol=1e-5)


def test_an_exception_in_the_middle_of_a_trace_leaves_the_model_as_it_was():
    class Broken(L.Layer):
        broken = False

        def call(self, x):
            if self.broken and x.shape[0] is None:
                raise ValueError("no batch of unknown size")
            return x

    x, y = lot_data(loud=False)
    dense, broken = L.Dense(3), Broken()
    model = sequential(dense, broken)
    model(x)
    Broken.broken = True
    _, plan = engine_for(model, x, y)
    assert plan.mapped == (broken.name,)
    assert "no batch of unknown size" in plan.mixing[0]
    assert not any("call" in vars(layer) for layer in (dense, broken))
    assert not tf.config.functions_run_eagerly()
    dp.DPModel(model)


class Penalised(L.Dense):
    """Adds a loss that is too small for its gradient to be missed on random data."""

    def call(self, x, training=None):
        z = super().call(x, training)
        self.add_loss(1e-4 * keras.ops.sum(z))
        return z


def test_losses_of_layers_are_not_lost():
    x, y = lot_data(loud=False)
    engine, plan = engine_for(sequential(Penalised(3)), x, y)
    assert (plan.engine, plan.mapped) == ("ghost", ())
    plain, _ = engine_for(engine.example_loss.model, x, y, "vectorized")
    assert distance(sums_of(engine, x, y), sums_of(plain, x, y)) < 1e-6


class PenalisedMixing(Penalised):
    """One that has to be mapped."""

    def call(self, x, training=None):
        return when_loud(super().call(x, training))


def test_losses_of_mapped_layers_are_not_lost():
    x, y = lot_data(loud=False)
    _, plan = engine_for(sequential(PenalisedMixing(3)), x, y)
    assert plan.engine == "vectorized"
    assert "add_loss" in plan.reason


@pytest.mark.parametrize("jit_compile", [False, True])
def test_an_empty_lot_is_a_legal_lot(jit_compile):
    """Its number of physical batches is not known when the step is traced."""
    x, y = lot_data(loud=False)
    engine, _ = engine_for(sequential(L.Dense(3)), x, y)
    engine._jit_compile = jit_compile
    seed = tf.constant([1, 2], tf.int64)
    spec = [tf.TensorSpec((None, 1, *s)) for s in ((4,), (2,), ())]
    run = tf.function(
        lambda x, y, mask: engine.clipped_sum(((x, y, None), mask), clipping.L2Ball(1.0), seed)[0],
        input_signature=spec,
        autograph=False,
    )
    for rows in (0, 2):
        sums = run(x[:rows, None], y[:rows, None], tf.ones([rows, 1]))
        assert any(np.any(s) for s in sums) == (rows > 0)
