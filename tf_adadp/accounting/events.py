"""`dp_accounting` events: checking them, walking through them and writing them as JSON.

`dp_accounting` builds events without checking their numbers, and a NaN would later give
ε = 0. So every event of a ledger passes `encode_event`, which checks its class and the
range of every field; nothing else is written to, or built from, a file.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dp_accounting
from dp_accounting import dp_event

from tf_adadp.utils.checks import check_instance, check_integer, check_number


def _number(name: str, value: Any) -> float:
    return check_number(name, value, at_least=0)


def _probability(name: str, value: Any) -> float:
    return check_number(name, value, at_least=0, at_most=1)


def _positive(name: str, value: Any) -> int:
    return check_integer(name, value, at_least=1)


def _mean(name: str, value: Any) -> float:
    return check_number(name, value, at_least=1)


_SCALAR_FIELDS: dict[str, dict[str, Callable[[str, Any], float | int]]] = {
    "NoOpDpEvent": {},
    "NonPrivateDpEvent": {},
    "UnsupportedDpEvent": {},
    "GaussianDpEvent": {"noise_multiplier": _number},
    "LaplaceDpEvent": {"noise_multiplier": _number},
    "ZCDpEvent": {"rho": _number, "xi": _number},
    "SelfComposedDpEvent": {"count": _positive},
    "ComposedDpEvent": {},
    "PoissonSampledDpEvent": {"sampling_probability": _probability},
    "SampledWithoutReplacementDpEvent": {
        "source_dataset_size": _positive,
        "sample_size": _positive,
    },
    "TruncatedSubsampledGaussianDpEvent": {
        "dataset_size": _positive,
        "sampling_probability": _probability,
        "truncated_batch_size": _positive,
        "noise_multiplier": _number,
    },
    "RepeatAndSelectDpEvent": {"mean": _mean, "shape": _number},
}
_ONE_INNER_EVENT = {
    "RepeatAndSelectDpEvent",
    "SelfComposedDpEvent",
    "PoissonSampledDpEvent",
    "SampledWithoutReplacementDpEvent",
}
_SAMPLING = {
    "PoissonSampledDpEvent",
    "SampledWithoutReplacementDpEvent",
    "TruncatedSubsampledGaussianDpEvent",
}
_KNOWN = ", ".join(_SCALAR_FIELDS)


def encode_event(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """Returns `event` as a JSON-able dict, every number checked.

    Raises:
      ValueError: `event` is not a DpEvent of a class this package knows, or one of its fields is
        out of range (NaN and infinities included); the message names class and field.

    Example:
        >>> accounting.encode_event(accounting.FixedSizeSampling(100, 10).event(2.0))
        {'type': 'SampledWithoutReplacementDpEvent', 'source_dataset_size': 100, 'sample_size': 10,
        'event': {'type': 'GaussianDpEvent', 'noise_multiplier': 1.0}}
    """
    name = type(event).__name__
    if name not in _SCALAR_FIELDS or type(event) is not getattr(dp_event, name, None):
        raise ValueError(f"event={event!r}: give a dp_accounting event of class {_KNOWN}.")
    encoded: dict[str, Any] = {"type": name}
    for field, check in _SCALAR_FIELDS[name].items():
        encoded[field] = check(f"{name}.{field}", getattr(event, field))
    if encoded.get("sample_size", 1) > encoded.get("source_dataset_size", 1):
        raise ValueError(f"event={event!r}: give a sample_size of at most source_dataset_size.")
    if name in _ONE_INNER_EVENT:
        encoded["event"] = encode_event(event.event)
    elif name == "ComposedDpEvent":
        encoded["events"] = [encode_event(part) for part in event.events]
    return encoded


def decode_event(config: Mapping[str, Any]) -> dp_accounting.DpEvent:
    """Builds the event that `encode_event` wrote.

    Raises:
      ValueError: unknown class (or one this version of dp_accounting lacks), missing, surplus or
        out-of-range fields.

    Example:
        >>> event = accounting.PoissonSampling(60000, 600).event(1.1)
        >>> accounting.decode_event(accounting.encode_event(event)) == event
        True
    """
    check_instance("event", config, Mapping, "a mapping", wrong_type=ValueError)
    fields = dict(config)
    name = fields.pop("type", None)
    if not isinstance(name, str) or name not in _SCALAR_FIELDS:
        raise ValueError(f"unknown event type {name!r}; known are {_KNOWN}.")
    cls = getattr(dp_event, name, None)
    if cls is None:
        raise ValueError(f"the installed dp_accounting has no {name}; install a newer one.")
    if name in _ONE_INNER_EVENT:
        fields["event"] = decode_event(fields.get("event"))
    elif name == "ComposedDpEvent":
        check_instance(
            f"{name}.events", fields.get("events"), list, "a list", wrong_type=ValueError
        )
        fields["events"] = [decode_event(part) for part in fields["events"]]
    try:
        event = cls(**fields)
    except TypeError as error:
        raise ValueError(f"{name} has wrong fields: {error}.") from error
    encode_event(event)  # the range checks
    return event


def event_key(event: dp_accounting.DpEvent) -> str:
    """Returns a canonical string: equal exactly for equal events, usable as a cache key."""
    return json.dumps(encode_event(event), sort_keys=True, separators=(",", ":"), allow_nan=False)


def event_from_key(key: str) -> dp_accounting.DpEvent:
    """Builds the event of a key; the inverse of `event_key`."""
    return decode_event(json.loads(key))


def walk(event: dp_accounting.DpEvent) -> Iterator[dp_accounting.DpEvent]:
    """Yields `event` and every event inside it, outermost first."""
    yield event
    for inner in getattr(event, "events", None) or [getattr(event, "event", None)]:
        if inner is not None:
            yield from walk(inner)


def sampling_parts(event: dp_accounting.DpEvent) -> list[dp_accounting.DpEvent]:
    """Returns the parts of `event` that describe how records were sampled."""
    return [part for part in walk(event) if type(part).__name__ in _SAMPLING]


def is_non_private(event: dp_accounting.DpEvent) -> bool:
    """Tells whether `event` releases anything without privacy, so that ε = ∞."""
    return any(
        isinstance(part, dp_accounting.NonPrivateDpEvent)
        or getattr(part, "noise_multiplier", None) == 0
        for part in walk(event)
    )
