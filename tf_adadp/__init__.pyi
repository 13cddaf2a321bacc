"""The public names, each with its module: editors read their types here, `lazy_loader` the rest."""

from . import accounting as accounting
from . import audit as audit
from . import clipping as clipping
from . import noise as noise
from .accounting import PrivacyLedger as PrivacyLedger
from .accounting import PrivacyWarning as PrivacyWarning
from .callbacks import PrivacyCallback as PrivacyCallback
from .clipping import ClippedSums as ClippedSums
from .clipping import QuantileClip as QuantileClip
from .distribution import replicas as replicas
from .distribution import workers as workers
from .gradients import clipped_sum as clipped_sum
from .metrics import RawMetricsWarning as RawMetricsWarning
from .metrics import ReleasedMetrics as ReleasedMetrics
from .model import DPModel as DPModel
from .model import load_model as load_model
from .optimizers import ADADP as ADADP
from .optimizers import ADAL as ADAL
from .optimizers import ADAN as ADAN
from .optimizers import AGD as AGD
from .optimizers import DPOPT as DPOPT
from .optimizers import DPSGD as DPSGD
from .optimizers import SADPSGD as SADPSGD
from .optimizers import AdaCliP as AdaCliP
from .optimizers import AutoSGD as AutoSGD
from .optimizers import DPAdam as DPAdam
from .optimizers import DPOptimizer as DPOptimizer
from .optimizers import DPRMSprop as DPRMSprop
from .optimizers import InverseSqrtDecay as InverseSqrtDecay
from .optimizers import make_private as make_private
from .optimizers import priors as priors
from .pca import DPPCA as DPPCA
from .pca import PCAProjection as PCAProjection
from .sampling import DeclaredLots as DeclaredLots
from .sampling import FixedSizeLots as FixedSizeLots
from .sampling import PoissonLots as PoissonLots
from .sampling import ShuffledLots as ShuffledLots
from .sampling import TruncatedPoissonLots as TruncatedPoissonLots
from .sampling import UserLots as UserLots
from .sampling import make_lot as make_lot
from .training.private_step import private_step as private_step
from .validation import compatibility_changes as compatibility_changes
from .validation import make_compatible as make_compatible
from .validation import validate as validate

__version__: str
