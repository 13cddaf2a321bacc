"""ADADP with its default arguments beside DP-SGD and DP-Adam tuned for each task and each ε.

    python -m benchmarks.adadp_default --tasks=digits,digits_scaled            # no download
    TF_ADADP_DATA_DIR=folder python -m benchmarks.adadp_default --workers=2

A cell is a task at an ε (δ = 1e-5, RDP): all methods share lot size, steps and noise multiplier,
which is calibrated to the ε. "_scaled" tasks are the same with every input column multiplied by
10^U(−1.5, 1.5), fixed for all seeds.

DPSGD and DPAdam are TUNED: seven learning rates each, and further ones, by factors of 2, where the
best is at an end, tried on a tenth of the training data that is held out (one seed), the best one
trained on all of it with three seeds. The search is not charged to ε, which favours them. All other
methods run at their DEFAULT arguments, three seeds. Seeds fix weights, lots and noise.

Six parts: "study" (the cells), "seeds" (other seeds, and more of them, in the cells that came out
below: three seeds tell no difference of half a point there, and the same ones would repeat their
chance), "ablation" (variants of ADADP, the paper's Fig. 4), "sensitivity"
(η, β, σ*, L, the paper's Fig. 5), "rates" (parts and constants of the rate that ADADP finds, and no
noise at all), "options" (published changes and rivals, adadp_variants.py). Jobs that the JSON holds
already are not run again; a job is one method in one cell. The folder holds mnist.npz,
fashion_mnist.npz and, from cifar_features.py, cifar10_features.npz, and from lora_pretrained.py,
weights; tasks whose file is not there are skipped. "_lora" tasks are classes 5 to 9, for an encoder
that has learned 0 to 4 without privacy: only adapters and a new head are trained.
"""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import time
from collections.abc import Callable

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # off by default on some CPUs, twice as slow

import keras
import numpy as np
import tensorflow as tf

import tf_adadp as dp
from benchmarks import adadp_report, harness, lora_pretrained, models
from benchmarks.adadp_rates import ENDING, NO_NOISE_CELLS, RATE_CELLS, RATES, EndingRate
from benchmarks.adadp_variants import OPTION_CELLS, OPTION_SEARCH, OPTIONS
from tf_adadp import accounting, priors

DELTA = 1e-5
SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Task:
    """Data and model; `cells` maps ε to (expected lot size, steps). Methods of None are all.

    Images are averaged to `side` × `side` pixels where it is given. Only records of `classes` are
    kept where they are given. `weights` is a file of the data folder from which `build` reads.
    """

    data: str
    build: Callable[[], keras.Model]
    cells: dict[float, tuple[int, int]]
    scaled: bool = False
    methods: tuple[str, ...] | None = None
    side: int | None = None
    classes: range | None = None
    weights: str | None = None


_LARGE = {0.5: (1024, 150), 1.0: (1024, 300), 3.0: (1024, 500), 8.0: (1024, 700)}
_DIGITS = {0.5: (256, 60), 1.0: (256, 100), 3.0: (256, 200), 8.0: (256, 300)}


def _mlp(*widths):
    return functools.partial(models.mlp, *widths)


def _some(cells, *epsilons):
    return {e: cells[e] for e in epsilons}


