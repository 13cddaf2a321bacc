"""Compares all methods of the papers at equal ε, on MNIST behind 60 private components.

    TF_ADADP_DATA_DIR=<folder with mnist.npz> python -m benchmarks.methods --workers=2
    TF_ADADP_DATA_DIR=<folder> python -m benchmarks.methods --tasks=mnist_cnn,cifar10_small

"mnist" is the network of Abadi et al. 2016 and of ADADP and AdaCliP: DPPCA to 60 components, 1,000
ReLU units, 10 classes. For each ε (δ = 1e-5, RDP, Poisson lots, add or remove one record) all
methods get the same components' noise σ_p, lot size and steps; what the components cost is part of
the ε, and σ* is the least that keeps the rest within it. "mnist_large_lots" is the same with lots
twice as large, at twice the work, for the methods in LARGE. "mnist_cnn" and "fashion_cnn" are
SA-DPSGD's tanh network on the images themselves, for the methods in CNN. Its network for CIFAR-10
takes hours for a seed; "cifar10_small" is a smaller one, on images averaged to 16×16 pixels.

Every method has ONE number to search, its rate (for ADADP and ADAL the start of the default
schedule): four values each on a tenth of the training data that is held out (one seed), and further
ones, by factors of 2, as long as the best is at an end; the best then on all of it, three seeds.
Networks on images are searched with 200 steps, at the full run's σ*. The search is not charged. All
else is at its default.

AGD has no rate: its number is `splits`, how many rounds its first noise divides the budget into. It
stops when the budget is spent, so its steps are its own. SADPSGD's energy is that of 1,000 training
records that are set aside for it and taken as public: it trains on the others. Every candidate is
charged; "claimed ε" is what its paper would report.

Resumable: jobs whose row is in the JSON are not run again.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # off by default on some CPUs, twice as slow

import keras
import numpy as np

import tf_adadp as dp
from benchmarks import adadp_default as study
from benchmarks import harness, models
from tf_adadp import accounting

DELTA = 1e-5
SEEDS = (0, 1, 2)
COMPONENTS, HIDDEN, LOT = 60, 1000, 1024
PUBLIC = 1000  # records that SADPSGD's energy is measured on
# ε: (σ_p of the components, steps)
CELLS = {0.5: (16.0, 150), 1.0: (10.0, 300), 2.0: (7.0, 500), 4.0: (4.0, 700)}
LARGE_LOT, LARGE_CELLS = 2 * LOT, {2.0: (7.0, 700), 4.0: (4.0, 1000)}
CNN_CELLS, CNN_SEARCH = {1.0: (None, 400), 2.0: (None, 800), 3.0: (None, 1500)}, 200
SMALL, SMALL_CELLS = (16, 16, 3), {1.0: (None, 200), 2.0: (None, 400), 3.0: (None, 600)}
_SGD = (1.0, 2.0, 4.0, 8.0)
_SCHEDULE = (0.008, 0.016, 0.032, 0.064)


@dataclasses.dataclass(frozen=True)
class Method:
    """Says how to make an optimizer, and what to try.

    Attributes:
        make: `make(rate, **private arguments)`.
        rates: the four values searched first.
        public: records set aside as public; `make` gets them as `energy_data`.
        own_budget: True if `make` takes total_epsilon and total_delta in place of a noise
            multiplier.
    """

    make: Callable
    rates: tuple[float, ...]
    public: int = 0
    own_budget: bool = False


def _scheduled(kind, **given):
    return lambda rate, **k: kind(dp.InverseSqrtDecay(rate), **given, **k)


METHODS = {
    "DPSGD": Method(dp.DPSGD, _SGD),
    "AutoSGD": Method(dp.AutoSGD, _SGD),
    "DPAdam": Method(dp.DPAdam, (2e-3, 4e-3, 8e-3, 1.6e-2)),
    "ADAL": Method(_scheduled(dp.ADAL), _SCHEDULE),
    "ADADP": Method(_scheduled(dp.ADADP, prior="released"), _SCHEDULE),
    "ADAN": Method(dp.ADAN, _SGD),
    "AdaCliP": Method(dp.AdaCliP, _SGD),
    "DPOPT": Method(dp.DPOPT, _SGD),
    "SADPSGD": Method(dp.SADPSGD, _SGD, public=PUBLIC),
    "AGD": Method(
        lambda splits, **k: dp.AGD(splits=max(1, round(splits)), **k),
        (160, 320, 640, 1280),
        own_budget=True,
    ),
}
LARGE = ("DPSGD", "ADADP")
CNN = ("DPSGD", "ADADP", "AutoSGD", "SADPSGD")


@dataclasses.dataclass(frozen=True)
class Task:
    """`load(σ_p, seed, held_out)` gives a DPPCA or None, x, y, x_test, y_test; cells as CELLS."""

    load: Callable
    build: Callable[[], keras.Model]
    cells: dict[float, tuple[float | None, int]]
    methods: tuple[str, ...]
    search_steps: int | None = None
    lot_size: int = LOT


@functools.cache
def arrays(name, shape, side=None):
    """A data set as float32 in [0, 1], see `models.arrays`."""
    return models.arrays(models.data_file(f"{name}.npz"), shape, side)


def split(held_out, *data):
    """The arrays, or for a search nine tenths of the training data and the tenth to score on."""
    x, y, x_test, y_test = arrays(*data)
    if held_out:
        order = np.random.default_rng(1).permutation(len(x))
        cut = len(x) // 10
        x_test, y_test = x[order[:cut]], y[order[:cut]]
        x, y = x[order[cut:]], y[order[cut:]]
    return x, y, x_test, y_test


@functools.lru_cache(maxsize=2)
def components(sigma, seed, held_out):
    """A fitted DPPCA and the projected arrays, entries of about 1: the factor is public."""
    x, y, x_test, y_test = split(held_out, "mnist", (784,))
    pca = dp.DPPCA(COMPONENTS, noise_multiplier=sigma, seed=seed).fit(x)
    scale = np.sqrt(COMPONENTS)
    project = lambda a: (scale * pca.transform(a)).astype(np.float32)  # noqa: E731
    return pca, project(x), y, project(x_test), y_test


def images(name, shape=(28, 28, 1), side=None):
    """`load` of a network on the images themselves, averaged to a side where it is given."""

    def load(sigma, seed, held_out):
        del sigma, seed
        return None, *split(held_out, name, shape, side)

    return load


def _build():
    return models.mlp(COMPONENTS, HIDDEN, 10)


def _build_small():
    return models.small_cnn(SMALL, "tanh")


TASKS = {
    "mnist": Task(components, _build, CELLS, tuple(METHODS)),
    "mnist_large_lots": Task(components, _build, LARGE_CELLS, LARGE, lot_size=LARGE_LOT),
    "mnist_cnn": Task(images("mnist"), models.tanh_cnn, CNN_CELLS, CNN, CNN_SEARCH),
    "fashion_cnn": Task(images("fashion_mnist"), models.tanh_cnn, CNN_CELLS, CNN, CNN_SEARCH),
    "cifar10_small": Task(
        images("cifar10", SMALL, SMALL[0]), _build_small, SMALL_CELLS, CNN, CNN_SEARCH
    ),
}


def noise_for(epsilon, sigma, lot_size, records, steps):
    """The least σ* (to 0.1 % of ε) at which components, if any, and all steps cost at most ε."""
    law = accounting.PoissonSampling(records, lot_size)
    return _components_ledger(sigma).calibrate_noise_multiplier(epsilon, DELTA, law, steps)


def rest_of(epsilon, sigma, law, **arguments):
    """AGD's total_epsilon that leaves room for the components.

    AGD's filter bounds the Rényi divergence of all its releases at ONE order; the components'
    divergence of that order is taken off the budget, which holds ε with a factor of 1.
    """
    if sigma is None:
        return epsilon
    (components_entry,) = _components_ledger(sigma).entries
    total, order = epsilon, None
    while True:  # a smaller budget has a larger order, at which the components cost more
        probe = dp.AGD(total_epsilon=total, total_delta=DELTA, **arguments)
        probe.build([keras.Variable(np.zeros(2, np.float32))])
        probe.begin(law, None, 1)
        if probe.budget_filter.order == order:
            return total
        order = probe.budget_filter.order
        total = epsilon - probe.budget_filter.cost(components_entry.event)


def _components_ledger(sigma):
    ledger = accounting.PrivacyLedger()
    if sigma is not None:
        dp.DPPCA(COMPONENTS, noise_multiplier=sigma).charge(ledger)
    return ledger


def train(task, name, rate, epsilon, seed, *, held_out=False):
    """One run: its accuracy, what it was charged, and what it did."""
    method, (sigma, steps) = METHODS[name], TASKS[task].cells[epsilon]
    pca, x, y, x_test, y_test = TASKS[task].load(sigma, seed, held_out)
    private = {"seed": seed}
    if method.public:
        chosen = np.random.default_rng(2).permutation(len(x))
        public, trained = chosen[: method.public], chosen[method.public :]
        private["energy_data"] = (x[public], y[public])
        x, y = x[trained], y[trained]
    lot = TASKS[task].lot_size
    if held_out:
        lot = lot * 9 // 10
    if method.own_budget:
        law = accounting.PoissonSampling(len(x), lot)
        private["total_epsilon"] = rest_of(epsilon, sigma, law, splits=max(1, round(rate)))
        private["total_delta"] = DELTA
        steps = 10_000  # never reached
    else:
        private["noise_multiplier"] = noise_for(epsilon, sigma, lot, len(x), steps)
        if held_out:
            steps = TASKS[task].search_steps or steps
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = dp.DPModel(TASKS[task].build())
    optimizer = method.make(rate, **private)
    at_once = 1 if method.own_budget else 50
    model.compile(optimizer, loss=models.loss(), metrics=[], steps_per_execution=at_once)
    if pca is not None:
        model.ledger.merge(pca.ledger)
    history = model.fit(x, y, batch_size=lot, steps_per_epoch=steps, verbose=0).history
    parts = [model.model(x_test[i : i + 1000]).numpy() for i in range(0, len(x_test), 1000)]
    accuracy = np.mean(np.argmax(np.concatenate(parts), 1) == y_test)
    found = {"accuracy": round(float(accuracy), 5), "steps": int(optimizer.iterations)}
    # AGD's guarantee is its filter's; the ledger may read lower, and is none of its own.
    found["charged_epsilon"] = epsilon if method.own_budget else round(model.epsilon(DELTA), 4)
    found["noise_multiplier"] = private.get("noise_multiplier")
    if isinstance(optimizer, dp.SADPSGD):
        law = accounting.PoissonSampling(len(x), lot)
        found["accepted"] = int(history["accepted"][-1])
        found["claimed_epsilon"] = round(optimizer.epsilon_as_published(law, DELTA), 4)
    return found


def run_job(job):
    """Searches the rate and runs the seeds of one method at one ε; returns the row."""
    task, method, epsilon = job
    start = time.perf_counter()
    tried = study.search(
        lambda rate: train(task, method, rate, epsilon, SEEDS[-1] + 1, held_out=True)["accuracy"],
        METHODS[method].rates,
    )
    rate = max(tried, key=tried.get)
    found = [train(task, method, rate, epsilon, seed) for seed in SEEDS]
    sigma, _ = TASKS[task].cells[epsilon]
    row = {
        "part": "methods",
        "task": task,
        "epsilon": epsilon,
        "method": method,
        "setting": None,
        "accuracies": [run.pop("accuracy") for run in found],
        "delta": DELTA,
        "components_noise_multiplier": sigma,
        "lot_size": TASKS[task].lot_size,
        **{name: value for name, value in found[0].items() if value is not None},
        "arguments": {"rate": float(rate)},
        "held_out": {str(tested): accuracy for tested, accuracy in sorted(tried.items())},
        "seconds": round(time.perf_counter() - start, 1),
    }
    for name in ("accepted", "claimed_epsilon"):
        if name in row:
            row[name] = [run[name] for run in found]
    return row


def table(rows):
    """Markdown: a line per method, a column per task and ε."""
    rows = [row for row in rows if row["method"] in METHODS]
    columns = [
        (task, epsilon)
        for task in TASKS
        for epsilon in TASKS[task].cells
        if any((row["task"], row["epsilon"]) == (task, epsilon) for row in rows)
    ]
    cells = {(row["method"], row["task"], row["epsilon"]): row for row in rows}

    def text(row):
        if row is None:
            return ""
        values = 100 * np.array(row["accuracies"])
        return f"{values.mean():.2f} ± {values.std(ddof=1):.2f} ({row['arguments']['rate']:g})"

    names = [name for name in METHODS if any((name, *column) in cells for column in columns)]
    return harness.markdown_table(
        ["method (rate found)", *(f"{task}, ε = {e:g}" for task, e in columns)],
        [[name, *(text(cells.get((name, *column))) for column in columns)] for name in names],
    )


def plot(rows, path):
    """Accuracy over ε of the networks on components, a line per method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    for name in METHODS:
        mine = sorted(
            (r["epsilon"], r["accuracies"])
            for r in rows
            if r["method"] == name and r["task"] == "mnist"
        )
        if mine:
            means = [100 * np.mean(a) for _, a in mine]
            spread = [100 * np.std(a, ddof=1) for _, a in mine]
            panel.errorbar([e for e, _ in mine], means, spread, fmt="o-", label=name, capsize=2)
    panel.set(xscale="log", xlabel="ε (δ = 1e-5, RDP, components included)", ylabel="accuracy, %")
    panel.set_xticks(list(CELLS), [f"{e:g}" for e in CELLS])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def jobs(tasks, methods, epsilons):
    """`(task, method, ε)` of all that is asked for."""
    return [
        (task, method, epsilon)
        for task in tasks
        for epsilon in TASKS[task].cells
        if epsilon in epsilons
        for method in TASKS[task].methods
        if method in methods
    ]


def main():
    cells = sorted({e for task in TASKS.values() for e in task.cells})
    parser = harness.resumable(__doc__, __file__)
    parser.add_argument("--tasks", type=harness.names(TASKS), default=list(TASKS))
    parser.add_argument("--methods", choices=list(METHODS), action="append", help="one; repeat it")
    parser.add_argument("--epsilons", type=float, choices=cells, action="append", help="the same")
    parser.add_argument("--workers", type=harness.count, default=2, help="they share the cores")
    args = parser.parse_args()
    key = ("part", "task", "epsilon", "method", "setting")
    results = harness.Results(args.out, key=key, one_machine=False, force=args.force)
    todo = [
        (task, method, epsilon)
        for task, method, epsilon in jobs(
            args.tasks, args.methods or METHODS, args.epsilons or cells
        )
        if not results.find(task=task, epsilon=epsilon, method=method)
    ]
    study.run(todo, results, args.workers, run_job)
    plot(results.rows, args.out.with_suffix(".png"))
    print(table(results.rows))


if __name__ == "__main__":
    main()
