"""Search for hyper-parameters that is charged.

* `search`: independent trials, their number random; the best one alone is released, which costs
  a small multiple of one trial. `Winner` is what it returns.
* `ComposedTuner`: makes any KerasTuner tuner, which looks at all trials, pay for all of them.
"""

from tf_adadp.tuning.composed import ComposedTuner
from tf_adadp.tuning.search import Winner, search

__all__ = ["ComposedTuner", "Winner", "search"]