# A slower start: what it gains on convolutional networks, it loses on short runs.
_WARM = "ADADP, warm-up 20"
# The rate of 0.1, the same for all tensors.
_SCHEDULE = "ADADP, schedule"
# Of the convolutional networks: at 5 minutes a run there is no search. Rates from a few short runs.
_CNN = ("ADADP", _SCHEDULE, "ADADP, 0.01", "ADADP, 0.01, C = 0.3", _WARM, "DPSGD, η = 4")
METHODS = ("ADADP", "DPSGD", _SCHEDULE, "ADAL, schedule", "ADAN", "DPAdam")
TASKS = {
    "digits": Task("digits", _mlp(64, 64, 10), _DIGITS, methods=(*METHODS, _WARM)),
    "digits_scaled": Task("digits", _mlp(64, 64, 10), _some(_DIGITS, 1.0, 3.0, 8.0), scaled=True),
    "mnist": Task("mnist", _mlp(784, 128, 10), _LARGE),
    "mnist_scaled": Task("mnist", _mlp(784, 128, 10), _some(_LARGE, 1.0, 3.0, 8.0), scaled=True),
    "fashion": Task("fashion_mnist", _mlp(784, 128, 10), _some(_LARGE, 1.0, 3.0)),
    "fashion_scaled": Task("fashion_mnist", _mlp(784, 128, 10), _some(_LARGE, 3.0), scaled=True),
    "cifar": Task("cifar10_features", _mlp(1024, 128, 10), _some(_LARGE, 1.0, 3.0)),
    "cifar_scaled": Task("cifar10_features", _mlp(1024, 128, 10), _some(_LARGE, 3.0), scaled=True),
    "mnist_cnn": Task("mnist", models.tanh_cnn, {3.0: (1024, 1500)}, methods=_CNN),
    "fashion_cnn": Task("fashion_mnist", models.tanh_cnn, {3.0: (1024, 1500)}, methods=_CNN),
}
# Other architectures, each run at most 2 minutes on a core.
_SMALL = {1.0: (1024, 60), 3.0: (1024, 300)}
_MORE = {(data, name): {8.0: (1024, 300)} for data, name in [("mnist", "gru"), ("cifar10", "tanh")]}
_SMALL_METHODS = ("ADADP", "DPSGD", _SCHEDULE)
_ARCHITECTURES = {
    "tanh": lambda shape: models.small_cnn(shape, "tanh"),
    "relu": lambda shape: models.small_cnn(shape, "relu"),
    "group_norm": lambda shape: models.small_cnn(shape, "relu", normalized=True),
    "residual": models.residual,
    "gru": lambda shape: models.recurrent(shape, "GRU"),
    "lstm": lambda shape: models.recurrent(shape, "LSTM"),
    "patches": models.patches,
    "deep": lambda shape: models.deep_mlp(shape, 8),
    "logistic": lambda shape: keras.Sequential(
        [keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(10)]
    ),
}
_OF_DATA = {
    "mnist": ("tanh", "relu", "group_norm", "gru", "lstm", "patches"),
    "fashion_mnist": ("tanh", "relu", "group_norm", "gru", "patches", "deep", "logistic"),
    "cifar10": ("tanh", "relu", "group_norm", "residual", "logistic"),
}
for _data, _names in _OF_DATA.items():
    _shape = (16, 16, 3) if _data == "cifar10" else (14, 14, 1)
    for _name in _names:
        TASKS[f"{_data.partition('_')[0]}_{_name}"] = Task(
            _data,
            functools.partial(_ARCHITECTURES[_name], _shape),
            _SMALL | _MORE.get((_data, _name), {}),
            methods=_SMALL_METHODS,
            side=_shape[0],
        )
# A table: models of few weights, of short runs and long ones.
_TABLE = {1.0: (512, 60), 3.0: (512, 300)}
for _name, _widths in {"table_logistic": (20, 2), "table_mlp": (20, 32, 2)}.items():
    TASKS[_name] = Task("table", _mlp(*_widths), _TABLE, methods=_SMALL_METHODS)
# Half of the records are private: half of the lot has the same sampling probability and noise.
for _data in lora_pretrained.DATA:
    TASKS[f"{_data.partition('_')[0]}_lora"] = Task(
        _data,
        functools.partial(lora_pretrained.adapted, _data),
        {1.0: (512, 60), 3.0: (512, 300)},
        methods=_SMALL_METHODS,
        side=lora_pretrained.SHAPE[0],
        classes=lora_pretrained.PRIVATE,
        weights=lora_pretrained.weights_name(_data),
    )
_SGD_RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SEARCH = {
    "DPSGD": _SGD_RATES,
    ENDING: _SGD_RATES,
    "DPAdam": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
}
# Data that needs no file.
_MADE = {"digits": models.digits, "table": models.table}
ALL_METHODS = tuple(dict.fromkeys((*METHODS, *_CNN)))


def _rows(learning_rate, **arguments):
    """ADADP with the shape of version 0.1, by rows."""
    return dp.ADADP(learning_rate, **{"prior": "released", **arguments})


def _scheduled(**arguments):
    return _rows(dp.InverseSqrtDecay(), **arguments)


