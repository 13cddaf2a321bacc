"""Draws truncated Poisson lots: Poisson lots cut to a maximum size."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tf_adadp.accounting import TruncatedPoissonSampling
from tf_adadp.sampling.sampled import SampledLots, poisson_subset, subset
from tf_adadp.sampling.sources import as_source


class TruncatedPoissonLots(SampledLots, enforces_law=True):
    """Draws Poisson lots, and keeps a uniformly random `max_size` examples of larger ones.

    Every lot is padded to ⌈max_size/B⌉ physical batches, so shapes are static and reveal nothing
    about the lot. Truncation costs privacy, and only the "pld" accountant can analyse it: use
    `PrivacyCallback(..., accountant="pld")`. The cost is negligible if max_size is a few times
    √expected_size above expected_size.

    Guarantee: that of `tf_adadp.accounting.TruncatedPoissonSampling`, for neighbours by adding or
    removing one example; steps are independent.

    Args:
        x, y, sample_weight, seed, transform: as for `PoissonLots`.
        expected_size: L in (0, N], the expected number of examples drawn, before the lot is cut.
            Sums are divided by it.
        max_size: an integer from expected_size to N.

    Raises:
        TypeError: as for `PoissonLots`.
        ValueError: empty data, arrays of unequal length, a size missing or out of range.

    Example:
        >>> lots = dp.TruncatedPoissonLots(np.zeros((1000, 4)), np.zeros(1000), 100, max_size=150)
        >>> lots.law.max_size
        150
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        expected_size: float | None = None,
        max_size: int | None = None,
        sample_weight: Any = None,
        seed: int | None = None,
        transform: Callable[[Any], tuple] | None = None,
    ):
        source = as_source(x, y, sample_weight, transform)
        law = TruncatedPoissonSampling(len(source), expected_size, max_size)
        super().__init__(source, law, seed)

    def _indices(self, step: int) -> np.ndarray:
        generator = self._key.generator(step)
        drawn = poisson_subset(generator, self.num_examples, self.law.probability)
        if len(drawn) <= self.law.max_size:
            return drawn
        return drawn[subset(generator, len(drawn), self.law.max_size)]
