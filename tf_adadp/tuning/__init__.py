"""Search for hyper-parameters that is charged.

* `search`: independent trials, their number random; the best one alone is released, which costs
  a small multiple of one trial. It returns a `Winner`.
* `ComposedTuner`: makes any KerasTuner tuner charge all of its trials, since it looks at all.
"""

from tf_adadp.tuning.composed import ComposedTuner
from tf_adadp.tuning.search import Winner, search

__all__ = ["ComposedTuner", "Winner", "search"]
