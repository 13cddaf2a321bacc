"""Attacks on the ledger: releases made without a charge, charges that vanish, budgets overrun.

Every test is an attack that once lowered ε below what was released.
"""

import copy

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format

import tf_adadp as dp
from tests.helpers import ROWS, crossentropy, data, plain_model, private_model

DELTA = 1e-3
STEPS = 4  # per epoch of lots of 30


def after(steps, expected_size=30):
    return dp.accounting.epsilon(1.0, expected_size / ROWS, steps, DELTA)


def fit(private, epochs=1, **kwargs):
    x, y = data()
    return private.fit(x, y, batch_size=30, epochs=epochs, verbose=0, **kwargs)


def release(private, lots=1):
    """Steps of a custom loop that charges nothing."""
    private.optimizer.build(private.trainable_variables)
    zeros = [tf.zeros(v.shape) for v in private.trainable_variables]
    for _ in range(lots):
        private.optimizer.apply_private(zeros, 30)


def refuses(private, match):
    with pytest.raises(ValueError, match=match):
        private.epsilon(DELTA)


def lost_history(private, match):
    """Also where the count of the optimizer's steps alone would make `epsilon` refuse."""
    assert any(match in reason for reason in private.ledger.unknown_reasons)
    with pytest.raises(ValueError, match="history|ledger"):
        private.epsilon(DELTA)


def assert_same_weights(a, b):
    for v, w in zip(a, b, strict=True):
        np.testing.assert_array_equal(v, w)


