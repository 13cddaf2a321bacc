"""Refuses Grain datasets whose elements are not one record each.

The unit of privacy is one element of a random-access source. A `grain.MapDataset` keeps the steps
that it was made by, so they are checked, as those of a tf.data.Dataset are. Grain is not imported.
"""

from typing import Any

# One element of each, from one element of its parent.
_ONE_TO_ONE = {
    "SourceMapDataset", "RangeMapDataset", "MapMapDataset", "MapWithIndexMapDataset",
    "ShuffleMapDataset", "SliceMapDataset", "_WithSeedMapDataset", "ZipMapDataset",
    "ConcatenateMapDataset",
}  # fmt: skip
# The others, by what to do in their place.
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


def check_grain(items: Any) -> None:
    """Refuses a `grain.MapDataset` that may hold one record in several elements.

    Raises:
        ValueError: it repeats, batches, mixes, filters or augments its records, or reads one
            source twice.
    """
    if not _is_grain(items):
        return
    sources, todo = set(), [items]
    while todo:
        node = todo.pop()
        kind = type(node).__name__
        if kind not in _ONE_TO_ONE or not type(node).__module__.startswith("grain."):
            fix = _INSTEAD.get(kind, "Make one element of each record, or pass the source itself.")
            raise ValueError(
                f"x is a grain dataset with the step {kind.removesuffix('MapDataset')}, whose "
                f"elements are not one record each, and one element is the unit of privacy. {fix}"
            )
        if not node.parents:
            source = getattr(node, "_source", node)
            if source is not node and _is_grain(source):  # its steps count as well
                todo.append(source)
                continue
            source = id(source)
            if source in sources:
                raise ValueError(
                    "x is a grain dataset that reads one source twice, so one record is in "
                    "several elements, and one element is the unit of privacy. Read it once."
                )
            sources.add(source)
        todo.extend(node.parents)


def _is_grain(items):
    kinds = type(items).__mro__
    return any(k.__name__ == "MapDataset" and k.__module__.startswith("grain.") for k in kinds)
