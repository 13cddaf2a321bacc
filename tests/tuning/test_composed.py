"""KerasTuner tuners: ComposedTuner charges all trials, and a search without it says so."""

import json
import math
import pathlib
import warnings

import keras
import numpy as np
import pytest

import tf_adadp as dp
from tests.helpers import ROWS, data, plain_model, private_model

kt = pytest.importorskip("keras_tuner")
# KerasTuner 1.4 asks threads for their names in ways that Python discourages.
pytestmark = [
    pytest.mark.filterwarnings("ignore:currentThread:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:getName:DeprecationWarning"),
]

X, Y = data()
VALIDATION = data(40, seed=1)
DELTA = 1e-5
STEPS = 2
LAW = dp.accounting.PoissonSampling(ROWS, 30)
FIT = {
    "batch_size": 30,
    "steps_per_epoch": STEPS,
    "validation_data": VALIDATION,
    "verbose": 0,
}


def build(hp):
    rate = hp.Float("rate", 0.01, 1.0, sampling="log")
    return private_model(dp.DPSGD(rate, noise_multiplier=1.0), log_raw_metrics=False)


def composed(kind):
    return type("Tuner", (dp.tuning.ComposedTuner, kind), {})


def after(steps):
    ledger = dp.PrivacyLedger()
    ledger.add(LAW.event(1.0), steps, law=LAW)
    return ledger.epsilon(DELTA)


@pytest.fixture
def make(tmp_path):
    """Makes a tuner of a class in a folder of its own."""

    def make(kind, hypermodel=build, **arguments):
        defaults = {"objective": "val_accuracy", "seed": 1, "directory": tmp_path}
        if not issubclass(kind, kt.Hyperband):
            defaults["max_trials"] = 3
        return kind(hypermodel, **{**defaults, **arguments})

    return make


@pytest.mark.representative(0, 1)
@pytest.mark.parametrize("kind", [kt.RandomSearch, kt.BayesianOptimization, kt.GridSearch])
def test_every_model_that_a_tuner_returns_has_the_cost_of_all_trials(kind, make):
    tuner = make(composed(kind))
    tuner.search(X, Y, epochs=2, **FIT)
    for model in tuner.get_best_models(2):
        assert model.epsilon(DELTA) == pytest.approx(after(3 * 2 * STEPS))
        assert model.ledger.is_one_with(tuner.ledger)
        assert model.ledger.not_covered_reasons == ()
    again = tuner.hypermodel.build(tuner.get_best_hyperparameters()[0])
    assert again.epsilon(DELTA) == pytest.approx(after(3 * 2 * STEPS))


def test_executions_are_all_charged_and_models_are_saved_with_the_cost(make, tmp_path):
    tuner = make(composed(kt.RandomSearch), executions_per_trial=2, max_trials=2)
    tuner.search(X, Y, epochs=1, **FIT)
    model = tuner.get_best_models()[0]
    assert model.epsilon(DELTA) == pytest.approx(after(2 * 2 * STEPS))
    model.save(tmp_path / "best.keras")
    assert dp.load_model(tmp_path / "best.keras").epsilon(DELTA) == model.epsilon(DELTA)
    model.fit(X, Y, epochs=1, **FIT)  # on top of the search
    assert model.epsilon(DELTA) == pytest.approx(after(5 * STEPS))


@pytest.mark.extended
def test_hyperband_trains_some_models_further_and_counts_nothing_twice(make):
    """Every step that any of its trials made is charged once."""
    made = []

    class Counting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            made.append(self.model.optimizer)

        def __deepcopy__(self, memo):
            return self

    tuner = make(composed(kt.Hyperband), max_epochs=4, factor=2)
    tuner.search(X, Y, callbacks=[Counting()], **FIT)
    resumed = [
        t for t in tuner.oracle.trials.values() if "tuner/trial_id" in t.hyperparameters.values
    ]
    assert resumed
    assert tuner.ledger.steps == len(made)
    assert tuner.get_best_models()[0].epsilon(DELTA) == pytest.approx(after(len(made)))


