"""Refuses Grain datasets whose elements are not one record each.

The unit of privacy is one element of a random-access source. A `grain.MapDataset` keeps the steps
that it was made by, so they are checked, as those of a tf.data.Dataset are. Grain is not imported.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

# One element of each, from one element of its parent.
_ONE_TO_ONE = {
    "SourceMapDataset", "RangeMapDataset", "MapMapDataset", "MapWithIndexMapDataset",
    "ShuffleMapDataset", "SliceMapDataset", "_WithSeedMapDataset", "ZipMapDataset",
    "ConcatenateMapDataset",
}  # fmt: skip
# The other steps, each with advice.
_INSTEAD = {
    "RepeatMapDataset": "Leave it out: fit(epochs=...) repeats.",
    "BatchMapDataset": "Leave it out: lots are drawn of single records.",
    "FilterMapDataset": "Filter the source beforehand: what is dropped would be drawn as None.",
    "RandomMapMapDataset": (
        "Put random layers into the model, e.g. keras.layers.RandomFlip, or set "
        "augmentation_multiplicity: a record would keep the same draw for good."
    ),
    "WindowShuffleMapDataset": "Leave it out, or use shuffle(): lots are drawn at random.",
}


def check_grain(items: Any) -> list[Any]:
    """Refuses a random-access source that may hold one record in several elements.

    Only a `grain.MapDataset` and files of ArrayRecord can be looked into. Two sources that hold
    equal records in different places are the user's own duplicates, as in arrays.

    Returns:
        The sources that are read in the end, `items` itself if it is no `grain.MapDataset`.

    Raises:
        ValueError: it repeats, batches, mixes, filters or augments its records, reads one source
            twice, or has a slice of a source that changed its length since.
    """
    sources = list(_sources(items))
    alike: dict[Any, list] = {}  # parts that may overlap
    for part in (part for source in sources for part in _parts(source)):
        others = alike.setdefault(_kind(part), [])
        if any(_overlap(part, other) for other in others):
            raise ValueError(
                f"x reads one source twice ({_named(part)}), so one record is in several elements, "
                "and one element is the unit of privacy. Read it once."
            )
        others.append(part)
    return sources


def _sources(items) -> Iterator[Any]:
    """Yields the sources of a dataset, after checking its steps."""
    if not _is_grain(items):
        yield items
        return
    kind = type(items).__name__
    if kind not in _ONE_TO_ONE or not type(items).__module__.startswith("grain."):
        fix = _INSTEAD.get(kind, "Make one element of each record, or pass the source itself.")
        raise ValueError(
            f"x is a grain dataset with the step {kind.removesuffix('MapDataset')}, whose "
            f"elements are not one record each, and one element is the unit of privacy. {fix}"
        )
    sliced = getattr(items, "_parent_length", None)  # of a SliceMapDataset, when it was made
    if sliced is not None and sliced != len(items.parents[0]):
        raise ValueError(
            f"x is a grain dataset with a slice of {sliced} elements, which are "
            f"{len(items.parents[0])} by now, so one record may be in several elements. Slice "
            "again, and leave the source as it is."
        )
    for parent in items.parents:
        yield from _sources(parent)
    if not items.parents:
        source = getattr(items, "_source", items)
        yield from [source] if source is items else _sources(source)


def _parts(source):
    """Returns the stretches of files, the range, or the object that a source reads."""
    instructions = getattr(source, "_read_instructions", None)  # of ArrayRecord
    if instructions is not None:
        return [(os.path.realpath(i.filename), i.start, i.end) for i in instructions]
    if all(isinstance(getattr(source, name, None), int) for name in ("start", "stop", "step")):
        return [range(source.start, source.stop, source.step)]
    return [source]


def _kind(part):
    """Returns a file's path, the type of ranges and arrays, or an object's identity."""
    if isinstance(part, tuple):
        return part[0]
    return type(part) if isinstance(part, (range, np.ndarray)) else id(part)


def _overlap(a, b):
    """Tells whether two parts of one kind have a record in common."""
    if isinstance(a, tuple):
        return max(a[1], b[1]) < min(a[2], b[2])
    if isinstance(a, range):
        a, b = sorted((a, b), key=len)
        return any(number in b for number in a)
    return a is b or (isinstance(a, np.ndarray) and np.shares_memory(a, b))


def _named(part):
    return part[0] if isinstance(part, tuple) else type(part).__name__


def _is_grain(items):
    kinds = type(items).__mro__
    return any(k.__name__ == "MapDataset" and k.__module__.startswith("grain.") for k in kinds)
