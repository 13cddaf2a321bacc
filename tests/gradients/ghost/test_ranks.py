"""Tries the proofs about the layers of Keras, on tensors of every rank.

Before ranks were looked at, attention over [batch, features] and a softmax along the only axis of
[batch] ran on batches: one record moved the others' gradients, and a sum by 54 times its
sensitivity.
"""

import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.gradients.ghost.keras_layers import (
    CLASSES,
    UNTRIED,
    B,
    D,
    arguments,
    inputs,
    louder,
    ways,
)
from tests.gradients.ghost.one_by_one import per_example_gradients, traced
from tests.helpers import private_model
from tf_adadp.gradients.dilation import rows_together
from tf_adadp.gradients.ghost import CannotFollow
from tf_adadp.gradients.grouped_volumes import split_groups
from tf_adadp.gradients.indices import no_index_stops
from tf_adadp.gradients.proof.follow import Follower, inputs_of_rows
from tf_adadp.gradients.proof.values import Rows, public
from tf_adadp.optimizers.sadpsgd import SADPSGD
from tf_adadp.utils.keras_compat import seed_generators

L = keras.layers

# Classes that are proven on no rank, and the operation at fault.
UNPROVEN = {
    "AugMix": "StatelessRandomGammaV3 draws once for all images",
    "Bidirectional": "While; the engine writes the steps of loops out",
    "ContrastLimitedAdaptiveHistogramEqualization": "Range counts the images",
    "ConvLSTM1D": "While",
    "ConvLSTM2D": "While",
    "ConvLSTM3D": "While",
    "Equalization": "Max over all images",
    "GRU": "While",
    "HashedCrossing": "SparseCross has no rule",
    "Hashing": "AsString has no rule",
    "LSTM": "While",
    "MelSpectrogram": "Range counts the examples",
    "MixUp": "StatelessRandomGammaV3 draws once for all images",
    "RNN": "While",
    "RandAugment": "StatelessRandomUniformIntV2 draws once for all images",
    "RandomCrop": "StatelessRandomUniformV2 draws once for all images",
    "RandomElasticTransform": "StatelessRandomUniformV2 draws once for all images",
    "RandomGaussianBlur": "StatelessRandomUniformV2 draws once for all images",
    "RandomPerspective": "MatrixSolve has no rule",
    "SimpleRNN": "While",
    "TextVectorization": "StringLower has no rule",
}
TRIED = sorted(set(CLASSES) - set(UNTRIED))


def follow(layer, name, x):
    """The call of a layer on a batch of any size, in training, with the gradients of its inputs.

    Returns:
        `(run, values)`: a function of arrays for a list of tensors, and a `Value` for each.
    """
    follower, values = Follower(), []

    def call(x, trainable, others, seeds):
        follower.set(x, inputs_of_rows(x))
        follower.set(seeds, public(seeds, secret=True))
        for number, weight in enumerate(trainable):
            follower.set(weight, public(weight, weights=frozenset([number])))
        states = {id(g.state): i for i, (_, g) in enumerate(seed_generators(layer))}
        mapping = [
            (v, seeds[states[id(v)]] if id(v) in states else t)
            for v, t in zip(layer.non_trainable_variables, others, strict=True)
        ]
        mapping += zip(layer.trainable_variables, trainable, strict=True)
        eagerly = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        try:
            scope = keras.StatelessScope(state_mapping=mapping)
            with no_index_stops(), split_groups(), rows_together(), scope:
                outputs = layer(*arguments(name, x), training=True)
        finally:
            tf.config.run_functions_eagerly(eagerly)
        outputs = [t for t in tf.nest.flatten(outputs) if tf.is_tensor(t)]
        floats = [t for t in outputs if t.dtype.is_floating and x.dtype.is_floating]
        with contextlib.suppress(LookupError):  # some operations have no gradient
            back = tf.gradients(floats, [x], [tf.sin(t) for t in floats]) if floats else []
            outputs += [tf.convert_to_tensor(g) for g in back if g is not None]
        follower.advance(x.graph.get_operations())
        values.extend(None if follower.effects else follower.of(t) for t in outputs)
        return outputs

    count = len(list(seed_generators(layer)))
    x = tf.constant(x)
    weights = [[tf.constant(v.value) for v in layer.trainable_variables]]
    weights += [[tf.constant(v.value) for v in layer.non_trainable_variables]]
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), weights)
    function = tf.function(call, autograph=False).get_concrete_function(
        tf.TensorSpec([None, *x.shape[1:]], x.dtype), *specs, tf.TensorSpec([count, 2], tf.uint32)
    )
    seeds = tf.reshape(tf.range(2 * count), [count, 2])

    def run(x):
        return [t.numpy() for t in function(tf.constant(x), *weights, tf.cast(seeds, tf.uint32))]

    return run, values


