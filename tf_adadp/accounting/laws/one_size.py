"""The base of laws whose lots all have the same size."""

import dataclasses
from typing import ClassVar

import dp_accounting

from tf_adadp.accounting.laws.base import SamplingLaw


@dataclasses.dataclass(frozen=True)
class _OneSizeSampling(SamplingLaw):
    """Lots of exactly `size` of the `num_examples` records; neighbours by replacing one."""

    num_examples: int
    size: int
    declared: bool = False
    neighboring_relation: ClassVar = dp_accounting.NeighboringRelation.REPLACE_ONE

    def __post_init__(self):
        self._check_num_examples_and_declared()
        self._set_integer(
            "size",
            f"an integer from 1 to num_examples = {self.num_examples}",
            at_least=1,
            at_most=self.num_examples,
        )

    @property
    def expected_lot_size(self) -> int:
        """Returns n."""
        return self.size

    @property
    def max_lot_size(self) -> int:
        """Returns n."""
        return self.size

    @property
    def full_batch(self) -> bool:
        """Tells whether n = N."""
        return self.size == self.num_examples

    def lot_size_probability(self, size: int) -> float:
        """Returns 1 for n, 0 for every other size."""
        return float(size == self.size)
