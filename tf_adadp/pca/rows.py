"""Makes rows of records: numeric, flat, and of L2 norm below 1 for any content.

Errors raised here depend on shapes and types alone, never on values.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike

# Rows are normalised to this and not to 1, so that rounding cannot carry a release past its
# sensitivity. The margin, 2⁻¹⁹, is more than the rounding of norms (d·2⁻⁵³) and of the sum over N
# rows of products of BLOCK rows (2·N·BLOCK·2⁻⁵³): enough for two million records. It scales all
# rows alike, which no direction feels.
LENGTH = 1.0 - 2.0**-20
BLOCK = 4096  # the error terms of a block take as long as the product of some 500 rows


def row_blocks(
    x: ArrayLike | Iterable[ArrayLike], width: int | None = None
) -> Iterator[np.ndarray]:
    """Yields x as arrays [n ≤ BLOCK, d], each record flattened.

    Args:
        x: an array [N, ...], or an iterable of batches [n, ...] that is passed over once.
        width: the d that is wanted, of a fitted object; by default that of the first batch.

    Raises:
        TypeError: x is neither, or a batch is no array.
        ValueError: values are not real numbers, have no feature axis, no features, or not `width`.
    """
    wanted = None if width is None else f"{width}, as in fit"
    for name, part in _parts(x):
        matrix = _matrix(name, part)
        if wanted is None:
            width, wanted = matrix.shape[1], f"{matrix.shape[1]}, as in the first batch"
        if matrix.shape[1] != width:
            raise ValueError(f"{name} has {matrix.shape[1]} features: give {wanted}.")
        for start in range(0, len(matrix), BLOCK):
            yield matrix[start : start + BLOCK]


def raw_rows(rows: np.ndarray) -> np.ndarray:
    """Returns rows as they are, in float64."""
    return rows.astype(np.float64)


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Scales every row of [n, d] to norm LENGTH, in float64; rows without a direction become 0.

    Those are rows of zeros and rows with a NaN or an infinity. Every other row is divided by its
    largest entry first: then its square neither overflows nor vanishes.
    """
    rows = rows.astype(np.float64)
    rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    rows /= np.where(largest > 0, largest, 1.0)
    norms = np.sqrt(np.sum(rows * rows, axis=1, keepdims=True))  # at least 1, or 0
    rows *= LENGTH / np.maximum(norms, 1.0)
    return rows


def _parts(x):
    if hasattr(x, "__array__"):
        return [("x", x)]
    spec = getattr(x, "element_spec", None)
    shape = getattr(spec, "shape", None)
    if shape is not None and shape.rank != 0:
        # Unbatched images would pass for batches of their rows, at many times the sensitivity.
        # Decoded ones may have no known shape at all.
        if shape.rank is None or None in tuple(shape)[1:]:
            raise ValueError(
                f"x is a dataset with elements of shape {shape}, which may be single records of "
                "any size: give each its shape by tf.ensure_shape, then dataset.batch(256)."
            )
        if shape[0] is not None:
            raise ValueError(
                f"x is a dataset with elements of the fixed shape {shape}, which may be single "
                "records: batch it, dataset.batch(256), without drop_remainder."
            )
    try:
        batches = iter(x)
    except TypeError:
        raise TypeError(
            f"x is a {type(x).__name__}: give an array [N, ...] or an iterable of batches [n, ...]."
        ) from None
    return ((f"batch {i} of x", batch) for i, batch in enumerate(batches))


def _matrix(name, values):
    kind = type(values).__name__
    if isinstance(values, (tuple, dict)):
        raise TypeError(
            f"{name} is a {kind}: give the inputs alone, for a dataset of (x, y) "
            "dataset.map(lambda x, y: x)."
        )
    if not hasattr(values, "__array__"):  # NumPy would find its dtype from its values
        raise TypeError(f"{name} is a {kind}: give arrays [n, ...].")
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{name} has dtype {values.dtype}: give real numbers.")
    if values.ndim < 2:
        raise ValueError(
            f"{name} has shape {values.shape}: give an array [N, ...] with one row per record, or "
            "an iterable of such batches."
        )
    width = math.prod(values.shape[1:])
    if width == 0:
        raise ValueError(f"{name} has shape {values.shape}: give at least one feature.")
    return values.reshape(len(values), width)
