"""The JSON form of dp_accounting events."""

import json
import math

import dp_accounting
import numpy as np
import pytest

from tf_adadp.accounting import decode_event, encode_event
from tf_adadp.accounting.events import event_from_key, event_key, is_non_private, sampling_parts

GAUSSIAN = dp_accounting.GaussianDpEvent(0.1 + 0.2)  # needs all 17 digits
POISSON = dp_accounting.PoissonSampledDpEvent(1 / 3, GAUSSIAN)
FIXED = dp_accounting.SampledWithoutReplacementDpEvent(10, 3, GAUSSIAN)
EVENTS = [
    dp_accounting.NoOpDpEvent(),
    dp_accounting.NonPrivateDpEvent(),
    dp_accounting.UnsupportedDpEvent(),
    GAUSSIAN,
    dp_accounting.LaplaceDpEvent(2.0),
    POISSON,
    FIXED,
    dp_accounting.SelfComposedDpEvent(POISSON, 7),
    dp_accounting.ComposedDpEvent([POISSON, dp_accounting.SelfComposedDpEvent(GAUSSIAN, 2)]),
    dp_accounting.ComposedDpEvent([]),
]
if hasattr(dp_accounting, "ZCDpEvent"):
    EVENTS += [
        dp_accounting.ZCDpEvent(0.5),
        dp_accounting.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 1.5),
    ]


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_round_trip_through_json(event):
    restored = decode_event(json.loads(json.dumps(encode_event(event), allow_nan=False)))
    assert restored == event
    assert type(restored) is type(event)
    assert event_from_key(event_key(event)) == event


def test_keys_tell_events_apart_and_join_equal_ones():
    assert len({event_key(event) for event in EVENTS}) == len(EVENTS)
    assert event_key(dp_accounting.GaussianDpEvent(2)) == event_key(
        dp_accounting.GaussianDpEvent(np.float64(2.0))
    )


@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.GaussianDpEvent(math.nan),  # dp_accounting itself would answer ε = 0
        dp_accounting.GaussianDpEvent(math.inf),
        dp_accounting.GaussianDpEvent(-1.0),
        dp_accounting.GaussianDpEvent("1"),
        dp_accounting.PoissonSampledDpEvent(1.5, GAUSSIAN),
        dp_accounting.PoissonSampledDpEvent(0.5, None),
        dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(math.nan)),
        dp_accounting.SampledWithoutReplacementDpEvent(3, 4, GAUSSIAN),
        dp_accounting.SelfComposedDpEvent(GAUSSIAN, 0),
        dp_accounting.SelfComposedDpEvent(GAUSSIAN, -3),
        dp_accounting.ComposedDpEvent([GAUSSIAN, 3]),
        dp_accounting.SingleEpochTreeAggregationDpEvent(1.0, 3),
        dp_accounting.DpEvent(),
        "GaussianDpEvent",
        None,
    ],
    ids=str,
)
def test_refuses_to_encode(event):
    with pytest.raises(ValueError, match="=.*: give "):
        encode_event(event)


def test_refuses_foreign_classes_with_a_known_name():
    class GaussianDpEvent(dp_accounting.DpEvent):
        noise_multiplier = 1.0

    with pytest.raises(ValueError, match="event=.*: give a dp_accounting event"):
        encode_event(GaussianDpEvent())


@pytest.mark.parametrize(
    "config",
    [
        {"type": "DpEvent"},
        {"type": "os.system"},
        {"type": ["GaussianDpEvent"]},
        {},
        [],
        {"type": "GaussianDpEvent"},
        {"type": "GaussianDpEvent", "noise_multiplier": 1.0, "surplus": 1},
        {"type": "GaussianDpEvent", "noise_multiplier": -1.0},
        {"type": "GaussianDpEvent", "noise_multiplier": {"type": "NoOpDpEvent"}},
        {"type": "PoissonSampledDpEvent", "sampling_probability": 0.5},
        {"type": "ComposedDpEvent", "events": {"type": "NoOpDpEvent"}},
    ],
    ids=str,
)
def test_refuses_to_decode(config):
    with pytest.raises(ValueError, match="event|Event"):
        decode_event(config)


def test_non_private_parts_are_found_wherever_they_are():
    hidden = dp_accounting.ComposedDpEvent(
        [GAUSSIAN, dp_accounting.SelfComposedDpEvent(dp_accounting.NonPrivateDpEvent(), 2)]
    )
    assert is_non_private(hidden)
    assert is_non_private(
        dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(0))
    )
    assert not any(is_non_private(event) for event in EVENTS if event != EVENTS[1])


def test_sampling_parts():
    assert sampling_parts(dp_accounting.ComposedDpEvent([POISSON, GAUSSIAN, FIXED])) == [
        POISSON,
        FIXED,
    ]
