"""Priors: estimates of each gradient coordinate's size, from past releases or public facts."""

from tf_adadp.optimizers.priors.base import Prior
from tf_adadp.optimizers.priors.exponential import ExponentialPrior
from tf_adadp.optimizers.priors.fixed import EqualLayersPrior, FanInPrior, FixedPrior
from tf_adadp.optimizers.priors.windowed import WindowedPrior

__all__ = [
    "EqualLayersPrior",
    "ExponentialPrior",
    "FanInPrior",
    "FixedPrior",
    "Prior",
    "WindowedPrior",
]
