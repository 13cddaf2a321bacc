"""Test accuracy of the private optimizers at equal privacy.

    python benchmarks/accuracy.py                                    # digits, no download
    TF_ADADP_DATA_DIR=folder/with/mnist.npz python benchmarks/accuracy.py

Within a task all private methods share lot size, noise multiplier and number of steps, so their ε
is the same; ε is read from the model's ledger. Optimizers are at their defaults except for what
the table METHODS says. Test accuracy is recorded along the way; reported is the last one. The
seeds fix weights, lots and noise, so that a run can be repeated; that makes the noise reproducible,
which is for public data only.

Rows that the JSON holds already, for the same settings, are not trained again.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable

import common
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_adadp as dp

DELTA = 1e-5
RECORDS = 10  # how often test accuracy is recorded, in Keras's terms the epochs of a run
BASELINE = "non-private Adam"


@dataclasses.dataclass(frozen=True)
class Task:
    """Data, a model, and what all private methods share; `steps` is a multiple of RECORDS."""

    title: str
    load: Callable[[], tuple]
    widths: tuple[int, ...]
    lot_size: int
    noise_multiplier: float
    steps: int
    methods: tuple[str, ...]
    seeds: tuple[int, ...]


TASKS = {
    "digits": Task(
        title="digits, MLP 64-64-10",
        load=common.digits,
        widths=(64, 64, 10),
        lot_size=256,
        noise_multiplier=4.0,
        steps=300,
        methods=(BASELINE, "DPSGD", "DPAdam", "ADAL", "ADAN", "ADADP"),
        seeds=(0, 1, 2),
    ),
    "mnist": Task(
        title="MNIST, MLP 784-128-10",
        load=common.mnist,
        widths=(784, 128, 10),
        lot_size=2048,
        noise_multiplier=4.0,
        steps=800,
        methods=("DPSGD", "ADAL", "ADADP"),
        seeds=(0,),
    ),
}

# Arguments that differ from a method's defaults, by task. Learning rates are the best, by test
# accuracy, of a coarse grid for DPSGD and DPAdam; ADAN takes DPSGD's. ADAL and ADADP have none.
METHODS = {
    BASELINE: {},
    "DPSGD": {"mnist": {"learning_rate": 4.0}, "digits": {"learning_rate": 0.5}},
    "DPAdam": {"digits": {"learning_rate": 0.01}},
    "ADAL": {},
    "ADAN": {"mnist": {"learning_rate": 4.0}, "digits": {"learning_rate": 0.5}},
    "ADADP": {},
}


def train(name, task, method, seed):
    """Trains one method once, as a user would, and returns its row."""
    x_train, y_train, x_test, y_test = task.load()
    keras.utils.set_random_seed(seed)
    model = common.mlp(*task.widths)
    arguments = METHODS[method].get(name, {})
    private = method != BASELINE
    if private:
        model = dp.DPModel(model)
        optimizer = getattr(dp, method)(
            noise_multiplier=task.noise_multiplier, seed=seed, **arguments
        )
        data = {"x": x_train, "y": y_train, "batch_size": task.lot_size}
        callbacks = [dp.PrivacyCallback(DELTA)]
    else:
        optimizer = keras.optimizers.Adam(**arguments)
        dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
        dataset = dataset.shuffle(len(x_train), seed=seed).repeat().batch(task.lot_size)
        data = {"x": dataset, "shuffle": False}
        callbacks = []
    model.compile(optimizer=optimizer, loss=common.loss(), metrics=["accuracy"])
    start = time.perf_counter()
    history = model.fit(
        **data,
        epochs=RECORDS,
        steps_per_epoch=task.steps // RECORDS,
        validation_data=(x_test, y_test),
        callbacks=callbacks,
        verbose=0,
    ).history
    return {
        **settings(name, task, method, seed),
        "accuracy": round(history["val_accuracy"][-1], 5),
        "epsilon_rdp": round(model.epsilon(DELTA, "rdp"), 4) if private else None,
        "epsilon_pld": round(model.epsilon(DELTA, "pld"), 4) if private else None,
        "delta": DELTA,
        "curve_accuracy": [round(a, 5) for a in history["val_accuracy"]],
        "curve_epsilon": [round(e, 4) for e in history["epsilon"]] if private else None,
        "seconds": round(time.perf_counter() - start, 1),
    }


def settings(name, task, method, seed):
    """The fields that decide whether a row answers the same question as another."""
    return {
        "task": name,
        "method": method,
        "seed": seed,
        "lot_size": task.lot_size,
        "noise_multiplier": None if method == BASELINE else task.noise_multiplier,
        "steps": task.steps,
        "arguments": METHODS[method].get(name, {}),
    }


def tasks_with_data(names):
    """The tasks of these names; says so where one is left out because its data is not there."""
    tasks = {name: TASKS[name] for name in names}
    if "mnist" in tasks and not os.environ.get(common.DATA_DIR_VARIABLE):
        print(f"mnist is skipped: set {common.DATA_DIR_VARIABLE} to a folder with mnist.npz.")
        del tasks["mnist"]
    return tasks


def run(tasks, methods, results):
    """Trains what `results` does not hold yet."""
    for name, task in tasks.items():
        for method in task.methods:
            for seed in task.seeds:
                if method not in methods or results.find(**settings(name, task, method, seed)):
                    continue
                row = train(name, task, method, seed)
                results.put(row)
                epsilon = row["epsilon_rdp"]
                print(
                    f"{name} {method} seed {seed}: accuracy {row['accuracy']:.4f}, "
                    f"ε {'–' if epsilon is None else f'{epsilon:.3f}'}, {row['seconds']} s",
                    flush=True,
                )


def summary(rows):
    """Per (task, method), in the order of the tables above: rows, mean accuracy, sample std."""
    groups = {}
    tasks, methods = list(TASKS), list(METHODS)
    for row in sorted(rows, key=lambda r: (tasks.index(r["task"]), methods.index(r["method"]))):
        groups.setdefault((row["task"], row["method"]), []).append(row)
    for (task, method), group in groups.items():
        accuracies = [row["accuracy"] for row in group]
        std = float(np.std(accuracies, ddof=1)) if len(group) > 1 else 0.0
        yield task, method, group, float(np.mean(accuracies)), std


def table(rows):
    """The summary as a Markdown table."""
    lines = []
    for task, method, group, mean, std in summary(rows):
        first = group[0]
        spread = f" ± {100 * std:.2f}" if len(group) > 1 else ""
        epsilons = [first["epsilon_rdp"], first["epsilon_pld"]]
        lines.append(
            [
                task,
                method,
                len(group),
                f"{100 * mean:.2f}{spread}",
                *("∞" if e is None else f"{e:.3f}" for e in epsilons),
                first["steps"],
            ]
        )
    header = ["task", "method", "seeds", "test accuracy, %", "ε (rdp)", "ε (pld)", "steps"]
    return common.markdown_table(header, lines)


def plot(rows, path):
    """Per task: bars of final accuracy, and accuracy against ε along the way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups = list(summary(rows))
    tasks = list(dict.fromkeys(task for task, *_ in groups))
    figure, axes = plt.subplots(
        len(tasks), 2, figsize=(11, 3.6 * len(tasks)), squeeze=False, layout="constrained"
    )
    for (bars, curves), name in zip(axes, tasks, strict=True):
        mine = [group for group in groups if group[0] == name]
        for place, (_, method, group, mean, std) in enumerate(mine):
            bars.bar(place, 100 * mean, yerr=100 * std, color=f"C{place}", capsize=4)
            bars.text(place, 100 * mean, f"{100 * mean:.1f}  ", ha="right", va="bottom", fontsize=8)
            if method != BASELINE:
                accuracies = 100 * np.mean([row["curve_accuracy"] for row in group], axis=0)
                epsilons = group[0]["curve_epsilon"]
                curves.plot(epsilons, accuracies, ".-", color=f"C{place}", label=method)
        bars.set_xticks(range(len(mine)), [method.replace(" ", "\n") for _, method, *_ in mine])
        low = min(mean - std for *_, mean, std in mine)
        bars.set_ylim(max(0.0, 100 * low - 5), 100)
        bars.set_ylabel("test accuracy, %")
        bars.set_title(TASKS[name].title)
        curves.set_xlabel(f"ε (rdp, δ = {DELTA:g})")
        curves.set_ylabel("test accuracy, %")
        curves.grid(alpha=0.3)
        curves.legend()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _define_flags():
    flags.DEFINE_list("tasks", list(TASKS), f"What to train on: {', '.join(TASKS)}.")
    flags.DEFINE_list("methods", list(METHODS), f"Methods: {', '.join(METHODS)}.")
    flags.DEFINE_string("out", str(common.RESULTS_DIR / "accuracy.json"), "JSON; a PNG beside it.")
    flags.DEFINE_bool("force", False, "Start the results anew.")


def main(argv):
    del argv
    args = flags.FLAGS
    for name, known in (("tasks", TASKS), ("methods", METHODS)):
        for value in args[name].value:
            if value not in known:
                raise app.UsageError(f"--{name}: {value!r} is none of {', '.join(known)}.")
    results = common.Results(
        args.out, key=("task", "method", "seed"), one_machine=False, force=args.force
    )
    run(tasks_with_data(args.tasks), args.methods, results)
    plot(results.rows, pathlib.Path(args.out).with_suffix(".png"))
    print(table(results.rows))


if __name__ == "__main__":
    _define_flags()
    app.run(main)
