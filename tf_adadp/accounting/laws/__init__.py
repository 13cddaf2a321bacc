"""Sampling laws: how the records of a lot were chosen, and the cost of one step on such a lot.

A law is made by the object that samples and travels with its lots to the ledger, so that the
sampling probability charged can never differ from the one used. A user who samples by other means
may declare the law (`declared=True`); every report then states this.

One file per law, and one line here.

Throughout, σ* is the noise multiplier of one step: the standard deviation of the noise added to
the sum of clipped vectors, over the L2 bound C of ONE such vector.
"""

from tf_adadp.accounting.laws.base import SamplingLaw
from tf_adadp.accounting.laws.fixed_size import FixedSizeSampling
from tf_adadp.accounting.laws.poisson import PoissonSampling, poisson_event
from tf_adadp.accounting.laws.shuffled import ShuffledSampling
from tf_adadp.accounting.laws.truncated import TruncatedPoissonSampling
from tf_adadp.accounting.laws.unknown import UnknownSampling
from tf_adadp.accounting.laws.users import UserSampling

__all__ = [
    "FixedSizeSampling",
    "PoissonSampling",
    "SamplingLaw",
    "ShuffledSampling",
    "TruncatedPoissonSampling",
    "UnknownSampling",
    "UserSampling",
    "poisson_event",
]
