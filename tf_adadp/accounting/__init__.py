"""Computes the privacy cost of training: ε and δ before, during and after it.

It needs NumPy, SciPy and dp_accounting, but not TensorFlow, so budgets can be planned and ledgers
checked on any machine.

  * `PoissonSampling`, `TruncatedPoissonSampling`, `FixedSizeSampling`, `ShuffledSampling`,
    `UserSampling`, `UnknownSampling`: sampling laws of lots, with the `dp_accounting` event of one
    step.
  * `epsilon`, `delta`, `calibrate_noise_multiplier`, `calibrate_sampling_probability`,
    `max_steps`, `split_budget`: plan training by Poisson lots.
  * `joint_noise_multiplier`: several Gaussian releases from one lot, as one.
  * `PrivacyLedger`: the record of all releases; computes ε, saves, loads, merges.
  * `privacy_curve`: δ(ε) of a ledger as a matplotlib figure.
  * `RenyiFilter`, `selection_event`: budgets for training whose results decide its noise.
  * `search_event`: a search for hyper-parameters that releases the best of its trials alone.
  * `rdp_theorem1`, `rdp_wang_theorem9`, `rdp_wang_theorem27` and their accountants: the bound of
    the ADADP paper, and those of Wang, Balle and Kasiviswanathan that it comes from.
  * `compare`: all bounds for one run in a table or a figure; `clt_mu`, `clt_epsilon`: the
    central-limit approximation of Gaussian differential privacy, which is not a bound.

Accountants are named "rdp", "pld", "theorem1", "wang_theorem9" and "wang_theorem27".
`PrivacyWarning` is the category of warnings about figures that are correct but easily misread.
"""

from tf_adadp.accounting.accountants import ACCOUNTANTS
from tf_adadp.accounting.bounds.comparison import ComparedBound, Comparison, compare
from tf_adadp.accounting.bounds.gaussian_dp import clt_epsilon, clt_mu
from tf_adadp.accounting.bounds.theorem1 import Theorem1Accountant, rdp_theorem1
from tf_adadp.accounting.bounds.wang import (
    WangTheorem9Accountant,
    WangTheorem27Accountant,
    rdp_wang_theorem9,
    rdp_wang_theorem27,
)
from tf_adadp.accounting.curve import privacy_curve
from tf_adadp.accounting.entry import LedgerEntry
from tf_adadp.accounting.events import decode_event, encode_event
from tf_adadp.accounting.filters import LedgerBudget, RenyiFilter
from tf_adadp.accounting.joint import joint_noise_multiplier
from tf_adadp.accounting.laws import (
    FixedSizeSampling,
    PoissonSampling,
    SamplingLaw,
    ShuffledSampling,
    TruncatedPoissonSampling,
    UnknownSampling,
    UserSampling,
)
from tf_adadp.accounting.ledger import PrivacyLedger
from tf_adadp.accounting.planning import (
    BudgetSplit,
    calibrate_noise_multiplier,
    calibrate_sampling_probability,
    delta,
    epsilon,
    max_steps,
    split_budget,
)
from tf_adadp.accounting.privacy_warning import PrivacyWarning
from tf_adadp.accounting.selection import selection_event
from tf_adadp.accounting.trials import search_event

__all__ = [
    "ACCOUNTANTS",
    "BudgetSplit",
    "ComparedBound",
    "Comparison",
    "FixedSizeSampling",
    "LedgerBudget",
    "LedgerEntry",
    "PoissonSampling",
    "PrivacyLedger",
    "PrivacyWarning",
    "RenyiFilter",
    "SamplingLaw",
    "ShuffledSampling",
    "Theorem1Accountant",
    "TruncatedPoissonSampling",
    "UnknownSampling",
    "UserSampling",
    "WangTheorem27Accountant",
    "WangTheorem9Accountant",
    "calibrate_noise_multiplier",
    "calibrate_sampling_probability",
    "clt_epsilon",
    "clt_mu",
    "compare",
    "decode_event",
    "delta",
    "encode_event",
    "epsilon",
    "joint_noise_multiplier",
    "max_steps",
    "privacy_curve",
    "rdp_theorem1",
    "rdp_wang_theorem27",
    "rdp_wang_theorem9",
    "search_event",
    "selection_event",
    "split_budget",
]
