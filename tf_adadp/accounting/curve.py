"""Draws δ(ε), and metrics against ε. Needs matplotlib, which is imported only for drawing."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tf_adadp.accounting.ledger import PrivacyLedger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS, _SLOW_POINTS = 80, 25
# Metrics that ε covers, or that come from other records, by the beginnings of their names in logs.
_KINDS = {"released_": "training, released", "val_": "validation"}


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

    Example:
        >>> ledger = dp.PrivacyLedger()
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> ledger.add(law.event(1.1), 1000, law=law)
        >>> accounting.privacy_curve(ledger, delta=1e-5).savefig("curve.png")
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


def metrics_over_epsilon(
    points: Sequence[tuple[float, dict]], delta: float, accountant: str = "rdp"
) -> "Figure | None":
    """Draws every metric against the ε spent when it was measured, in one panel each.

    Lines show metrics released with noise (`released_*`), which ε covers, and validation metrics
    (`val_*`) of other records, which ε does not cover. Raw training metrics are left out, and so
    are losses if there are other metrics, and values that are not a single number. A released
    metric is its mean over an epoch, drawn at the ε of the epoch's end.

    Args:
      points: ε and the logs of an epoch, in their order. Points of infinite ε are not drawn.
      delta, accountant: those of ε, for the label.

    Returns:
      A `matplotlib.figure.Figure`, or None if the logs have none of these metrics.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    lines = {}  # {metric: {kind: [(ε, value)]}}
    for epsilon, logs in points:
        for name, value in logs.items():
            for start, kind in _KINDS.items():
                if name.startswith(start) and math.isfinite(epsilon) and np.ndim(value) == 0:
                    of_metric = lines.setdefault(name.removeprefix(start), {})
                    of_metric.setdefault(kind, []).append((epsilon, float(value)))
    if not lines:
        return None
    metrics = [name for name in lines if not name.endswith("loss")] or list(lines)
    columns = min(len(metrics), 3)
    rows = -(-len(metrics) // columns)
    figure = Figure(figsize=(5 * columns, 3.5 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for metric, axes in zip(metrics, panels, strict=False):
        for kind, found in sorted(lines[metric].items()):
            axes.plot(*zip(*found, strict=True), "o-", markersize=3, label=kind)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"ε at δ = {delta:g} ({accountant})")
        axes.set_ylabel(metric)
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in panels:  # the rest of the iterator: panels without a metric
        axes.set_axis_off()
    return figure
