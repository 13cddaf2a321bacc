"""Per-example gradient norms and clipped sums without per-example gradients."""

from tf_adadp.gradients.ghost.alone import ATTENTION
from tf_adadp.gradients.ghost.engine import GhostEngine
from tf_adadp.gradients.ghost.plan import GradientPlan, PlannedGradient, planned
from tf_adadp.gradients.ghost.retired import declare_independent, register
from tf_adadp.gradients.ghost.trace import CannotFollow, Trace, obstacles_of, trace_model

__all__ = [
    "ATTENTION",
    "CannotFollow",
    "GhostEngine",
    "GradientPlan",
    "PlannedGradient",
    "Trace",
    "declare_independent",
    "obstacles_of",
    "planned",
    "register",
    "trace_model",
]