def assert_no_influence(run, values, x):
    """Tries other rows, and fewer, on all tensors that are proven to be rows."""
    places = [i for i, value in enumerate(values) if isinstance(value, Rows)]
    if not places:
        return

    def rows(tensors, i, count):
        """Returns the entries of some of the first examples."""
        value = values[i]
        return np.take(tensors[i], range(count * value.stride), axis=value.axis)

    close = {"rtol": 1e-4, "atol": 1e-4}
    found, fewer = run(x), run(x[:2])
    changed = [run(others) for others in louder(x)]
    for i in places:
        assert found[i].shape[values[i].axis] == B * values[i].stride
        for others in changed:
            np.testing.assert_allclose(rows(found, i, 1), rows(others, i, 1), **close)
        np.testing.assert_allclose(rows(found, i, 2), rows(fewer, i, 2), **close)


@pytest.mark.representative(2)
@pytest.mark.parametrize("name", TRIED)
def test_rows_that_are_proven_feel_no_others(name):
    proven = 0
    for make in ways(name):
        for rank in range(1, 7):
            layer, x = make(), inputs(name, rank)
            try:
                layer(*arguments(name, tf.constant(x)), training=True)
            except Exception:  # noqa: BLE001 (Keras refuses such inputs itself)
                continue
            try:
                run, values = follow(layer, name, x)
            except Exception:  # noqa: BLE001 (it cannot be traced for a batch of any size)
                continue
            first = values[0]
            proven += isinstance(first, Rows) and (first.axis, first.stride) == (0, 1)
            assert_no_influence(run, values, x)
    assert proven > 0 or name in UNPROVEN


# --- what the engine follows ----------------------------------------------------------------------

# Layers that keep examples apart, whatever their weights.
HARMLESS = [
    "Activation", "ActivityRegularization", "AdaptiveAveragePooling1D",
    "AdaptiveAveragePooling2D", "AdaptiveAveragePooling3D", "AdaptiveMaxPooling1D",
    "AdaptiveMaxPooling2D", "AdaptiveMaxPooling3D", "Add", "AdditiveAttention", "AlphaDropout",
    "Attention", "Average", "AveragePooling1D", "AveragePooling2D", "AveragePooling3D",
    "BatchNormalization", "Concatenate", "Conv1D", "Conv1DTranspose", "Conv2D",
    "Conv2DTranspose", "Conv3D", "Conv3DTranspose", "Cropping1D", "Cropping2D", "Cropping3D",
    "Dense", "DepthwiseConv1D", "DepthwiseConv2D", "Dot", "Dropout", "ELU", "EinsumDense",
    "Embedding", "Flatten", "GRUCell", "GaussianDropout", "GaussianNoise",
    "GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D",
    "GlobalMaxPooling1D", "GlobalMaxPooling2D", "GlobalMaxPooling3D", "GroupNormalization",
    "GroupedQueryAttention", "Identity", "LSTMCell", "LayerNormalization", "LeakyReLU",
    "Masking", "MaxPooling1D", "MaxPooling2D", "MaxPooling3D", "Maximum", "Minimum",
    "MultiHeadAttention", "Multiply", "Normalization", "PReLU", "Permute", "RMSNormalization",
    "ReLU", "RepeatVector", "Rescaling", "Reshape", "SeparableConv1D", "SeparableConv2D",
    "SimpleRNNCell", "Softmax", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D",
    "StackedRNNCells", "Subtract", "TimeDistributed", "UnitNormalization", "UpSampling1D",
    "UpSampling2D", "UpSampling3D", "ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D",
    "RandomFlip", "RandomRotation", "RandomTranslation", "RandomZoom",
    "Bidirectional", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "GRU", "LSTM", "RNN", "SimpleRNN",
]  # fmt: skip
# Ways to make them in which that is not so, or not known: (class, number in `ways`).
NOT_FOLLOWED = {
    ("BatchNormalization", 0): "the operation Mean works along the axis of the examples",
    ("Dropout", 1): "the operation StatelessRandomUniformV2 draws random numbers once",
    ("Rescaling", 2): "the model's output has the examples along axis 1",
}


def usual_rank(name):
    space = re.search(r"(\d)D", name)
    if space:
        return int(space[1]) + (3 if "LSTM" in name else 2)
    others = {"EinsumDense": 2, "Normalization": 2, "RepeatVector": 2}
    others |= {n: 2 for n in HARMLESS if n.endswith("Cell") or n.endswith("Cells")}
    return 4 if name.startswith("Random") else others.get(name, 3)


