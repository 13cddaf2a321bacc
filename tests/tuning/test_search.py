"""A search of a random number of trials: what it returns, charges, refuses and hides."""

import math
import re

import keras
import numpy as np
import pytest
import scipy.stats

import tf_adadp as dp
from tests.helpers import ROWS, data, plain_model, private_model
from tf_adadp.accounting.accountants import Composition
from tf_adadp.accounting.events import event_from_key, event_key
from tf_adadp.accounting.trials import search_event
from tf_adadp.tuning.trial import TrialCost

X, Y = data()
LAW = dp.accounting.PoissonSampling(ROWS, 30)
STEPS = 4
DELTA = 1e-5


def optimizer(**arguments):
    return dp.DPSGD(0.1, **{"noise_multiplier": 1.0, **arguments})


def plan(steps=STEPS, law=LAW, **arguments):
    planned = dp.PrivacyLedger()
    optimizer(**arguments).charge(planned, law, steps)
    return planned


def train(hyperparameters, **arguments):
    model = private_model(optimizer(l2_norm_clip=hyperparameters.get("clip", 1.0), **arguments))
    model.fit(X, Y, batch_size=30, epochs=1, steps_per_epoch=STEPS, verbose=0)
    return model


def charged(hyperparameters, **arguments):
    """A trial that is charged as `train`, and draws weights instead of training: much faster."""
    model = private_model(optimizer(l2_norm_clip=hyperparameters.get("clip", 1.0), **arguments))
    model.optimizer.charge(model.ledger, LAW, STEPS)
    return model


def first_weight(model):
    return float(model.model.get_weights()[0][0, 0])


def loss(model):
    """The score of most tests; on other records than those trained on."""
    return -model.evaluate(*data(seed=1), verbose=0, return_dict=True)["loss"]


def search(train=charged, space=None, planned=None, **arguments):
    arguments = {
        "mean_trials": 2,
        "score": first_weight,
        "score_data": "made-up records",
        **arguments,
    }
    space = {"clip": [0.5, 1.0, 2.0]} if space is None else space
    return dp.tuning.search(train, space, plan() if planned is None else planned, **arguments)


def fails(hyperparameters):
    raise FloatingPointError("of a trial")


# What it costs


@pytest.mark.parametrize(
    ("mean", "epsilon"), [(1, 1.2159), (3, 1.7843), (10, 2.2362), (30, 2.6384)]
)
def test_the_published_figures(mean, epsilon):
    """q = 0.01, σ = 1, 100 steps, δ = 1e-5: ε 1.21 → 2.24 for ten trials in the mean."""
    law = dp.accounting.PoissonSampling(1000, 10)
    ledger = dp.PrivacyLedger()
    ledger.add(search_event(law.event(1.0), 100, mean), law=law)
    assert ledger.epsilon(DELTA) == pytest.approx(epsilon, abs=5e-5)


def test_the_bound_is_that_of_the_paper():
    """Theorem 2 with η = 1, by itself, at the orders of dp_accounting."""
    ledger = dp.PrivacyLedger()
    ledger.add(LAW.event(1.0), 20, law=LAW)
    orders, rdp = Composition.of([(LAW.event(1.0), 20)])._rdp("rdp")
    mean, gamma = 6.0, 1 / 6.0
    second = 2 * np.min((1 - 1 / orders) * rdp - math.log(gamma) / orders)
    bound = rdp + math.log(mean) / (orders - 1) + second
    epsilon = np.min(bound + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1))
    searched = dp.PrivacyLedger()
    searched.add(search_event(LAW.event(1.0), 20, mean), law=LAW)
    assert searched.epsilon(DELTA) == pytest.approx(epsilon, rel=1e-6)
    assert searched.epsilon(DELTA) > ledger.epsilon(DELTA)


def test_a_search_composes_with_what_comes_before_and_after():
    event, step = search_event(LAW.event(1.0), 10, 5), LAW.event(2.0)
    orders, search_rdp = Composition.of([(event, 1)])._rdp("rdp")
    both = Composition.of([(step, 7), (event, 2), (step, 3)])._rdp("rdp")[1]
    steps = Composition.of([(step, 10)])._rdp("rdp")[1]
    np.testing.assert_allclose(both, 2 * search_rdp + steps, rtol=1e-12)