# Variants of ADADP at the schedule, or at a rate of their own.
VARIANTS = {
    _SCHEDULE: _scheduled,
    "ADAL, schedule": lambda **k: dp.ADAL(dp.InverseSqrtDecay(), **k),
    "ADAN": dp.ADAN,
    "no step scaling": lambda **k: _scheduled(scale_step=False, **k),
    "box": lambda **k: _scheduled(clipping="local", **k),
    "printed, ε = ∞": lambda **k: dp.ADADP(prior="raw", clipping="local", **k),
    "printed ellipsoid, ε = ∞": lambda **k: dp.ADADP(prior="raw", **k),
    "windowed": lambda **k: _scheduled(prior=priors.WindowedPrior(exponent=0.5), **k),
    "by row and column": lambda **k: _scheduled(prior=_prior(pooling="both"), **k),
    "by layer": lambda **k: _scheduled(prior=_prior(pooling="layer"), **k),
    "by coordinate": lambda **k: _scheduled(prior=_prior(pooling="coordinate"), **k),
    "no shrinkage": lambda **k: _scheduled(prior=_prior(shrinkage=False), **k),
    "exponent 1/4": lambda **k: _scheduled(prior=_prior(exponent=0.25), **k),
    "ADADP, 0.01": lambda **k: _rows(dp.InverseSqrtDecay(0.01, 50), **k),
    "ADADP, 0.01, C = 0.3": lambda **k: _rows(dp.InverseSqrtDecay(0.01, 50), l2_norm_clip=0.3, **k),
    _WARM: lambda **k: _rows(dp.InverseSqrtDecay(0.036, warmup_steps=20), **k),
    "DPSGD, η = 4": lambda **k: dp.DPSGD(4.0, **k),
    "fan-in": lambda **k: _scheduled(prior=priors.FanInPrior(), **k),
    "EMA 0.98": lambda **k: _scheduled(use_ema=True, ema_momentum=0.98, **k),
    "momentum 0.5": lambda **k: _rows(dp.InverseSqrtDecay(0.016), momentum=0.5, **k),
}
ALL_VARIANTS = {**RATES, ENDING: dp.DPSGD, **VARIANTS, **OPTIONS}
ABLATION_CELLS = (("digits", 3.0), ("digits_scaled", 3.0))
# Cells that the study has more than 0.5 points below tuned DP-SGD, and how many seeds they get.
MORE_SEEDS = {**{("digits", e): 20 for e in (0.5, 1.0, 3.0)}, ("mnist_lstm", 3.0): 10}
# What the prior would be worth if it knew the columns' scales instead of learning them.
KNOWN_SCALES = "known scales"
KNOWN_CELLS = (("digits_scaled", 3.0), ("mnist_scaled", 3.0))


def _prior(**arguments):
    return priors.ExponentialPrior(**{"exponent": 0.5, **arguments})


def _known_scales(task):
    """The prior of someone who was told by what each column was multiplied."""
    keras.backend.clear_session()  # names as `train` will make them
    kernel = TASKS[task].build().trainable_variables[0]
    factors = column_factors(kernel.shape[0])
    # Of the same size in the mean as what belongs to the other layers.
    factors = factors / np.sqrt(np.mean(factors**2))
    return priors.FixedPrior({kernel.path: factors[:, None]})


def column_factors(columns):
    """Returns the factors of the columns of a "_scaled" task."""
    return 10.0 ** np.random.default_rng(7).uniform(-1.5, 1.5, columns)


def _sensitivity():
    """Jobs around one cell of digits: what is changed, to what, for ADADP and DPSGD."""
    for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
        yield "learning rate ×", factor, "ADADP", {"learning_rate": 0.032 * factor}
        yield "learning rate ×", factor, "DPSGD", {"learning_rate": 1.0 * factor}
    for beta in (0.6, 1.2, 2.4, 4.8):
        yield "β (box)", beta, _SCHEDULE, {"clipping": "local", "local_clip_factor": beta}
    for name in (_SCHEDULE, "DPSGD"):
        for sigma in (1.0, 2.0, 4.0, 8.0):
            yield "σ*", sigma, name, {"noise_multiplier": sigma}
        for lot in (64, 128, 256, 512):
            yield "L", lot, name, {"lot_size": lot}
        for clip in (0.25, 0.5, 1.0, 2.0, 4.0):
            yield "C", clip, name, {"l2_norm_clip": clip}


@functools.cache
def load(task):
    """x_train, y_train, x_test, y_test of a task."""
    task = TASKS[task]
    if task.data in _MADE:
        x_train, y_train, x_test, y_test = _MADE[task.data]()
    else:
        shape = task.build().input_shape[1:]
        file = models.data_file(f"{task.data}.npz")
        x_train, y_train, x_test, y_test = models.arrays(file, shape, task.side, task.classes)
    if task.scaled:
        factors = column_factors(x_train.shape[1]).astype(np.float32)
        x_train, x_test = (x * factors for x in (x_train, x_test))
    return x_train, y_train, x_test, y_test


