"""The results of adadp_default.py as Markdown tables and as a figure."""

import math

import numpy as np
from scipy import special

from benchmarks import harness

_TUNED = ("DPSGD", "DPAdam")
COMPARED = ("ADADP", "DPSGD")
# Points; what the default is meant to be below tuned DP-SGD nowhere.
_TOLERATED = 0.5
# Groups of tasks by the ends of their names; what has none of them is dense.
_GROUPS = {
    "convolutional, residual": ("_cnn", "_tanh", "_relu", "_group_norm", "_residual"),
    "transformer over patches": ("_patches",),
    "LoRA": ("_lora",),
    "recurrent": ("_gru", "_lstm"),
    "eight plain layers": ("_deep",),
    "logistic regression": ("fashion_logistic", "cifar10_logistic"),
    "tables": ("table_logistic", "table_mlp"),
}


def _mean(row):
    return 100 * float(np.mean(row["accuracies"]))


def _order(row):
    """A setting's name and value: `L 64` before `L 128`."""
    name, _, value = row["setting"].rpartition(" ")
    return name, float(value)


def _plain(row):
    """A row's optimizer, whatever its rate follows."""
    return row["method"].partition(",")[0]


def _text(row):
    return f"{_mean(row):.2f} ± {100 * np.std(row['accuracies'], ddof=1):.2f}"


def _with_rate(row):
    """A row's accuracy and, where it was searched, its rate; nothing for None."""
    if row is None:
        return ""
    rate = row["arguments"].get("learning_rate")
    return _text(row) + (f" ({rate:g})" if rate else "")


def _cells(rows):
    """Returns the study's {(task, ε): {method: row}}, in the order of the rows' tasks and ε."""
    cells = {}
    for row in rows:
        if row["part"] == "study":
            cells.setdefault((row["task"], row["epsilon"]), {})[row["method"]] = row
    return dict(sorted(cells.items()))


def _compared(rows):
    """Returns the cells that have both ADADP and the tuned DPSGD."""
    return {c: found for c, found in _cells(rows).items() if set(COMPARED) <= set(found)}


def differences(rows):
    """ADADP at its defaults less the tuned DPSGD, in points, for every cell that has both."""
    return {c: _mean(f["ADADP"]) - _mean(f["DPSGD"]) for c, f in _compared(rows).items()}


def by_chance(rows):
    """Returns, for every cell, how likely seeds alone put ADADP below by more than 0.5 points.

    It is Φ(−0.5/SE): the difference of two equal methods, with SE² = (s² + s'²)/seeds.
    """
    errors = {c: _standard_error([f[m] for m in COMPARED]) for c, f in _compared(rows).items()}
    return {c: special.ndtr(-_TOLERATED / error) if error else 0.0 for c, error in errors.items()}


def _standard_error(rows):
    """Returns that of the difference of the rows' means, in points."""
    return 100 * math.hypot(
        *(np.std(r["accuracies"], ddof=1) / math.sqrt(len(r["accuracies"])) for r in rows)
    )


def _group(task):
    return next((name for name, ends in _GROUPS.items() if task.endswith(ends)), "dense")


def groups(rows):
    """Returns the differences by group of networks, as Markdown."""
    chances = by_chance(rows)
    by_group = {name: [] for name in ("dense", *_GROUPS)}
    for (task, epsilon), apart in differences(rows).items():
        by_group[_group(task)].append((apart, chances[task, epsilon]))
    by_group["all"] = [pair for found in by_group.values() for pair in found]
    lines = []
    for name, found in by_group.items():
        if not found:
            continue
        a, chance = np.transpose(found)
        below = np.sum(a < -_TOLERATED)
        figures = (f"{f:+.2f}" for f in (a.mean(), a.min(), a.max()))
        lines.append([name, len(a), *figures, below, f"{chance.sum():.1f}"])
    header = ["networks", "cells", "mean", "least", "most", "below −0.5", "by chance"]
    return harness.markdown_table(header, lines)


