"""`compile(target_epsilon=…)`: σ* from the budget, fixed, saved, and never exceeded."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp

DELTA = 1e-3
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(200, 5)).astype(np.float32), rng.integers(0, 3, 200)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make(optimizer=None, target_epsilon=2.0, model=None, **compile_arguments):
    keras.utils.set_random_seed(0)
    if model is None:
        model = dp.DPModel(keras.Sequential([keras.Input([5]), keras.layers.Dense(3, name="d")]))
    compile_arguments = {"target_delta": DELTA, "log_raw_metrics": False, **compile_arguments}
    optimizer = dp.DPSGD() if optimizer is None else optimizer
    model.compile(optimizer, LOSS, target_epsilon=target_epsilon, **compile_arguments)
    return model


def fit(model, epochs=3, batch_size=40, **arguments):
    return model.fit(X, Y, batch_size=batch_size, epochs=epochs, verbose=0, **arguments)


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        (lambda: dp.ADADP(), {}),
        (lambda: dp.ADADP(microbatch_size=4), {}),
        (lambda: dp.DPSGD(), {"accountant": "pld"}),
        (lambda: dp.DPSGD(), {"accountant": "theorem1"}),
        (lambda: dp.DPSGD(), {"target_epsilon": 0.1}),
        (lambda: dp.DPSGD(), {"target_epsilon": 20.0, "steps_per_execution": 4}),
        (lambda: dp.DPSGD(), {"released_metrics": dp.ReleasedMetrics(5.0, loss_bound=3.0)}),
        (
            lambda: dp.SADPSGD(energy_data=(X, Y), energy_noise_multiplier=20.0, energy_clip=1.0),
            {},
        ),
        pytest.param(
            lambda: dp.DPOPT(directions="budgeted", direction_noise_multiplier=5.0),
            {},
            marks=pytest.mark.extended,
        ),
    ],
)
def test_training_costs_the_target_and_no_more(optimizer, arguments):
    model = make(optimizer(), **arguments)
    fit(model)
    target = arguments.get("target_epsilon", 2.0)
    spent = model.epsilon(DELTA, arguments.get("accountant", "rdp"))
    assert 0.995 * target <= spent <= target
    at_once = arguments.get("steps_per_execution", 1)
    assert model.ledger.steps == 3 * -(-5 // at_once) * at_once


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("lots", "accountant"),
    [
        (lambda: dp.ShuffledLots(X, Y, 40), "rdp"),
        (lambda: dp.FixedSizeLots(X, Y, 40), "rdp"),
        # Each reading of this law takes "pld" a second or more.
        pytest.param(
            lambda: dp.TruncatedPoissonLots(X, Y, 40, max_size=60),
            "pld",
            marks=pytest.mark.nightly,
        ),
        (
            lambda: dp.UserLots(
                X,
                Y,
                user_ids=np.arange(200) // 4,
                expected_users=10,
                max_records_per_user=4,
                expected_size=40,
            ),
            "rdp",
        ),
    ],
)
def test_every_law_is_priced(lots, accountant):
    model = make(accountant=accountant)
    model.fit(lots(), epochs=2, verbose=0)
    assert 1.99 <= model.epsilon(DELTA, accountant) <= 2.0


@pytest.mark.extended
def test_it_trains_as_with_that_multiplier_given(capsys):
    model = make(dp.ADADP(seed=3))
    fit(model)
    sigma = model.optimizer.noise_multiplier
    printed = capsys.readouterr().out
    assert printed.count("noise_multiplier=") == 1
    assert f"noise_multiplier={sigma:.5g} for 15 steps" in printed
    keras.utils.set_random_seed(0)
    given = dp.DPModel(keras.Sequential([keras.Input([5]), keras.layers.Dense(3)]))
    given.compile(dp.ADADP(noise_multiplier=sigma, seed=3), LOSS, log_raw_metrics=False)
    fit(given)
    for a, b in zip(model.get_weights(), given.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_fit_searches_once(monkeypatch):
    """It settles its noise twice, as callbacks may restore weights in between."""
    searches = []
    search = dp.PrivacyLedger.calibrate_noise_multiplier

    def counted(*args, **kwargs):
        searches.append(args)
        return search(*args, **kwargs)

    monkeypatch.setattr(dp.PrivacyLedger, "calibrate_noise_multiplier", counted)
    fit(make())
    assert len(searches) == 1


def test_what_the_ledger_holds_is_counted_first(capsys):
    model, alone = make(), make()
    pca = dp.DPPCA(2, noise_multiplier=5.0)
    pca.fit(X, ledger=model.ledger)
    before = model.ledger.epsilon(DELTA)
    fit(model)
    fit(alone)
    assert 1.99 <= model.epsilon(DELTA) <= 2.0
    assert model.optimizer.noise_multiplier > alone.optimizer.noise_multiplier
    assert f"on top of epsilon={before:.5g}" in capsys.readouterr().out


def test_a_later_fit_is_refused_with_what_is_left():
    model = make()
    fit(model)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"10 steps are planned.*room for 0 .*spent. Compile with"):
        fit(model, epochs=2)
    assert model.ledger.steps == 15
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_an_early_end_leaves_room():
    model = make()
    fit(model, callbacks=[Stop()])
    assert model.ledger.steps == 1
    sigma = model.optimizer.noise_multiplier
    with pytest.raises(ValueError, match=r"room for 14 \(2 epochs\).* steps_per_epoch=14 trains"):
        fit(model, epochs=3)
    fit(model, epochs=1, steps_per_epoch=14)
    assert model.optimizer.noise_multiplier == sigma
    assert 1.99 <= model.epsilon(DELTA) <= 2.0


class Crash(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise InterruptedError


def test_a_restored_run_keeps_its_multiplier_and_ends_at_the_target(tmp_path):
    def callbacks():
        # Steps after the last backup are in this file, and are taken again.
        privacy = dp.PrivacyCallback(DELTA, ledger_path=tmp_path / "ledger.json")
        return [privacy, keras.callbacks.BackupAndRestore(tmp_path / "backup")]

    first = make()
    with pytest.raises(InterruptedError):
        fit(first, epochs=4, callbacks=[*callbacks(), Crash(13)])
    again = make()
    with pytest.warns(dp.accounting.PrivacyWarning, match="stopped 3 steps before its end"):
        fit(again, epochs=4, callbacks=callbacks())
    assert again.optimizer.noise_multiplier == first.optimizer.noise_multiplier
    assert again.optimizer.steps_taken == 17
    assert again.ledger.steps == 20
    assert 1.99 <= again.epsilon(DELTA) <= 2.0


def test_a_fit_after_a_restored_one_begins_at_its_own_first_epoch(tmp_path):
    """BackupAndRestore leaves the epoch that it restored on the model."""
    first, again = (keras.callbacks.BackupAndRestore(tmp_path / "backup") for _ in range(2))
    with pytest.raises(InterruptedError):
        fit(make(), epochs=4, callbacks=[first, Crash(13)])
    model = make()
    assert fit(model, epochs=4, callbacks=[again]).epoch == [2, 3]
    make(target_epsilon=3.0, model=model)
    assert fit(model, epochs=2).epoch == [0, 1]
    assert model.ledger.steps == 20 + 10
    assert 2.98 <= model.epsilon(DELTA) <= 3.0


@pytest.mark.representative(1)
@pytest.mark.parametrize("way", ["model", "weights", "checkpoint"])
def test_the_multiplier_is_saved(tmp_path, way):
    model = make(steps_per_execution=5)
    fit(model, epochs=1)
    sigma = model.optimizer.noise_multiplier
    if way == "model":
        model.save(tmp_path / "m.keras")
        loaded = dp.load_model(tmp_path / "m.keras")
    else:
        loaded = make()
        loaded.optimizer.build(loaded.trainable_variables)
        if way == "weights":
            model.save_weights(tmp_path / "m.weights.h5")
            loaded.load_weights(tmp_path / "m.weights.h5")
        else:
            path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
            tf.train.Checkpoint(model=loaded).restore(path)
    with pytest.raises(ValueError, match=f"room for 0 .* noise_multiplier={sigma:.5g}"):
        fit(loaded, epochs=1)
    assert loaded.optimizer.noise_multiplier == sigma
    # A larger budget, of a new optimizer, counts what is spent.
    make(target_epsilon=3.0, model=loaded)
    fit(loaded, epochs=1)
    assert 2.98 <= loaded.epsilon(DELTA) <= 3.0


@pytest.mark.extended
def test_a_restored_multiplier_replaces_one_that_was_traced(tmp_path):
    """The noise added is the noise charged. Inputs are zero, so only noise changes 5,000 weights.

    Its sample std leaves ±5 % in fewer than 1 in 10⁶ draws (chi-square).
    """

    def take_a_step(model, *callbacks):
        before = model.get_weights()[0]
        model.fit(np.zeros_like(X), Y, 40, 2, 0, [*callbacks, Stop()], steps_per_epoch=5)
        moved = (model.get_weights()[0] - before).std()
        assert abs(moved * 40 / model.optimizer.noise_multiplier - 1) < 0.05

    def wide(target_epsilon):
        layers = [keras.Input([5]), keras.layers.Dense(1000, use_bias=False)]
        model = dp.DPModel(keras.Sequential(layers))
        return make(dp.DPSGD(1.0), target_epsilon, model)

    class Load(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            kept = self.model.get_weights()
            self.model.load_weights(tmp_path / "w.weights.h5")
            self.model.set_weights(kept)  # only σ* is to be another one

    loud, quiet = wide(1.0), wide(8.0)
    take_a_step(loud)
    loud.save_weights(tmp_path / "w.weights.h5")
    take_a_step(quiet)
    assert quiet.optimizer.noise_multiplier < loud.optimizer.noise_multiplier / 2
    take_a_step(quiet, Load())
    assert quiet.optimizer.noise_multiplier == loud.optimizer.noise_multiplier
    sigmas = {e.event.event.noise_multiplier for e in quiet.ledger.entries}
    assert len(sigmas) == 2


@pytest.mark.filterwarnings("ignore:epsilon relies on a sampling law declared by the user")
def test_one_batch_at_a_time_needs_a_settled_multiplier():
    model, law = make(), dp.accounting.PoissonSampling(200, 40)
    with pytest.raises(ValueError, match="call fit first"):
        model.train_on_batch(X[:40], Y[:40], law=law)
    fit(model, callbacks=[Stop()])
    for _ in range(14):
        model.train_on_batch(X[:40], Y[:40], law=law)
    with pytest.raises(ValueError, match="room for 0"):
        model.train_on_batch(X[:40], Y[:40], law=law)
    assert 1.99 <= model.epsilon(DELTA) <= 2.0


def test_charges_of_other_callbacks_shorten_the_run():
    model = make()

    class Charge(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                law = dp.accounting.PoissonSampling(200, 40)
                self.model.ledger.add(law.event(self.model.optimizer.noise_multiplier), 4, law=law)

    with pytest.warns(dp.accounting.PrivacyWarning, match="stopped 4 steps before its end"):
        fit(model, callbacks=[Charge()])
    assert model.optimizer.steps_taken == 11
    assert 1.99 <= model.epsilon(DELTA) <= 2.0


def test_epsilon_is_at_the_delta_of_the_budget_by_its_accountant():
    model = make(accountant="pld")
    fit(model)
    assert model.epsilon() == model.epsilon(DELTA, "pld") < model.epsilon(DELTA)
    assert model.epsilon(accountant="rdp") == model.epsilon(DELTA)
    model.compile(dp.DPSGD(noise_multiplier=1.0), LOSS, log_raw_metrics=False)
    with pytest.raises(ValueError, match=r"delta is missing.*epsilon\(1e-5\)"):
        model.epsilon()


@pytest.mark.parametrize(
    ("text", "optimizer", "arguments"),
    [
        ("beside noise_multiplier=1.5", lambda: dp.DPSGD(noise_multiplier=1.5), {}),
        ("total_epsilon", lambda: dp.AGD(total_epsilon=1.0, total_delta=1e-5), {}),
        ("target_delta=None", None, {"target_delta": None}),
        ("target_epsilon=None", None, {"target_epsilon": None}),
        ("target_epsilon", None, {"target_epsilon": -1.0}),
        ("target_delta|delta", None, {"target_delta": 1.0}),
        ("accountant", None, {"accountant": "moments"}),
        (r"ADADP\(\), or with .*keras.optimizers.Adam\)\(\)", lambda: "adam", {}),
        ("made without noise_multiplier", None, {"target_epsilon": None, "target_delta": None}),
    ],
)
def test_compile_refuses(text, optimizer, arguments):
    with pytest.raises(ValueError, match=text):
        make(optimizer and optimizer(), **arguments)


@pytest.mark.parametrize(
    ("text", "optimizer", "arguments"),
    [
        ("whatever its noise", lambda: dp.ADADP(prior="raw"), {}),
        (
            "or raise target_epsilon or direction_noise_multiplier",
            lambda: dp.DPOPT(directions="budgeted", direction_noise_multiplier=0.3),
            {},
        ),
        (
            "Lower epochs or batch_size, or raise target_epsilon",
            None,
            {"target_epsilon": 0.05, "accountant": "theorem1"},
        ),
    ],
)
def test_a_budget_that_no_noise_meets_is_refused(text, optimizer, arguments):
    model = make(optimizer and optimizer(), **arguments)
    with pytest.raises(ValueError, match=text):
        fit(model)
    assert model.ledger.steps == 0


def test_a_budget_that_is_spent_is_refused():
    model = make()
    dp.DPPCA(2, noise_multiplier=0.5).fit(X, ledger=model.ledger)
    with pytest.raises(ValueError, match="target_epsilon=2.0 is spent"):
        fit(model)
    assert model.ledger.steps == 1


def test_a_planned_multiplier_is_for_optimizers_without_one():
    with pytest.raises(ValueError, match="is fixed"):
        dp.DPSGD(noise_multiplier=1.0).plan_noise(2.0)


@pytest.mark.parametrize("stops", [False, True])
def test_a_run_that_something_else_ends_is_no_guarantee_but_its_budget_is(stops):
    """Results may have decided the number of steps."""
    model = make()
    fit(model, callbacks=[Stop()] if stops else [])
    text = " ".join(model.ledger.statement(DELTA).split())
    assert ("Spent: epsilon" in text) == stops
    assert ("Guarantee: epsilon" in text) == (not stops)
    assert ("a callback ended training after 1 of 15 planned steps" in text) == stops
    assert "epsilon = 2 at delta = 0.001 is guaranteed" in text


class Stubborn(keras.callbacks.Callback):
    """Sets back what a budget has set."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = False

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = False


