"""Training metrics that are released with noise, and a warning of those that are not."""

from tf_adadp.metrics.released import LotMetrics
from tf_adadp.metrics.settings import PREFIX, RawMetricsWarning, ReleasedMetrics

__all__ = ["PREFIX", "LotMetrics", "RawMetricsWarning", "ReleasedMetrics"]
