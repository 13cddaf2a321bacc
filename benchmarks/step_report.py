"""The results of step_time.py as Markdown tables and as a figure."""

import numpy as np

from benchmarks import harness
from benchmarks.workloads import PLAIN, WORKLOADS, memory_limit, time_limit

_SETTINGS = ("model", "lot_size", "examples")
_HOW = ("method", "engine", "physical_batch_size")
KEY = ("measure", *_SETTINGS, *_HOW)
_PLAIN_METHODS = tuple(plain.method for plain in PLAIN)


def announce(row, *fields):
    """Prints a row that was just measured."""
    values = ", ".join(f"{name} {row[name]}" for name in fields)
    print(f"{row['model']}, lot {row['lot_size']}, {label(row)}: {values}", flush=True)


def label(row):
    """Names what was measured, in a few words: `adadp, auto, B=32`."""
    if row["engine"] is None:
        return row["method"]
    return f"{row['method']}, {row['engine']}, B={row['physical_batch_size'] or 'auto'}"


def memory_ratio(results, row):
    """Peak of a row over that of the leaner plain Keras run; None where that is not known."""
    same = {name: row[name] for name in _SETTINGS}
    measure = row["measure"]
    plain = [results.find(measure=measure, method=m, **same) for m in _PLAIN_METHODS]
    if None in plain:
        return None
    return row["memory_mb"] / max(min(p["memory_mb"] for p in plain), 1e-9)


def tables(results):
    """The rows as Markdown: the private contenders, then what was measured beside peers."""
    parts = []
    for measure, title in (("time", ""), ("peer_time", "Next to other libraries:\n\n")):
        rows = [row for row in results.rows if row["measure"] == measure]
        if rows:
            parts.append(title + _table(results, rows))
    return "\n\n".join(parts)


def _table(results, rows):
    header = [
        "model",
        "lot",
        "method",
        "step, ms",
        "ms per example",
        "× plain (rounds)",
        "mark",
        "memory, MiB (data)",
        "× plain",
        "mark",
    ]
    lines = []
    for row in rows:
        memory = results.find(measure="memory", **{k: row[k] for k in _SETTINGS + _HOW})
        ratio = memory and memory_ratio(results, memory)
        low, high = row["ratio_range"]
        lines.append(
            [
                WORKLOADS[row["model"]].title,
                row["lot_size"],
                label(row),
                f"{row['step_ms']:.1f}",
                f"{row['ms_per_example']:.4f}",
                f"{row['ratio']:.1f} ({low:.1f}–{high:.1f})",
                _mark(time_limit(row)),
                f"{memory['memory_mb']:.0f} ({memory['data_mb']:.0f})" if memory else "",
                f"{ratio:.2f}" if ratio else "",
                _mark(memory_limit(row)),
            ]
        )
    return harness.markdown_table(header, lines)


def _mark(limit):
    return "" if limit is None else f"≤ {limit:g}"


def plot(results, path):
    """Bars of step time and memory relative to plain Keras, marks as dashed lines.

    One row of axes for each model, lot size and amount of data. Peers stand below the private
    contenders.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups = {}
    for row in results.rows:
        if row["method"] not in _PLAIN_METHODS:
            groups.setdefault(tuple(row[name] for name in _SETTINGS), []).append(row)
    heights = [0.9 + 0.22 * max(len(_timed(g)), len(_sized(g))) for g in groups.values()]
    figure, axes = plt.subplots(
        len(groups),
        2,
        figsize=(11, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for (left, right), (key, rows) in zip(axes, groups.items(), strict=True):
        model, lot_size, _ = key
        timed, sized = _timed(rows), _sized(rows)
        spread = [_spread(r) for r in timed]
        _bars(left, timed, [r["ratio"] for r in timed], map(time_limit, timed), spread)
        left.set_title(f"{WORKLOADS[model].title}, lot {lot_size}: step / plain Keras", fontsize=9)
        ratios = [memory_ratio(results, r) or np.nan for r in sized]
        _bars(right, sized, ratios, map(memory_limit, sized))
        right.set_title("peak memory / plain Keras", fontsize=9)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _timed(rows):
    """Returns what was timed, once each: alone where that is known, else next to the peers."""
    times = {}
    for measure in ("time", "peer_time"):
        for row in rows:
            if row["measure"] == measure:
                times.setdefault(label(row), row)
    return list(times.values())


def _sized(rows):
    sized = (row for row in rows if row["measure"] == "memory")
    return sorted(sized, key=lambda row: row["engine"] is None)  # peers last


def _spread(row):
    """Returns how far the rounds reach below and above; the ratio of medians may lie outside."""
    low, high = row["ratio_range"]
    return [max(0.0, row["ratio"] - low), max(0.0, high - row["ratio"])]


def _bars(axis, rows, values, limits, spread=None):
    places, limits = np.arange(len(rows)), list(limits)
    errors = np.transpose(spread) if spread else np.zeros([2, len(rows)])
    axis.barh(places, values, xerr=errors, height=0.6, color="#4878a8", ecolor="#333333")
    for place, value, limit in zip(places, values, limits, strict=True):
        axis.text(value + errors[1][place], place, f" {value:.1f}×", va="center", fontsize=8)
        if limit is not None:
            axis.plot([limit, limit], [place - 0.45, place + 0.45], "--", color="#c44e52")
    axis.set_yticks(places, [label(row) for row in rows], fontsize=8)
    axis.invert_yaxis()
    ends = [*(values + errors[1]), *(limit for limit in limits if limit is not None)]
    axis.set_xlim(0, 1.15 * max(np.nan_to_num(ends), default=1.0))


# The README's columns: a library, and the prefix of its modes.
_LIBRARIES = {
    "tf_adadp, DPSGD": "dpsgd",
    "ADADP": "adadp",
    "TF Privacy": "tf_privacy:",
    "Opacus": "opacus:",
    "JAX-Privacy": "jax_privacy:",
}


def libraries(rows):
    """Returns {model: {library: least step time over its modes, × plain Keras}}."""
    measured = [row for row in rows if row["measure"] == "peer_time"]
    return {
        model: {
            library: min(
                row["ratio"]
                for row in measured
                if row["model"] == model and row["method"].startswith(prefix)
            )
            for library, prefix in _LIBRARIES.items()
        }
        for model in dict.fromkeys(row["model"] for row in measured)
    }
