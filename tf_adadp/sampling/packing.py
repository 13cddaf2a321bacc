"""Packs a lot as whole physical batches and a mask, in one structure."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.sampling.sources import ArraySource, Spec, with_absent
from tf_adadp.utils.checks import check_integer

Lot = tuple[tuple[Any, Any, Any], tf.Tensor]  # ((x, y, sample_weight), mask)


def make_lot(
    x: Any, y: Any = None, sample_weight: Any = None, physical_batch_size: int | None = None
) -> Lot:
    """Packs ALL rows given into one lot `((x, y, sample_weight), mask)`, as `Lots` yields them.

    It serves custom loops that draw their own examples. The lot has no sampling law: state the law
    where the step is charged.

    Args:
        x, y, sample_weight: arrays or nested structures of arrays, one row per example; no rows
            make an empty lot. y and sample_weight may be None.
        physical_batch_size: B, rows per physical batch; None for one batch with all rows.

    Returns:
        Eager tensors of shape [⌈n/B⌉, B, ...] and the mask [⌈n/B⌉, B], float32.

    Raises:
        TypeError: a component is not an array; `physical_batch_size` is not an integer.
        ValueError: the arrays differ in rows; `physical_batch_size` is less than 1.

    Example:
        >>> (x, y, weights), mask = dp.make_lot(np.ones((3, 2)), np.ones(3), physical_batch_size=2)
        >>> print(x.shape, mask.numpy().astype(int).tolist())
        (2, 2, 2) [[1, 1], [1, 0]]
    """
    source = ArraySource(x, y, sample_weight)
    size = max(len(source), 1)
    if physical_batch_size is not None:
        size = check_physical_batch_size(physical_batch_size)
    count, leaves = source.rows(np.arange(len(source)), size)
    return pack(source.spec, map(tf.convert_to_tensor, physical_batches(count, leaves, size)))


def check_physical_batch_size(size: int) -> int:
    """Returns a number of rows ≥ 1; TypeError for no integer, ValueError below 1."""
    return check_integer("physical_batch_size", size, at_least=1, wrong_type=TypeError)


def physical_batches(count: int, leaves: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
    """Cuts padded rows, the first `count` of them real, into [P, size, ...]; appends the mask."""
    mask = np.zeros(len(leaves[0]), np.float32)
    mask[:count] = 1.0
    return [leaf.reshape(-1, size, *leaf.shape[1:]) for leaf in (*leaves, mask)]


def pack(element_spec: Spec, tensors: Iterable[tf.Tensor]) -> Lot:
    """Packs leaves and mask as `((x, y, sample_weight), mask)`, None where the spec has None."""
    *leaves, mask = tensors
    return keras.tree.pack_sequence_as(element_spec, with_absent(element_spec, leaves)), mask
