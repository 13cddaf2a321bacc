"""Refuses models that cannot be trained privately, each problem with a fix; reports all at once."""

from tf_adadp.validation.api import validate
from tf_adadp.validation.arguments import (
    check_callbacks,
    check_class_labels,
    check_data_source,
    check_labels,
    check_metric_names,
    check_trainable_state,
    declared_law,
)
from tf_adadp.validation.compatible import compatibility_changes, make_compatible
from tf_adadp.validation.evaluation import check_validation_data
from tf_adadp.validation.layers import check_layers, check_overrides, check_weights
from tf_adadp.validation.mixing import check_batch_sizes, check_reached, warn_of_mixing
from tf_adadp.validation.report import Report
from tf_adadp.validation.tokens import check_tokens
from tf_adadp.validation.tuners import check_tuner

__all__ = [
    "Report",
    "check_batch_sizes",
    "check_callbacks",
    "check_class_labels",
    "check_data_source",
    "check_labels",
    "check_layers",
    "check_metric_names",
    "check_overrides",
    "check_reached",
    "check_tokens",
    "check_trainable_state",
    "check_tuner",
    "check_validation_data",
    "check_weights",
    "compatibility_changes",
    "declared_law",
    "make_compatible",
    "validate",
    "warn_of_mixing",
]