@pytest.mark.parametrize(
    "law",
    [
        dp.accounting.FixedSizeSampling(ROWS, 30),
        dp.accounting.ShuffledSampling(ROWS, 30),
        dp.accounting.UserSampling(40, 10, 3, 30),
    ],
)
def test_searches_under_other_relations_and_units(law):
    planned = plan(law=law)
    ledger = dp.PrivacyLedger()
    ledger.add(TrialCost.of(planned).search_event(4), law=law)
    assert planned.epsilon(DELTA) < ledger.epsilon(DELTA) < math.inf
    assert ledger.entries[0].neighboring_relation is law.neighboring_relation
    assert ledger.entries[0].steps == STEPS


@pytest.mark.parametrize("accountant", ["pld", "theorem1", "wang_theorem9", "wang_theorem27"])
def test_other_accountants_refuse_and_name_the_one_that_knows(accountant):
    ledger = dp.PrivacyLedger()
    ledger.add(search_event(LAW.event(1.0), 3, 10), law=LAW)
    with pytest.raises(ValueError, match='accountant="rdp"'):
        ledger.epsilon(DELTA, accountant)


def test_noise_for_a_search_within_a_budget():
    sigma = dp.PrivacyLedger().calibrate_noise_multiplier(
        2.0, DELTA, LAW, 1, step=lambda sigma: search_event(LAW.event(sigma), STEPS, 10)
    )
    ledger = dp.PrivacyLedger()
    ledger.add(search_event(LAW.event(sigma), STEPS, 10), law=LAW)
    assert 1.99 < ledger.epsilon(DELTA) <= 2.0


def test_the_event_survives_files():
    event = search_event(LAW.event(1.0), 3, 10)
    assert event_from_key(event_key(event)) == event
    ledger = dp.PrivacyLedger()
    ledger.add(event, law=LAW, origin="search")
    again = dp.PrivacyLedger.from_json(ledger.to_json())
    assert again.entries == ledger.entries
    for field, wrong in (("mean", "0.5"), ("mean", "NaN"), ("mean", "true"), ("shape", "-1")):
        text = re.sub(f'"{field}":[0-9.]*', f'"{field}":{wrong}', event_key(event))
        with pytest.raises(ValueError, match=f"RepeatAndSelectDpEvent.{field}"):
            event_from_key(text)


# What it returns