def has_data(name):
    """Tells whether a task's files are there."""
    task = TASKS[name]
    names = () if task.data in _MADE else (f"{task.data}.npz", task.weights)
    return all(models.data_file(name).exists() for name in names if name)


def noise_for(task, epsilon, lot_size, steps):
    """The least σ* for which all steps cost at most ε at DELTA, by RDP."""
    return accounting.calibrate_noise_multiplier(
        epsilon, DELTA, lot_size / len(load(task)[0]), steps
    )


def train(task, optimizer, lot_size, steps, seed, *, held_out=False):
    """Test accuracy after `steps` steps; on a held-out tenth of the training data if asked for."""
    x, y, x_test, y_test = load(task)
    if held_out:
        order = np.random.default_rng(1).permutation(len(x))
        cut = len(x) // 10
        x_test, y_test = x[order[:cut]], y[order[:cut]]
        x, y = x[order[cut:]], y[order[cut:]]
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = dp.DPModel(TASKS[task].build())
    at_once = next(n for n in (50, 20, 10, 5, 2, 1) if steps % n == 0)
    model.compile(optimizer, loss=models.loss(), metrics=[], steps_per_execution=at_once)
    model.fit(x, y, batch_size=lot_size, steps_per_epoch=steps, verbose=0)
    inner = model.model
    parts = [inner(x_test[i : i + 1000]).numpy() for i in range(0, len(x_test), 1000)]
    accuracy = np.mean(np.argmax(np.concatenate(parts), 1) == y_test)
    return round(float(accuracy), 5), model.epsilon(DELTA)


def search(score, rates):
    """Returns {rate: score}, with rates beyond those given until the best has a worse on each side.

    Rates that are added are doubled or halved.
    """
    tried = {rate: score(rate) for rate in rates}
    while (best := max(tried, key=tried.get)) in (low := min(tried), high := max(tried)):
        further = low / 2 if best == low else high * 2
        tried[further] = score(further)
    return tried


def run_job(job):
    """Runs one job in a worker; returns its row."""
    part, task, epsilon, method, changed = job
    start = time.perf_counter()
    lot_size, steps = TASKS[task].cells[epsilon]
    changed = dict(changed)
    setting = changed.pop("setting", None)
    seeds = changed.pop("seeds", SEEDS)
    lot_size = changed.pop("lot_size", lot_size)
    sigma = changed.pop("noise_multiplier", None)
    if sigma is None:
        sigma = noise_for(task, epsilon, lot_size, steps)

    def optimizer(seed, **arguments):
        if method == KNOWN_SCALES:
            arguments["prior"] = _known_scales(task)
            return _scheduled(noise_multiplier=sigma, seed=seed, **arguments)
        if method == ENDING:
            arguments["learning_rate"] = EndingRate(arguments["learning_rate"], steps)
        make = ALL_VARIANTS.get(method) or getattr(dp, method)
        return make(noise_multiplier=sigma, seed=seed, **{**changed, **arguments})

    tried = {}
    arguments = {}
    searches = {"study": SEARCH, "seeds": SEARCH, "rates": SEARCH, "options": OPTION_SEARCH}
    rates = searches.get(part, {}).get(method)
    if rates is not None:
        # The same share of the data per step: a tenth is held out.
        lot = lot_size * 9 // 10

        def score(rate):
            made = optimizer(SEEDS[-1] + 1, learning_rate=rate)
            return train(task, made, lot, steps, SEEDS[-1] + 1, held_out=True)[0]

        tried = search(score, rates)
        arguments["learning_rate"] = float(max(tried, key=tried.get))
        tried = {str(rate): accuracy for rate, accuracy in sorted(tried.items())}
    found = [train(task, optimizer(s, **arguments), lot_size, steps, s) for s in seeds]
    return {
        "part": part,
        "task": task,
        "epsilon": epsilon,
        "method": method,
        "setting": setting,
        "accuracies": [accuracy for accuracy, _ in found],
        "charged_epsilon": None if np.isinf(found[0][1]) else round(found[0][1], 4),
        "delta": DELTA,
        "noise_multiplier": round(sigma, 5),
        "lot_size": lot_size,
        "steps": steps,
        "arguments": {**changed, **arguments},
        "held_out": tried,
        "seconds": round(time.perf_counter() - start, 1),
    }


