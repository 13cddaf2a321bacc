"""The sets K that one example's contribution is clipped into, and the noise that fits them.

| set | K | s |
|---|---|---|
| `L2Ball` | ‖v‖₂ ≤ C | σ*·C |
| `LayerBalls` | ‖v_l‖₂ ≤ C_l | σ*·√(Σ C_k²) |
| `Box` | abs(v_i) ≤ c_i | three choices, see there |
| `Ellipsoid` | ‖v/b‖₂ ≤ 1 | σ*·b |
| `Switch` | one of two sets | that set's |

`RowsBeside` releases statistics of the rows beside the sum of a ball or an ellipsoid: how many lie
inside, for `QuantileClip`, a clip norm that follows a quantile of the norms; and their losses.

`base` defines sets and the condition on their noise. Your own set is a subclass of
`ClippingSet` that an optimizer returns from `clipping_set`; it needs no registration.
"""

from tf_adadp.clipping.balls import L2Ball, LayerBalls, bounds_for
from tf_adadp.clipping.base import ClippedSums, ClippingSet
from tf_adadp.clipping.beside import RowsBeside
from tf_adadp.clipping.box import Box
from tf_adadp.clipping.ellipsoid import Ellipsoid
from tf_adadp.clipping.quantile import QuantileClip
from tf_adadp.clipping.row_gradients import AxisScales, RowGradients, Rows
from tf_adadp.clipping.switch import Switch

__all__ = [
    "AxisScales",
    "Box",
    "ClippedSums",
    "ClippingSet",
    "Ellipsoid",
    "L2Ball",
    "LayerBalls",
    "QuantileClip",
    "RowGradients",
    "Rows",
    "RowsBeside",
    "Switch",
    "bounds_for",
]
