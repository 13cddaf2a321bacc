"""The privacy curve δ(ε) of a ledger, as a picture. Needs matplotlib, which is imported here only
when a picture is drawn.
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from tf_adadp.accounting.ledger import PrivacyLedger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS, _SLOW_POINTS = 80, 25


def privacy_curve(ledger: PrivacyLedger, delta: float, accountant: str = "rdp") -> "Figure":
    """Draws δ over ε for everything in a ledger, with ε at the given δ marked.

    Args:
      ledger: the releases.
      delta: δ in (0, 1) to mark.
      accountant: one of `ACCOUNTANTS`.

    Returns:
      A `matplotlib.figure.Figure`; `figure.savefig(path)` writes it.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: as `PrivacyLedger.epsilon`.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no window

    epsilon = ledger.epsilon(delta, accountant)
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    if math.isfinite(epsilon):
        points = _SLOW_POINTS if accountant == "pld" else _POINTS
        grid = np.linspace(0, 2 * epsilon or 1.0, points)
        deltas = [ledger.delta(float(point), accountant) for point in grid]
        axes.semilogy(grid, np.maximum(deltas, 1e-300))
        axes.plot([epsilon], [delta], "o", label=f"ε = {epsilon:.4g} at δ = {delta:g}")
        axes.set_ylim(min(delta, max(min(deltas), delta**2)), 1)
        axes.legend()
    else:
        axes.text(0.5, 0.5, "ε = ∞", ha="center", va="center", transform=axes.transAxes)
    axes.set_xlabel("ε")
    axes.set_ylabel("δ")
    kind = " (odometer reading)" if ledger.odometer_reasons else ""
    axes.set_title(f"{ledger.steps} releases, accountant {accountant}{kind}", fontsize="medium")
    return figure
