"""Prints the records as a table, and draws accuracy over ε beside published points.

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
}
PUBLISHED = {
    "scattering, linear (2021)": ("s", {"mnist": (3.0, 98.7), "fashion_mnist": (3.0, 89.7)}),
    "scattering, CNN (2021)": ("D", {"cifar10": (3.0, 69.3)}),
    "DP-RandP (2023)": ("*", {"cifar10": (1.0, 72.3)}),
    "tanh CNN (2020)": (
        "^",
        {"mnist": (2.93, 98.1), "fashion_mnist": (3.0, 86.0), "cifar10": (3.0, 59.2)},
    ),
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
                f"| {title} | {float(epsilon):g} | {max(r['epsilon_rdp'] for r in runs):.2f} "
                f"| {mean:.2f} ± {spread:.2f} | {row['settings']['steps']} | {minutes:.1f} |"
            )
        for baseline, accuracy in results.get(name, {}).get("baselines", {}).items():
            lines.append(f"| {title}: {baseline} | ∞ | ∞ | {accuracy:.2f} | | |")
    return "\n".join(lines)


def draw(results, path):
    """Draws one panel for each data set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = figure.subplots(2, 3).flat
    for name, title in NAMES.items():
        panel = next(panels)
        rows = _private(results, name)
        if not rows:
            continue
        means, spreads = zip(*(summary(row["runs"]) for row in rows.values()), strict=True)
        epsilons = [float(epsilon) for epsilon in rows]
        panel.errorbar(epsilons, means, spreads, marker="o", capsize=3, label="records")
        for label, (marker, points) in PUBLISHED.items():
            if name in points:
                panel.plot(*points[name], marker, label=label)
        for number, (baseline, accuracy) in enumerate(results[name]["baselines"].items()):
            panel.axhline(accuracy, color=f"C{number + 1}", ls="--", label=baseline)
        panel.set(title=title, xlabel="ε at δ = 1e-5", ylabel="test accuracy, %")
        panel.legend(fontsize="small")
    next(panels).set_axis_off()
    figure.savefig(path, dpi=110)


def _private(results, name):
    """Returns the rows of a data set that have two runs or more."""
    rows = {key: row for key, row in results.get(name, {}).items() if key != "baselines"}
    return {epsilon: row for epsilon, row in rows.items() if len(row["runs"]) > 1}


if __name__ == "__main__":
    source, picture = map(pathlib.Path, sys.argv[1:])
    found = json.loads(source.read_text())
    print(table(found))
    draw(found, picture)