def jobs(parts, tasks, methods=ALL_METHODS):
    """`(part, task, ε, method, changed arguments as pairs)` of all that is asked for."""
    if "study" in parts:
        for method in methods:  # the comparison that matters most comes first
            for task in tasks:
                for epsilon in TASKS[task].cells:
                    if method in (TASKS[task].methods or METHODS):
                        yield "study", task, epsilon, method, ()
    if "seeds" in parts:
        for (task, epsilon), number in MORE_SEEDS.items():
            seeds = range(10, 10 + number)
            setting = f"seeds {seeds[0]} to {seeds[-1]}"
            for method in adadp_report.COMPARED if task in tasks else ():
                yield "seeds", task, epsilon, method, (("seeds", seeds), ("setting", setting))
    if "ablation" in parts:
        for task, epsilon in ABLATION_CELLS:
            for method in VARIANTS if task in tasks else ():
                if method in _CNN[2:]:
                    continue
                yield "ablation", task, epsilon, method, ()
        for task, epsilon in KNOWN_CELLS:
            if task in tasks:
                yield "ablation", task, epsilon, KNOWN_SCALES, ()
    if "sensitivity" in parts and "digits" in tasks:
        for name, value, method, changed in _sensitivity():
            changed = (*changed.items(), ("setting", f"{name} {value:g}"))
            yield "sensitivity", "digits", 3.0, method, changed
    if "rates" in parts:
        for task, epsilon in RATE_CELLS:
            for method in (*RATES, ENDING) if task in tasks else ():
                yield "rates", task, epsilon, method, ()
        none = (("noise_multiplier", 0), ("allow_no_noise", True), ("setting", "no noise"))
        for task, epsilon in NO_NOISE_CELLS:
            for method in ("ADADP", "DPSGD") if task in tasks else ():
                yield "rates", task, epsilon, method, none
    if "options" in parts:
        for task, epsilon in OPTION_CELLS:
            for method in OPTIONS if task in tasks else ():
                yield "options", task, epsilon, method, ()


def _start_worker(threads):
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.get_logger().setLevel("ERROR")  # many models in one process: retracing is expected


def run(todo, results, workers, work=run_job):
    """Runs the jobs in worker processes and puts their rows as they come."""
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    with concurrent.futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(threads,),
    ) as pool:
        for future in concurrent.futures.as_completed([pool.submit(work, job) for job in todo]):
            row = future.result()
            results.put(row)
            mean = 100 * np.mean(row["accuracies"])
            print(
                f"{row['part']} {row['task']} ε={row['epsilon']:g} {row['method']} "
                f"{row['setting'] or ''}: {mean:.2f} {row['arguments']} ({row['seconds']} s)",
                flush=True,
            )


PARTS = ["study", "seeds", "ablation", "sensitivity", "rates", "options"]


def main():
    parser = harness.resumable(__doc__, __file__)
    parser.add_argument("--parts", type=harness.names(PARTS), default=PARTS)
    parser.add_argument("--tasks", type=harness.names(TASKS), default=list(TASKS))
    parser.add_argument("--methods", choices=ALL_METHODS, action="append", help="one; repeat it")
    parser.add_argument("--workers", type=harness.count, default=2, help="they share the cores")
    args = parser.parse_args()
    tasks = [name for name in args.tasks if has_data(name)]
    if tasks != args.tasks:
        left_out = ", ".join(sorted(set(args.tasks) - set(tasks)))
        print(f"Skipped, no file in {models.DATA_DIR_VARIABLE}: {left_out}.")
        if "_lora" in left_out:
            print("python -m benchmarks.lora_pretrained makes the weights of the LoRA tasks.")
    key = ("part", "task", "epsilon", "method", "setting")
    results = harness.Results(args.out, key=key, one_machine=False, force=args.force)
    todo = []
    for job in jobs(args.parts, tasks, args.methods or ALL_METHODS):
        fields = dict(zip(key, (*job[:4], dict(job[4]).get("setting")), strict=True))
        if not results.find(**fields):
            todo.append(job)
    run(todo, results, args.workers)
    adadp_report.plot(results.rows, args.out.with_suffix(".png"))
    print(adadp_report.tables(results.rows))
    print("\nREADME.md:\n\n" + adadp_report.architectures(results.rows))


if __name__ == "__main__":
    main()
