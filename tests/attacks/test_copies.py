"""Attacks with copies of trained weights, and with training past the DPModel."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, crossentropy, data, plain_model, private_model

DELTA = 1e-3


def trained(**kwargs):
    private = private_model(**kwargs)
    x, y = data()
    private.fit(x, y, batch_size=30, verbose=0)
    return private


def fit_plain(model, optimizer=None):
    """Training without privacy, past the DPModel that wraps the model."""
    model.compile(optimizer or keras.optimizers.SGD(0.1), crossentropy())
    model.fit(*data(), verbose=0)


def says_changed(private):
    return "the weights are not those that the last private step left" in " ".join(
        private.ledger.statement(DELTA).split()
    )


def test_a_deep_copy_of_the_plain_model_keeps_its_history():
    private = trained()
    twin = copy.deepcopy(private.model)
    for a, b in zip(twin.get_weights(), private.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for made in (twin, copy.deepcopy(twin), copy.deepcopy([twin])[0]):
        assert dp.DPModel(made).epsilon(DELTA) == private.epsilon(DELTA) > 0
    # Each goes on with its own; training on both is in neither's ledger but its own.
    again = private_model(model=twin)
    again.fit(*data(), batch_size=30, verbose=0)
    assert again.ledger.steps == 8
    assert private.ledger.steps == 4


def test_a_deep_copy_of_a_custom_loops_model_keeps_its_history():
    model, ledger = plain_model(), dp.PrivacyLedger()
    lots = dp.PoissonLots(*data(), expected_size=30)
    optimizer, loss = dp.DPSGD(0.1, noise_multiplier=1.0), crossentropy()
    for lot in lots.take(3, 16):
        dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)
    twin = dp.DPModel(copy.deepcopy(model))
    assert twin.epsilon(DELTA) == ledger.epsilon(DELTA) > 0
    assert twin.ledger is not ledger


@pytest.mark.representative(1)
@pytest.mark.parametrize("way", ["model", "weights"])
def test_changes_of_loaded_weights_are_noticed(tmp_path, way):
    private = trained()
    if way == "model":
        private.save(tmp_path / "m.keras")
        loaded = dp.load_model(tmp_path / "m.keras")
    else:
        private.save_weights(tmp_path / "m.weights.h5")
        loaded = private_model()
        loaded.load_weights(tmp_path / "m.weights.h5")
    assert not says_changed(loaded)
    loaded.fit(*data(), batch_size=30, verbose=0)
    assert not says_changed(loaded)
    if way == "model":
        loaded = dp.load_model(tmp_path / "m.keras")
    else:
        loaded.load_weights(tmp_path / "m.weights.h5")
    fit_plain(loaded.model)
    assert says_changed(loaded)
    loaded.save(tmp_path / "changed.keras")
    assert says_changed(dp.load_model(tmp_path / "changed.keras"))


def test_public_weights_may_be_trained_after_loading(tmp_path):
    private_model().save(tmp_path / "m.keras")
    loaded = dp.load_model(tmp_path / "m.keras")
    fit_plain(loaded.model)
    assert not says_changed(loaded)


def test_a_deep_copy_of_lost_history_stays_lost():
    private = trained()
    private.ledger.mark_unknown("a file was lost")
    with pytest.raises(ValueError, match="a file was lost"):
        dp.DPModel(copy.deepcopy(private.model)).epsilon(DELTA)


def test_a_deep_copy_of_public_weights_is_public():
    assert dp.DPModel(copy.deepcopy(private_model().model)).epsilon(DELTA) == 0.0


def test_the_plain_model_still_saves_and_pickles_as_keras_does(tmp_path):
    private = trained()
    private.model.save(tmp_path / "m.keras")
    keras.models.load_model(tmp_path / "m.keras")
    pickle.loads(pickle.dumps(private.model))
    assert "deepcopy" not in private.model.to_json()


def clone(model):
    made = keras.models.clone_model(model)
    made.set_weights(model.get_weights())
    return made


def test_a_ledger_says_what_cloned_weights_cost():
    """Nothing tells of `clone_model` and `set_weights`: that is what `ledger=` is for."""
    private = trained()
    assert dp.DPModel(clone(private.model)).epsilon(DELTA) == 0.0
    history = copy.deepcopy(private.ledger)
    told = dp.DPModel(clone(private.model), ledger=history)
    assert told.ledger is history
    assert told.epsilon(DELTA) == private.epsilon(DELTA) > 0
    told.compile(dp.DPSGD(0.1, noise_multiplier=1.0), crossentropy(), jit_compile=False)
    told.fit(*data(), batch_size=30, verbose=0)
    assert history.steps == told.ledger.steps == 8
    # Weights that were told their history keep it when they are wrapped again.
    assert dp.DPModel(told.model).epsilon(DELTA) == told.epsilon(DELTA)


def test_a_ledger_goes_with_the_model_into_files(tmp_path):
    private = trained()
    told = dp.DPModel(clone(private.model), ledger=copy.deepcopy(private.ledger))
    told.save(tmp_path / "m.keras")
    assert dp.load_model(tmp_path / "m.keras").epsilon(DELTA) == private.epsilon(DELTA)


def test_an_empty_ledger_is_the_one_that_is_charged():
    ledger = dp.PrivacyLedger(dataset="digits")
    private = dp.DPModel(plain_model(), ledger=ledger)
    private.compile(dp.DPSGD(0.1, noise_multiplier=1.0), crossentropy(), jit_compile=False)
    private.fit(*data(), batch_size=30, verbose=0)
    assert private.ledger is ledger
    assert ledger.steps == 4


def test_a_ledger_beside_a_known_history_adds_up():
    private = trained()
    other = dp.PrivacyLedger()
    law = dp.accounting.PoissonSampling(ROWS, 30)
    other.add(law.event(1.0), 6, law=law)
    both = dp.DPModel(private.model, ledger=other)
    assert both.ledger.steps == private.ledger.steps == other.steps == 10


def test_an_unbuilt_model_takes_a_ledger():
    history = trained().ledger
    unbuilt = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(3)])
    private = dp.DPModel(unbuilt, ledger=copy.deepcopy(history))
    unbuilt(data()[0])
    assert private.epsilon(DELTA) == dp.DPModel(unbuilt).epsilon(DELTA) == history.epsilon(DELTA)


@pytest.mark.parametrize("ledger", ["ledger.json", 3, {}])
def test_bad_ledgers(ledger):
    with pytest.raises(TypeError, match="ledger=.*give a tf_adadp.PrivacyLedger"):
        dp.DPModel(plain_model(), ledger=ledger)


# Training the plain model by itself after private steps.


def test_training_the_plain_model_is_in_the_statement(tmp_path):
    private = trained()
    assert not says_changed(private)
    fit_plain(private.model)
    assert says_changed(private)
    assert private.epsilon(DELTA) > 0  # of what was released
    # It stays so: later, saved, and merged.
    private.fit(*data(), batch_size=30, verbose=0)
    private.ledger.save(tmp_path / "ledger.json")
    assert dp.PrivacyLedger.load(tmp_path / "ledger.json").not_covered_reasons
    merged = dp.PrivacyLedger()
    merged.merge(private.ledger)
    assert merged.not_covered_reasons == private.ledger.not_covered_reasons
    assert merged.covers(private.ledger)
    assert not dp.PrivacyLedger().covers(private.ledger)


def test_it_is_seen_where_nobody_reads_the_ledger_in_between():
    private = trained()
    fit_plain(private.model)
    private.fit(*data(), batch_size=30, verbose=0)
    assert says_changed(private)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.set_weights([w + 1 for w in m.get_weights()]),
        lambda m: m.layers[-1].bias.assign_add(tf.ones([3])),
    ],
)
def test_other_changes_are_seen(change):
    private = trained()
    change(private.model)
    assert says_changed(private)


@pytest.mark.filterwarnings("ignore:epsilon relies on a sampling law declared")
def test_private_training_by_whichever_way_is_no_change(tmp_path):
    x, y = data()
    private = trained()
    again = private_model(model=private.model)  # another model of the same weights
    again.fit(x, y, batch_size=30, verbose=0)
    private.train_on_batch(x[:30], y[:30], law=dp.accounting.PoissonSampling(ROWS, 30))
    lots, loss = dp.PoissonLots(x, y, expected_size=30), crossentropy()
    optimizer = dp.DPSGD(0.1, noise_multiplier=1.0)
    for lot in lots.take(2, 16):
        dp.private_step(private.model, loss, lot, optimizer, ledger=private.ledger, law=lots.law)
    private.save_weights(tmp_path / "m.weights.h5")
    private.fit(x, y, batch_size=30, verbose=0)
    private.load_weights(tmp_path / "m.weights.h5")
    stopping = keras.callbacks.EarlyStopping(
        monitor="val_loss", mode="max", patience=0, restore_best_weights=True
    )
    private.fit(x, y, batch_size=30, epochs=4, verbose=0, validation_data=(x, y),
                callbacks=[stopping])  # fmt: skip
    for model in (private, again):
        assert not says_changed(model)
        assert not model.ledger.not_covered_reasons


def test_averaged_weights_are_no_change():
    private = trained(optimizer=dp.DPSGD(0.1, noise_multiplier=1.0, use_ema=True))
    assert not says_changed(private)


def test_public_training_before_is_no_change():
    model = plain_model()
    fit_plain(model)
    assert not says_changed(trained(model=model))


def test_a_change_before_private_steps_of_another_kind_is_seen():
    private = trained()
    fit_plain(private.model)
    lots, loss = dp.PoissonLots(*data(), expected_size=30), crossentropy()
    optimizer = dp.DPSGD(0.1, noise_multiplier=1.0)
    for lot in lots.take(1, 16):
        dp.private_step(private.model, loss, lot, optimizer, ledger=private.ledger, law=lots.law)
    assert says_changed(private)


def test_a_change_before_a_deep_copy_is_seen():
    private = trained()
    fit_plain(private.model)
    assert says_changed(dp.DPModel(copy.deepcopy(private.model)))


def test_a_change_of_a_part_of_a_weight_is_seen():
    """Inputs that are always 0, as the corners of an image, leave their weights as they are."""
    private = private_model(model=plain_model(keras.layers.Dense(400, use_bias=False)))
    x, y = data()
    private.fit(x, y, batch_size=30, verbose=0)
    kernel = private.model.layers[0].kernel
    kernel.assign(np.concatenate([kernel[:2], kernel[2:] + 1.0]))
    assert says_changed(private)
