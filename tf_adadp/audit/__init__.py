"""Attacks the claims: lower bounds on ε, to compare with the ε of ledgers.

A bound above a claim refutes it. A bound below proves nothing: the attack may be weak.

  * `audit_optimizer`, `draw_scores`: many releases of an optimizer on two neighbouring data sets;
    `epsilon_lower_bound` for scores of any mechanism, `gaussian_epsilon_lower_bound` and
    `law_epsilon_lower_bound`, which see smaller faults, where the trade-off function is known.
  * `replay_difference`: whether weights and state follow from the releases alone.
  * `OneRunAudit`: canaries in one whole training.
  * `loss_attack`, `lira`, `MembershipReport`: membership inference.

Everything here looks at raw data and is not private; nothing of it is charged.
"""

from tf_adadp.audit.bounds import (
    EpsilonBound,
    best_guesses,
    clopper_pearson,
    epsilon_lower_bound,
    gaussian_epsilon_estimate,
    one_run_epsilon_lower_bound,
    one_run_p_value,
)
from tf_adadp.audit.losses import example_losses
from tf_adadp.audit.membership import MembershipReport, lira, loss_attack
from tf_adadp.audit.one_run import OneRunAudit, OneRunBound, one_run_bound
from tf_adadp.audit.releases import (
    MechanismAudit,
    audit_optimizer,
    draw_scores,
    recorded_releases,
)
from tf_adadp.audit.replay import replay_difference
from tf_adadp.audit.tradeoff import (
    GaussianBound,
    LawBound,
    gaussian_epsilon_lower_bound,
    law_epsilon_lower_bound,
    one_run_fdp_epsilon_lower_bound,
)

__all__ = [
    "EpsilonBound",
    "GaussianBound",
    "LawBound",
    "MechanismAudit",
    "MembershipReport",
    "OneRunAudit",
    "OneRunBound",
    "audit_optimizer",
    "best_guesses",
    "clopper_pearson",
    "draw_scores",
    "epsilon_lower_bound",
    "example_losses",
    "gaussian_epsilon_estimate",
    "gaussian_epsilon_lower_bound",
    "law_epsilon_lower_bound",
    "lira",
    "loss_attack",
    "one_run_bound",
    "one_run_epsilon_lower_bound",
    "one_run_fdp_epsilon_lower_bound",
    "one_run_p_value",
    "recorded_releases",
    "replay_difference",
]
