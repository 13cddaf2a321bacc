"""Computes clipped sums of per-example gradients, by one of two engines.

`choose` makes the engine of a model: `ghost` works without per-example gradients (their factors are
in `forms`), `vectorized` forms them. Custom loops call `clipped_sum`.
"""

from tf_adadp.gradients import ghost
from tf_adadp.gradients.choose import make_engine
from tf_adadp.gradients.lot_sums import clipped_sum

__all__ = ["clipped_sum", "ghost", "make_engine"]