class Crash(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3:
            raise KeyboardInterrupt


# A restored ledger counts towards the budget.


@pytest.mark.representative(1)
@pytest.mark.parametrize("room", [14, 12])
def test_a_resumed_run_keeps_the_budget_of_the_whole_history(room, tmp_path):
    """BackupAndRestore brings 12 steps back after the budget was first counted."""
    budget = after(room) * (1 + 1e-9)

    def run(callback):
        private = private_model()
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        fit(private, epochs=8, callbacks=[backup, callback])
        return private

    with pytest.raises(KeyboardInterrupt):
        run(Crash())
    again = dp.PrivacyCallback(DELTA, max_epsilon=budget)
    if room == 3 * STEPS:
        with pytest.raises(ValueError, match="leaves no room"):
            run(again)
    else:
        private = run(again)
        assert private.ledger.steps == room
        assert private.epsilon(DELTA) <= budget


# Releases that nobody paid for.


def test_uncharged_releases_survive_saving(tmp_path):
    private = private_model()
    release(private)
    private.save(tmp_path / "m.keras")
    private.save_weights(tmp_path / "w.weights.h5")
    lost_history(
        dp.load_model(tmp_path / "m.keras"), "1 releases of the optimizer were not charged"
    )
    other = private_model()
    other.load_weights(tmp_path / "w.weights.h5")
    lost_history(other, "1 releases of the optimizer were not charged")


def test_uncharged_releases_survive_compiling_again():
    private = private_model()
    release(private)
    refuses(private, "1 releases of the optimizer were not charged")
    private.compile(dp.DPSGD(0.1, noise_multiplier=1.0), crossentropy(), jit_compile=False)
    refuses(private, "1 releases of the optimizer were not charged")


def test_a_charge_of_a_failed_execution_pays_for_nothing_else():
    class Broken(dp.PoissonLots):
        def _rows(self, step, multiple):
            raise OSError("disk")

    x, y = data()
    private = private_model(steps_per_execution=50)
    with pytest.raises((OSError, tf.errors.OpError)):
        private.fit(Broken(x, y, expected_size=1), steps_per_epoch=50, verbose=0)
    assert private.ledger.steps == 50  # charged before spent, and never taken back
    assert private.optimizer.uncharged_releases == 0
    release(private, 2)
    assert private.optimizer.uncharged_releases == 2
    refuses(private, "2 releases of the optimizer were not charged")


def test_a_later_fit_does_not_pay_for_earlier_releases():
    private = private_model()
    release(private, 3)
    fit(private)
    refuses(private, "3 releases of the optimizer were not charged")


# Weights whose history is unknown.


def test_set_weights_outside_of_fit_loses_the_history():
    trained, private = private_model(), private_model()
    fit(trained)
    private.set_weights(trained.get_weights())
    lost_history(private, "set_weights was called")


def test_callbacks_may_go_back_to_earlier_weights_of_the_run():
    x, y = data()
    stopping = keras.callbacks.EarlyStopping(
        monitor="val_loss", mode="max", patience=0, restore_best_weights=True
    )
    private = private_model()
    history = fit(private, epochs=9, validation_data=(x, y), callbacks=[stopping])
    assert len(history.epoch) < 9, "the weights were to be restored"
    assert private.epsilon(DELTA) == pytest.approx(after(private.ledger.steps))


def test_legacy_weights_files_have_no_ledger(tmp_path):
    trained, private = private_model(), private_model()
    fit(trained)
    with h5py.File(tmp_path / "w.h5", "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, trained)
    private.load_weights(tmp_path / "w.h5")
    assert_same_weights(private.get_weights(), trained.get_weights())
    lost_history(private, "without a ledger")


def test_weights_files_without_a_ledger(tmp_path):
    trained, private = private_model(), private_model()
    trained.save_weights(tmp_path / "w.weights.h5")
    with h5py.File(tmp_path / "w.weights.h5", "r+") as file:
        del file["vars/ledger"]
    private.load_weights(tmp_path / "w.weights.h5")
    lost_history(private, "without a ledger")


def checkpointed(private, path, whole):
    """A tf.train.Checkpoint with the DPModel in it, or with its parts alone."""
    private.optimizer.build(private.trainable_variables)
    if whole:
        return tf.train.Checkpoint(model=private)
    return tf.train.Checkpoint(net=private.model, optimizer=private.optimizer)


def test_tensorflow_checkpoints_of_the_model_hold_the_ledger(tmp_path):
    trained, private = private_model(), private_model()
    fit(trained)
    path = checkpointed(trained, tmp_path, whole=True).save(tmp_path / "c")
    fit(private, epochs=2)
    for _ in range(2):
        checkpointed(private, tmp_path, whole=True).restore(path)
        assert_same_weights(private.get_weights(), trained.get_weights())
        assert private.epsilon(DELTA) == pytest.approx(after(3 * STEPS))
    fit(private)
    assert private.epsilon(DELTA) == pytest.approx(after(4 * STEPS))


def test_a_tampered_ledger_in_a_checkpoint_fails_closed(tmp_path, monkeypatch):
    trained, private = private_model(), private_model()
    fit(trained)
    lower = trained.ledger.to_json().replace('"count": 4', '"count": 1')
    monkeypatch.setattr(type(trained._ledger_state), "serialize", lambda self: lower.encode())
    path = checkpointed(trained, tmp_path, whole=True).save(tmp_path / "c")
    with pytest.raises(ValueError, match="does not match its checksum"):
        checkpointed(private, tmp_path, whole=True).restore(path)
    lost_history(private, "damaged")


@pytest.mark.representative(1)
@pytest.mark.parametrize("own_epochs", [0, 1, 3])
def test_checkpoints_without_the_ledger_are_seen(own_epochs, tmp_path):
    """Also those of a run with fewer steps than this model's ledger knows of."""
    trained, private = private_model(), private_model()
    fit(trained, epochs=2)
    path = checkpointed(trained, tmp_path, whole=False).save(tmp_path / "c")
    if own_epochs:
        fit(private, epochs=own_epochs)
        private.save_weights(tmp_path / "w.weights.h5")
        private = private_model()
        private.load_weights(tmp_path / "w.weights.h5")  # nor is a loaded model fooled
    checkpointed(private, tmp_path, whole=False).restore(path)
    refuses(private, "restored without the ledger")


@pytest.mark.parametrize("skip_mismatch", [False, True])
def test_a_damaged_ledger_fails_closed(skip_mismatch, tmp_path):
    """Keras swallows the error with skip_mismatch, and loads the weights all the same."""
    trained, private = private_model(), private_model()
    fit(trained)
    path = tmp_path / "w.weights.h5"
    trained.save_weights(path)
    with h5py.File(path, "r+") as file:
        file["vars/ledger"][300] ^= 1
    if skip_mismatch:
        with pytest.warns(UserWarning, match="could not be loaded"):
            private.load_weights(path, skip_mismatch=True)
    else:
        with pytest.raises(ValueError):  # noqa: PT011 (Keras wraps it in its own words)
            private.load_weights(path)
    lost_history(private, "damaged")


# Variables that more than one model trains.


def two_heads():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    return [private_model(model=keras.Model(inputs, keras.layers.Dense(3)(hidden))) for _ in "ab"]


def test_models_that_share_a_backbone_share_a_ledger():
    first, second = two_heads()
    fit(first)
    fit(second, epochs=2)
    assert first.epsilon(DELTA) == second.epsilon(DELTA) == pytest.approx(after(3 * STEPS))
    fit(first)  # and go on sharing it
    assert first.epsilon(DELTA) == second.epsilon(DELTA) == pytest.approx(after(4 * STEPS))


def test_the_budget_counts_what_the_other_model_spent():
    first, second = two_heads()
    fit(first)
    budget = after(6) * (1 + 1e-9)
    fit(second, epochs=3, callbacks=[dp.PrivacyCallback(DELTA, max_epsilon=budget)])
    assert int(second.optimizer.iterations) == 6 - STEPS
    assert first.epsilon(DELTA) == second.epsilon(DELTA) <= budget


def test_wrapping_a_trained_model_again_forgets_nothing():
    private = private_model()
    fit(private)
    again = private_model(model=private.model)
    assert again.epsilon(DELTA) == private.epsilon(DELTA) > 0
    assert private_model(model=plain_model()).epsilon(DELTA) == 0.0


# What a second round of attacks found.


def test_a_frozen_trained_backbone_brings_its_ledger():
    x, y = data()
    backbone = keras.layers.Dense(8, "tanh")
    first = private_model(model=plain_model(backbone))
    first.fit(x, y, batch_size=30, verbose=0)
    backbone.trainable = False
    second = private_model(model=plain_model(backbone))
    second.fit(x, y, batch_size=30, verbose=0)
    assert second.ledger is first.ledger
    assert second.ledger.steps == 8


def test_a_wrapped_again_model_saves_the_ledger_it_shares(tmp_path):
    x, y = data()
    first = private_model()
    first.fit(x, y, batch_size=30, verbose=0)
    again = private_model(model=first.model)
    again.save(tmp_path / "m.keras")
    assert dp.load_model(tmp_path / "m.keras").epsilon(1e-3) == first.epsilon(1e-3) > 0


def test_an_optimizer_that_is_not_the_compiled_one_is_seen():
    x, y = data()
    private = private_model()
    private.predict(x[:1], verbose=0)
    stranger = dp.DPSGD(0.1, noise_multiplier=1.0)
    stranger.build(private.trainable_variables)
    (lot,) = dp.PoissonLots(x, y, expected_size=30).take(1, 16)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    stranger.apply_private(
        dp.clipped_sum(private.model, loss, lot, stranger, jit_compile=False), 30
    )
    for model in (private, dp.DPModel(private.model)):
        with pytest.raises(ValueError, match="not charged"):
            model.epsilon(1e-3)


def test_a_restore_at_the_beginning_of_an_epoch_counts_against_the_budget(tmp_path):
    x, y = data()
    trained = private_model()
    trained.fit(x, y, batch_size=30, epochs=5, verbose=0)
    trained.save_weights(tmp_path / "w.weights.h5")

    class Restores(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.load_weights(tmp_path / "w.weights.h5")

    budget = dp.accounting.epsilon(1.0, 0.25, 22, 1e-3)
    private = private_model()
    callback = dp.PrivacyCallback(1e-3, max_epsilon=budget)
    with pytest.raises(ValueError, match="leaves no room"):
        private.fit(x, y, batch_size=30, epochs=9, verbose=0, callbacks=[callback, Restores()])
    assert private.epsilon(1e-3) <= dp.accounting.epsilon(1.0, 0.25, 24, 1e-3)
    assert private.ledger.steps == 24


# What a third round found: weights that lost their ledger, and ledgers that lost their weights.


def loaded_by_file(private, folder):
    private.save(folder / "m.keras")
    return dp.load_model(folder / "m.keras")


def loaded_weights(private, folder):
    private.save_weights(folder / "m.weights.h5")
    other = private_model()
    other.load_weights(folder / "m.weights.h5")
    return other


def deep_copied(private, folder):
    return copy.deepcopy(private)


def restored(private, folder):
    tf.train.Checkpoint(model=private).write(str(folder / "ckpt"))
    other = private_model()
    tf.train.Checkpoint(model=other).read(str(folder / "ckpt")).expect_partial()
    return other


@pytest.mark.representative(1)
@pytest.mark.parametrize("load", [loaded_by_file, loaded_weights, deep_copied, restored])
def test_loaded_weights_keep_their_ledger_when_wrapped_again(tmp_path, load):
    private = private_model()
    fit(private, epochs=2)
    loaded = load(private, tmp_path)
    again = private_model(model=loaded.model)
    assert again.epsilon(DELTA) == loaded.epsilon(DELTA) == pytest.approx(after(8))
    inputs = keras.Input(loaded.model.input_shape[1:])
    outputs = keras.layers.Dense(3)(loaded.model.layers[0](inputs))
    head = private_model(model=keras.Model(inputs, outputs))
    fit(head)
    assert head.epsilon(DELTA) == again.epsilon(DELTA) == pytest.approx(after(12))


def test_weights_restored_before_they_are_made_keep_their_ledger(tmp_path):
    private = private_model()
    fit(private)
    tf.train.Checkpoint(model=private).write(str(tmp_path / "ckpt"))
    layers = [keras.layers.Dense(v.shape[1]) for v in private.weights if len(v.shape) == 2]
    unbuilt = keras.Sequential(layers)
    tf.train.Checkpoint(model=dp.DPModel(unbuilt)).read(str(tmp_path / "ckpt")).expect_partial()
    unbuilt(data()[0])
    assert dp.DPModel(unbuilt).epsilon(DELTA) == pytest.approx(after(4))


def test_weights_of_unknown_history_stay_so_when_wrapped_again():
    private = private_model()
    private.set_weights(private.get_weights())
    lost_history(private_model(model=private.model), "set_weights")


def test_public_weights_beside_trained_ones_stay_public():
    """A reading tags nothing: what was never trained can be part of another model."""
    backbone = keras.layers.Dense(8, "tanh", trainable=False)
    first = private_model(model=plain_model(backbone))
    fit(first)
    assert first.epsilon(DELTA) > 0
    assert private_model(model=plain_model(backbone)).epsilon(DELTA) == 0.0


def test_a_ledger_read_through_another_model_in_the_middle_of_a_fit_is_still_charged():
    """Two models trained apart, and a third with a layer of each: then they have one ledger."""
    layers = [keras.layers.Dense(4), keras.layers.Dense(4)]
    first, second = (private_model(model=plain_model(layer)) for layer in layers)
    fit(first)
    fit(second)
    held = second.ledger
    inputs = keras.Input(first.model.input_shape[1:])
    both = keras.layers.Concatenate()([layer(inputs) for layer in layers])
    third = private_model(model=keras.Model(inputs, keras.layers.Dense(3)(both)))

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert first.ledger.steps == second.ledger.steps == 8 + 4 * (epoch + 1)

    fit(third, epochs=3, callbacks=[Reads()])
    assert held.steps == first.ledger.steps == 20
    for model in (first, second, third):
        assert model.epsilon(DELTA) == pytest.approx(after(20))


@pytest.mark.parametrize("built", [True, False])
def test_a_model_made_later_reports_what_a_custom_loop_charged(built):
    plain, ledger = plain_model(), dp.PrivacyLedger()
    law = dp.accounting.PoissonSampling(ROWS, 30)
    optimizer = dp.DPSGD(0.1, noise_multiplier=1.0)
    if built:
        optimizer.build(plain.trainable_variables)
    for _ in range(5):
        optimizer.charge(ledger, law)
        optimizer.build(plain.trainable_variables)
        optimizer.apply_private([tf.zeros(v.shape) for v in plain.trainable_variables], 30)
    private = private_model(model=plain)
    assert private.epsilon(DELTA) == pytest.approx(after(5))
    fit(private)
    assert private.epsilon(DELTA) == pytest.approx(after(9))
    optimizer.charge(ledger, law)  # by the ledger that was charged all along
    assert private.epsilon(DELTA) == pytest.approx(after(10))
    assert ledger.steps == 6


def test_a_list_of_variables_that_is_used_again():
    plain, ledger = plain_model(), dp.PrivacyLedger()
    optimizer, variables = dp.DPSGD(0.1, noise_multiplier=1.0), list(plain.trainable_variables)
    optimizer.build(variables)
    variables.clear()
    x, y = data()
    lots = dp.PoissonLots(x, y, expected_size=30)
    for lot in lots.take(3, physical_batch_size=16):
        dp.private_step(plain, crossentropy(), lot, optimizer, ledger=ledger, law=lots.law)
    assert dp.DPModel(plain).epsilon(DELTA) == pytest.approx(after(3))
