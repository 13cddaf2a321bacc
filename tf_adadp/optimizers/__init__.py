"""Private Keras optimizers: a clipping set, one noisy release per lot, Keras's own update rule."""

from tf_adadp.optimizers.adadp import ADADP
from tf_adadp.optimizers.adan import ADAN
from tf_adadp.optimizers.base import DPOptimizer
from tf_adadp.optimizers.dpadam import DPAdam
from tf_adadp.optimizers.dprmsprop import ADAL, DPRMSprop
from tf_adadp.optimizers.dpsgd import DPSGD
from tf_adadp.optimizers.schedules import InverseSqrtDecay

__all__ = [
    "ADADP",
    "ADAL",
    "ADAN",
    "DPAdam",
    "DPOptimizer",
    "DPRMSprop",
    "DPSGD",
    "InverseSqrtDecay",
]