def test_no_callback_goes_on_past_max_epsilon():
    law = dp.accounting.PoissonSampling(200, 40)
    model = make(dp.DPSGD(noise_multiplier=1.0), target_epsilon=None, target_delta=None)
    limit = dp.accounting.epsilon(1.0, law.probability, 7, DELTA) * 1.0001
    callbacks = [dp.PrivacyCallback(DELTA, max_epsilon=limit), Stubborn()]
    with pytest.raises(ValueError, match=r"max_epsilon=.* leaves no room"):
        fit(model, callbacks=callbacks)
    assert model.ledger.steps == 7


def test_no_callback_goes_on_past_target_epsilon():
    """Another callback's charge ends the run in its third epoch of four."""
    model = make()

    class Charge(Stubborn):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                law = dp.accounting.PoissonSampling(200, 40)
                self.model.ledger.add(law.event(self.model.optimizer.noise_multiplier), 6, law=law)

    with (
        pytest.warns(dp.accounting.PrivacyWarning, match="stopped 6 steps before its end"),
        pytest.raises(ValueError, match=r"target_epsilon=2.0 .* has room for 0"),
    ):
        fit(model, epochs=4, callbacks=[Charge()])
    assert model.optimizer.steps_taken == 14
    assert 1.99 <= model.epsilon() <= 2.0


def test_a_callback_without_a_metric_that_ends_a_run_is_recorded():
    class Own(keras.callbacks.Callback):
        stopped_epoch = 0

        def on_epoch_end(self, epoch, logs=None):
            self.stopped_epoch = 1
            self.model.stop_training = True

    model = make()
    fit(model, callbacks=[Own()])
    (reason,) = model.ledger.odometer_reasons
    assert reason == "Own ended training after 5 of 15 planned steps"


def test_a_file_that_later_steps_chose_is_no_guarantee(tmp_path):
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.keras", monitor="val_loss", save_best_only=True
    )
    model = make()
    fit(model, callbacks=[best], validation_data=(X, Y))
    assert "Guarantee: epsilon" in model.ledger.statement(DELTA)
    loaded = dp.load_model(tmp_path / "best.keras")
    assert "Spent: epsilon" in loaded.ledger.statement(DELTA)
    assert "keeps the best one" in loaded.ledger.odometer_reasons[0]
    model.save(tmp_path / "last.keras")
    assert dp.load_model(tmp_path / "last.keras").ledger.odometer_reasons == ()
