"""Clipped sums of per-example gradients: the loss of one example, and the engines that sum it.

`choose` makes the engine of a model: `ghost` works without per-example gradients (their factors are
in `forms`), `vectorized` forms them. `clipped_sum` is the way in for custom loops.
"""

from tf_adadp.gradients import ghost
from tf_adadp.gradients.choose import make_engine
from tf_adadp.gradients.compiled_losses import (
    PROBE_BATCH,
    batch_reductions,
    check_reduces_no_batch,
    losses_of_rows,
    without_state,
)
from tf_adadp.gradients.example_graph import ExampleGraph, refuse_state, shaped_by_values
from tf_adadp.gradients.example_loss import ExampleLoss, weight_regularization
from tf_adadp.gradients.ghost.independence import mixing_reason
from tf_adadp.gradients.lot_sums import clipped_sum, engine_for_lot
from tf_adadp.gradients.vectorized import VectorizedEngine

__all__ = [
    "PROBE_BATCH",
    "ExampleGraph",
    "ExampleLoss",
    "VectorizedEngine",
    "batch_reductions",
    "check_reduces_no_batch",
    "clipped_sum",
    "engine_for_lot",
    "ghost",
    "losses_of_rows",
    "make_engine",
    "mixing_reason",
    "refuse_state",
    "shaped_by_values",
    "weight_regularization",
    "without_state",
]
