"""The sets K that one example's contribution is clipped into, and the noise that fits them."""

from tf_adadp.clipping.row_gradients import (
    AxisScales,
    RowGradients,
    Rows,
    as_rows,
    grouped,
    raised_sum,
    row_norms,
    sum_of_squares,
)
from tf_adadp.clipping.sets import (
    Box,
    ClippedSums,
    ClippingSet,
    Ellipsoid,
    L2Ball,
    LayerBalls,
    Normalized,
    Switch,
    bounds_for,
)

__all__ = [
    "AxisScales",
    "Box",
    "ClippedSums",
    "ClippingSet",
    "Ellipsoid",
    "L2Ball",
    "LayerBalls",
    "Normalized",
    "RowGradients",
    "Rows",
    "Switch",
    "as_rows",
    "bounds_for",
    "grouped",
    "raised_sum",
    "row_norms",
    "sum_of_squares",
]