def test_trials_that_fail_are_charged(make):
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if self.model.ledger.steps == STEPS:  # the first trial
                raise kt.FailedTrialError("too slow")

        def __deepcopy__(self, memo):
            return self

    tuner = make(composed(kt.RandomSearch), max_trials=2)
    tuner.search(X, Y, epochs=1, callbacks=[Fails()], **FIT)
    assert [t.status for t in tuner.oracle.trials.values()].count("FAILED") == 1
    assert tuner.get_best_models()[0].epsilon(DELTA) == pytest.approx(after(2 * STEPS))


@pytest.mark.extended
def test_a_search_that_goes_on_in_another_process_remembers_its_trials(make, tmp_path):
    first = make(composed(kt.RandomSearch), max_trials=1)
    first.search(X, Y, epochs=1, **FIT)
    second = make(composed(kt.RandomSearch), max_trials=2)
    assert second.ledger.epsilon(DELTA) == pytest.approx(after(STEPS))
    second.search(X, Y, epochs=1, **FIT)
    assert second.get_best_models()[0].epsilon(DELTA) == pytest.approx(after(2 * STEPS))


def test_the_ledger_is_in_the_project_before_the_checkpoint(make, tmp_path):
    """Checks that the ledger of a killed search knows at least what the checkpoint holds."""
    found = []

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            folder = pathlib.Path(tuner.project_dir)
            if list(folder.glob("trial_*/*.weights.h5")):
                state = json.loads((folder / "tuner0.json").read_text())
                found.append(dp.PrivacyLedger.from_json(state["privacy_ledger"]).steps)

        def __deepcopy__(self, memo):
            return self

    tuner = make(composed(kt.RandomSearch), max_trials=1)
    tuner.search(X, Y, epochs=3, callbacks=[Look()], **FIT)
    assert found == [STEPS, 2 * STEPS]


def test_a_project_without_a_ledger_fails_closed(make):
    with pytest.warns(dp.PrivacyWarning, match="KerasTuner"):
        make(kt.RandomSearch, max_trials=1).search(X, Y, epochs=1, **FIT)
    tuner = make(composed(kt.RandomSearch))
    with pytest.raises(ValueError, match="kept no ledger"):
        tuner.get_best_models()[0].epsilon(DELTA)


