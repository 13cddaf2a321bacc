"""Training metrics that are released with noise, and a warning of those that are not."""

from tf_adadp.metrics.settings import RawMetricsWarning, ReleasedMetrics

__all__ = ["RawMetricsWarning", "ReleasedMetrics"]
