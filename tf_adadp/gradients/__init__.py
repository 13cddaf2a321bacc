"""Clipped sums of per-example gradients: the loss of one example, and the engines that sum it.

`choose` makes the engine of a model: `ghost` works without per-example gradients (their factors are
in `forms`), `vectorized` forms them. `clipped_sum` is the way in for custom loops.
"""

from tf_adadp.gradients import ghost
from tf_adadp.gradients.choose import make_engine
from tf_adadp.gradients.lot_sums import clipped_sum

__all__ = ["clipped_sum", "ghost", "make_engine"]
