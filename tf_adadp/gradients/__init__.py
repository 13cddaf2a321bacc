"""Clipped sums of per-example gradients: the loss of one example, and engines that sum them."""

from tf_adadp.gradients.api import clipped_sum, make_engine
from tf_adadp.gradients.example_loss import (
    PROBE_BATCH,
    ExampleLoss,
    check_reduces_no_batch,
    check_writes_no_state,
    refuse_state,
    weight_regularization,
    without_state,
)
from tf_adadp.gradients.vectorized import VectorizedEngine

__all__ = [
    "PROBE_BATCH",
    "ExampleLoss",
    "VectorizedEngine",
    "check_reduces_no_batch",
    "check_writes_no_state",
    "clipped_sum",
    "make_engine",
    "refuse_state",
    "weight_regularization",
    "without_state",
]
