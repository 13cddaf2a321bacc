"""Compares all bounds for one run, as a table and as a figure over steps."""

import dataclasses
import textwrap
from typing import TYPE_CHECKING

import dp_accounting
import numpy as np

from tf_adadp.accounting.accountants import Composition, is_non_private_key
from tf_adadp.accounting.bounds.gaussian_dp import clt_mu_of_events, epsilon_of_mu
from tf_adadp.accounting.events import event_from_key, event_key
from tf_adadp.accounting.laws import FixedSizeSampling, poisson_event
from tf_adadp.utils.checks import (
    check_delta,
    check_integer,
    check_noise_multiplier,
    check_sampling_probability,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Relation = dp_accounting.NeighboringRelation
_NEIGHBOURS = {
    _Relation.ADD_OR_REMOVE_ONE: "add or remove",
    _Relation.REPLACE_ONE: "replace",
    _Relation.REPLACE_SPECIAL: "replace by null",
}
# Loosest first. The last is an approximation, not a bound: see `gaussian_dp`.
_CLT = "gdp_clt"
_REMARKS = {
    "theorem1": "Theorem 1 of the ADADP paper, with its conversion",
    "wang_theorem9": "Wang et al. 2019, any mechanism; stays above 0 however much noise",
    "wang_theorem27": "Wang et al. 2019, Gaussian",
    "rdp": "Rényi, dp_accounting",
    "pld": "privacy loss distributions, dp_accounting",
    _CLT: "APPROXIMATION for many steps: the true ε may be larger, never charged",
}
_FIXED_SIZE_NOTE = (
    "Figures for fixed-size lots are for data sets that differ by REPLACING one record, which "
    "moves a clipped sum twice as far: they are taken at half the noise multiplier, and say "
    "nothing about Poisson lots."
)


@dataclasses.dataclass(frozen=True)
class ComparedBound:
    """One figure of a comparison.

    Attributes:
      name: an accountant's name, or "gdp_clt" for the central-limit figure.
      lots: how lots are sampled.
      neighboring_relation: the relation the figure is for. Figures for different relations are
        statements about different things.
      epsilon: ε, None where this bound has none for these releases.
      is_guarantee: whether the true ε is proven to be at most this. False for "gdp_clt".
      remark: its source, or the reason for a missing ε.

    Example:
        >>> comparison = accounting.compare(1.1, sampling_probability=0.01, steps=1000, delta=1e-5)
        >>> [row.name for row in comparison.rows if not row.is_guarantee]
        ['gdp_clt']
    """

    name: str
    lots: str
    neighboring_relation: dp_accounting.NeighboringRelation
    epsilon: float | None
    is_guarantee: bool
    remark: str


@dataclasses.dataclass(frozen=True)
class _Run:
    """Releases in the order they are made; charges as in `Composition`, repeats allowed."""

    lots: str
    relation: dp_accounting.NeighboringRelation
    charges: tuple[tuple[str, int], ...]

    @property
    def steps(self) -> int:
        return sum(count for _, count in self.charges)

    def first(self, steps: int) -> "_Run":
        """Returns the first `steps` releases."""
        charges, left = [], steps
        for key, count in self.charges:
            charges.append((key, min(count, left)))
            left -= charges[-1][1]
        return dataclasses.replace(self, charges=tuple(charges))

    def bounds(self) -> tuple[str, ...]:
        """Returns the names of the bounds to show."""
        has_clt = self.relation is _Relation.ADD_OR_REMOVE_ONE
        return tuple(name for name in _REMARKS if name != _CLT or has_clt)

    def epsilon(self, name: str, delta: float) -> float:
        """Returns ε by one bound; raises ValueError if it has none."""
        if name != _CLT:
            return Composition((), self.relation).plus(self.charges).epsilon(delta, name)
        if any(is_non_private_key(key) for key, count in self.charges if count):
            return float("inf")
        mu = clt_mu_of_events((event_from_key(key), count) for key, count in self.charges)
        if mu is None:
            raise ValueError("the central limit is known for Gaussians on Poisson lots only.")
        return epsilon_of_mu(mu, delta)

    def row(self, name: str, delta: float) -> ComparedBound:
        try:
            epsilon, remark = self.epsilon(name, delta), _REMARKS[name]
        except ValueError as error:
            epsilon, remark = None, f"not available: {error}"
        return ComparedBound(name, self.lots, self.relation, epsilon, name != _CLT, remark)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Holds the bounds of `compare` and `PrivacyLedger.compare`; `str()` of it is a table.

    Bounds that have no ε for these releases are named below the table, each with the whole reason.

    Attributes:
      title: the releases that are compared.
      delta: δ of every ε.
      rows: the figures, each labelled with the neighbouring relation it is for.

    Example:
        >>> comparison = accounting.compare(1.1, sampling_probability=0.01, steps=1000, delta=1e-5)
        >>> print(comparison.title)
        1000 steps, σ* = 1.1, q = 0.01
    """

    title: str
    delta: float
    rows: tuple[ComparedBound, ...]
    _runs: tuple[_Run, ...] = dataclasses.field(repr=False)

    @classmethod
    def _of(cls, title: str, delta: float, runs: tuple[_Run, ...]) -> "Comparison":
        rows = tuple(run.row(name, delta) for run in runs for name in run.bounds())
        return cls(title, delta, rows, runs)

    def __str__(self):
        header = ("bound", "lots", "neighbours", "ε", "guarantee", "remark")
        cells = [
            (
                row.name,
                row.lots,
                _NEIGHBOURS[row.neighboring_relation],
                f"{row.epsilon:.4g}",
                "yes" if row.is_guarantee else "NO",
                row.remark,
            )
            for row in self.rows
            if row.epsilon is not None
        ]
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in (header, *cells)
        ]
        relations = {row.neighboring_relation for row in self.rows}
        notes = [_FIXED_SIZE_NOTE] if _Relation.REPLACE_ONE in relations else []
        notes += [
            f"{row.name} ({row.lots}, {_NEIGHBOURS[row.neighboring_relation]}): {row.remark}"
            for row in self.rows
            if row.epsilon is None
        ]
        below = [line for note in notes for line in ("", *textwrap.wrap(note, 96))]
        return "\n".join([f"{self.title}, δ = {self.delta:g}", "", *lines, *below])

    def figure(self, points: int = 32, slow_points: int = 6) -> "Figure":
        """Returns a `matplotlib.figure.Figure` of ε over the number of releases, all bounds.

        Needs matplotlib (pip install "tf_adadp[examples]"), which is imported here. Dotted lines
        are for replace-one neighbours; the dashed line is not a guarantee.

        Args:
          points: readings along each line, ≥ 1.
          slow_points: the same for "pld", which takes seconds for each.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.4), layout="constrained")
        axes = figure.add_subplot()
        colours = {name: f"C{i}" for i, name in enumerate(_REMARKS)}
        for run in self._runs:
            for name in run.bounds():
                steps = _grid(run.steps, slow_points if name == "pld" else points)
                try:
                    epsilons = [run.first(int(t)).epsilon(name, self.delta) for t in steps]
                except ValueError:  # the table gives the reason
                    continue
                replaces = run.relation is _Relation.REPLACE_ONE
                style = "--" if name == _CLT else ":" if replaces else "-"
                marker = "o" if len(steps) < points else None
                label = f"{name}, {run.lots}, {_NEIGHBOURS[run.relation]}"
                label += " (approximation)" if name == _CLT else ""
                axes.plot(steps, epsilons, style, marker=marker, color=colours[name], label=label)
        axes.set_xlabel("releases")
        axes.set_ylabel(f"ε at δ = {self.delta:g}")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.set_title(self.title, fontsize=10)
        if axes.lines:
            axes.legend(fontsize=7)
        return figure


