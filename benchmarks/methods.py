"""All methods of the papers at equal ε, on MNIST behind 60 private principal components.

    TF_ADADP_DATA_DIR=<folder with mnist.npz> python benchmarks/methods.py --workers=2

The network of Abadi et al. 2016 and of ADADP and AdaCliP: DPPCA to 60 components, 1,000 ReLU units,
10 classes. For each ε (δ = 1e-5, RDP, Poisson lots, add or remove one record) all methods get the
same components' noise σ_p, lot size and steps; what the components cost is part of the ε, and σ* is
the least that keeps the rest within it.

Every method has ONE number to search, its rate (for ADADP and ADAL the start of the default
schedule): four values each on a tenth of the training data that is held out (one seed), the best
then on all of it, three seeds. The search is not charged. ε-free settings are the defaults. AGD has
no rate: its total budget, largest step and splits are its own, and it stops when the budget is
spent. SADPSGD's energy is that of 1,000 training records that are set aside for it, taken as
public, and every candidate is charged; "claimed ε" is what its paper would report.

Resumable: jobs whose row is in the JSON are not run again.
"""

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # off by default on some CPUs, twice as slow

import adadp_default as study
import common
import keras
import numpy as np
from absl import app, flags

import tf_adadp as dp
from tf_adadp import accounting

DELTA = 1e-5
SEEDS = (0, 1, 2)
COMPONENTS, HIDDEN, LOT = 60, 1000, 1024
PUBLIC = 1000  # records that SADPSGD's energy is measured on
# ε: (σ_p of the components, steps)
CELLS = {0.5: (16.0, 150), 1.0: (10.0, 300), 2.0: (7.0, 500), 4.0: (4.0, 700)}
_SGD = (1.0, 2.0, 4.0, 8.0)
_SCHEDULE = (0.008, 0.016, 0.032, 0.064)


@dataclasses.dataclass(frozen=True)
class Method:
    """`make(rate, **private arguments)`, and the rates to try."""

    make: Callable
    rates: tuple[float, ...]


def _scheduled(kind):
    return lambda rate, **k: kind(dp.InverseSqrtDecay(rate), **k)


METHODS = {
    "DPSGD": Method(dp.DPSGD, _SGD),
    "AutoSGD": Method(dp.AutoSGD, _SGD),
    "DPAdam": Method(dp.DPAdam, (2e-3, 4e-3, 8e-3, 1.6e-2)),
    "ADAL": Method(_scheduled(dp.ADAL), _SCHEDULE),
    "ADADP": Method(_scheduled(dp.ADADP), _SCHEDULE),
    "ADAN": Method(dp.ADAN, _SGD),
    "AdaCliP": Method(dp.AdaCliP, _SGD),
    "DPOPT": Method(dp.DPOPT, _SGD),
}


@functools.cache
def arrays():
    """MNIST as float32 in [0, 1]: x_train, y_train, x_test, y_test."""
    path = pathlib.Path(os.environ.get(common.DATA_DIR_VARIABLE, ".")) / "mnist.npz"
    with np.load(path) as stored:
        x, x_test = (stored[n].astype(np.float32) / 255.0 for n in ("x_train", "x_test"))
        return x, stored["y_train"].astype(np.int32), x_test, stored["y_test"].astype(np.int32)


@functools.lru_cache(maxsize=2)
def components(sigma, seed, held_out):
    """A fitted DPPCA and the projected arrays, entries of about 1: the factor is public."""
    x, y, x_test, y_test = arrays()
    if held_out:
        order = np.random.default_rng(1).permutation(len(x))
        cut = len(x) // 10
        x_test, y_test = x[order[:cut]], y[order[:cut]]
        x, y = x[order[cut:]], y[order[cut:]]
    pca = dp.DPPCA(COMPONENTS, noise_multiplier=sigma, seed=seed).fit(x)
    scale = np.sqrt(COMPONENTS)
    project = lambda a: (scale * pca.transform(a)).astype(np.float32)  # noqa: E731
    return pca, project(x), y, project(x_test), y_test


def noise_for(epsilon, sigma, lot_size, records, steps):
    """The least σ* (to 0.1 %) at which components and all steps cost at most ε at DELTA."""
    ledger = accounting.PrivacyLedger()
    dp.DPPCA(COMPONENTS, noise_multiplier=sigma).charge(ledger)
    law = accounting.PoissonSampling(records, lot_size)
    low, high = 0.3, 100.0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        if ledger.preview(law.event(middle), steps, DELTA, law=law) > epsilon:
            low = middle
        else:
            high = middle
    return high


