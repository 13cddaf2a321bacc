"""Known layers keep the examples of a batch apart on every rank on which they may run on one.

Before ranks were looked at, attention over [batch, features] and a softmax along the only axis of
[batch] ran on batches: one record moved the others' gradients, and a sum by 54 times its
sensitivity.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import private_model
from tf_adadp.gradients import ghost
from tf_adadp.gradients.ghost import independence
from tf_adadp.optimizers.sadpsgd import SADPSGD

L = keras.layers
B, D = 5, 4
WAYS = {  # where a class cannot be made without arguments, or has more than one way to work
    "Activation": [lambda a=a: L.Activation(a) for a in ("softmax", "log_softmax", "glu", "relu")],
    "Attention": [L.Attention, lambda: L.Attention(score_mode="concat")],
    "Bidirectional": [lambda: L.Bidirectional(L.GRU(2))],
    "Concatenate": [L.Concatenate, lambda: L.Concatenate(axis=1)],
    "Conv1D": [lambda: L.Conv1D(2, 2)],
    "Conv1DTranspose": [lambda: L.Conv1DTranspose(2, 2)],
    "Conv2D": [lambda: L.Conv2D(2, 2)],
    "Conv2DTranspose": [lambda: L.Conv2DTranspose(2, 2)],
    "Conv3D": [lambda: L.Conv3D(2, 2)],
    "Conv3DTranspose": [lambda: L.Conv3DTranspose(2, 2)],
    "ConvLSTM1D": [lambda: L.ConvLSTM1D(2, 2)],
    "ConvLSTM2D": [lambda: L.ConvLSTM2D(2, 2)],
    "ConvLSTM3D": [lambda: L.ConvLSTM3D(2, 2)],
    "Dense": [lambda: L.Dense(2), lambda: L.Dense(2, activation="softmax")],
    "DepthwiseConv1D": [lambda: L.DepthwiseConv1D(2)],
    "DepthwiseConv2D": [lambda: L.DepthwiseConv2D(2)],
    "Dot": [lambda: L.Dot(1), lambda: L.Dot(-1), lambda: L.Dot(1, normalize=True)],
    "Dropout": [lambda: L.Dropout(0.5), lambda: L.Dropout(0.5, noise_shape=(1, 1, D))],
    "EinsumDense": [
        lambda: L.EinsumDense("ab,bc->ac", 3),
        lambda: L.EinsumDense("...b,bc->...c", 3),
        lambda: L.EinsumDense("...b,bc->...c", 3, activation=tf.nn.softmax),
    ],
    "Embedding": [lambda: L.Embedding(50, 2)],
    "GRUCell": [],  # called with states
    "GroupNormalization": [lambda: L.GroupNormalization(1), lambda: L.GroupNormalization(-1)],
    "GroupedQueryAttention": [lambda: L.GroupQueryAttention(2, 2, 1)],
    "InputLayer": [],
    "LSTMCell": [],
    "LayerNormalization": [L.LayerNormalization, lambda: L.LayerNormalization(axis=1)],
    "MultiHeadAttention": [
        lambda: L.MultiHeadAttention(1, 2),
        lambda: L.MultiHeadAttention(1, 2, attention_axes=(1,)),
    ],
    "Normalization": [lambda: L.Normalization(mean=[0.1] * D, variance=[2.0] * D)],
    "Permute": [lambda: L.Permute((2, 1)), lambda: L.Permute((1,))],
    "RMSNormalization": [L.RMSNormalization, lambda: L.RMSNormalization(axis=1)],
    "RNN": [lambda: L.RNN(L.GRUCell(2))],
    "RepeatVector": [lambda: L.RepeatVector(3)],
    "Rescaling": [
        lambda: L.Rescaling(2.0),
        lambda: L.Rescaling(np.ones((1, 1, D))),
        lambda: L.Rescaling(1.0, offset=np.arange(2.0 * D).reshape(2, 1, 1, D)),
        lambda: L.Rescaling(np.arange(1.0 * B * D).reshape(B, D)),
    ],
    "Reshape": [lambda: L.Reshape((-1,)), lambda: L.Reshape((1, -1)), lambda: L.Reshape(())],
    "SeparableConv1D": [lambda: L.SeparableConv1D(2, 2)],
    "SeparableConv2D": [lambda: L.SeparableConv2D(2, 2)],
    "SimpleRNNCell": [],
    "Softmax": [L.Softmax, lambda: L.Softmax(1)],
    "StackedRNNCells": [],
    "TimeDistributed": [
        lambda: L.TimeDistributed(L.Dense(2)),
        lambda: L.TimeDistributed(L.Softmax()),
        lambda: L.TimeDistributed(L.UnitNormalization()),
    ],
    "UnitNormalization": [L.UnitNormalization, lambda: L.UnitNormalization(axis=1)],
}
for _argument, _names in {
    2: (
        "GRU", "LSTM", "SimpleRNN", "AveragePooling1D", "AveragePooling2D", "AveragePooling3D",
        "MaxPooling1D", "MaxPooling2D", "MaxPooling3D", "AdaptiveAveragePooling1D",
        "AdaptiveAveragePooling2D", "AdaptiveAveragePooling3D", "AdaptiveMaxPooling1D",
        "AdaptiveMaxPooling2D", "AdaptiveMaxPooling3D",
    ),
    0.5: (
        "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout",
        "GaussianDropout", "GaussianNoise",
    ),
}.items():  # fmt: skip
    WAYS |= {n: [lambda n=n, a=_argument: getattr(L, n)(a)] for n in _names}
WAYS["RandomRotation"] = [lambda: L.RandomRotation(0.2)]
WAYS["RandomTranslation"] = [lambda: L.RandomTranslation(0.2, 0.2)]
WAYS["RandomZoom"] = [lambda: L.RandomZoom(0.2)]
PAIRS = ("Add", "AdditiveAttention", "Attention", "Average", "Concatenate", "Dot", "Maximum")
PAIRS += ("Minimum", "Multiply", "Subtract")
CLASSES = sorted(
    c.__name__ for c in independence._KNOWN if c.__module__.startswith("keras.src.layers.")
)


def run(layer, x, arguments):
    """The layer's output as in a batched pass, in eager mode; None where that is refused."""
    for part in layer._flatten_layers():
        for generator in getattr(part, "_seed_generators", ()):
            generator.state.assign(np.array([1, 2], np.uint32))
    # As where a rule sees to an activation of the user's.
    checked_layers = ghost.checked_layers(keras.Sequential([layer]), has_rule=lambda layer: True)
    try:
        with ghost.on_known_ranks(checked_layers):
            return layer(*arguments(tf.constant(x)), training=False).numpy()
    except ghost.CannotFollow:
        return None


