"""Draws fixed-size lots: uniformly random subsets without replacement."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tf_adadp.accounting import FixedSizeSampling
from tf_adadp.sampling.sampled import SampledLots, subset
from tf_adadp.sampling.sources import as_source


class FixedSizeLots(SampledLots, enforces_law=True):
    """Draws every lot as a uniformly random subset of exactly `size` examples.

    A subset has no example twice. Lots of different steps are independent, so an example may be in
    consecutive lots. Reading costs O(size).

    Guarantee: for neighbours of which one example is replaced, a step that releases a sum over the
    lot is a mechanism sampled without replacement
    (`dp_accounting.SampledWithoutReplacementDpEvent`). Replacing an example moves a sum clipped at
    C by up to 2C, so the effective noise multiplier is σ*/2.

    Args:
        x, y, sample_weight, seed, transform: as for `PoissonLots`.
        size: the number of examples in a lot, an integer in 1..N.

    Raises:
        TypeError: as for `PoissonLots`.
        ValueError: empty data, arrays of unequal length, `size` missing or no integer in 1..N.

    Example:
        >>> lots = dp.FixedSizeLots(np.zeros((1000, 4)), np.zeros(1000), size=100)
        >>> lots.law.neighboring_relation.name
        'REPLACE_ONE'
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
        law = FixedSizeSampling(num_examples=len(source), size=size)
        super().__init__(source, law, seed)

    def _indices(self, step: int) -> np.ndarray:
        return subset(self._key.generator(step), self.num_examples, self.law.size)
