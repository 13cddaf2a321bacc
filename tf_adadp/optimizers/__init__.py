"""Private Keras optimizers: a clipping set, one noisy release per lot, Keras's own update rule."""

from tf_adadp.optimizers.adaclip import AdaCliP
from tf_adadp.optimizers.adadp import ADADP
from tf_adadp.optimizers.adan import ADAN
from tf_adadp.optimizers.agd import AGD
from tf_adadp.optimizers.autosgd import AutoSGD
from tf_adadp.optimizers.base import DPOptimizer
from tf_adadp.optimizers.dpadam import DPAdam
from tf_adadp.optimizers.dpopt import DPOPT
from tf_adadp.optimizers.dprmsprop import ADAL, DPRMSprop
from tf_adadp.optimizers.dpsgd import DPSGD
from tf_adadp.optimizers.private import make_private
from tf_adadp.optimizers.sadpsgd import SADPSGD
from tf_adadp.optimizers.schedules import InverseSqrtDecay

__all__ = [
    "ADADP",
    "ADAL",
    "ADAN",
    "AGD",
    "AdaCliP",
    "AutoSGD",
    "DPAdam",
    "DPOPT",
    "DPOptimizer",
    "DPRMSprop",
    "DPSGD",
    "InverseSqrtDecay",
    "SADPSGD",
    "make_private",
]
