"""Lots drawn at random from data with random access."""

import abc

import numpy as np

from tf_adadp.accounting import SamplingLaw
from tf_adadp.sampling.base import Lots
from tf_adadp.sampling.keys import LotKey
from tf_adadp.sampling.sources import Rows, Source


class SampledLots(Lots):
    """Lots that are a pure function of (key, step) and of the data.

    A subclass says which examples are in a lot, in `_indices`, by the random numbers of
    `self._key.generator(step)`.

    Args:
        source: the examples, of `as_source`.
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

    @property
    def num_local_examples(self) -> int:
        """The number of examples that this host draws from: N, or a part of them."""
        return len(self._source)

    @property
    def seed(self) -> int | None:
        """The seed, or None when the key is secret."""
        return self._key.seed

    @property
    def secret_key(self) -> LotKey | None:
        """The key, or None where a seed makes it known."""
        return self._key if self.seed is None else None

    @property
    def source(self) -> Source:
        """The examples that lots are drawn from."""
        return self._source

    @abc.abstractmethod
    def _indices(self, step: int) -> np.ndarray:
        """Returns the indices of the examples of lot `step`, int64, in any order."""

    def _rows(self, step: int, multiple: int) -> Rows:
        indices = self._indices(step)
        if self._present is not None:
            indices = indices[self._present[indices]]
        # The order within a lot means nothing; sorted, a memory-mapped file is read front to back.
        return self._source.rows(np.sort(indices), multiple)


def subset(generator: np.random.Generator, number: int, size: int) -> np.ndarray:
    """Draws a uniformly random set of `size` of the indices 0..number − 1, in O(size)."""
    return generator.choice(number, size, replace=False, shuffle=False)


def poisson_subset(generator: np.random.Generator, number: int, probability: float) -> np.ndarray:
    """Draws each of the indices 0..number − 1 independently, in time O(those drawn)."""
    return subset(generator, number, generator.binomial(number, probability))
