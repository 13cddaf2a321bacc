"""Draws lots of examples by a known sampling law.

A lot is the set of examples of one private step. The cost of the step depends on the law by which
the lot was drawn, so the object that draws also states the law, `lots.law`, by which steps are
charged.

- `PoissonLots`: every example enters every lot independently with probability L/N. The default.
- `TruncatedPoissonLots`: Poisson lots, cut to a maximum size.
- `FixedSizeLots`: every lot is a uniformly random subset of fixed size.
- `ShuffledLots`: passes over random permutations, without amplification.
- `UserLots`: every USER enters every lot independently, with a bounded number of records.
- `DeclaredLots`: the batches of a `tf.data.Dataset`, whose law the user states.

All are `Lots`: `as_dataset(physical_batch_size)` and `take(num_lots, physical_batch_size)`
give elements `((x, y, sample_weight), mask)`, each lot cut into whole physical batches.

`make_lot` packs examples that the caller drew into the same form. `SampledLots` is the base class
of lots drawn at random.
"""

from tf_adadp.sampling.base import Lots
from tf_adadp.sampling.declared import DeclaredLots
from tf_adadp.sampling.fixed_size import FixedSizeLots
from tf_adadp.sampling.packing import make_lot
from tf_adadp.sampling.poisson import PoissonLots
from tf_adadp.sampling.sampled import SampledLots
from tf_adadp.sampling.shuffled import ShuffledLots
from tf_adadp.sampling.truncated import TruncatedPoissonLots
from tf_adadp.sampling.users import UserLots

__all__ = [
    "DeclaredLots",
    "FixedSizeLots",
    "Lots",
    "PoissonLots",
    "SampledLots",
    "ShuffledLots",
    "TruncatedPoissonLots",
    "UserLots",
    "make_lot",
]
