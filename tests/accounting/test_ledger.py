"""PrivacyLedger: recording, reading, merging, storing, refusing."""

import copy
import hashlib
import json
import math
import os
import pickle
import threading
import time
import warnings

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from hypothesis import given
from hypothesis import strategies as st

from tf_adadp import accounting
from tf_adadp.accounting import (
    ACCOUNTANTS,
    FixedSizeSampling,
    PoissonSampling,
    PrivacyLedger,
    PrivacyWarning,
    RenyiFilter,
    UnknownSampling,
)
from tf_adadp.accounting.filters import LedgerBudget

Relation = dp_accounting.NeighboringRelation
Gaussian = dp_accounting.GaussianDpEvent
LAW = PoissonSampling(60000, 600)
EVENT = LAW.event(0.9)
DELTA = 1e-6
EMPTY = json.loads(PrivacyLedger().to_json())["ledger"]


def filled(count=1800, law=LAW, sigma=0.9, **kwargs):
    ledger = PrivacyLedger()
    ledger.add(law.event(sigma), count, law=law, **kwargs)
    return ledger


# Reading


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_agrees_with_the_functions(accountant):
    ledger = filled(100)
    expected = accounting.epsilon(0.9, 0.01, 100, DELTA, accountant)
    assert ledger.epsilon(DELTA, accountant) == expected
    expected = accounting.delta(0.9, 0.01, 100, 1.0, accountant)
    assert ledger.delta(1.0, accountant) == expected


def test_agrees_with_a_fresh_accountant_on_a_mixture():
    ledger, reference = PrivacyLedger(), rdp.RdpAccountant()
    other = LAW.event(2.5)
    for event, count, law in [(Gaussian(16.0), 1, None), (EVENT, 40, LAW), (other, 7, LAW)] * 2:
        ledger.add(event, count, law=law)
        reference.compose(event, count)
    for delta in (1e-5, 1e-6, 1e-10):
        assert ledger.epsilon(delta) == pytest.approx(reference.get_epsilon(delta), rel=1e-12)
    assert ledger.steps == 96


@pytest.mark.parametrize(("sigma", "expected"), [(16, 0.226), (7, 0.552), (6, 0.652), (4, 1.013)])
def test_one_gaussian_release(sigma, expected):
    # DPPCA's release, unamplified, at δ = 1e-5.
    ledger = PrivacyLedger()
    ledger.add(Gaussian(sigma), origin="DPPCA")
    assert ledger.epsilon(1e-5) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_an_empty_ledger_costs_nothing(accountant):
    assert PrivacyLedger().epsilon(DELTA, accountant) == 0
    assert PrivacyLedger().delta(1.0, accountant) == 0
    assert PrivacyLedger().steps == 0


@pytest.mark.parametrize("accountant", ["rdp", "theorem1"])
def test_fixed_size_lots_are_charged_at_half_the_multiplier(accountant):
    law = FixedSizeSampling(60000, 600)
    classes = {"rdp": rdp.RdpAccountant, "theorem1": accounting.Theorem1Accountant}
    reference = classes[accountant](neighboring_relation=Relation.REPLACE_ONE)
    reference.compose(dp_accounting.SampledWithoutReplacementDpEvent(60000, 600, Gaussian(2.0)), 50)
    ledger = filled(50, law, 4.0)
    assert ledger.epsilon(DELTA, accountant) == pytest.approx(reference.get_epsilon(DELTA), 1e-12)
    with pytest.raises(ValueError, match='accountant="pld" cannot analyse.*"rdp" or "theorem1"'):
        ledger.epsilon(DELTA, "pld")


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_whole_data_lots_double_the_sensitivity_once_under_replace_one(accountant):
    # σ* = 4 and replace-one neighbours: what σ* = 2 costs under add-or-remove, by any accountant.
    ledger = filled(3, FixedSizeSampling(600, 600), 4.0)
    delta = 1e-5
    assert ledger.epsilon(delta, accountant) == accounting.epsilon(2.0, 1.0, 3, delta, accountant)


@given(st.lists(st.tuples(st.sampled_from([0.8, 1.5, 6.0]), st.integers(1, 50)), max_size=8))
def test_epsilon_never_falls_as_releases_are_added(releases):
    ledger, previous, steps = PrivacyLedger(), 0.0, 0
    for sigma, count in releases:
        announced = ledger.preview(LAW.event(sigma), count, DELTA, law=LAW)
        ledger.add(LAW.event(sigma), count, law=LAW)
        current = ledger.epsilon(DELTA)
        assert current == announced
        assert current >= previous
        previous, steps = current, steps + count
        assert ledger.steps == steps
        assert PrivacyLedger.from_json(ledger.to_json()).epsilon(DELTA) == current