def train(method, rate, epsilon, seed, *, held_out=False):
    """Accuracy and charged ε of one run."""
    sigma, steps = CELLS[epsilon]
    pca, x, y, x_test, y_test = components(sigma, seed, held_out)
    lot = LOT * 9 // 10 if held_out else LOT
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = dp.DPModel(common.mlp(COMPONENTS, HIDDEN, 10))
    private = {"noise_multiplier": noise_for(epsilon, sigma, lot, len(x), steps), "seed": seed}
    optimizer = METHODS[method].make(rate, **private)
    model.compile(optimizer, loss=common.loss(), metrics=[], steps_per_execution=50)
    model.ledger.merge(pca.ledger)
    model.fit(x, y, batch_size=lot, steps_per_epoch=steps, verbose=0)
    accuracy = np.mean(np.argmax(model.model(x_test).numpy(), 1) == y_test)
    return round(float(accuracy), 5), model.epsilon(DELTA), private["noise_multiplier"]


def run_job(job):
    """Searches the rate and runs the seeds of one method at one ε; returns the row."""
    method, epsilon = job
    start = time.perf_counter()
    tried = {
        str(rate): train(method, rate, epsilon, SEEDS[-1] + 1, held_out=True)[0]
        for rate in METHODS[method].rates
    }
    rate = float(max(tried, key=tried.get))
    found = [train(method, rate, epsilon, seed) for seed in SEEDS]
    return {
        "part": "methods",
        "task": "mnist",
        "epsilon": epsilon,
        "method": method,
        "setting": None,
        "accuracies": [accuracy for accuracy, _, _ in found],
        "charged_epsilon": round(found[0][1], 4),
        "delta": DELTA,
        "noise_multiplier": round(found[0][2], 4),
        "components_noise_multiplier": CELLS[epsilon][0],
        "lot_size": LOT,
        "steps": CELLS[epsilon][1],
        "arguments": {"rate": rate},
        "held_out": tried,
        "seconds": round(time.perf_counter() - start, 1),
    }


def table(rows):
    """Markdown: a line per method, a column per ε."""
    epsilons = sorted({row["epsilon"] for row in rows})
    cells = {(row["method"], row["epsilon"]): row for row in rows}

    def text(row):
        if row is None:
            return ""
        values = 100 * np.array(row["accuracies"])
        return f"{values.mean():.2f} ± {values.std(ddof=1):.2f} ({row['arguments']['rate']:g})"

    names = [name for name in METHODS if any((name, e) in cells for e in epsilons)]
    return common.markdown_table(
        ["method (rate found)", *(f"ε = {e:g}" for e in epsilons)],
        [[name, *(text(cells.get((name, e))) for e in epsilons)] for name in names],
    )


def plot(rows, path):
    """Accuracy over ε, a line per method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    for name in METHODS:
        mine = sorted((r["epsilon"], r["accuracies"]) for r in rows if r["method"] == name)
        if mine:
            means = [100 * np.mean(a) for _, a in mine]
            spread = [100 * np.std(a, ddof=1) for _, a in mine]
            panel.errorbar([e for e, _ in mine], means, spread, fmt="o-", label=name, capsize=2)
    panel.set(xscale="log", xlabel="ε (δ = 1e-5, RDP, components included)", ylabel="accuracy, %")
    panel.set_xticks(list(CELLS), [f"{e:g}" for e in CELLS])
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def _define_flags():
    names, cells = list(METHODS), [f"{e:g}" for e in CELLS]
    flags.DEFINE_multi_enum("methods", names, names, "Once for each.")
    flags.DEFINE_multi_enum("epsilons", cells, cells, "Once for each.")
    flags.DEFINE_integer("workers", 2, "Processes; the cores are shared out.", lower_bound=1)
    flags.DEFINE_string("out", str(common.RESULTS_DIR / "methods.json"), "JSON; PNG beside.")
    flags.DEFINE_bool("force", False, "Start the results anew.")


def main(argv):
    del argv
    args = flags.FLAGS
    key = ("part", "task", "epsilon", "method", "setting")
    results = common.Results(args.out, key=key, one_machine=False, force=args.force)
    jobs = [
        (method, float(epsilon))
        for epsilon in args.epsilons
        for method in args.methods
        if not results.find(epsilon=float(epsilon), method=method)
    ]
    study.run(jobs, results, args.workers, run_job)
    plot(results.rows, pathlib.Path(args.out).with_suffix(".png"))
    print(table(results.rows))


if __name__ == "__main__":
    _define_flags()
    app.run(main)
