"""Runs what the record scripts share: budgets and seeds, a file of results, baselines.

δ = 1e-5 everywhere. ε is that of one training, by PLD, for one record added or removed: of all
releases of training records in it. Not charged are the choice of a recipe (--held_out), other
trainings, and baselines, which are not private.

Results are rows of a JSON file: {name: {ε: {"settings", "runs"}, "baselines": {title: accuracy}}}.
A run is written when it ends, and is not run again. Run one script at a time on a file.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from table import summary  # noqa: E402

DELTA = 1e-5


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


@dataclasses.dataclass(frozen=True)
class Task:
    """Holds what a record is about.

    Attributes:
        load: (folder of data or None) to the `Split` that the data set has.
        prepare: (`Split`) to a function (recipe, ε, seed) that trains privately, and returns the
            model and its accuracy on the test records. What is done once for all trainings is done
            here.
        recipes: {ε: dataclass of choices}.
        baselines: {title: function of a `Split` to a test accuracy}, without privacy.
        settings: other choices, {name: value}, which are stored.
    """

    load: Callable
    prepare: Callable
    recipes: dict
    baselines: dict = dataclasses.field(default_factory=dict)
    settings: dict = dataclasses.field(default_factory=dict)


def package_folder(name):
    """Returns the folder of a package that has data, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None:
        sys.exit(f'The data are in the package {name}: pip install ".[records]"')
    return pathlib.Path(found.submodule_search_locations[0])


def held_out(split, part=10):
    """Returns a `Split` of the training records alone, one part of them to test on."""
    import numpy as np

    order = np.random.default_rng(1).permutation(len(split.y))
    cut = len(order) // part
    train, test = order[cut:], order[:cut]
    return Split(split.x[train], split.y[train], split.x[test], split.y[test])


def record(name, task, options):
    """Trains for every ε and seed asked for that has no run yet; prints and stores the runs."""
    path = pathlib.Path(options.out)
    stored = json.loads(path.read_text()) if path.exists() else {}
    found = stored.setdefault(f"{name}, held out" if options.held_out else name, {})
    baselines = found.setdefault("baselines", {})
    rows = {}  # of the ε asked for
    for text in options.epsilons:
        epsilon = float(text)
        if epsilon not in task.recipes:
            raise app.UsageError(f"--epsilons={text} has no recipe: give of {list(task.recipes)}.")
        settings = {**task.settings, **dataclasses.asdict(task.recipes[epsilon])}
        rows[epsilon] = found.setdefault(f"{epsilon:g}", {"settings": settings, "runs": []})
        if rows[epsilon]["settings"] != settings:
            raise app.UsageError(
                f"{path} has runs of {name} at epsilon = {text} with {rows[epsilon]['settings']}, "
                f"not {settings}. Remove them, or give another --out."
            )
    if all(len(row["runs"]) >= options.seeds for row in rows.values()):
        return
    split = task.load(options.data_dir)
    if options.held_out:
        split = held_out(split)
    for title, baseline in task.baselines.items():
        if title not in baselines:
            baselines[title] = round(100 * float(baseline(split)), 2)
            print(f"{name}, {title}: {baselines[title]} %", flush=True)
    train = task.prepare(split)
    for seed in range(options.seeds):
        for epsilon, row in rows.items():
            if seed < len(row["runs"]):
                continue
            start = time.perf_counter()
            model, accuracy = train(task.recipes[epsilon], epsilon, seed)
            run = {
                "accuracy": round(100 * accuracy, 2),
                "epsilon_pld": round(model.epsilon(DELTA, accountant="pld"), 4),
                "epsilon_rdp": round(model.epsilon(DELTA, accountant="rdp"), 4),
                "minutes": round((time.perf_counter() - start) / 60, 2),
            }
            row["runs"].append(run)
            whole = path.with_suffix(".new")
            whole.write_text(json.dumps(stored, indent=1) + "\n")
            os.replace(whole, path)  # so that a stop leaves a whole file
            print(f"{name}, epsilon = {epsilon:g}, seed {seed}: {run}", flush=True)
    for epsilon, row in rows.items():
        mean, spread = summary(row["runs"])
        print(f"{name}, epsilon = {epsilon:g}: {mean:.2f} ± {spread:.2f} %")


def run(name, task):
    """Runs a record script: `record` of a `Task`, with flags."""
    # Defined here, since other examples that are imported beside have flags of these names.
    holders = [
        flags.DEFINE_list("epsilons", ["1", "2", "3"], "Budgets ε to train for."),
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
        record(name, task, flags.FLAGS)

    app.run(main)
