"""Sampling laws: the event of a step, validation, configuration."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest

from tf_adadp.accounting import (
    FixedSizeSampling,
    PoissonSampling,
    SamplingLaw,
    ShuffledSampling,
    TruncatedPoissonSampling,
    UnknownSampling,
    UserSampling,
)

Gaussian = dp_accounting.GaussianDpEvent
Relation = dp_accounting.NeighboringRelation
LAWS = [
    PoissonSampling(60000, 600),
    PoissonSampling(60000, 600.5, declared=True),
    FixedSizeSampling(60000, 600),
    FixedSizeSampling(60000, 60000, declared=True),
    TruncatedPoissonSampling(60000, 600.5, 700),
    ShuffledSampling(60000, 600),
    UserSampling(5000, 50, 4, 120.5, declared=True),
    UnknownSampling("a tf.data.Dataset was given"),
]
NoOp = dp_accounting.NoOpDpEvent()


def test_poisson_events():
    law = PoissonSampling(60000, 600)
    assert law.probability == 0.01
    assert law.neighboring_relation is Relation.ADD_OR_REMOVE_ONE
    assert law.event(4.0) == dp_accounting.PoissonSampledDpEvent(0.01, Gaussian(4.0))
    # One record may turn one microbatch's vector into any other: sensitivity 2C.
    assert law.event(4.0, microbatched=True) == dp_accounting.PoissonSampledDpEvent(
        0.01, Gaussian(2.0)
    )
    full = PoissonSampling(600, 600)
    assert full.event(4.0) == Gaussian(4.0)
    assert full.event(4.0, microbatched=True) == Gaussian(2.0)
    assert full.describe() == "full batches: every lot holds all 600 records"


def test_truncated_events():
    law = TruncatedPoissonSampling(60000, 600, 700)
    assert law.neighboring_relation is Relation.ADD_OR_REMOVE_ONE
    assert (law.expected_lot_size, law.max_lot_size) == (600, 700)
    truncated = dp_accounting.TruncatedSubsampledGaussianDpEvent
    assert law.event(4.0) == truncated(60000, 0.01, 700, 4.0)
    assert law.event(4.0, microbatched=True) == truncated(60000, 0.01, 700, 2.0)
    assert law.matches(law.event(4.0))
    for other in ((60001, 600, 700), (60000, 601, 700), (60000, 600, 701)):
        assert not law.matches(TruncatedPoissonSampling(*other).event(4.0))
    assert not law.matches(PoissonSampling(60000, 600).event(4.0))
    assert not PoissonSampling(60000, 600).matches(law.event(4.0))


def test_an_old_dp_accounting_is_named(monkeypatch):
    monkeypatch.delattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent")
    with pytest.raises(ValueError, match=r"install 0\.6 or newer"):
        TruncatedPoissonSampling(100, 10, 20).event(1.0)


def test_user_events_count_all_records_of_a_user():
    law = UserSampling(num_users=5000, expected_users=50, max_records_per_user=4, expected_size=120)
    assert law.neighboring_relation is Relation.ADD_OR_REMOVE_ONE
    assert (law.unit, law.num_units, law.num_examples) == ("user", 5000, None)
    assert (law.expected_lot_size, law.max_lot_size) == (120, None)
    assert law.event(4.0) == dp_accounting.PoissonSampledDpEvent(0.01, Gaussian(1.0))
    assert law.event(4.0, microbatched=True) == dp_accounting.PoissonSampledDpEvent(
        0.01, Gaussian(0.5)
    )
    assert law.matches(law.event(4.0))
    assert not law.matches(dp_accounting.PoissonSampledDpEvent(0.02, Gaussian(1.0)))
    everybody = UserSampling(50, 50, 4, 120)
    assert everybody.event(4.0) == Gaussian(1.0)


def test_a_pass_is_charged_whole_at_its_first_lot():
    law = ShuffledSampling(num_examples=23, size=5)
    step = law.event(4.0)
    assert step == law.event(4.0, microbatched=True) == Gaussian(2.0)
    assert (law.neighboring_relation, law.lots_per_pass) == (Relation.REPLACE_ONE, 4)
    assert law.charges(step, 1) == [(step, 1)]
    assert law.charges(step, 3, position=1) == [(NoOp, 3)]
    assert law.charges(step, 4, position=1) == [(step, 1), (NoOp, 3)]
    assert law.charges(step, 9, position=4) == [(step, 3), (NoOp, 6)]
    assert law.charges(law.event(0), 4) == [(dp_accounting.NonPrivateDpEvent(), 1), (NoOp, 3)]


@pytest.mark.parametrize("executions", [[1] * 23, [3] * 8, [7, 1, 5, 10], [23]])
def test_charges_cover_every_pass_before_its_first_lot(executions):
    law = ShuffledSampling(num_examples=23, size=5)
    step, position, passes, steps = law.event(1.0), 0, 0, 0
    for count in executions:
        charged = dict(law.charges(step, count, position))
        passes, steps = passes + charged.get(step, 0), steps + sum(charged.values())
        position += count
        assert passes == math.ceil(position / 4)
        assert steps == position


def test_affordable_steps_are_those_that_the_charges_allow():
    law = ShuffledSampling(num_examples=23, size=5)
    for events in range(4):
        for position in range(9):
            steps = law.affordable_steps(events, position)
            for more, cost in ((steps, events), (steps + 1, events + 1)):
                charged = dict(law.charges(law.event(1.0), more, position)) if more else {}
                assert charged.get(law.event(1.0), 0) == cost
    assert PoissonSampling(100, 10).affordable_steps(7, position=3) == 7


def test_independent_lots_are_charged_one_by_one():
    for law in LAWS:
        if not isinstance(law, ShuffledSampling):
            assert law.charges(law.event(2.0), 5, position=3) == [(law.event(2.0), 5)]


def test_a_pass_of_other_releases_is_refused():
    law = ShuffledSampling(100, 10)
    both = dp_accounting.ComposedDpEvent([law.event(1.0), Gaussian(3.0)])
    for event in (both, PoissonSampling(100, 10).event(1.0), dp_accounting.ZCDpEvent(0.1)):
        with pytest.raises(ValueError, match="cannot be charged once for a pass"):
            law.charges(event, 5)
    for arguments in ((0,), (1, -1), (1, 0.5), (True,)):
        with pytest.raises(ValueError, match="(steps|position)=.*: give an integer"):
            law.charges(law.event(1.0), *arguments)


def test_fixed_size_events_charge_the_replaced_record_once():
    law = FixedSizeSampling(60000, 600)
    expected = dp_accounting.SampledWithoutReplacementDpEvent(60000, 600, Gaussian(2.0))
    assert law.neighboring_relation is Relation.REPLACE_ONE
    assert law.event(4.0) == expected
    assert law.event(4.0, microbatched=True) == expected
    full = FixedSizeSampling(600, 600)
    assert full.event(4.0) == full.event(4.0, microbatched=True) == Gaussian(2.0)


def test_unknown_events():
    law = UnknownSampling("why")
    assert law.neighboring_relation is None
    assert law.num_examples is None
    assert law.declared is False
    assert law.event(4.0) == dp_accounting.UnsupportedDpEvent()


@pytest.mark.parametrize("law", LAWS)
def test_no_noise_is_not_private(law):
    assert law.event(0) == law.event(0.0, microbatched=True) == dp_accounting.NonPrivateDpEvent()


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf, None, True])
def test_refuses_bad_noise_multipliers(law, sigma):
    with pytest.raises(ValueError, match="noise_multiplier=.*: give a finite number ≥ 0"):
        law.event(sigma)


@pytest.mark.parametrize("law", LAWS)
def test_config_round_trip_through_json(law):
    config = json.loads(json.dumps(law.to_config()))
    restored = SamplingLaw.from_config(config)
    assert restored == law
    assert type(restored) is type(law)
    assert type(law).from_config(config) == law


def test_numpy_sizes_become_plain_numbers():
    law = PoissonSampling(np.int64(100), np.float32(10))
    assert json.dumps(law.to_config()) == json.dumps(PoissonSampling(100, 10).to_config())
    json.dumps(FixedSizeSampling(np.int64(100), np.int32(10)).to_config())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"law": "Cyclic"}, "unknown sampling law 'Cyclic'"),
        ({}, "unknown sampling law None"),
        ({"law": ["PoissonSampling"]}, "unknown sampling law"),
        ({"law": "PoissonSampling", "num_examples": 5}, "wrong fields"),
        ({"law": "PoissonSampling", "num_examples": 5, "expected_size": 6}, "expected_size"),
        ("PoissonSampling", "give a mapping"),
    ],
)
def test_refuses_bad_configs(config, message):
    with pytest.raises(ValueError, match=message):
        SamplingLaw.from_config(config)


def test_from_config_of_another_law():
    with pytest.raises(ValueError, match="unknown sampling law"):
        PoissonSampling.from_config(FixedSizeSampling(5, 2).to_config())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonSampling(0, 1), "num_examples"),
        (lambda: PoissonSampling(10.5, 1), "num_examples"),
        (lambda: PoissonSampling(10, 0), "expected_size"),
        (lambda: PoissonSampling(10, 11), "expected_size=11: give .* at most num_examples = 10"),
        (lambda: PoissonSampling(10, math.nan), "expected_size"),
        (lambda: PoissonSampling(10, 5, declared=1), "declared"),
        (lambda: FixedSizeSampling(-3, 1), "num_examples"),
        (lambda: FixedSizeSampling(10, 0), "size"),
        (lambda: FixedSizeSampling(10, 11), "size=.*: give an integer from 1 to num_examples = 10"),
        (lambda: FixedSizeSampling(10, 2.0), "size"),
        (lambda: TruncatedPoissonSampling(10, 0, 5), "expected_size"),
        (lambda: TruncatedPoissonSampling(10, 5, 4), "max_size=.*: give .* from expected_size = 5"),
        (lambda: TruncatedPoissonSampling(10, 5, 11), "max_size=11: give .* to num_examples = 10"),
        (lambda: TruncatedPoissonSampling(10, 5, 7.5), "max_size"),
        (lambda: ShuffledSampling(0, 1), "num_examples"),
        (lambda: ShuffledSampling(10, 11), "size=.*: give an integer from 1 to num_examples = 10"),
        (lambda: ShuffledSampling(10, 2.5), "size"),
        (lambda: UserSampling(0, 1, 1, 1), "num_users"),
        (lambda: UserSampling(10, 11, 1, 1), "expected_users=.*: give .* num_users = 10"),
        (lambda: UserSampling(10, 5, 0, 1), "max_records_per_user=0: give an integer ≥ 1"),
        (lambda: UserSampling(10, 5, 1.5, 1), "max_records_per_user"),
        (lambda: UserSampling(10, 5, 2, 11), "expected_size=11: give .* = 10"),
        (lambda: UserSampling(10, 5, 2, 0), "expected_size"),
        (lambda: UserSampling(10, 5, 2, 4, declared=None), "declared"),
        (lambda: UnknownSampling(" "), "reason"),
        (lambda: UnknownSampling(None), "reason"),
    ],
)
def test_refuses_bad_sizes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_laws_are_immutable_and_hashable():
    law = PoissonSampling(100, 10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        law.expected_size = 5
    assert len({law, PoissonSampling(100, 10), PoissonSampling(100, 10, declared=True)}) == 2


def test_descriptions_tell_who_says_so():
    assert "probability 0.01" in PoissonSampling(60000, 600).describe()
    assert "declared by the user" not in PoissonSampling(60000, 600).describe()
    assert "declared by the user" in PoissonSampling(60000, 600, declared=True).describe()
    assert "exactly 600 of 60000" in FixedSizeSampling(60000, 600).describe()
    assert "a tf.data.Dataset was given" in LAWS[-1].describe()