def tables(rows):
    """Returns all parts as Markdown."""
    parts = []
    cells = _cells(rows)
    if cells:
        apart = differences(rows)
        lines = [
            [
                *(task, f"{epsilon:g}"),
                *(_with_rate(found.get(method)) for method in COMPARED),
                f"{apart[task, epsilon]:+.2f}" if (task, epsilon) in apart else "",
            ]
            for (task, epsilon), found in cells.items()
            if set(COMPARED) & set(found)
        ]
        parts.append(harness.markdown_table(["task", "ε", *_names(COMPARED), "difference"], lines))
        if apart:
            parts.append(groups(rows))
        others = dict.fromkeys(m for found in cells.values() for m in found if m not in COMPARED)
        if others:
            lines = [
                [task, f"{epsilon:g}", *(_with_rate(found.get(m)) for m in others)]
                for (task, epsilon), found in cells.items()
                if set(others) & set(found)
            ]
            parts.append(harness.markdown_table(["task", "ε", *_names(others)], lines))
    repeated = [row for row in rows if row["part"] == "seeds"]
    if repeated:
        parts.append(_seeds_table(repeated))
    for part in ("ablation", "rates"):
        variants = [row for row in rows if row["part"] == part]
        if variants:
            parts.append(_variants_table(variants))
    options = [row for row in rows if row["part"] == "options"]
    if options:
        parts.append(_options_table(options, cells))
    sensitivity = [row for row in rows if row["part"] == "sensitivity"]
    if sensitivity:
        by_name = {}
        for row in sorted(sensitivity, key=_order):
            by_name.setdefault(row["setting"], {})[_plain(row)] = row
        lines = [
            [name, *(_text(found[m]) if m in found else "" for m in ("ADADP", "DPSGD"))]
            for name, found in by_name.items()
        ]
        parts.append(harness.markdown_table(["digits", "ADADP", "DPSGD"], lines))
    return "\n\n".join(parts)


# The README's rows: a network and its data, and the task.
_SHOWN = {
    "MLP 64-64-10, digits": "digits",
    "MLP 64-64-10, digits with scaled columns": "digits_scaled",
    "MLP 784-128-10, MNIST": "mnist",
    "tanh CNN, Fashion-MNIST 14×14": "fashion_tanh",
    "ReLU CNN, Fashion-MNIST 14×14": "fashion_relu",
    "CNN with group normalisation, CIFAR-10 16×16": "cifar10_group_norm",
    "residual network, CIFAR-10 16×16": "cifar10_residual",
    "GRU over rows, MNIST 14×14": "mnist_gru",
    "LSTM over rows, MNIST 14×14": "mnist_lstm",
    "transformer over patches, MNIST 14×14": "mnist_patches",
    "transformer, adapters of rank 4 (LoRA), MNIST 14×14, classes 5 to 9": "mnist_lora",
    "eight ELU layers, Fashion-MNIST 14×14": "fashion_deep",
    "logistic regression, Fashion-MNIST 14×14": "fashion_logistic",
    "MLP, a drawn table of 20 columns": "table_mlp",
}


def architectures(rows):
    """Returns the README's table: one task for each architecture, at ε = 1 and 3."""
    cells = _cells(rows)

    def shown(task, epsilon, method):
        found = cells.get((task, epsilon), {})
        return _text(found[method]) if method in found else "not run"

    lines = [
        [name, *(shown(task, e, m) for e in (1.0, 3.0) for m in ("ADADP", "DPSGD"))]
        for name, task in _SHOWN.items()
    ]
    columns = [f"{m}, ε = {e}" for e in (1, 3) for m in ("ADADP", "DP-SGD tuned")]
    return harness.markdown_table(["test accuracy, %", *columns], lines)


def _names(methods):
    kinds = {m: ", tuned (η)" if m in _TUNED else "" if "," in m else ", default" for m in methods}
    return [m + kind for m, kind in kinds.items()]