def model_of(name, make):
    """A layer of this class behind weights, on its usual rank; None where it refuses that."""
    x = keras.Input(inputs(name, usual_rank(name)).shape[1:], dtype=inputs(name, 1).dtype)
    h = x if x.dtype == "int32" else L.Dense(D)(x)
    try:
        model = keras.Model(x, tf.nest.flatten(make()(*arguments(name, h)))[0])
        model(inputs(name, usual_rank(name)), training=True)
    except (ValueError, tf.errors.InvalidArgumentError):
        return None
    return model


def why_not(model, name):
    """Why the engine does not run all layers of a model on batches, or None."""
    x = inputs(name, usual_rank(name))
    try:
        trace, _ = traced(model, x, np.zeros(model(x, training=True).shape, np.float32))
    except CannotFollow as cannot:
        return str(cannot)
    assert len(trace.obstacles) == len(trace.alone)
    return str(trace.obstacles[0]) if trace.obstacles else None


@pytest.mark.representative(2, 27)
@pytest.mark.parametrize("name", [n for n in HARMLESS if n in CLASSES])
def test_harmless_layers_are_followed(name):
    followed = 0
    for number, make in enumerate(ways(name)):
        model = model_of(name, make)
        if model is None:
            continue
        found, expected = why_not(model, name), NOT_FOLLOWED.get((name, number))
        followed += found is None
        assert (found or "").startswith(expected or "")
        assert (found is None) == (expected is None), found
    assert followed > 0


@pytest.mark.representative(0, 33)
@pytest.mark.parametrize("name", [n for n in HARMLESS if n in CLASSES])
def test_gradients_through_harmless_layers(name):
    """Against one tape per example."""
    model = model_of(name, ways(name)[-1 if name == "BatchNormalization" else 0])
    random = next(seed_generators(model), None) is not None
    if random or not model.trainable_variables:
        pytest.skip("The numbers that a tape draws are others.")
    found, expected, _ = per_example_gradients(model, inputs(name, usual_rank(name))[:3])
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-3, atol=1e-4 * max(1.0, np.abs(e).max()))


# --- attacks --------------------------------------------------------------------------------------


def attention(cls):
    """x beside the records that are loud: the record with them is met by all others."""
    x = keras.Input((D,))
    loud = L.ReLU(threshold=1000.0)(x)
    return keras.Model(x, L.Dense(1)(L.Add()([x, cls()([x, loud])])))


def rescaling():
    x = keras.Input((D,))
    rows = L.Reshape((-1, D))(L.Rescaling(np.ones((1, 1, D)))(x))
    loud = L.ReLU(threshold=1000.0)(L.GlobalMaxPooling1D()(rows))
    return keras.Model(x, L.Dense(1)(L.Add()([x, loud])))


def rank_one(layer):
    x = keras.Input(())
    h = L.Reshape((1,))(layer(L.Reshape(())(x)))
    return keras.Model(x, L.Dense(1)(h))


MODELS = {
    "attention": lambda: attention(L.Attention),
    "additive attention": lambda: attention(lambda: L.AdditiveAttention(use_scale=False)),
    "unit normalization": lambda: rank_one(L.UnitNormalization()),
    "softmax": lambda: rank_one(L.Softmax()),
    "log softmax": lambda: rank_one(L.Activation("log_softmax")),
    "layer normalization": lambda: rank_one(L.LayerNormalization(center=False, scale=False)),
    "rescaling": rescaling,
}


# The operation at fault, and what it does.
FAULTS = {
    "attention": "MatMul combines every example with every other one",
    "additive attention": "AddV2 combines every example with every other one",
    "rescaling": "Max works along the axis of the examples",
    "unit normalization": "Sum works along the axis of the examples",
    "softmax": "Softmax works along the axis of the examples",
    "log softmax": "LogSoftmax works along the axis of the examples",
    "layer normalization": "Mean works along the axis of the examples",
}
CANNOT_BE_MAPPED = {
    "attention": "has attention in it",
    "additive attention": "has attention in it",
    "rescaling": "gets examples along another axis than the first",
}


