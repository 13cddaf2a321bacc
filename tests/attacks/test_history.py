"""Attempts to make a ledger forget releases, or say of a budget what is no longer true."""

import os

import keras
import numpy as np
import pytest

import tf_adadp as dp
from tf_adadp.accounting import FixedSizeSampling, PoissonSampling, PrivacyLedger
from tf_adadp.accounting.files.ledger_file import LedgerFile

LAW = PoissonSampling(1000, 100)
EVENT, OTHER = LAW.event(1.0), LAW.event(2.0)
DELTA = 1e-5


def filled(count):
    ledger = PrivacyLedger()
    ledger.add(EVENT, count, law=LAW)
    return ledger


def test_a_raised_budget_takes_back_what_the_first_one_said():
    ledger, law = PrivacyLedger(), PoissonSampling(50_000, 50)
    event = law.event(1.0)
    for epsilon in (1.0, 3.0):
        budget = ledger.budget_for(event, epsilon, DELTA, law=law)
        ledger.begin_budget(budget)
        ledger.add(event, ledger.remaining_under(budget, event), law=law)
        if epsilon == 1.0:
            first = ledger.steps
            assert "is guaranteed" in " ".join(ledger.statement(DELTA).split())
    assert ledger.epsilon(DELTA) > 1.0
    assert [budget.outside for budget in ledger.budgets] == [ledger.steps - first, first]
    assert "is guaranteed" not in " ".join(ledger.statement(DELTA).split())


def test_no_budget_is_guaranteed_once_history_is_lost():
    ledger = PrivacyLedger()
    ledger.begin_budget(ledger.budget_for(EVENT, 3.0, DELTA, law=LAW))
    ledger.add(EVENT, 2, law=LAW)
    assert "is guaranteed" in " ".join(ledger.statement(DELTA).split())
    ledger.mark_unknown("a file was lost")
    assert "is guaranteed" not in " ".join(ledger.statement(DELTA).split())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_children_of_a_fork_do_not_count_up_the_same_entries(tmp_path):
    ledger = filled(10)
    for child in range(2):
        process = os.fork()
        if process == 0:
            ledger.add(EVENT, 500, law=LAW)
            ledger.add(OTHER, 300, law=LAW)
            ledger.save(tmp_path / f"{child}.json")
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0
    for child in range(2):
        ledger.merge(PrivacyLedger.load(tmp_path / f"{child}.json"))
    assert ledger.steps == 10 + 2 * 800


def test_what_was_announced_and_merged_is_not_overwritten():
    ledger = filled(1)
    ahead = ledger.announced()
    ahead.add(OTHER, 1000, law=LAW)
    ledger.merge(ahead)
    before = ledger.epsilon(DELTA)
    ledger.add(EVENT, 1, law=LAW)
    assert ledger.steps == 1002
    assert ledger.epsilon(DELTA) >= before


def test_saving_does_not_drop_what_a_file_says_of_its_end(tmp_path):
    ledger = filled(10)
    early = PrivacyLedger.from_json(ledger.to_json())
    ledger.mark_odometer("EarlyStopping")
    ledger.save(tmp_path / "ledger.json")
    with pytest.raises(ValueError, match="was not overwritten"):
        early.save(tmp_path / "ledger.json")
    assert PrivacyLedger.load(tmp_path / "ledger.json").odometer_reasons == ("EarlyStopping",)


def test_a_link_leads_to_one_history(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    ledger = filled(1)
    ledger.save(target)
    link.symlink_to(target)
    file = LedgerFile(link)
    ledger.add(EVENT, 1000, law=LAW)
    file.write(ledger)
    with pytest.raises(BlockingIOError):
        LedgerFile(link)
    file.close()
    assert link.is_symlink()
    assert PrivacyLedger.load(target).steps == PrivacyLedger.load(link).steps == 1001


def test_a_budget_on_fixed_size_lots_begins_on_an_empty_ledger():
    law = FixedSizeSampling(1000, 100)
    ledger, event = PrivacyLedger(), law.event(8.0)
    budget = ledger.budget_for(event, 3.0, DELTA, law=law)
    ledger.begin_budget(budget)
    assert ledger.remaining_under(budget, event) == ledger.remaining(event, 3.0, DELTA, law=law) > 0


def _model(**kwargs):
    model = dp.DPModel(keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]))
    model.compile(dp.DPSGD(0.1, noise_multiplier=1.0), loss="mse", **kwargs)
    return model


X, Y = np.ones((40, 3), np.float32), np.zeros((40, 1), np.float32)


def test_more_releases_than_were_charged_stay_uncharged():
    optimizer = dp.DPSGD(0.1, noise_multiplier=1.0)
    optimizer.build([keras.Variable(np.zeros(3, np.float32))])
    ledger = PrivacyLedger()
    with optimizer.charged(ledger, LAW, 1):
        for _ in range(20):
            optimizer.apply_private([np.zeros(3, np.float32)], 100.0)
    assert ledger.steps == 1
    assert optimizer.uncharged_releases == 19


def test_steps_per_execution_cannot_change_behind_the_graph():
    model = _model(steps_per_execution=10)
    model.fit(X, Y, batch_size=10, steps_per_epoch=10, verbose=0)
    model.steps_per_execution = 1
    with pytest.raises(ValueError, match="steps_per_execution was changed after compile"):
        model.fit(X, Y, batch_size=10, steps_per_epoch=10, verbose=0)
    assert model.ledger.steps == 10


class _ReleasesAtTheEnd(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        law = PoissonSampling(40, 10)
        self.model.ledger.add(law.event(3.0), 1, law=law, origin="a callback")


def test_the_file_has_what_other_callbacks_charge_at_the_end(tmp_path):
    path = tmp_path / "ledger.json"
    model = _model()
    callbacks = [dp.PrivacyCallback(1e-3, ledger_path=path), _ReleasesAtTheEnd()]
    model.fit(X, Y, batch_size=10, verbose=0, callbacks=callbacks)
    assert PrivacyLedger.load(path).steps == model.ledger.steps == 5


def test_weights_of_a_model_that_is_not_compiled(tmp_path):
    model = _model()
    model.fit(X, Y, batch_size=10, verbose=0)
    model.save_weights(tmp_path / "a.weights.h5")
    plain = dp.DPModel(keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]))
    plain.load_weights(tmp_path / "a.weights.h5")
    assert plain.ledger.steps == 4
