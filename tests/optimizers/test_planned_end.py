"""Rates that are found fall to 0 at the end of a run whose number of steps is known."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import crossentropy, data, plain_model, private_model
from tests.optimizers.cases import make_variables


def plan(optimizer):
    """Returns T and N."""
    return optimizer._plan.numpy()[:2].tolist()


class Plans(keras.callbacks.Callback):
    """Keeps T and N of every execution, and does `act` after number `at`."""

    def __init__(self, at=None, act=None):
        super().__init__()
        self.at, self.act, self.seen = at, act, []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(plan(self.model.optimizer))
        if len(self.seen) == self.at:
            self.act(self.model)


def adadp():
    return dp.ADADP(noise_multiplier=1.0, seed=0)


def ends(optimizer, steps):
    """Returns e of each of so many steps, without taking them."""
    found = []
    for _ in range(steps):
        found.append(float(optimizer._end_factor()))
        optimizer.iterations.assign_add(1)
    return found


def test_the_last_three_in_ten_steps_fall_to_0():
    optimizer = adadp()
    optimizer.build(make_variables())
    optimizer.plan_steps(20)
    falling = [1.0] * 15 + [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    np.testing.assert_allclose(ends(optimizer, 23), [*falling, 1, 1, 1], rtol=1e-6)
    optimizer.plan_steps(10)  # another run
    np.testing.assert_allclose(ends(optimizer, 10), [1.0] * 8 + [2 / 3, 1 / 3], rtol=1e-6)
    optimizer.plan_steps(4, 20)  # the rest of a run
    np.testing.assert_allclose(ends(optimizer, 4), falling[16:], rtol=1e-6)
    optimizer.plan_steps(0)
    assert ends(optimizer, 3) == [1, 1, 1]


@pytest.mark.parametrize(
    ("steps", "total", "promise"), [(300, None, 0.35), (2, 1200, 0.0875), (9000, None, 0.07)]
)
def test_steps_of_a_long_run_promise_less(steps, total, promise):
    optimizer = adadp()
    optimizer.build(make_variables())
    assert float(optimizer._run_promise()) == pytest.approx(0.35)
    optimizer.plan_steps(steps, total)
    assert float(optimizer._run_promise()) == pytest.approx(promise)
    optimizer.iterations.assign_add(steps)  # the run has ended
    optimizer.plan_steps(10)  # a short one does not undo what a long one held back
    assert float(optimizer._run_promise()) == pytest.approx(promise)


def test_fit_plans_and_batches_do_not():
    x, y = data()
    optimizer = adadp()
    private = private_model(optimizer)

    def plans(**epochs):
        seen = Plans()
        private.fit(x, y, batch_size=30, verbose=0, callbacks=[seen], **epochs)
        assert optimizer._steps_left() <= 0
        return seen.seen

    assert plans(epochs=2) == [[8, 8]] * 8
    private.train_on_batch(x[:30], y[:30])
    assert plans(epochs=1) == [[13, 4]] * 4
    assert plans(initial_epoch=3, epochs=4) == [[17, 16]] * 4
    optimizer.plan_steps(5)  # batches of a loop keep the loop's
    private.train_on_batch(x[:30], y[:30])
    assert plan(optimizer) == [22, 5]


def test_what_a_callback_restores_has_the_end_of_the_run(tmp_path):
    """Restores, after 9 of 12 steps, variables of step 4: three steps are to come."""
    x, y = data()
    private = private_model(adadp())

    def save(model):
        model.save_weights(tmp_path / "early.weights.h5")

    def load(model):
        model.load_weights(tmp_path / "early.weights.h5")

    seen = Plans(9, load)
    callbacks = [Plans(4, save), seen]
    private.fit(x, y, batch_size=30, epochs=3, verbose=0, callbacks=callbacks)
    assert seen.seen == [[12, 12]] * 9 + [[7, 12]] * 3


def test_an_early_end_and_whole_executions():
    x, y = data()
    optimizer = adadp()
    private = private_model(optimizer, steps_per_execution=2)

    def stop(model):
        model.stop_training = True

    seen = Plans(1, stop)
    private.fit(x, y, batch_size=40, epochs=3, verbose=0, callbacks=[seen])
    assert seen.seen == [[12, 12]]  # an epoch of three lots takes two executions
    assert optimizer.steps_taken == 2
    assert plan(optimizer) == [0, 0]


def test_a_run_that_is_resumed_ends_as_planned(tmp_path):
    """The backup holds weights of the third epoch; the rate does not start anew."""
    x, y = data()

    class Crash(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 3:
                raise KeyboardInterrupt

    seen = Plans()

    def train(*callbacks):
        optimizer = adadp()
        private = private_model(optimizer)
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        private.fit(x, y, batch_size=30, epochs=5, verbose=0, callbacks=[backup, *callbacks])
        return optimizer

    with pytest.raises(KeyboardInterrupt):
        train(Crash())
    assert train(seen).steps_taken == 20
    assert seen.seen == [[20, 20]] * 8


@pytest.mark.extended
def test_a_run_that_its_budget_cuts_ends_there(tmp_path):
    """Crashes after 11 of 20 steps; the two epochs of the backup leave 9 of 12 steps affordable."""
    x, y = data()

    def train(*callbacks):
        private = private_model(dp.ADADP(seed=0), target_epsilon=8.0, target_delta=1e-3)
        privacy = dp.PrivacyCallback(1e-3, ledger_path=tmp_path / "ledger.json")
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        callbacks = [privacy, backup, *callbacks]
        private.fit(x, y, batch_size=30, epochs=5, verbose=0, callbacks=callbacks)

    def crash(model):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(Plans(11, crash))
    seen = Plans()
    with pytest.warns(dp.accounting.PrivacyWarning, match="stopped 3 steps before its end"):
        train(seen)
    assert seen.seen == [[17, 20]] * 9


def test_loops_plan_by_themselves():
    x, y = data()
    model, lots = plain_model(), dp.PoissonLots(x, y, expected_size=30)
    optimizer, ledger = dp.ADAL(noise_multiplier=1.0), dp.PrivacyLedger()
    optimizer.build(model.trainable_variables)
    optimizer.plan_steps(2)
    found = []
    for lot in lots.take(2, physical_batch_size=16):
        found.append(float(optimizer._end_factor()))
        dp.private_step(model, crossentropy(), lot, optimizer, ledger=ledger, law=lots.law)
    assert found == [1, 1]  # the falling part of two steps is shorter than one
    assert plan(optimizer) == [2, 2]


def test_numbers_of_steps_are_checked():
    optimizer = adadp()
    with pytest.raises(ValueError, match="optimizer.build"):
        optimizer.plan_steps(10)
    optimizer.build(make_variables())
    for steps, total, name in ((-1, None, "steps"), (1.5, None, "steps"), (10, 9, "total")):
        with pytest.raises(ValueError, match=name):
            optimizer.plan_steps(steps, total)
    with pytest.raises(RuntimeError, match="from Python before the first step"):
        tf.function(lambda: optimizer.plan_steps(10))()
    assert plan(optimizer) == [0, 0]


@pytest.mark.parametrize("optimizer", [dp.DPSGD, dp.ADADP, dp.AdaCliP])
def test_a_given_rate_has_no_end(optimizer):
    given = optimizer(0.1, noise_multiplier=1.0)
    given.plan_steps(10)
    given.build(make_variables())
    given.plan_steps(10)
    assert not hasattr(given, "_plan")
