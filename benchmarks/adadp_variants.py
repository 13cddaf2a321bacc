"""The part "options" of adadp_default.py: published changes to ADADP and rivals, in six cells.

What is like ADADP has its default rate. The others, which have no default rate of their own, get
theirs searched for each cell as DPSGD does in the study, with five rates to start with.
"""

import tf_adadp as dp
from benchmarks import adadp_geoclip as geoclip
from benchmarks import adadp_options as options

OPTION_CELLS = (
    ("digits", 1.0),
    ("digits_scaled", 3.0),
    ("mnist", 1.0),
    ("fashion_tanh", 3.0),
    ("fashion_relu", 1.0),
    ("mnist_gru", 1.0),
)
OPTIONS = {
    "ADADP, bias-corrected": options.CorrectedADADP,
    "DPAdam, bias-corrected": options.CorrectedDPAdam,
    "ADADP, low-pass": options.LowPassADADP,
    # Where noise is most of a release, the filter makes RMSprop's steps 4.5 times as long.
    "ADADP, low-pass, 0.01": lambda **k: options.LowPassADADP(dp.InverseSqrtDecay(0.01), **k),
    "DP-MicroAdam": options.DPMicroAdam,
    "DP-MicroAdam, 10 %": lambda **k: options.DPMicroAdam(density=0.1, **k),
    "scale then privatize": options.scale_then_privatize,
    "scale then privatize, Adam": options.ScaleThenPrivatizeAdam,
    "GeoClip": geoclip.GeoClip,
    "GeoClip, RMSprop": geoclip.GeoClipRMSprop,
    "ADADP, quantile clip": lambda **k: dp.ADADP(l2_norm_clip=dp.QuantileClip(), **k),
    "ADADP, automatic clipping": lambda **k: dp.ADADP(automatic_clipping=0.01, **k),
    "DPSGD, quantile clip": lambda **k: dp.DPSGD(l2_norm_clip=dp.QuantileClip(), **k),
    "DPSGD, automatic clipping": lambda **k: dp.DPSGD(automatic_clipping=0.01, **k),
}
OPTION_SEARCH = {
    "DPAdam, bias-corrected": (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2),
    "DP-MicroAdam": (1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1),
    "DP-MicroAdam, 10 %": (5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
    "scale then privatize, Adam": (5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
    "GeoClip": (0.25, 0.5, 1.0, 2.0, 4.0),
    "DPSGD, quantile clip": (0.125, 0.25, 0.5, 1.0, 2.0),
    "DPSGD, automatic clipping": (0.25, 0.5, 1.0, 2.0, 4.0),
}