def arguments_of(name):
    if name in PAIRS:
        return lambda x: ([x, 1.5 * x],)
    if name in ("MultiHeadAttention", "GroupedQueryAttention"):
        return lambda x: (x, x)
    return lambda x: (x,)


@pytest.mark.representative(8)
@pytest.mark.parametrize("name", CLASSES)
def test_rows_stay_apart_on_every_rank_that_is_let_through(name):
    rng = np.random.default_rng(0)
    ran = 0
    for make in WAYS[name] if name in WAYS else [getattr(L, name)]:
        for rank in range(1, 7):
            layer = make()
            if ghost.mixing_reason(layer, has_rule=True) is not None:
                continue
            shape = [B] + [D] * (rank - 1)
            x = rng.normal(size=shape).astype(np.float32)
            if name == "Embedding":
                x = np.abs(10 * x).astype(np.int32)
            if name.startswith("Random") and rank != 4:
                continue  # which the pass sees to
            others = x.copy()
            others[1:] = 40 if name == "Embedding" else 50 * x[1:] + 3
            try:
                layer(*arguments_of(name)(tf.constant(x)))
            except Exception:  # noqa: BLE001 (Keras refuses such inputs itself)
                continue
            found = run(layer, x, arguments_of(name))
            if found is None:
                continue
            ran += 1
            assert len(found) == B, rank
            changed = run(layer, others, arguments_of(name))
            np.testing.assert_allclose(found[0], changed[0], rtol=1e-4, atol=1e-4)
            fewer = run(layer, x[:2], arguments_of(name))
            np.testing.assert_allclose(found[:2], fewer, rtol=1e-4, atol=1e-4)
    untried = ("InputLayer", "StackedRNNCells", "GRUCell", "LSTMCell", "SimpleRNNCell")
    mixing = ("BatchNormalization",)
    assert ran > 0 or name in untried + mixing


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
    "rescaling": rescaling,
    "unit normalization": lambda: rank_one(L.UnitNormalization()),
    "softmax": lambda: rank_one(L.Softmax()),
    "log softmax": lambda: rank_one(L.Activation("log_softmax")),
    "layer normalization": lambda: rank_one(L.LayerNormalization(center=False, scale=False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_ghost_engine_leaves_such_models_alone(name):
    model = dp.DPModel(MODELS[name](), gradient_engine="ghost")
    model.compile(dp.DPSGD(noise_multiplier=1.0), "mse")
    x = np.zeros([2, *model.model.input_shape[1:]], np.float32)
    with pytest.raises(ValueError, match="on which it may work across the examples"):
        model.fit(x, np.zeros((2, 1)), 2, verbose=0)
    assert model.ledger.steps == 0


def test_masks_and_inputs_of_other_ranks_are_refused():
    """Keras lays a mask [batch, time] over the last two axes of [batch, time, time]."""
    x, mask = tf.ones([D, D, D]), tf.ones([D, D], tf.bool)
    heads, rnn, add = L.MultiHeadAttention(1, 2), L.LSTM(2), L.Add()
    add([x, x])
    for layer, arguments, masks in (
        (heads, (x, x), {"attention_mask": mask}),
        (heads, (x, x), {"query_mask": mask[:, 0]}),
        (L.GlobalAveragePooling1D(), (x,), {"mask": x > 0}),
        (L.Attention(), ([x, x[0]],), {}),
        (add, ([x, x[0]],), {}),
    ):
        checked = ghost.checked_layers(keras.Sequential([layer]))
        with ghost.on_known_ranks(checked), pytest.raises(ghost.CannotFollow, match="of rank"):
            layer(*arguments, **masks)
    for layer, arguments, masks in (
        (heads, (x, x), {"attention_mask": x > 0, "query_mask": mask}),
        (rnn, (x,), {"mask": mask}),
        (L.GlobalAveragePooling1D(), (x,), {"mask": mask}),
    ):
        with ghost.on_known_ranks(ghost.checked_layers(keras.Sequential([layer]))):
            layer(*arguments, **masks)


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
    """Layers are known, ranks are not: a record's loss must not depend on the others."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, D)).astype(np.float32), rng.normal(size=(40, 1))
    energy = {"energy_noise_multiplier": 1.0, "energy_clip": 1.0}
    for model, one_by_one in ((attention(L.Attention), True), (plain(), False)):
        optimizer = SADPSGD(0.1, noise_multiplier=1.0, energy_data=(x[:9], y[:9]), **energy)
        private = private_model(optimizer, model, loss="mse", metrics=None, jit_compile="auto")
        private.fit(x[9:], y[9:], batch_size=10, steps_per_epoch=1, verbose=0)
        assert optimizer._annealing.energy._one_by_one is one_by_one


def plain():
    return keras.Sequential([keras.Input((D,)), L.Dense(3, activation="softmax"), L.Dense(1)])
