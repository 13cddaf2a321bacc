"""Draws shuffled lots: passes over random permutations."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tf_adadp.accounting import ShuffledSampling
from tf_adadp.sampling.sampled import SampledLots
from tf_adadp.sampling.sources import as_source


class ShuffledLots(SampledLots, enforces_law=True):
    """Draws passes over random permutations of the examples, in lots of exactly `size`.

    A pass has ⌊N/size⌋ lots and no example twice; the N mod size examples at the end of its
    permutation are left out. Every pass has its own permutation, which takes O(N) memory and time.

    Guarantee: that of `tf_adadp.accounting.ShuffledSampling`: replacing one example costs one
    Gaussian(σ*/2) per PASS, charged at its first lot, without amplification. Every iteration (of
    `as_dataset`, of `take`, a `fit`, a resumed run) begins a new pass, which is charged anew even
    if the last one was left unfinished. `DPModel.fit` does so automatically; a custom loop passes
    `position`, the number of lots that it took of this iteration, to `optimizer.charge`.

    Use it where every example must be seen equally often, or to compare with other software that
    shuffles. At the same ε it needs more noise than `PoissonLots`, unless the passes are few and
    the lots large.

    Args:
        x, y, sample_weight, seed, transform: as for `PoissonLots`.
        size: the number of examples in a lot, an integer in 1..N.

    Raises:
        TypeError: as for `PoissonLots`.
        ValueError: empty data, arrays of unequal length, `size` missing or no integer in 1..N.

    Example:
        >>> lots = dp.ShuffledLots(np.zeros((1000, 4)), np.zeros(1000), size=100)
        >>> lots.steps_per_epoch
        10
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        size: int | None = None,
        sample_weight: Any = None,
        seed: int | None = None,
        transform: Callable[[Any], tuple] | None = None,
    ):
        source = as_source(x, y, sample_weight, transform)
        super().__init__(source, ShuffledSampling(len(source), size), seed)
        self._permutation = None

    @property
    def steps_per_epoch(self) -> int:
        """Returns ⌊N/size⌋: an epoch is a pass."""
        return self.law.lots_per_pass

    def _indices(self, step: int) -> np.ndarray:
        place = step % self.law.lots_per_pass
        first = step - place
        kept = self._permutation  # read once: several iterators may run
        if kept is None or kept[0] != first:
            kept = self._permutation = (
                first,
                self._key.generator(first).permutation(self.num_examples),
            )
        return kept[1][place * self.law.size :][: self.law.size]

    def __getstate__(self):
        return {**self.__dict__, "_permutation": None}  # a copy has its own key
