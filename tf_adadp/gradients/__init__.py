"""Clipped sums of per-example gradients: the loss of one example, and engines that sum them."""

from tf_adadp.gradients.api import clipped_sum, engine_for_lot, make_engine
from tf_adadp.gradients.example_graph import ExampleGraph, refuse_state, shaped_by_values
from tf_adadp.gradients.example_loss import (
    PROBE_BATCH,
    ExampleLoss,
    batch_reductions,
    check_reduces_no_batch,
    losses_of_rows,
    weight_regularization,
    without_state,
)
from tf_adadp.gradients.ghost.independence import mixing_reason
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
    "losses_of_rows",
    "make_engine",
    "mixing_reason",
    "refuse_state",
    "shaped_by_values",
    "weight_regularization",
    "without_state",
]