def _seeds_table(rows):
    """A row per cell: both methods, and the difference with its standard error."""
    cells = {}
    for row in rows:
        cell = row["task"], row["epsilon"], row["setting"]
        cells.setdefault(cell, {})[row["method"]] = row
    lines = []
    for (task, epsilon, setting), found in sorted(cells.items()):
        both = [found.get(method) for method in COMPARED]
        apart = ""
        if all(both):
            apart = f"{_mean(both[0]) - _mean(both[1]):+.2f} ± {_standard_error(both):.2f}"
        seeds = setting.removeprefix("seeds ")
        lines.append([task, f"{epsilon:g}", seeds, *map(_with_rate, both), apart])
    header = ["task", "ε", "seeds", *_names(COMPARED), "difference ± standard error"]
    return harness.markdown_table(header, lines)


def _variant(row):
    return ", ".join(filter(None, (row["method"], row["setting"])))


def _variants_table(rows):
    """A row per variant, and setting if there is one; a column per cell."""
    columns = list(dict.fromkeys((r["task"], r["epsilon"]) for r in rows))
    by_name = {}
    for row in rows:
        by_name.setdefault(_variant(row), {})[row["task"], row["epsilon"]] = _with_rate(row)
    header = ["variant", *(f"{task}, ε = {epsilon:g}" for task, epsilon in columns)]
    lines = [[name, *(found.get(c, "") for c in columns)] for name, found in by_name.items()]
    return harness.markdown_table(header, lines)


def _options_table(options, cells):
    """The options part: a row per variant, below ADADP's default in the same cells of the study."""
    columns = list(dict.fromkeys((row["task"], row["epsilon"]) for row in options))
    by_name = {
        "ADADP, default": {c: cells[c]["ADADP"] for c in columns if "ADADP" in cells.get(c, {})}
    }
    for row in options:
        by_name.setdefault(_variant(row), {})[row["task"], row["epsilon"]] = row
    lines = [
        [name, *(_with_rate(found.get(c)) for c in columns)] for name, found in by_name.items()
    ]
    header = [
        "variant (η where searched)",
        *(f"{task}, ε = {epsilon:g}" for task, epsilon in columns),
    ]
    return harness.markdown_table(header, lines)


def plot(rows, path):
    """Draws, above, ADADP and tuned DP-SGD in every cell of the study; below, single arguments."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cells = _compared(rows)
    figure, (study, sensitivity) = plt.subplots(
        2, 1, figsize=(9, 4 + 0.19 * len(cells)), layout="constrained",
        height_ratios=(0.19 * max(len(cells), 1), 3),
    )  # fmt: skip
    places = range(len(cells))
    ours, theirs = ([_mean(f[m]) for f in cells.values()] for m in ("ADADP", "DPSGD"))
    study.hlines(places, theirs, ours, color="0.7", linewidth=2)
    study.plot(theirs, places, "|", color="C3", markersize=11, mew=2, label="DPSGD, tuned (η)")
    study.plot(ours, places, "o", color="C0", label="ADADP, default")
    study.set_yticks(places, [f"{task}, ε = {epsilon:g}" for task, epsilon in cells], fontsize=8)
    study.invert_yaxis()
    study.margins(y=0.01)
    study.set_xlabel("test accuracy, %")
    study.grid(alpha=0.3)
    study.legend(loc="lower left")
    settings = [row for row in rows if row["part"] == "sensitivity"]
    order = list(dict.fromkeys(row["setting"] for row in sorted(settings, key=_order)))
    for method, mark in (("ADADP", "o"), ("DPSGD", "_")):
        mine = [row for row in settings if _plain(row) == method]
        at = [order.index(row["setting"]) for row in mine]
        errors = [100 * np.std(row["accuracies"], ddof=1) for row in mine]
        sensitivity.errorbar(at, [_mean(row) for row in mine], errors, fmt=mark, label=method)
    sensitivity.set_xticks(range(len(order)), order, fontsize=8, rotation=60)
    sensitivity.set_ylabel("digits, test accuracy, %")
    sensitivity.grid(alpha=0.3)
    sensitivity.legend()
    figure.savefig(path, dpi=90)
    plt.close(figure)