def test_reading_is_cheap_enough_for_every_step():
    ledger = filled(1)
    ledger.epsilon(DELTA)
    ledger.epsilon(DELTA, "theorem1")
    best = math.inf
    for _ in range(30):
        start = time.perf_counter()
        ledger.add(EVENT, law=LAW)
        ledger.epsilon(DELTA)
        best = min(best, time.perf_counter() - start)
    assert best < 3e-3  # 0.2 ms on an idle core; composing anew costs 20 ms
    assert len(ledger.entries) == 1


# Recording


def test_equal_releases_in_a_row_share_an_entry():
    ledger = PrivacyLedger()
    for _ in range(5):
        ledger.add(EVENT, law=LAW, origin="fit")
    ledger.add(EVENT, 3, law=LAW, origin="fit")
    assert [entry.count for entry in ledger.entries] == [8]
    ledger.add(EVENT, law=LAW, origin="fit", reproducible_noise=True)
    ledger.add(LAW.event(1.0), law=LAW, origin="fit")
    ledger.add(EVENT, law=LAW, origin="fit")
    ledger.add(EVENT, law=LAW, origin="another fit")
    assert [entry.count for entry in ledger.entries] == [8, 1, 1, 1, 1]
    assert len({entry.id for entry in ledger.entries}) == 5


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "1", None, math.nan])
def test_refuses_bad_counts(count):
    ledger = PrivacyLedger()
    with pytest.raises(ValueError, match="count=.*: give an integer ≥ 1"):
        ledger.add(EVENT, count, law=LAW)
    with pytest.raises(ValueError, match="count=.*: give an integer ≥ 1"):
        ledger.preview(EVENT, count, DELTA, law=LAW)
    assert ledger.steps == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(event=Gaussian(math.nan)), "GaussianDpEvent.noise_multiplier"),
        (dict(event="event"), "event=.*: give a dp_accounting event"),
        (dict(event=EVENT, law="poisson"), "law=.*: give a sampling law"),
        (dict(event=EVENT, law=PoissonSampling(60000, 601)), "does not sample by the law given"),
        (dict(event=EVENT, law=FixedSizeSampling(60000, 600)), "does not sample by the law given"),
        (
            dict(event=FixedSizeSampling(60000, 601).event(1), law=FixedSizeSampling(60000, 600)),
            "does not sample by the law given",
        ),
        (dict(event=EVENT, law=LAW, neighboring_relation=Relation.REPLACE_ONE), "contradicts"),
        (dict(event=EVENT, neighboring_relation="REPLACE_ONE"), "neighboring_relation=.*: give"),
        (dict(event=EVENT, origin=3), "origin=.*: give"),
        (dict(event=EVENT, reproducible_noise=None), "reproducible_noise=.*: give"),
    ],
)
def test_refuses_bad_releases(arguments, message):
    ledger = PrivacyLedger()
    with pytest.raises(ValueError, match=message):
        ledger.add(**arguments)
    assert ledger.entries == ()


def test_events_that_change_after_they_were_recorded_change_nothing():
    sigma, parts = np.array(1.0), [dp_accounting.GaussianDpEvent(1.0)]
    ledger, expected = PrivacyLedger(), PrivacyLedger()
    expected.add(dp_accounting.GaussianDpEvent(1.0))
    expected.add(dp_accounting.GaussianDpEvent(0.5))
    expected.add(dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(1.0)]))
    event = dp_accounting.GaussianDpEvent(sigma)
    ledger.add(event)
    sigma[...] = 0.5
    ledger.add(event)
    ledger.add(dp_accounting.ComposedDpEvent(parts))
    sigma[...] = 100.0
    parts.clear()
    for same in (ledger, PrivacyLedger.from_json(ledger.to_json())):
        assert same.epsilon(1e-5) == expected.epsilon(1e-5)