def test_the_winner_is_the_best_and_its_ledger_is_that_of_the_search():
    seen = []

    def score(model):
        seen.append((loss(model), model.model.get_weights()))
        return seen[-1][0]

    best = search(train, score=score, mean_trials=3, seed=2)
    assert len(seen) == 3
    value, weights = max(seen, key=lambda pair: pair[0])
    assert best.score == value
    for mine, theirs in zip(best.model.model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert best.hyperparameters["clip"] == best.model.optimizer.l2_norm_clip
    ledger = best.model.ledger
    assert [entry.event for entry in ledger.entries] == [search_event(LAW.event(1.0), STEPS, 3)]
    expected = dp.PrivacyLedger()
    expected.add(search_event(LAW.event(1.0), STEPS, 3), law=LAW)
    assert best.model.epsilon(DELTA) == expected.epsilon(DELTA) > plan().epsilon(DELTA)


def test_the_winner_trains_on_and_is_saved_with_its_cost(tmp_path):
    best = search(train, score=loss, seed=1).model
    ledger = best.ledger
    searched = best.epsilon(DELTA)
    best.fit(X, Y, batch_size=30, epochs=1, verbose=0)
    assert best.ledger is ledger
    assert best.ledger.steps == 1 + STEPS
    more = dp.PrivacyLedger.from_json(ledger.to_json())
    assert best.epsilon(DELTA) == more.epsilon(DELTA) > searched
    best.save(tmp_path / "best.keras")
    again = dp.load_model(tmp_path / "best.keras")
    assert again.epsilon(DELTA) == best.epsilon(DELTA)
    assert dp.DPModel(best.model).epsilon(DELTA) == best.epsilon(DELTA)  # by its weights alone


def test_what_was_released_before_is_counted_once():
    ledger = dp.PrivacyLedger()
    ledger.add(LAW.event(3.0), 5, law=LAW)
    text = ledger.to_json()

    def with_history(hyperparameters):
        model = charged(hyperparameters)
        model.ledger.merge(dp.PrivacyLedger.from_json(text))
        return model

    best = search(with_history, ledger=ledger, mean_trials=3, seed=2)
    assert best.model.ledger is ledger
    assert [entry.count for entry in ledger.entries] == [5, 1]


def test_the_statement_says_what_was_searched_and_by_which_data():
    words = " ".join(
        search(seed=1, score_data="40 public records").model.ledger.statement(DELTA).split()
    )
    assert "a random number of independent trials (geometric, 2 in the mean)" in words
    assert "scored on 40 public records" in words
    assert "hyper-parameter search but for the search above" in words
    assert "does not protect the records" in words


def test_space_takes_lists_and_distributions_of_scipy():
    drawn = []

    def note(hyperparameters):
        drawn.append(hyperparameters)
        raise ValueError

    with pytest.raises(RuntimeError, match="Every trial failed"):
        search(
            note, {"rate": scipy.stats.loguniform(0.01, 1), "n": range(3)}, mean_trials=200, seed=2
        )
    assert len(drawn) > 50
    assert {h["n"] for h in drawn} == {0, 1, 2}
    rates = [h["rate"] for h in drawn]
    assert len(set(rates)) == len(rates)
    assert 0.01 <= min(rates) < 0.1 < max(rates) <= 1


# Failed trials


def test_a_trial_that_fails_counts_and_loses():
    calls = []

    def sometimes(hyperparameters):
        calls.append(hyperparameters["clip"])
        if hyperparameters["clip"] != 1.0:
            return fails(hyperparameters)
        return charged(hyperparameters)

    best = search(sometimes, mean_trials=20, seed=2)
    assert best.hyperparameters == {"clip": 1.0}
    assert set(calls) == {0.5, 1.0, 2.0}


@pytest.mark.extended
def test_a_score_that_is_nan_loses():
    def score(model):
        return math.nan if model.optimizer.l2_norm_clip < 2 else -1e9

    assert search(score=score, mean_trials=20, seed=2).hyperparameters == {"clip": 2.0}


def test_where_all_fail_the_first_error_is_shown_and_the_search_charged():
    ledger = dp.PrivacyLedger()
    with pytest.raises(RuntimeError, match="Every trial failed") as raised:
        search(fails, ledger=ledger)
    assert isinstance(raised.value.__cause__, FloatingPointError)
    assert [entry.event.mean for entry in ledger.entries] == [2]
    assert raised.value.ledger is ledger
    with pytest.raises(RuntimeError, match="search\\(ledger=error.ledger\\)") as raised:
        search(fails)
    assert raised.value.ledger.epsilon(1e-5) == ledger.epsilon(1e-5)


# What it refuses, before anything is trained or charged


def never(hyperparameters):
    raise AssertionError("a trial ran")


@pytest.mark.parametrize("mean", [None, 0, 0.5, -3, math.inf, math.nan, "10", True])
def test_a_mean_without_bound_is_refused_before_anything(mean):
    ledger = dp.PrivacyLedger()
    with pytest.raises(ValueError, match="mean_trials=.*finite number of at least 1"):
        search(never, mean_trials=mean, ledger=ledger)
    assert ledger.entries == ()
    with pytest.raises(ValueError, match="mean_trials="):
        search_event(LAW.event(1.0), 3, mean)


def test_a_budget_that_is_spent_is_refused_before_anything():
    ledger = dp.PrivacyLedger()
    ledger.add(LAW.event(1.0), 50, law=LAW)
    spent = ledger.epsilon(DELTA)
    with pytest.raises(ValueError, match=f"epsilon={spent:.5g} is spent"):
        search(never, ledger=ledger, target_epsilon=spent, target_delta=DELTA)
    assert ledger.steps == 50
    with pytest.raises(ValueError, match="a budget is both"):
        search(never, target_epsilon=1.0)
    best = search(ledger=ledger, target_epsilon=100.0, target_delta=DELTA)
    assert spent < best.model.epsilon(DELTA) <= 100


def test_agd_is_refused():
    planned = dp.PrivacyLedger()
    agd = dp.AGD(total_epsilon=2.0, total_delta=DELTA)
    planned.add(LAW.event(2.0), 3, law=LAW, adaptive=agd.event_varies)
    with pytest.raises(ValueError, match="AGD"):
        search(never, planned=planned)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"planned": dp.PrivacyLedger()}, "planned has releases by 0 sampling laws"),
        ({"planned": 3}, "planned=3"),
        ({"space": ["clip"]}, "space="),
        ({"space": {"clip": []}}, "space\\['clip'\\]"),
        ({"space": {"clip": 3}}, "space\\['clip'\\]"),
        ({"score": 1.0}, "score=1.0"),
        ({"score_data": ""}, "score_data="),
        ({"ledger": "ledger.json"}, "ledger="),
        ({"seed": "a"}, "seed="),
        ({"planned": plan(law=dp.accounting.TruncatedPoissonSampling(ROWS, 30, 40))}, "pld"),
        ({"ledger": plan(law=dp.accounting.FixedSizeSampling(ROWS, 30))}, "neighbouring relations"),
        ({"ledger": plan(law=dp.accounting.PoissonSampling(ROWS + 1, 30))}, "another data set"),
    ],
)
def test_arguments_are_checked_before_anything(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        search(never, **arguments)


# What it refuses in a trial


def a_trial_like(law=LAW, steps=STEPS, **changes):
    def trained(hyperparameters):
        model = private_model(optimizer(**changes))
        model.optimizer.charge(model.ledger, law, steps)
        return model

    return trained


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (a_trial_like(steps=STEPS + 1), "more than planned"),
        (a_trial_like(dp.accounting.PoissonSampling(ROWS, 40)), "more than planned"),
        (a_trial_like(noise_multiplier=0.9), "more than planned"),
        (a_trial_like(seed=3), "from a given seed"),
        (lambda _: plain_model(), "what train returned"),
        (lambda _: None, "what train returned"),
    ],
)
def test_a_trial_that_is_not_as_planned_releases_nothing(trial, message):
    with pytest.raises((TypeError, ValueError), match=message):
        search(trial)


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"law": dp.accounting.PoissonSampling(ROWS, 20)},
        {"noise_multiplier": 2.0},
        {"steps": STEPS - 1},
    ],
)
def test_a_trial_may_cost_less_than_planned(changes):
    best = search(a_trial_like(**changes))
    assert best.model.ledger.entries[0].event == search_event(LAW.event(1.0), STEPS, 2)


