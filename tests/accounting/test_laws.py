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
    UnknownSampling,
)

Gaussian = dp_accounting.GaussianDpEvent
Relation = dp_accounting.NeighboringRelation
LAWS = [
    PoissonSampling(60000, 600),
    PoissonSampling(60000, 600.5, declared=True),
    FixedSizeSampling(60000, 600),
    FixedSizeSampling(60000, 60000, declared=True),
    UnknownSampling("a tf.data.Dataset was given"),
]


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
    with pytest.raises(ValueError, match="noise_multiplier must be a finite number ≥ 0"):
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
        ({"law": "Shuffled"}, "unknown sampling law 'Shuffled'"),
        ({}, "unknown sampling law None"),
        ({"law": ["PoissonSampling"]}, "unknown sampling law"),
        ({"law": "PoissonSampling", "num_examples": 5}, "wrong fields"),
        ({"law": "PoissonSampling", "num_examples": 5, "expected_size": 6}, "expected_size"),
        ("PoissonSampling", "must be a mapping"),
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
        (lambda: PoissonSampling(10, 11), "at most num_examples = 10, got 11"),
        (lambda: PoissonSampling(10, math.nan), "expected_size"),
        (lambda: PoissonSampling(10, 5, declared=1), "declared"),
        (lambda: FixedSizeSampling(-3, 1), "num_examples"),
        (lambda: FixedSizeSampling(10, 0), "size"),
        (lambda: FixedSizeSampling(10, 11), "size must be an integer from 1 to num_examples = 10"),
        (lambda: FixedSizeSampling(10, 2.0), "size"),
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
