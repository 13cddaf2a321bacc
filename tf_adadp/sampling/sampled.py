"""Draws lots at random from data with random access."""

import abc
import inspect
import os
from typing import Any, Self

import numpy as np
import tensorflow as tf

from tf_adadp.accounting import SamplingLaw
from tf_adadp.sampling.base import Lots
from tf_adadp.sampling.datasets import read_dataset
from tf_adadp.sampling.keys import LotKey
from tf_adadp.sampling.sources import Rows, Source


class SampledLots(Lots):
    """Draws lots as a pure function of (key, step) and the data.

    A subclass chooses the examples of a lot in `_indices`, with the random numbers of
    `self._key.generator(step)`.

    Args:
        source: the examples, as `as_source` returns them.
        law: the sampling law of `_indices`.
        seed, present: as for `PoissonLots`.
    """

    def __init__(
        self,
        source: Source,
        law: SamplingLaw,
        seed: int | None,
        present: np.ndarray | None = None,
    ):
        super().__init__(law, source.spec)
        self._source = source
        self._present = present
        self._key = LotKey(seed)

    @classmethod
    def from_dataset(
        cls,
        dataset: tf.data.Dataset,
        *,
        batched: bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        verbose: bool = True,
        **arguments: Any,
    ) -> Self:
        """Reads a finite `tf.data.Dataset` once, and makes lots of its records.

            lots = PoissonLots.from_dataset(dataset, expected_size=600)

        The unit of privacy is one record: one element of the dataset after batches are split.
        Neighbouring datasets differ by one record of those that were read, so an earlier step that
        chooses records by their place, such as `take`, belongs to the choice of the data. Steps
        that put one record into several elements (`repeat`, windows, mixup), pad it by others, or
        apply a function to a batch that is not proven to treat its records independently raise an
        error that names them. Random numbers are refused too: records are read once, so put random
        augmentation into layers of the model. One element of a generator, a Python function or a
        file counts as one record.

        Args:
            dataset: elements `x`, `(x, y)` or `(x, y, sample_weight)` of dense tensors, all records
                of one shape.
            batched: whether an element is a batch of records; None to find it in the dataset's
                steps. True for a generator that yields batches.
            cache_dir: a folder that keeps the records of this dataset in NumPy files, readable by
                its owner alone, for data that does not fit into memory. An interrupted read
                continues there; a complete folder is opened again after its first records are
                compared.
            verbose: whether to show a progress bar.
            **arguments: further arguments of the class, such as `expected_size` and `seed`; for
                `UserLots` also `user_ids`, the name of a feature.

        Raises:
            TypeError: dataset is no `tf.data.Dataset`.
            ValueError: user_ids or present is an array; the dataset has no end, no records, ragged
                tensors, records of unequal shapes, or a step that is refused as above; the folder
                holds another dataset.
        """
        if "user_ids" in arguments and "user_ids" not in inspect.signature(cls).parameters:
            raise ValueError(
                f"user_ids={arguments['user_ids']!r}: {cls.__name__} protect single records. Use "
                "UserLots.from_dataset, which protects all records of a user."
            )
        for name in ("user_ids", "present"):  # the dataset's steps may reorder or drop records
            if not isinstance(arguments.get(name), str | None):
                raise ValueError(
                    f"{name} is an array beside a dataset: it would be matched by position, and a "
                    "step such as shuffle() moves records. Put it into the dataset: for users map "
                    "to ({'image': …, 'user': …}, label) and give user_ids='user'."
                )
        inspect.signature(cls).bind(None, **arguments)  # a missing argument is told before reading
        x, y, sample_weight = read_dataset(dataset, batched, cache_dir, verbose)
        return cls(x, y, sample_weight=sample_weight, **arguments)

    @property
    def num_local_examples(self) -> int:
        """Returns the number of examples that this host draws from: N, or a part of them."""
        return len(self._source)

    @property
    def seed(self) -> int | None:
        """Returns the seed, or None when the key is secret."""
        return self._key.seed

    @property
    def secret_key(self) -> LotKey | None:
        """Returns the key; None with a seed, which makes it public."""
        return self._key if self.seed is None else None

    @property
    def source(self) -> Source:
        """Returns the examples that lots are drawn from."""
        return self._source

    @abc.abstractmethod
    def _indices(self, step: int) -> np.ndarray:
        """Returns the indices of the examples of lot `step`, int64, in any order."""

    def _rows(self, step: int, multiple: int) -> Rows:
        indices = self._indices(step)
        if self._present is not None:
            indices = indices[self._present[indices]]
        # Order within a lot has no effect; sorted, a memory-mapped file is read front to back.
        return self._source.rows(np.sort(indices), multiple)


def subset(generator: np.random.Generator, number: int, size: int) -> np.ndarray:
    """Draws a uniformly random set of `size` of the indices 0..number − 1, in O(size)."""
    return generator.choice(number, size, replace=False, shuffle=False)


def poisson_subset(generator: np.random.Generator, number: int, probability: float) -> np.ndarray:
    """Draws each of the indices 0..number − 1 independently, in time O(number drawn)."""
    return subset(generator, number, generator.binomial(number, probability))
