"""Per-example gradient norms and clipped sums without per-example gradients."""

from tf_adadp.gradients.ghost import convolution, dense, embedding, normalization  # noqa: F401
from tf_adadp.gradients.ghost.engine import GhostEngine
from tf_adadp.gradients.ghost.independence import (
    ATTENTION,
    CannotFollow,
    declare_independent,
    mixing_reason,
)
from tf_adadp.gradients.ghost.plan import GradientPlan, PlannedGradient, probe
from tf_adadp.gradients.ghost.ranks import checked_layers, on_known_ranks
from tf_adadp.gradients.ghost.registry import register
from tf_adadp.gradients.ghost.tracing import GhostPass
from tf_adadp.gradients.patching import replaced

__all__ = [
    "ATTENTION",
    "CannotFollow",
    "GhostEngine",
    "GhostPass",
    "GradientPlan",
    "PlannedGradient",
    "checked_layers",
    "declare_independent",
    "mixing_reason",
    "on_known_ranks",
    "probe",
    "register",
    "replaced",
]