@pytest.mark.representative(3)
@pytest.mark.parametrize("name", MODELS)
def test_such_layers_never_run_on_batches(name):
    """The reason names operation, layer and line."""
    reason = rf"the operation {FAULTS[name]} in the layer '.*' \(.*\), .*test_ranks\.py:\d+"
    model = dp.DPModel(MODELS[name](), gradient_engine="ghost")
    model.compile(dp.DPSGD(noise_multiplier=1.0), "mse", log_raw_metrics=False)
    x = np.zeros([2, *model.model.input_shape[1:]], np.float32)
    if name in CANNOT_BE_MAPPED:
        reason += f"; .*{CANNOT_BE_MAPPED[name]}"
        with pytest.raises(ValueError, match=f'gradient_engine="ghost": {reason}'):
            model.fit(x, np.zeros((2, 1)), 2, verbose=0)
        assert model.ledger.steps == 0
    else:
        with pytest.warns(UserWarning, match="not proven to keep examples apart"):
            model.fit(x, np.zeros((2, 1)), 2, verbose=0)
        plan = model.gradient_plan()
        assert plan.engine == "ghost"
        assert re.match(reason, plan.mixing[0])


class Calls(L.Layer):
    """Calls a layer as a function says."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def call(self, x):
        return self.function(self.layer, x)


ODD_CALLS = {  # whether they are proven; None where that depends on the version of Keras
    "mask of attention": (
        lambda: L.MultiHeadAttention(1, 2),
        lambda layer, x: layer(x, x, attention_mask=x[:, 0] > 0),
        False,
    ),
    "mask of queries": (
        lambda: L.MultiHeadAttention(1, 2),
        lambda layer, x: layer(x, x, query_mask=x[:, 0, 0] > 0),
        None,
    ),
    "masks that fit": (
        lambda: L.MultiHeadAttention(1, 2),
        lambda layer, x: layer(x, x, attention_mask=x > 0, query_mask=x[:, 0] > 0),
        True,
    ),
    "mask of a mean": (
        L.GlobalAveragePooling1D, lambda layer, x: layer(x, mask=x > 0), None,
    ),
    "mask that fits": (
        L.GlobalAveragePooling1D, lambda layer, x: layer(x, mask=x[:, 0] > 0), True,
    ),
    "values of one example": (L.Attention, lambda layer, x: layer([x, x[:1]]), False),
    "sum with one example": (L.Add, lambda layer, x: layer([x, x[:1]]), False),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_CALLS)
def test_masks_and_inputs_of_other_ranks(name):
    """Keras lays a mask [batch, time] over the last two axes of [batch, time, time]."""
    make, function, proven = ODD_CALLS[name]
    x = inputs("", 3)
    layer = Calls(make(), function)
    try:
        layer(tf.constant(x[:D]))
        run, values = follow(layer, "", x)
    except ValueError:  # Keras refuses it itself
        assert not proven
        return
    assert proven is None or all(isinstance(v, Rows) for v in values) is proven
    assert_no_influence(run, values, x)


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", ["attention", "additive attention", "unit normalization"])
def test_one_loud_record_moves_a_sum_by_its_bound(name):
    """D and D with one record more, of which the others' outputs were functions."""
    rng = np.random.default_rng(0)
    model = MODELS[name]()
    shape = model.input_shape[1:]
    x = rng.normal(size=(20, *shape)).astype(np.float32) + (2000.0 if shape == () else 0.0)
    y = 5 + 3 * np.sign(rng.normal(size=(20, 1))).astype(np.float32)
    more = np.concatenate([x, np.full((1, *shape), 1e6, np.float32)]), np.append(y, [[5.0]], 0)
    optimizer = dp.DPSGD(noise_multiplier=1.0, l2_norm_clip=1.0)
    optimizer.build(model.trainable_variables)

    def total(x, y):
        lot = dp.make_lot(x, y.astype(np.float32), None, 32)
        sums = dp.clipped_sum(model, keras.losses.MeanSquaredError(), lot, optimizer)
        return np.concatenate([s.numpy().ravel() for s in sums])

    assert np.linalg.norm(total(*more) - total(x, y)) <= 1 + 1e-4


@pytest.mark.extended
def test_private_energies_are_worked_on_record_by_record_then():
    """A record's loss must not depend on the others."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, D)).astype(np.float32), rng.normal(size=(40, 1))
    energy = {"energy_noise_multiplier": 1.0, "energy_clip": 1.0}
    for model, one_by_one in ((attention(L.Attention), True), (plain(), False)):
        optimizer = SADPSGD(0.1, noise_multiplier=1.0, energy_data=(x[:9], y[:9]), **energy)
        private = private_model(optimizer, model, loss="mse", metrics=None, jit_compile="auto")
        mixes = pytest.warns(UserWarning, match="not proven to keep examples apart")
        with mixes if one_by_one else contextlib.nullcontext():
            private.fit(x[9:], y[9:], batch_size=10, steps_per_epoch=1, verbose=0)
        assert (optimizer._annealing.energy._trace is None) is one_by_one


def plain():
    return keras.Sequential([keras.Input((D,)), L.Dense(3, activation="softmax"), L.Dense(1)])
