"""PrivacyCallback: ε in every log, and a stop before the budget is exceeded."""

import csv
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ROWS, data, private_model

import tf_adadp as dp

DELTA = 1e-3
STEPS = 4  # per epoch of lots of 30


def after(steps, accountant="rdp", sigma=1.0):
    return dp.accounting.epsilon(sigma, 30 / ROWS, steps, DELTA, accountant)


def fit(private, callbacks, epochs=3, **kwargs):
    x, y = data()
    return private.fit(
        x, y, batch_size=30, epochs=epochs, verbose=0, callbacks=callbacks, **kwargs
    ).history


@pytest.mark.parametrize("accountant", ["rdp", "pld", "theorem1"])
def test_every_epoch_has_its_epsilon(accountant):
    x, y = data()
    history = fit(
        private_model(), [dp.PrivacyCallback(DELTA, accountant=accountant)],
        validation_data=(x, y),
    )  # fmt: skip
    assert history["epsilon"] == pytest.approx(
        [after(STEPS * e, accountant) for e in (1, 2, 3)], rel=1e-6
    )
    assert "val_accuracy" in history


def test_epsilon_reaches_callbacks_that_stand_before_it(tmp_path):
    seen = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["epsilon"])

    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    board = keras.callbacks.TensorBoard(tmp_path / "board", update_freq=1)
    fit(private_model(), [log, board, Sees(), dp.PrivacyCallback(DELTA)], epochs=2)
    assert seen == pytest.approx([after(s) for s in range(1, 9)], rel=1e-6)
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["epsilon"]) for row in rows] == pytest.approx([after(4), after(8)])
    scalars = {}
    for path in (tmp_path / "board").rglob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                scalars.setdefault(value.tag, []).append(float(tf.make_ndarray(value.tensor)))
    assert scalars["epoch_epsilon"] == pytest.approx([after(4), after(8)], rel=1e-6)
    assert scalars["batch_epsilon"] == pytest.approx([after(s) for s in range(1, 9)], rel=1e-6)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_stops_before_the_budget_is_exceeded_also_within_an_epoch(steps_per_execution, accountant):
    budget = (after(6, accountant) + after(7, accountant)) / 2
    private = private_model(steps_per_execution=steps_per_execution)
    history = fit(
        private, [dp.PrivacyCallback(DELTA, max_epsilon=budget, accountant=accountant)], epochs=9
    )
    assert private.ledger.steps == 6
    assert private.epsilon(DELTA, accountant) <= budget < after(7, accountant)
    assert history["epsilon"][-1] == private.epsilon(DELTA, accountant)


def test_a_budget_of_exactly_the_epochs_is_used_up():
    private = private_model()
    fit(private, [dp.PrivacyCallback(DELTA, max_epsilon=after(8))], epochs=2)
    assert private.ledger.steps == 8


def test_a_spent_budget_is_an_error_and_nothing_is_trained():
    private = private_model()
    callback = dp.PrivacyCallback(DELTA, max_epsilon=after(5))
    fit(private, [callback], epochs=9)
    before = private.get_weights()
    with pytest.raises(ValueError, match=r"max_epsilon=.* leaves no room.*spent"):
        fit(private, [callback])
    for a, b in zip(before, private.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert private.ledger.steps == 5


def test_several_fits_add_up():
    private = private_model()
    callback = dp.PrivacyCallback(DELTA)
    fit(private, [callback], epochs=1)
    history = fit(private, [callback], epochs=1)
    assert history["epsilon"] == [pytest.approx(after(8))]


def test_epsilon_without_the_callback_is_charged_all_the_same():
    private = private_model()
    fit(private, [], epochs=1)
    assert private.epsilon(DELTA) == pytest.approx(after(4))


def test_the_ledger_file_is_written_ahead(tmp_path):
    path = tmp_path / "ledger.json"
    private = private_model()

    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and private.ledger.steps > STEPS:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(private, [dp.PrivacyCallback(DELTA, ledger_path=path), Crash()], epochs=2)
    done = private.ledger.steps
    stored = dp.PrivacyLedger.load(path)
    assert json.loads(path.read_text())
    assert done <= stored.steps <= done + STEPS + 1
    resumed = private_model()
    history = fit(resumed, [dp.PrivacyCallback(DELTA, ledger_path=path)], epochs=1)
    assert history["epsilon"][0] >= after(done + STEPS)
    assert dp.PrivacyLedger.load(path).epsilon(DELTA) == history["epsilon"][0]


def test_the_printed_prior_costs_infinity():
    private = private_model(dp.ADADP(noise_multiplier=4.0, prior="raw"))
    assert fit(private, [dp.PrivacyCallback(DELTA)], epochs=1)["epsilon"] == [np.inf]
    without_noise = private_model(dp.DPSGD(0.1, noise_multiplier=0, allow_no_noise=True))
    assert fit(without_noise, [dp.PrivacyCallback(DELTA)], epochs=1)["epsilon"] == [np.inf]


def test_delta_of_one_over_n_warns():
    x, y = data()
    private, callback = private_model(), dp.PrivacyCallback(1 / ROWS)
    with pytest.warns(dp.PrivacyWarning, match="not below 1/120"):
        private.fit(x, y, batch_size=30, verbose=0, callbacks=[callback])


def test_reproducible_noise_is_said():
    private = private_model(dp.DPSGD(0.1, noise_multiplier=1.0, seed=1))
    fit(private, [], epochs=1)
    assert "reproducible noise" in private.ledger.statement(DELTA)
    secret = private_model()
    fit(secret, [], epochs=1)
    assert "reproducible noise" not in secret.ledger.statement(DELTA)


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.EarlyStopping(monitor="loss"),
        keras.callbacks.ReduceLROnPlateau(monitor="accuracy"),
        keras.callbacks.ModelCheckpoint("m.keras", monitor="loss", save_best_only=True),
        keras.callbacks.TerminateOnNaN(),
    ],
    ids=lambda c: type(c).__name__,
)
def test_callbacks_that_steer_by_a_training_metric_are_refused(callback):
    private = private_model()
    with pytest.raises(ValueError, match=type(callback).__name__):
        fit(private, [callback])
    assert private.ledger.steps == 0


def test_callbacks_that_steer_by_a_validation_metric_work(tmp_path):
    x, y = data()
    fit(
        private_model(),
        [
            keras.callbacks.EarlyStopping(monitor="val_loss", restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau(monitor="val_accuracy"),
            keras.callbacks.ModelCheckpoint(
                tmp_path / "m.keras", monitor="val_loss", save_best_only=True
            ),
        ],
        validation_data=(x, y),
    )
    assert dp.load_model(tmp_path / "m.keras").ledger.steps > 0
