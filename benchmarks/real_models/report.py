"""The results of the zoo as Markdown: each limit with what was measured, and who is below it."""

import dataclasses

from benchmarks import harness, step_report
from benchmarks.real_models.entry import FIRST_FIT_FACTOR, FIRST_FIT_SECONDS, MEMORY_LIMIT
from benchmarks.real_models.zoo import MODELS
from benchmarks.workloads import PLAIN

KEY = step_report.KEY
_SAME = ("model", "lot_size", "examples")
_PLAIN_METHODS = tuple(plain.method for plain in PLAIN)
_HEADER = [
    "model",
    "method",
    "engine",
    "step, ms",
    "× plain (rounds)",
    "limit",
    "first fit, s (plain)",
    "limit",
    "memory, MiB",
    "× plain",
    "limit",
    "below all",
]


@dataclasses.dataclass(frozen=True)
class Check:
    """A figure and its limit; value is None where it was not measured."""

    name: str
    value: float | None
    limit: float | None

    @property
    def passed(self):
        """Tells whether the figure is known and not above the limit."""
        return self.value is not None and self.limit is not None and self.value <= self.limit


def checks(results, row):
    """The three checks of a private contender: step, first fit, memory.

    Args:
        results: a `harness.Results`.
        row: any of its rows about that contender.
    """
    time, fresh = (_measured(results, measure, row) for measure in ("time", "fresh"))
    plain = plain_first_fit(results, row)
    return (
        Check("step", time and time["ratio"], MODELS[row["model"]].step_limit),
        Check(
            "first fit",
            fresh and fresh["first_fit_s"],
            plain and FIRST_FIT_FACTOR * plain + FIRST_FIT_SECONDS,
        ),
        Check("memory", plain and fresh and step_report.memory_ratio(results, fresh), MEMORY_LIMIT),
    )


def plain_first_fit(results, row):
    """Seconds until the first step of the faster plain Keras run; None where it is not known."""
    same = {name: row[name] for name in _SAME}
    rows = [results.find(measure="fresh", method=m, **same) for m in _PLAIN_METHODS]
    if any(plain is None or "error" in plain for plain in rows):
        return None
    return min(plain["first_fit_s"] for plain in rows)


def _measured(results, measure, row):
    """The row of a measure about the contender of a row, unless it failed."""
    found = results.find(measure=measure, **{name: row[name] for name in KEY[1:]})
    return None if found is None or "error" in found else found


def contenders(results):
    """One row for every private contender, in the order of the zoo."""
    first = {}
    for row in results.rows:
        if row["method"] not in _PLAIN_METHODS:
            first.setdefault(tuple(row[name] for name in KEY[1:]), row)
    return sorted(first.values(), key=lambda row: list(MODELS).index(row["model"]))


def tables(results):
    """The table of figures and limits, and below it why models are not on the ghost engine."""
    rows = contenders(results)
    lines = [_line(results, row) for row in rows]
    passed = sum(line[-1] == "yes" for line in lines)
    parts = [
        harness.markdown_table(_HEADER, lines),
        f"Below all limits: {passed} of {len(lines)}.",
    ]
    reasons = {}
    for row in rows:
        fresh = _measured(results, "fresh", row)
        if fresh and fresh["plan"] != "ghost":
            reasons[MODELS[row["model"]].title] = fresh["reason"]
    if reasons:
        listed = [f"- {title}: {reason}" for title, reason in reasons.items()]
        parts.append("\n".join(["Not on the ghost engine:", "", *listed]))
    failed = [row for row in results.rows if "error" in row]
    if failed:
        listed = [
            f"- {row['model']}, {step_report.label(row)}, {row['measure']}: {row['error']}"
            for row in failed
        ]
        parts.append("\n".join(["Failed:", "", *listed]))
    return "\n\n".join(parts)


def _line(results, row):
    step, first_fit, memory = made = checks(results, row)
    time, fresh = (_measured(results, measure, row) for measure in ("time", "fresh"))
    plain = plain_first_fit(results, row)
    above = [check.name for check in made if not check.passed]
    return [
        MODELS[row["model"]].title,
        row["method"],
        fresh["plan"] if fresh else "",
        f"{time['step_ms']:.1f}" if time else "",
        "{:.2f} ({:.2f}–{:.2f})".format(time["ratio"], *time["ratio_range"]) if time else "",
        _mark(step.limit),
        f"{fresh['first_fit_s']:.1f} ({plain:.1f})" if fresh and plain else "",
        _mark(first_fit.limit),
        f"{fresh['memory_mb']:.0f}" if fresh else "",
        f"{memory.value:.2f}" if memory.value else "",
        _mark(memory.limit),
        f"NO: {', '.join(above)}" if above else "yes",
    ]


def _mark(limit):
    return "" if limit is None else f"≤ {limit:.3g}"