def test_adding_from_many_threads_loses_nothing():
    ledger = PrivacyLedger()

    def work(sigma):
        for _ in range(200):
            ledger.add(LAW.event(sigma), law=LAW)

    threads = [threading.Thread(target=work, args=(1.0 + i % 2,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.steps == 1200


# Refusing


def test_lost_history_fails_closed():
    ledger = filled()
    ledger.mark_unknown("the checkpoint had no ledger")
    for ask in (
        lambda: ledger.epsilon(DELTA),
        lambda: ledger.delta(1.0),
        lambda: ledger.preview(EVENT, 1, DELTA, law=LAW),
        lambda: ledger.remaining(EVENT, 9.0, DELTA, law=LAW),
        lambda: PrivacyLedger.from_json(ledger.to_json()).epsilon(DELTA),
        lambda: copy.deepcopy(ledger).epsilon(DELTA),
    ):
        with pytest.raises(ValueError, match="the checkpoint had no ledger"):
            ask()
    fresh = PrivacyLedger()
    fresh.merge(ledger)
    with pytest.raises(ValueError, match="the checkpoint had no ledger"):
        fresh.epsilon(DELTA)
    assert "NOT AVAILABLE" in ledger.statement(DELTA)
    with pytest.raises(ValueError, match="reason=.*: give"):
        ledger.mark_unknown("")


def test_unknown_sampling_is_refused_with_the_way_out():
    law = UnknownSampling("a tf.data.Dataset was given")
    ledger = filled(1)
    ledger.add(law.event(1.0), law=law)
    with pytest.raises(ValueError, match="(?s)tf.data.Dataset.*Declare how the batches were"):
        ledger.epsilon(DELTA)
    # No noise is ∞ by any sampling.
    ledger.add(law.event(0.0), law=law)
    assert ledger.epsilon(DELTA) == math.inf


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_one_non_private_release_spoils_everything(accountant):
    ledger = filled(1)
    ledger.add(dp_accounting.NonPrivateDpEvent(), neighboring_relation=Relation.REPLACE_ONE)
    assert ledger.epsilon(DELTA, accountant) == math.inf
    assert ledger.delta(1.0, accountant) == 1
    assert ledger.remaining(EVENT, 9.0, DELTA, accountant, law=LAW) == 0
    assert "NO privacy guarantee" in ledger.statement(DELTA, accountant)


def test_different_neighbouring_relations_do_not_add_up():
    ledger = filled(1)
    ledger.add(Gaussian(5.0), neighboring_relation=Relation.REPLACE_ONE)
    with pytest.raises(ValueError, match="ADD_OR_REMOVE_ONE and REPLACE_ONE"):
        ledger.epsilon(DELTA)
    with pytest.raises(ValueError, match="ADD_OR_REMOVE_ONE and REPLACE_ONE"):
        filled(1).preview(Gaussian(5.0), 1, DELTA, neighboring_relation=Relation.REPLACE_ONE)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, math.nan, None])
def test_refuses_bad_deltas(delta):
    ledger = filled(1)
    for ask in (
        lambda: ledger.epsilon(delta),
        lambda: ledger.preview(EVENT, 1, delta, law=LAW),
        lambda: ledger.remaining(EVENT, 1.0, delta, law=LAW),
        lambda: ledger.statement(delta),
    ):
        with pytest.raises(ValueError, match=r"delta=.*: give a number in \(0, 1\)"):
            ask()


def test_refuses_unknown_accountants():
    for ask in (
        lambda: PrivacyLedger().epsilon(DELTA, "moments"),
        lambda: PrivacyLedger().delta(1.0, "moments"),
        lambda: filled(1).preview(EVENT, 1, DELTA, "moments", law=LAW),
        lambda: filled(1).remaining(EVENT, 1.0, DELTA, "moments", law=LAW),
        lambda: filled(1).statement(DELTA, "moments"),
    ):
        with pytest.raises(ValueError, match="accountant='moments': give one of"):
            ask()


# Warning


def test_a_large_delta_warns_once():
    ledger = filled(1)
    with pytest.warns(PrivacyWarning, match="not below 1/60000"):
        ledger.epsilon(1 / 60000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger.epsilon(1 / 60000)
        ledger.epsilon(0.99 / 60000)
    with pytest.warns(PrivacyWarning, match="not below 1/60000"):
        ledger.epsilon(1e-3)


def test_a_declared_law_warns_once():
    law = PoissonSampling(60000, 600, declared=True)
    ledger = filled(1, law)
    with pytest.warns(PrivacyWarning, match="declared by the user"):
        ledger.epsilon(DELTA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger.epsilon(DELTA)
        ledger.delta(1.0)
        assert "declared by the user" in ledger.statement(DELTA)


def test_a_warning_made_an_error_is_raised_every_time():
    ledger = filled(1, PoissonSampling(60000, 600, declared=True))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(PrivacyWarning, match="declared by the user"):
                ledger.epsilon(DELTA)


# Planning ahead


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_remaining_is_the_last_count_that_fits(accountant):
    ledger = filled(50, sigma=2.0)
    ledger.add(Gaussian(20.0))
    target = 1.2
    event = LAW.event(2.0)
    n = ledger.remaining(event, target, DELTA, accountant, law=LAW)
    assert n > 0
    assert ledger.preview(event, n, DELTA, accountant, law=LAW) <= target
    assert ledger.preview(event, n + 1, DELTA, accountant, law=LAW) > target
    assert ledger.steps == 51


def test_remaining_at_the_ends():
    assert filled().remaining(EVENT, 0.5, DELTA, law=LAW) == 0  # spent already
    assert PrivacyLedger().remaining(dp_accounting.NonPrivateDpEvent(), 9.0, DELTA) == 0
    assert filled(1).remaining(dp_accounting.NoOpDpEvent(), 9.0, DELTA) == 2**53
    fresh = PrivacyLedger().remaining(EVENT, 3.0, DELTA, law=LAW)
    assert fresh == accounting.max_steps(0.9, 0.01, 3.0, DELTA)
    law = FixedSizeSampling(60000, 600)  # an empty ledger takes the relation of the event
    assert PrivacyLedger().remaining(law.event(4.0), 3.0, DELTA, law=law) > 0
    with pytest.raises(ValueError, match="target_epsilon"):
        filled(1).remaining(EVENT, -1.0, DELTA, law=LAW)


# Merging


def test_merging_checkpoints_of_one_run_never_loses_or_doubles():
    run = filled(100)
    checkpoint = PrivacyLedger.from_json(run.to_json())
    run.add(EVENT, 50, law=LAW)  # the run goes on to 150 and crashes
    resumed = PrivacyLedger.from_json(checkpoint.to_json())
    resumed.add(EVENT, 40, law=LAW)  # 40 more releases, other than the 50 lost ones
    assert [entry.count for entry in resumed.entries] == [100, 40]

    for first, second in ((run, resumed), (resumed, run), (checkpoint, run)):
        merged = copy.copy(first)
        merged.merge(second)
        merged.merge(second)
        merged.merge(checkpoint)
        merged.merge(merged)
        assert merged.steps == (150 if first is checkpoint else 190)


def test_merging_separate_runs_adds_them_up():
    first, second = filled(10), filled(20)
    first.merge(second)
    assert first.steps == 30
    assert first.epsilon(DELTA) == filled(30).epsilon(DELTA)
    first.add(EVENT, law=LAW)  # into an entry of its own, the others may go on elsewhere
    assert [entry.count for entry in first.entries] == [10, 20, 1]


@pytest.mark.parametrize("pairs", ["ab bc", "bc ab", "ab cb", "cb ab", "ab cd bd", "ab cd ca"])
def test_united_ledgers_are_one_with_all_that_either_was_united_with(pairs):
    ledgers = {name: filled(10 ** "abcd".index(name)) for name in sorted(set(pairs) - {" "})}
    total = sum(ledger.steps for ledger in ledgers.values())
    for first, second in pairs.split():
        ledgers[first].unite(ledgers[second])
    everyone = list(ledgers.values())
    for ledger in everyone:
        assert ledger.steps == total
        assert all(ledger.is_one_with(other) for other in everyone)
        assert not ledger.is_one_with(PrivacyLedger())
    for ledger in everyone:  # whoever adds, adds for all
        ledger.add(EVENT, law=LAW)
    everyone[-1].mark_odometer("a result")
    assert {ledger.steps for ledger in everyone} == {total + len(everyone)}
    assert {ledger.odometer_reasons for ledger in everyone} == {("a result",)}
    apart = copy.deepcopy(everyone[0])
    assert not apart.is_one_with(everyone[0])
    assert apart.steps == everyone[0].steps
    everyone[0].unite(everyone[1])  # once more changes nothing
    assert everyone[0].steps == total + len(everyone)


def test_nothing_added_while_ledgers_are_united_is_lost():
    ledgers = [PrivacyLedger() for _ in range(8)]

    def work(i):
        for k in range(50):
            ledgers[i].add(EVENT, law=LAW)
            if k % 10 == i % 10:
                ledgers[i].unite(ledgers[(i + 1) % 8])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {ledger.steps for ledger in ledgers} == {400}


def test_merging_refuses_altered_entries_and_changes_nothing():
    ledger = filled(10)
    config = json.loads(ledger.to_json())["ledger"]["entries"][0]
    config["event"]["event"]["noise_multiplier"] = 5.0
    other = PrivacyLedger()
    entry = accounting.LedgerEntry.from_config(config)
    other._history.entries[entry.id] = entry
    other.add(EVENT, law=LAW)
    with pytest.raises(ValueError, match="stands for different releases"):
        ledger.merge(other)
    assert ledger.steps == 10
    with pytest.raises(ValueError, match="other=.*: give a PrivacyLedger"):
        ledger.merge("ledger.json")


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_begin_entries_of_their_own(duplicate):
    ledger = filled(10)
    twin = duplicate(ledger)
    twin.add(EVENT, 5, law=LAW)
    ledger.add(EVENT, 7, law=LAW)
    twin.merge(ledger)
    assert twin.steps == 22


# The data set


@pytest.mark.parametrize("size", [60001, 6000])
def test_ledgers_of_another_number_of_records_do_not_merge(size):
    ledger, other = filled(10), filled(5, PoissonSampling(size, 600))
    with pytest.raises(ValueError, match=f"number of records is 60000, that of.*{size}.*same_data"):
        ledger.merge(other)
    assert ledger.steps == 10
    ledger.merge(other, same_data=True)
    assert ledger.steps == 15
    ledger.merge(filled(2, PoissonSampling(size, 60)))  # was said to be the same
    assert ledger.steps == 17
    ledger.merge(filled(2, FixedSizeSampling(60000, 30)))  # another q, another law
    assert ledger.steps == 19


def test_ledgers_of_other_names_do_not_merge():
    def named(name, count=10):
        ledger = PrivacyLedger(dataset=name)
        ledger.add(EVENT, count, law=LAW)
        return ledger

    census, survey, unnamed = named("census"), named("survey"), filled(3)
    with pytest.raises(ValueError, match="data set is 'census', that of the other ledger 'survey'"):
        census.merge(survey)
    census.merge(named("census"))
    census.merge(unnamed)
    assert census.steps == 23
    unnamed.merge(survey)  # nothing was said of the first three
    assert [entry.dataset for entry in unnamed.entries] == [None, "survey"]
    assert unnamed.dataset == "survey"
    census.merge(survey, same_data=True)
    restored = PrivacyLedger.from_json(census.to_json())
    assert restored.entries == census.entries
    assert {entry.dataset for entry in restored.entries} == {"census", "survey", None}
    assert "'census', 'survey'; 60000 records" in " ".join(census.statement(DELTA).split())
    for bad in ("", 7):
        with pytest.raises(ValueError, match="dataset=.*: give a name"):
            PrivacyLedger(dataset=bad)


# Budgets, and what is an odometer reading

BUDGET = RenyiFilter(8.0, 3.0, DELTA, Relation.ADD_OR_REMOVE_ONE)


def budgeted(target=3.0, event=EVENT, law=LAW):
    ledger = PrivacyLedger()
    budget = ledger.budget_for(event, target, DELTA, law=law)
    ledger.begin_budget(budget)
    return ledger, budget


@pytest.mark.parametrize("sigma", [0.7, 0.9, 3.0])
@pytest.mark.parametrize("target", [0.3, 3.0, 12.0])
def test_a_filter_for_one_event_stops_where_the_best_order_stops(sigma, target):
    event = LAW.event(sigma)
    ledger, budget = budgeted(target, event)
    n = ledger.remaining(event, target, DELTA, law=LAW)
    assert ledger.remaining_under(budget, event) == n
    # Also where the budget is what these releases cost, to the last bit.
    exact = filled(40, sigma=sigma).epsilon(DELTA)
    ledger, budget = budgeted(exact, event)
    assert ledger.remaining_under(budget, event) == 40
    for left in range(39, -1, -1):
        ledger.add(event, law=LAW)
        assert ledger.remaining_under(budget, event) == left
    assert ledger.budgets[0].outside == 0
    ledger.add(event, law=LAW)
    assert ledger.budgets[0].outside == 1
    assert ledger.remaining_under(budget, event) == 0


def test_a_budget_bounds_what_an_adaptive_strategy_spends():
    """Noise chosen by what is left: the best order of the sum moves, the filter's does not."""
    rng = np.random.default_rng(0)
    ledger, budget = budgeted(2.0)
    events = [LAW.event(sigma) for sigma in (0.6, 0.9, 2.0, 8.0)]
    for _ in range(200):
        event = events[rng.integers(4)]
        count = min(ledger.remaining_under(budget, event), int(rng.integers(1, 400)))
        if count:
            ledger.add(event, count, law=LAW)
    assert ledger.budgets == (LedgerBudget(budget, 0),)
    assert 1.5 < ledger.epsilon(DELTA) <= 2.0
    text = " ".join(ledger.statement(DELTA).split())
    assert "odometer reading" in text
    assert "epsilon = 2 at delta = 1e-06 is guaranteed" in text


def test_a_running_budget_goes_on_after_loading_and_merging():
    ledger, budget = budgeted()
    ledger.add(EVENT, 100, law=LAW)
    restored = PrivacyLedger.from_json(ledger.to_json())
    assert restored.budgets == ledger.budgets
    fresh = PrivacyLedger()
    fresh.merge(restored)
    # Another sigma would suit another order; the running one stays.
    assert fresh.budget_for(LAW.event(8.0), 3.0, DELTA, law=LAW) == budget
    assert fresh.budget_for(LAW.event(8.0), 2.0, DELTA, law=LAW) != budget
    fresh.add(EVENT, 10, law=LAW)
    fresh.merge(ledger)
    ledger.merge(fresh)
    assert fresh.budgets == ledger.budgets == (LedgerBudget(budget, 0),)
    # Two branches of one checkpoint, each within the budget, know nothing of each other.
    ledger.add(EVENT, 7, law=LAW)
    restored.add(EVENT, 5, law=LAW)
    ledger.merge(restored)
    assert ledger.budgets[0].outside == 5
    # Nor does a run that was held to no budget.
    fresh.merge(filled(3))
    assert fresh.budgets[0].outside == 3


def test_a_ledger_beyond_its_budget_is_saved_whatever_integers_counted():
    ledger, _ = budgeted(0.1)
    ledger.add(EVENT, np.int64(10**6), law=LAW)
    assert PrivacyLedger.from_json(ledger.to_json()).budgets == ledger.budgets


def test_a_budget_speaks_for_nothing_before_it_or_beside_it():
    ledger = filled(10)
    ledger.begin_budget(BUDGET)
    ledger.begin_budget(BUDGET)
    assert ledger.budgets == (LedgerBudget(BUDGET, 10),)
    assert "is NO guarantee for all that is recorded: 10 releases" in " ".join(
        ledger.statement(DELTA).split()
    )
    ledger, _ = budgeted()
    ledger.add(dp_accounting.NonPrivateDpEvent())
    ledger.begin_budget(BUDGET)  # raised, having seen results
    assert [budget.outside for budget in ledger.budgets] == [1, 1]
    with pytest.raises(ValueError, match="no budget below 0.00575"):
        budgeted(1e-3)
    with pytest.raises(ValueError, match="target_epsilon=.*: give"):
        budgeted(-1.0)


def test_what_the_ledger_knows_to_be_an_odometer_reading():
    ledger = filled(10)
    assert ledger.odometer_reasons == ()
    assert "odometer" not in repr(ledger)
    assert "provided that noise, sampling and the number of steps" in ledger_text(ledger)
    ledger.add(LAW.event(1.5), 5, law=LAW)  # somebody looked, or had planned to
    assert "(2 settings)" in ledger.odometer_reasons[0]
    assert repr(ledger).endswith("odometer reading>")
    assert "not by itself a guarantee" in ledger_text(ledger)
    ledger.declare_plan("10 steps at 0.9, then 5 at 1.5")
    assert ledger.odometer_reasons == ()
    assert "declared by the user: 10 steps at 0.9" in ledger_text(ledger)
    ledger.mark_odometer("stopped by a validation metric")
    ledger.mark_odometer("stopped by a validation metric")
    restored = PrivacyLedger.from_json(ledger.to_json())
    assert restored.odometer_reasons == ("stopped by a validation metric",)
    assert restored.plan == ledger.plan
    fresh = PrivacyLedger()
    fresh.merge(restored)
    assert fresh.odometer_reasons == restored.odometer_reasons
    assert fresh.plan == ledger.plan
    fresh.merge(filled(1))  # which the plan did not speak of
    assert fresh.plan is None
    assert len(fresh.odometer_reasons) == 2
    adaptive = filled(1, origin="AGD", adaptive=True)
    assert adaptive.odometer_reasons == ("AGD chose its noise by earlier outcomes",)
    for bad in ("", None):
        with pytest.raises(ValueError, match="reason=.*: give"):
            ledger.mark_odometer(bad)
        with pytest.raises(ValueError, match="plan=.*: give"):
            ledger.declare_plan(bad)


def ledger_text(ledger):
    return " ".join(ledger.statement(DELTA).split())


def test_files_of_the_first_version_are_read():
    ledger = filled(10, origin="DPSGD")
    (entry,) = json.loads(ledger.to_json())["ledger"]["entries"]
    del entry["adaptive"], entry["dataset"]
    content = {"history_lost": ["gone"], "entries": [entry]}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    document = {
        "format": "tf_adadp.PrivacyLedger",
        "version": 1,
        "sha256": hashlib.sha256(canonical.encode()).hexdigest(),
        "ledger": content,
    }
    restored = PrivacyLedger.from_json(json.dumps(document))
    assert restored.entries == ledger.entries
    assert restored.unknown_reasons == ("gone",)
    restored.merge(ledger)
    assert restored.steps == 10


# Storing


def assorted():
    ledger = PrivacyLedger()
    ledger.add(Gaussian(16.0), origin="DPPCA")
    ledger.add(EVENT, 30, law=LAW, origin="ADADP", reproducible_noise=True)
    ledger.add(EVENT, 2, law=PoissonSampling(60000, 600, declared=True))
    ledger.add(
        dp_accounting.ComposedDpEvent([EVENT, dp_accounting.SelfComposedDpEvent(Gaussian(9.0), 3)])
    )
    return ledger


def test_file_round_trip(tmp_path):
    ledger, path = assorted(), tmp_path / "ledger.json"
    ledger.save(path)
    restored = PrivacyLedger.load(str(path))
    assert restored.entries == ledger.entries
    assert restored.to_json() == ledger.to_json() == path.read_text(encoding="utf-8")
    with pytest.warns(PrivacyWarning):
        assert restored.epsilon(DELTA) == ledger.epsilon(DELTA)
    restored.save(path)  # replaces, and leaves no temporary file behind
    assert os.listdir(tmp_path) == ["ledger.json"]
    assert '"expected_size": 600' in path.read_text()


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    ledger = filled(1)
    ledger.save(path)
    old = path.read_text()
    ledger.add(EVENT, law=LAW)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        ledger.save(path)
    assert path.read_text() == old
    assert os.listdir(tmp_path) == ["ledger.json"]


def edit(**changes):
    def apply(text):
        return json.dumps({**json.loads(text), **changes})

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "truncated or no JSON"),
        (lambda text: "", "truncated or no JSON"),
        (lambda text: text.replace('"count": 30', '"count": 3'), "edited or damaged"),
        (lambda text: text.replace("16.0", "61.0"), "edited or damaged"),
        (lambda text: text.replace("16.0", "NaN"), "not finite"),
        (edit(version=3), "version is 3.*reads versions 1 to 2"),
        (edit(format="other"), "format"),
        (edit(ledger={"entries": []}), "incomplete"),
        (edit(ledger={**EMPTY, "entries": {}}), "malformed"),
        (edit(ledger={**EMPTY, "not_covered": "all"}), "malformed"),
        (lambda text: "[]", "format"),
        (lambda text: b"\xff\xfe\x00", "not a usable privacy ledger"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, message):
    path = tmp_path / "ledger.json"
    assorted().save(path)
    damaged = damage(path.read_text())
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    with pytest.raises(ValueError, match=message) as caught:
        PrivacyLedger.load(path)
    assert "ledger.json" in str(caught.value)


def test_a_file_with_a_right_checksum_is_still_checked():
    from tf_adadp.accounting.files.document import format_document

    good = assorted().entries[0].to_config()
    for bad in (
        {**good, "count": -5},
        {**good, "surplus": 1},
        {**good, "event": {"type": "Surprise"}},
        {**good, "neighboring_relation": ["REPLACE_ONE"]},
        "entry",
    ):
        with pytest.raises(ValueError, match="give|wrong|unknown"):
            PrivacyLedger.from_json(format_document({**EMPTY, "entries": [bad]}))
    with pytest.raises(ValueError, match="occurs twice"):
        PrivacyLedger.from_json(format_document({**EMPTY, "entries": [good, good]}))
    budget = {"filter": {"order": 8.0, "epsilon": 3.0, "delta": 1e-5}, "outside": 0}
    relation = {"neighboring_relation": "ADD_OR_REMOVE_ONE"}
    sound = {**budget, "filter": {**budget["filter"], **relation}}
    assert PrivacyLedger.from_json(format_document({**EMPTY, "budgets": [sound]})).budgets
    for wrong in (
        {"budgets": [budget]},
        {"budgets": ["budget"]},
        {"budgets": [{**sound, "outside": -1}]},
        {"budgets": [{"filter": {**sound["filter"], "order": 7.77}, "outside": 0}]},
        {"dataset": 3},
        {"plan": ""},
        {"readings": [None]},
        {"history_lost": [""]},
    ):
        with pytest.raises(ValueError, match="give|wrong"):
            PrivacyLedger.from_json(format_document({**EMPTY, **wrong}))


def test_missing_files_are_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        PrivacyLedger.load(tmp_path / "nothing.json")


# The statement


def test_statement_says_what_an_officer_needs():
    ledger = assorted()
    with pytest.warns(PrivacyWarning):
        text = ledger.statement(DELTA)
    flat = " ".join(text.split())
    for phrase in (
        f"epsilon = {ledger.epsilon(DELTA):.6g} at delta = 1e-06",
        "one record of the training data",
        "adding or removing one record",
        "Poisson sampling: each of 60000 records",
        "declared by the user",
        "RdpAccountant",
        "Releases: 34",
        "by DPPCA",
        "30 releases drew reproducible noise",
        "training metrics",
        "validation",
        "choose a model or end the training",
        "hyper-parameter search",
    ):
        assert phrase in flat
    assert max(map(len, text.splitlines())) <= 88
    assert "reproducible" not in filled(1).statement(DELTA)
    assert "nothing was released" in PrivacyLedger().statement(DELTA)


# Calibrating what is still to come


@pytest.mark.parametrize("accountant", ["rdp", "pld", "wang_theorem27"])
def test_calibration_counts_what_is_recorded(accountant):
    ledger = filled(200, sigma=4.0)
    ledger.add(Gaussian(9.0))
    law = PoissonSampling(60000, 6000)
    sigma = ledger.calibrate_noise_multiplier(1.5, DELTA, law, 100, accountant)
    before = ledger.steps
    reached = ledger.preview(law.event(sigma), 100, DELTA, accountant, law=law)
    assert 0.999 * 1.5 <= reached <= 1.5
    assert ledger.steps == before


def test_calibration_of_an_empty_ledger_is_the_functions():
    sigma = PrivacyLedger().calibrate_noise_multiplier(2.0, DELTA, LAW, 1000)
    assert sigma == accounting.calibrate_noise_multiplier(2.0, DELTA, 0.01, 1000)


def test_calibration_for_fixed_size_lots():
    law = FixedSizeSampling(60000, 600)
    sigma = PrivacyLedger().calibrate_noise_multiplier(2.0, DELTA, law, 1000)
    ledger = filled(1000, law, sigma)
    assert 0.999 * 2 <= ledger.epsilon(DELTA) <= 2
    # Neighbours differ by a replacement: twice the noise, and the looser bound.
    assert sigma > 2 * accounting.calibrate_noise_multiplier(2.0, DELTA, 0.01, 1000)


def test_calibration_refuses():
    ledger = filled(1800)
    with pytest.raises(ValueError, match="target_epsilon=1.0 is spent"):
        ledger.calibrate_noise_multiplier(1.0, DELTA, LAW, 10)
    with pytest.raises(ValueError, match="different neighbouring relations"):
        ledger.calibrate_noise_multiplier(9.0, DELTA, FixedSizeSampling(60000, 600), 10)
    with pytest.raises(ValueError, match="law=.*: give a sampling law"):
        ledger.calibrate_noise_multiplier(9.0, DELTA, 0.01, 10)
    with pytest.raises(ValueError, match="the sampling of the batches is unknown"):
        ledger.calibrate_noise_multiplier(9.0, DELTA, UnknownSampling("a test"), 10)
    ledger.mark_unknown("a test")
    with pytest.raises(ValueError, match="history of releases is incomplete"):
        ledger.calibrate_noise_multiplier(9.0, DELTA, LAW, 10)
