"""Both engines train alike, and trace once however lots vary."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import crossentropy, data, exact_sgd, plain_model
from tf_adadp import clipping
from tf_adadp.sampling import make_lot

L = keras.layers
OPTIMIZERS = {
    "dpsgd": lambda: dp.DPSGD(0.1, noise_multiplier=1.0, seed=3),
    "layers": lambda: dp.DPSGD(0.1, noise_multiplier=1.0, l2_norm_clip={"": 0.5}, seed=3),
    "adadp": lambda: dp.ADADP(noise_multiplier=1.0, warmup_steps=1, seed=3),
    "adadp_local": lambda: dp.ADADP(noise_multiplier=1.0, clipping="local", warmup_steps=1, seed=3),
    "adadp_raw": lambda: dp.ADADP(
        noise_multiplier=1.0, clipping="local", prior="raw", warmup_steps=1, seed=3
    ),
}


def _trained(gradient_engine, optimizer, **wrap):
    keras.utils.set_random_seed(5)
    model = dp.DPModel(plain_model(), gradient_engine=gradient_engine, **wrap)
    model.compile(optimizer, loss=crossentropy(), metrics=["accuracy"], jit_compile=False)
    x, y = data()
    history = model.fit(x, y, batch_size=30, epochs=2, verbose=0).history
    return model, history


@pytest.mark.representative(0, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_curves_coincide(name):
    ghost, ghost_history = _trained("ghost", OPTIMIZERS[name]())
    plain, plain_history = _trained("vectorized", OPTIMIZERS[name]())
    assert ghost.gradient_plan().engine == "ghost"
    assert plain.gradient_plan().engine == "vectorized"
    for a, b in zip(ghost.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ghost_history["loss"], plain_history["loss"], rtol=1e-4)
    assert ghost_history["accuracy"] == plain_history["accuracy"]


@pytest.mark.extended
@pytest.mark.parametrize("physical_batch_size", [1, 7, 16, 1000])
def test_chunks_change_nothing(physical_batch_size):
    whole, _ = _trained("ghost", exact_sgd())
    cut, _ = _trained("ghost", exact_sgd(), physical_batch_size=physical_batch_size)
    # Lots are drawn with secret keys, so only full lots compare.
    x, y = data()
    for model in (whole, cut):
        model.set_weights([np.zeros_like(w) + 0.1 for w in model.get_weights()])
        model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
    for a, b in zip(whole.get_weights(), cut.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("gradient_engine", ["ghost", "vectorized"])
def test_varying_lots_are_traced_once(gradient_engine):
    traced = []

    def loss(y_true, y_pred):
        traced.append(1)
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    model = dp.DPModel(plain_model(), gradient_engine=gradient_engine, physical_batch_size=8)
    model.compile(dp.DPSGD(noise_multiplier=1.0), loss=loss, jit_compile=False)
    x, y = data()
    model.fit(x, y, batch_size=3, epochs=1, steps_per_epoch=1, verbose=0)
    after_one = len(traced)
    assert after_one > 0
    model.fit(x, y, batch_size=3, epochs=3, steps_per_epoch=20, verbose=0)  # some lots are empty
    model.fit(x, y, batch_size=60, epochs=1, verbose=0)
    assert len(traced) == after_one


@pytest.mark.extended
def test_the_ghost_engine_under_xla():
    x, y = data()
    states = []
    for jit_compile in (True, False):
        keras.utils.set_random_seed(5)
        model = dp.DPModel(plain_model(), gradient_engine="ghost", physical_batch_size=32)
        model.compile(exact_sgd(), loss=crossentropy(), jit_compile=jit_compile)
        model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
        states.append(model.get_weights())
    for a, b in zip(*states, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.extended
def test_empty_lots_are_legal():
    lots = dp.PoissonLots(*data(rows=50), expected_size=1e-6, seed=1)
    model = dp.DPModel(plain_model(), gradient_engine="ghost")
    model.compile(dp.DPSGD(0.1, noise_multiplier=1.0), loss=crossentropy())
    before = model.model.get_weights()
    model.fit(lots, steps_per_epoch=2, verbose=0)
    assert all(np.all(np.isfinite(w)) for w in model.get_weights())
    assert any(np.any(a != b) for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("layers", "size"),
    [
        # TensorFlow's own kernel loses a channel of no rows at all.
        (lambda: [L.Reshape((2, 3, 1)), L.SeparableConv2D(2, 2), L.GlobalAveragePooling2D()], 0.5),
        # `tf.vectorized_map` cannot follow it over one row.
        (lambda: [L.Reshape((3, 2)), L.LSTM(2, return_sequences=True), L.Flatten()], 3),
    ],
)
def test_lots_of_no_row_and_of_one(layers, size):
    x, y = data(rows=6)
    lots = dp.PoissonLots(x, y, expected_size=size, seed=1)
    model = dp.DPModel(plain_model(*layers()), gradient_engine="ghost", physical_batch_size=1)
    model.compile(exact_sgd(), loss=crossentropy(), jit_compile=False)
    model.fit(lots, steps_per_epoch=8, verbose=0)
    assert model.ledger.steps == 8
    (x_spec, y_spec, _), mask_spec = lots.as_dataset(1, 1).element_spec

    engine = model.session.prepared.engine

    @tf.function(input_signature=[x_spec, y_spec, mask_spec])
    def summed(x, y, mask):
        lot, ball = ((x, y, None), mask), clipping.L2Ball(1e6)
        return engine.clipped_sum(lot, ball, tf.zeros([2], tf.int64))[0]

    totals = []
    for rows in (0, 1, 3):
        (x_lot, y_lot, _), mask = make_lot(x[:rows], y[:rows], physical_batch_size=1)
        sums = summed(x_lot, y_lot, mask)
        totals.append(np.concatenate([np.ravel(s) for s in sums]))
    assert not np.any(totals[0])
    assert np.any(totals[1])
    with tf.GradientTape() as tape:
        losses = keras.losses.sparse_categorical_crossentropy(
            y[:3], model.model(x[:3]), from_logits=True
        )
        loss = tf.reduce_sum(losses)
    plain = tape.gradient(loss, model.trainable_variables)
    plain = np.concatenate([np.ravel(g) for g in plain])
    np.testing.assert_allclose(totals[2], plain, rtol=1e-3, atol=1e-5)


def test_a_row_of_nan_contributes_nothing():
    x, y = data(rows=40)
    weights = []
    for bad in (x[:30], np.concatenate([x[:30], np.full((10, 6), np.nan, np.float32)])):
        keras.utils.set_random_seed(5)
        model = dp.DPModel(plain_model(), gradient_engine="ghost")
        # The same divisor for both: a lot's size is public, and nothing of the lot itself.
        model.compile(exact_sgd(0.1 * len(bad) / 30), loss=crossentropy())
        model.fit(bad, y[: len(bad)], batch_size=len(bad), verbose=0)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_plan_before_training_and_unknown_engine(capsys):
    model = dp.DPModel(plain_model())
    with pytest.raises(ValueError, match="compile"):
        model.gradient_plan()
    model.compile(dp.DPSGD(noise_multiplier=1.0), loss=crossentropy())
    plan = model.gradient_plan()
    assert [g.form for g in plan.gradients] == ["outer", "materialized"] * 2
    assert "MatMul" in str(plan)
    assert not capsys.readouterr().out
    assert tf.nest.flatten(model.get_weights())  # nothing was trained
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(ValueError, match="gradient_engine='fast'"):
        dp.DPModel(plain_model(), gradient_engine="fast")


@pytest.mark.extended
def test_an_eager_custom_loop_prepares_once():
    traced = []

    def loss(y_true, y_pred):
        traced.append(1)
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    model, optimizer = plain_model(), dp.DPSGD(noise_multiplier=1.0)
    optimizer.build(model.trainable_variables)
    counts = []
    for lot in dp.PoissonLots(*data(), expected_size=20).take(4, 16):
        before = len(traced)
        optimizer.apply_private(dp.clipped_sum(model, loss, lot, optimizer), 20)
        counts.append(len(traced) - before)
    assert counts[1] < counts[0]  # no trial on random data, no checks
    assert counts[1] == counts[2] == counts[3]
    model.layers[0].trainable = False
    other = dp.DPSGD(noise_multiplier=1.0)
    other.build(model.trainable_variables)
    lot = next(iter(dp.PoissonLots(*data(), expected_size=20).take(1, 16)))
    assert len(dp.clipped_sum(model, loss, lot, other)) == 2


@pytest.mark.extended
def test_a_layer_changed_between_steps_is_looked_at_again():
    model, optimizer = plain_model(), dp.DPSGD(noise_multiplier=1.0, l2_norm_clip=1.0)
    optimizer.build(model.trainable_variables)
    (lot,) = dp.PoissonLots(*data(), expected_size=60).take(1, 16)

    def sums(gradient_engine):
        return dp.clipped_sum(
            model, crossentropy_loss, lot, optimizer, gradient_engine=gradient_engine
        )

    crossentropy_loss = crossentropy()
    sums("auto")
    layer = model.layers[0]
    call = layer.call
    layer.call = lambda x, **kwargs: call(x - tf.reduce_mean(x, axis=0), **kwargs)
    for a, b in zip(sums("auto"), sums("vectorized"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
