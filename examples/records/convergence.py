"""Counts steps and ε to an accuracy: ADADP against DP-SGD on MNIST behind private components.

    python examples/records/convergence.py --data_dir=<folder of mnist.npz>

ADADP's paper claims fast convergence: 96 % at a quarter of DP-SGD's ε. The network is that of
components.py. Both optimizers have the same components, lots and noise, which are within ε = 4
after all steps (RDP, δ = 1e-5). `ADADP()` has its defaults; DP-SGD has the rate that
benchmarks/methods.py found on held-out records. Test accuracy is measured every ten steps.

Writes {optimizer: [{"steps", "epsilon", "accuracy"} of each seed], "settings"} and a figure.
"""

import dataclasses
import json
import os
import pathlib
import statistics

import components
import images
import record
from absl import app, flags

import tf_adadp as dp

RECIPE = components.Recipe(1000, 4.0, 2048, initial_rate=None, average=None, accountant="rdp")
EPSILON, EVERY, TARGETS = 4.0, 10, (0.90, 0.95)
OPTIMIZERS = {"ADADP": RECIPE.optimizer, "DPSGD": lambda: dp.DPSGD(8.0)}


def curve(projected, optimizer, seed):
    """Returns accuracy and ε at every tenth step of one training."""
    import keras

    model = components.network(projected, RECIPE, seed)
    split = projected(RECIPE, seed)[1]
    found = {"steps": [], "epsilon": [], "accuracy": []}

    class Measure(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            found["steps"].append((epoch + 1) * EVERY)
            found["epsilon"].append(round(model.epsilon(RECIPE.delta), 4))
            found["accuracy"].append(round(record.test_accuracy(model, split), 4))

    record.fit(
        model,
        RECIPE,
        split,
        EPSILON,
        optimizer(),
        epochs=RECIPE.steps // EVERY,
        callbacks=[Measure()],
    )
    return found


def reached(run, target):
    """Returns steps and ε at which a run first has an accuracy, or None."""
    for steps, epsilon, accuracy in zip(*run.values(), strict=True):
        if accuracy >= target:
            return steps, epsilon
    return None


def table(results):
    """Returns steps and ε to each accuracy as Markdown, means over the seeds."""
    heads = [f"{unit} to {target:.0%}" for target in TARGETS for unit in ("steps", "ε")]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name, runs in results.items():
        cells = []
        for target in TARGETS:
            places = [reached(run, target) for run in runs]
            if None in places:
                cells += [f"{places.count(None)} of {len(places)} do not reach it", ""]
                continue
            steps, epsilons = zip(*places, strict=True)
            cells += [f"{statistics.mean(steps):.0f}", f"{statistics.mean(epsilons):.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results, path):
    """Draws test accuracy over steps and over ε, a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, key, label in zip(panels, ("steps", "epsilon"), ("steps", "ε"), strict=True):
        for number, (name, runs) in enumerate(results.items()):
            for seed, run in enumerate(runs):
                shares = [100 * accuracy for accuracy in run["accuracy"]]
                title = name if seed == 0 else None
                panel.plot(run[key], shares, color=f"C{number}", lw=0.9, label=title)
        for target in TARGETS:
            panel.axhline(100 * target, color="gray", ls=":")
        panel.set(xlabel=label, ylim=(80, 98))
        panel.legend()
    panels[0].set_ylabel("test accuracy, %")
    figure.savefig(path, dpi=110)


def main(argv):
    """Trains what is missing, prints the table and draws the figure."""
    del argv
    path = pathlib.Path(flags.FLAGS.out)
    results = json.loads(path.read_text()) if path.exists() else {}
    settings = {"epsilon": EPSILON, **dataclasses.asdict(RECIPE)}
    if results.setdefault("settings", settings) != settings:
        raise app.UsageError(f"{path} has runs of {results['settings']}. Give another --out.")
    projected = components.projector(images.load("mnist", flags.FLAGS.data_dir))
    for seed in range(flags.FLAGS.seeds):
        for name, optimizer in OPTIMIZERS.items():
            runs = results.setdefault(name, [])
            if seed == len(runs):
                runs.append(curve(projected, optimizer, seed))
                record.write(results, path)
                print(name, seed, [reached(runs[-1], target) for target in TARGETS], flush=True)
    del results["settings"]
    print(table(results))
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    flags.DEFINE_string("data_dir", os.environ.get("TF_ADADP_DATA_DIR"), "Folder of mnist.npz.")
    flags.DEFINE_string("out", "convergence.json", "File of results; the figure is beside it.")
    flags.DEFINE_integer("seeds", 3, "Trainings of each optimizer.", lower_bound=1)
    app.run(main)