def test_trials_of_other_data_are_refused():
    for law in (dp.accounting.PoissonSampling(60, 15), dp.accounting.FixedSizeSampling(ROWS, 3)):
        with pytest.raises(ValueError, match="number of records have to agree"):
            search(a_trial_like(law))


def test_what_is_no_step_of_training_belongs_before_the_search():
    def with_pca(hyperparameters):
        model = charged(hyperparameters)
        model.ledger.add(LAW.event(50.0).event)
        return model

    with pytest.raises(ValueError, match="belongs into `ledger`"):
        search(with_pca)


def test_a_trial_by_an_adaptive_optimizer_is_refused():
    def adaptive(hyperparameters):
        model = charged(hyperparameters)
        model.ledger.add(LAW.event(50.0), law=LAW, adaptive=True)
        return model

    with pytest.raises(ValueError, match="AGD"):
        search(adaptive)


def test_trials_that_go_on_from_each_other_are_refused():
    model = private_model(optimizer())

    def same(hyperparameters):
        model.optimizer.charge(model.ledger, LAW)
        return model

    with pytest.raises(ValueError, match="goes on from an earlier one"):
        search(same, mean_trials=50, seed=0)


def test_trials_that_load_an_earlier_one_are_refused(tmp_path):
    path = tmp_path / "trial.weights.h5"

    def warm(hyperparameters):
        model = private_model(optimizer())
        if path.exists():
            model.load_weights(path)
        model.optimizer.charge(model.ledger, LAW)
        model.save_weights(path)
        return model

    with pytest.raises(ValueError, match="goes on from an earlier one"):
        search(warm, mean_trials=50, seed=0)


def test_trials_that_charge_the_search_s_own_ledger_are_refused():
    ledger = dp.PrivacyLedger()

    def charged_twice(hyperparameters):
        model = private_model(optimizer(), wrap={"ledger": ledger})
        model.optimizer.charge(model.ledger, LAW)
        return model

    with pytest.raises(ValueError, match="charged `ledger` itself"):
        search(charged_twice, ledger=ledger)


def test_steps_that_nobody_charged_are_refused():
    def uncharged(hyperparameters):
        model = train(hyperparameters)
        zeros = [keras.ops.zeros(v.shape) for v in model.trainable_variables]
        model.optimizer.apply_private(zeros, 30)
        return model

    with pytest.raises(ValueError, match="not charged"):
        search(uncharged)
