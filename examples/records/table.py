"""Prints the records as tables, and draws accuracy over ε beside published points.

    python examples/records/table.py records.json records.png

Published: Tramèr and Boneh (2021), scattering features; Tang et al. (2023, DP-RandP), networks
pretrained on images of random processes; Papernot et al. (2020), tanh CNNs; Fu et al. (SA-DPSGD),
Table 1, whose accounting charges accepted updates alone.
"""

import json
import pathlib
import statistics
import sys

NAMES = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "reviews": "reviews (text)",
    "affairs": "affairs (table)",
    "mnist_components": "MNIST, 60 components",
    "mnist_components, straightened": "MNIST, 60 components, straightened",
    "cifar10_frozen": "CIFAR-10, public convolutions",
}
PUBLISHED = {
    "scattering, linear (2021)": ("s", {"mnist": (3.0, 98.7), "fashion_mnist": (3.0, 89.7)}),
    "scattering, CNN (2021)": ("D", {"cifar10": (3.0, 69.3)}),
    "DP-RandP (2023)": ("*", {"cifar10": (1.0, 72.3)}),
    "tanh CNN (2020)": (
        "^",
        {"mnist": (2.93, 98.1), "fashion_mnist": (3.0, 86.0), "cifar10": (3.0, 59.2)},
    ),
    "ADADP, as printed": (
        "P",
        {
            "mnist_components": (1.4, 96.0),
            "cifar10_frozen": ([0.62, 1.07, 2.13, 3.55], [68, 69, 70, 71]),
        },
    ),
    "DP-SGD of Abadi et al. (2016)": ("v", {"mnist_components": ([0.5, 2, 8], [90, 95, 97])}),
    "SA-DPSGD, as printed": ("x", {"mnist": (3.0, 98.89), "fashion_mnist": (3.0, 88.5)}),
}


def summary(runs):
    """Mean and standard deviation of the accuracies of runs, in %."""
    accuracies = [run["accuracy"] for run in runs]
    return statistics.mean(accuracies), statistics.stdev(accuracies)


def table(results):
    """Returns the rows as Markdown."""
    lines = [
        "| data | ε (PLD) | ε (RDP) | accuracy, % | steps | minutes |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in NAMES.items():
        for epsilon, row in _private(results, name).items():
            runs = row["runs"]
            mean, spread = summary(runs)
            minutes = statistics.mean(run["minutes"] for run in runs)
            lines.append(
                f"| {title} | {_budget(epsilon, row)} | {max(r['epsilon_rdp'] for r in runs):.2f} "
                f"| {mean:.2f} ± {spread:.2f} | {row['settings']['steps']} | {minutes:.1f} |"
            )
        for baseline, accuracy in results.get(name, {}).get("baselines", {}).items():
            lines.append(f"| {title}: {baseline} | ∞ | ∞ | {accuracy:.2f} | | |")
    return "\n".join(lines)


def variants(results):
    """Returns what variants of the recipes reach at each ε, beside the recipes, as Markdown.

    Two tables: what chooses nothing or pays for its choice, and images with one part changed.
    """
    unchosen = ("defaults", "searched")
    lines = ["| data | ε | recipe | defaults | charged search |", "|---|---|---|---|---|"]
    for name, title in NAMES.items():
        rows = [_private(results, key) for key in (name, *(f"{name}, {v}" for v in unchosen))]
        for epsilon, row in rows[0].items():
            if any(epsilon in found for found in rows[1:]):
                cells = [_cell(found.get(epsilon)) for found in rows]
                lines.append(f"| {title} | {_budget(epsilon, row)} | {' | '.join(cells)} |")
    images = ("mnist", "fashion_mnist", "cifar10")
    parts = {}
    for key in results:
        name, _, part = key.partition(", ")
        if name in images and part not in ("", *unchosen) and "held out" not in part:
            parts.setdefault(part, {})[name] = _private(results, key).get("3")
    heads = " | ".join(NAMES[name] for name in images)
    lines += ["", f"| ε = 3 | {heads} |", "|---|---|---|---|"]
    whole = {name: _private(results, name).get("3") for name in images}
    for part, rows in {"recipe": whole, **parts}.items():
        cells = " | ".join(_cell(rows.get(name)) for name in images)
        lines.append(f"| {part} | {cells} |")
    return "\n".join(lines)


def _budget(epsilon, row):
    """Returns ε, with δ if it is not 1e-5."""
    delta = row["settings"]["delta"]
    return epsilon if delta == 1e-5 else f"{epsilon} (δ = {delta:.0e})".replace("e-0", "e-")


def _cell(row):
    return "" if row is None else "{:.2f} ± {:.2f}".format(*summary(row["runs"]))


def draw(results, path):
    """Draws one panel for each data set, variants that have a title of their own in the same."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7), layout="constrained")
    panels = figure.subplots(2, 4).flat
    for name, title in NAMES.items():
        variant = name.partition(", ")[2]
        if not variant:
            panel = next(panels)
        rows = _private(results, name)
        if not rows:
            continue
        means, spreads = zip(*(summary(row["runs"]) for row in rows.values()), strict=True)
        epsilons = [float(epsilon) for epsilon in rows]
        panel.errorbar(epsilons, means, spreads, marker="o", capsize=3, label=variant or "records")
        if variant:
            panel.legend(fontsize="small")
            continue
        for label, (marker, points) in PUBLISHED.items():
            if name in points:
                panel.plot(*points[name], marker, label=label)
        for number, (baseline, accuracy) in enumerate(results[name].get("baselines", {}).items()):
            panel.axhline(accuracy, color=f"C{number + 1}", ls="--", label=baseline)
        panel.set(title=title, xlabel="ε", ylabel="test accuracy, %")
        panel.legend(fontsize="small")
    for panel in panels:
        panel.set_axis_off()
    figure.savefig(path, dpi=110)


def _private(results, name):
    """Returns the rows of a data set that have two runs or more."""
    rows = {key: row for key, row in results.get(name, {}).items() if key != "baselines"}
    return {epsilon: row for epsilon, row in rows.items() if len(row["runs"]) > 1}


if __name__ == "__main__":
    source, picture = map(pathlib.Path, sys.argv[1:])
    found = json.loads(source.read_text())
    print(table(found), variants(found), sep="\n\n")
    draw(found, picture)