def compare(
    noise_multiplier: float, sampling_probability: float, steps: int, delta: float
) -> Comparison:
    """Returns ε of one planned run by every bound, for Poisson and for fixed-size lots.

    Poisson lots: add-or-remove-one neighbours at σ*. Fixed-size lots, q = n/N: replace-one
    neighbours at σ*/2, as `FixedSizeSampling` charges. Every row says which, and whether it is a
    guarantee: all are but the central-limit figure "gdp_clt". Takes as long as its "pld" row, from
    a tenth of a second to several.

    Args:
      noise_multiplier: σ* ≥ 0, noise standard deviation over the L2 bound of one clipped vector.
      sampling_probability: q in [0, 1].
      steps: T ≥ 0.
      delta: δ in (0, 1).

    Raises:
      ValueError: an argument is out of range.

    Example:
        >>> comparison = accounting.compare(1.1, sampling_probability=0.01, steps=1000, delta=1e-5)
        >>> {row.name: round(row.epsilon, 2) for row in comparison.rows[:2]}
        {'theorem1': 3.81, 'wang_theorem9': 3.19}
    """
    sigma = check_noise_multiplier(noise_multiplier)
    q = check_sampling_probability(sampling_probability)
    steps = check_integer("steps", steps, at_least=0)
    poisson = fixed_size = poisson_event(q, sigma)
    if q > 0:
        # The bounds depend on n/N alone, and a float is a ratio of whole numbers.
        size, records = q.as_integer_ratio()
        fixed_size = FixedSizeSampling(records, size).event(sigma)
    runs = (
        _Run("Poisson", _Relation.ADD_OR_REMOVE_ONE, ((event_key(poisson), steps),)),
        _Run("fixed size", _Relation.REPLACE_ONE, ((event_key(fixed_size), steps),)),
    )
    title = f"{steps} steps, σ* = {sigma:.4g}, q = {q:.4g}"
    return Comparison._of(title, check_delta(delta), runs)


def compare_releases(composition: Composition, charges, delta: float) -> Comparison:
    """Returns the comparison of releases that were made, charges in their order."""
    relation = composition.relation
    run = _Run("as recorded", relation, tuple(charges))
    return Comparison._of(f"{run.steps} recorded releases", delta, (run,))


def _grid(steps: int, points: int) -> np.ndarray:
    """Returns at most `points` whole numbers from 1 to `steps`, the last always among them."""
    if steps == 0:
        return np.zeros(1, dtype=np.int64)
    return np.unique(np.linspace(steps, 1, points).round().astype(np.int64))