@pytest.mark.extended
def test_a_search_without_it_warns_once_and_leaves_a_note_in_the_ledger(make):
    tuner = make(kt.RandomSearch, max_trials=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuner.search(X, Y, epochs=1, **FIT)
    mine = [w for w in caught if issubclass(w.category, dp.PrivacyWarning)]
    assert len(mine) == 1
    assert "this trial alone" in str(mine[0].message)
    assert "ComposedTuner" in str(mine[0].message)
    model = tuner.get_best_models()[0]
    assert model.epsilon(DELTA) == pytest.approx(after(STEPS))  # of one trial, and it says so
    assert any("this trial alone" in reason for reason in model.ledger.not_covered_reasons)
    assert "NOT COVERED by epsilon: a KerasTuner search" in " ".join(
        model.ledger.statement(DELTA).split()
    )


@pytest.mark.representative(2)
@pytest.mark.parametrize("base", [kt.RandomSearch, composed(kt.RandomSearch)])
@pytest.mark.parametrize("objective", ["accuracy", "loss", ["val_loss", "accuracy"]])
def test_a_raw_training_metric_is_no_objective(base, objective, make):
    tuner = make(base, objective=objective)
    with pytest.raises(ValueError, match="raw training metric"):
        tuner.search(X, Y, epochs=1, **FIT)
    if base is not kt.RandomSearch:
        assert tuner.ledger.steps == 0


@pytest.mark.extended
def test_a_released_metric_is_an_objective(make):
    def build(hp):
        rate = hp.Float("rate", 0.01, 1.0)
        released = dp.ReleasedMetrics(noise_multiplier=2.0, loss_bound=2.0)
        return private_model(dp.DPSGD(rate, noise_multiplier=1.0), released_metrics=released)

    objective = kt.Objective("released_loss", "min")
    tuner = make(composed(kt.RandomSearch), build, objective=objective, max_trials=2)
    tuner.search(X, Y, epochs=1, **FIT)
    assert tuner.get_best_models()[0].epsilon(DELTA) > after(2 * STEPS)


def test_a_budget_of_one_training_is_refused(make):
    def build(hp):
        hp.Float("rate", 0.01, 1.0)
        return private_model(dp.DPSGD(0.1), target_epsilon=1.0, target_delta=DELTA)

    with pytest.raises(ValueError, match="the first one would spend it"):
        make(composed(kt.RandomSearch), build)


def test_a_budget_holds_all_trials_together(make):
    """Two trials fit into the budget, the third finds it spent."""
    limit = (after(2 * STEPS) + after(2 * STEPS + 1)) / 2
    tuner = make(composed(kt.RandomSearch), max_trials=4, max_consecutive_failed_trials=1)
    callback = dp.PrivacyCallback(DELTA, max_epsilon=limit)
    with pytest.raises(RuntimeError, match="max_epsilon=.* leaves no room"):
        tuner.search(X, Y, epochs=1, callbacks=[callback], **FIT)
    assert tuner.ledger.steps == 2 * STEPS
    assert tuner.get_best_models()[0].epsilon(DELTA) <= limit


def test_what_is_no_private_model_is_refused_before_anything(make, monkeypatch):
    def plain(hp):
        hp.Float("rate", 0.01, 1.0)
        model = plain_model()
        model.compile("sgd", "mse")
        return model

    with pytest.raises(TypeError, match="what the hypermodel built"):
        make(composed(kt.RandomSearch), plain)
    monkeypatch.setenv("KERASTUNER_ORACLE_IP", "127.0.0.1")
    with pytest.raises(ValueError, match="several processes"):
        make(composed(kt.RandomSearch))


def test_a_tuner_without_a_hypermodel_is_refused(make):
    class Alone(dp.tuning.ComposedTuner, kt.RandomSearch):
        def run_trial(self, trial, *args, **kwargs):
            return 1.0

    with pytest.raises(ValueError, match="hypermodel=None"):
        make(Alone, None)


@pytest.mark.extended
def test_a_hypermodel_of_its_own_class_keeps_its_fit(make):
    epochs = []

    class Mine(kt.HyperModel):
        def build(self, hp):
            return build(hp)

        def fit(self, hp, model, *args, **kwargs):
            epochs.append(hp.Int("epochs", 1, 2))
            return model.fit(*args, epochs=epochs[-1], **kwargs)

    tuner = make(composed(kt.RandomSearch), Mine())
    tuner.search(X, Y, **FIT)
    assert tuner.ledger.steps == STEPS * sum(epochs)
    assert np.isfinite(tuner.ledger.epsilon(DELTA))
    assert math.isclose(tuner.get_best_models()[0].epsilon(DELTA), after(STEPS * sum(epochs)))


def test_a_fit_of_its_own_that_is_interrupted_leaves_its_charges_in_the_project(make):
    class Own(kt.HyperModel):
        def build(self, hp):
            return build(hp)

        def fit(self, hp, model, x, y, **kwargs):
            model.fit(x, y, **FIT)
            raise KeyboardInterrupt

    tuner = make(composed(kt.RandomSearch), Own(), project_name="own")
    with pytest.raises(KeyboardInterrupt):
        tuner.search(X, Y)
    assert tuner.ledger.steps == STEPS
    again = make(composed(kt.RandomSearch), Own(), project_name="own")
    assert again.ledger.epsilon(DELTA) == after(STEPS)
