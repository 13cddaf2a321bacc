"""Time and memory of private training steps, against a plain Keras step.

    python benchmarks/step_time.py

Time: every contender trains through its own `fit`, sampling included, on random data. They take
turns, block by block, in one process, so that a busy machine slows all alike. A block's first steps
(iterator start, prefetch) are dropped. Reported: the median step over all blocks, the ratio of
medians to the faster of two plain Keras steps (with and without XLA), and the least and greatest
ratio within one round of blocks.

Memory: each contender in a process of its own, the peak above what the process held after importing
TensorFlow, Keras and tf_adadp and running one operation. The data counts; there are 10 lots of it.

Results already in the JSON for the same settings are not measured again. Works unchanged on a GPU,
where the peak of the device's memory is reported besides.
"""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import common
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_adadp as dp

SETTLING_STEPS = 2
LOTS_OF_DATA = 10
PLAIN = ("keras", "keras:noxla")
_NOISE = {"noise_multiplier": 4.0, "l2_norm_clip": 1.0}
OPTIMIZERS = {
    "dpsgd": lambda: dp.DPSGD(**_NOISE),
    "dpadam": lambda: dp.DPAdam(**_NOISE),
    "dprmsprop": lambda: dp.DPRMSprop(**_NOISE),
    "adadp": lambda: dp.ADADP(warmup_steps=0, **_NOISE),
    "adadp_local": lambda: dp.ADADP(clipping="local", warmup_steps=0, **_NOISE),
}
JIT_COMPILE = {"": "auto", "xla": True, "noxla": False}
DEFAULT_METHODS = ("dpsgd", "dpadam", "dprmsprop", "adadp", "adadp_local:xla", "adadp_local:noxla")
MEMORY_LIMIT, MEMORY_LIMIT_BATCH = 3.0, 32


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and a lot size, with the ratios of step times that are not to be exceeded."""

    name: str
    title: str
    build: Callable[[], keras.Model]
    input_shape: tuple[int, ...]
    lot_size: int
    limits: dict[str, float]  # by method; "" for all that are not named


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "mlp",
            "MLP 784-1000-10",
            lambda: common.mlp(784, 1000, 10),
            (784,),
            600,
            {"": 60.0, "adadp_local:xla": 20.0},
        ),
        Workload("cnn", "tanh CNN, 26,010 weights", common.tanh_cnn, (28, 28, 1), 512, {"": 12.0}),
    )
}


class StepTimer(keras.callbacks.Callback):
    """Notes when each step ended. Keras has read the step's logs by then, so its work is done."""

    def __init__(self):
        super().__init__()
        self._ends = []

    def on_train_batch_end(self, batch, logs=None):
        """Notes the time."""
        self._ends.append(time.perf_counter())

    def milliseconds(self):
        """Durations of the steps after the settling ones."""
        return 1e3 * np.diff(self._ends)[SETTLING_STEPS - 1 :]


def contender(workload, method, physical_batch_size):
    """A function `train(steps, callbacks)` that trains one method on a workload's random data.

    Args:
        workload: a `Workload`.
        method: "keras" or a name in OPTIMIZERS, with ":xla" or ":noxla" to say what
            `jit_compile="auto"` would choose.
        physical_batch_size: of the DPModel, None for its own choice; not used for "keras".
    """
    name, _, jit = method.partition(":")
    options = {
        "loss": common.loss(),
        "metrics": ["accuracy"],
        "jit_compile": JIT_COMPILE[jit],
    }
    size = workload.lot_size
    x, y = common.random_data(LOTS_OF_DATA * size, workload.input_shape)
    if name == "keras":
        model = workload.build()
        model.compile(optimizer=keras.optimizers.SGD(), **options)
        # Batches that need no work at all: the plain step at its fastest.
        batches = (x.reshape(-1, size, *x.shape[1:]), y.reshape(-1, size))
        dataset = tf.data.Dataset.from_tensor_slices(batches).repeat().prefetch(2)
        data = {"x": dataset, "shuffle": False}
    else:
        model = dp.DPModel(workload.build(), physical_batch_size=physical_batch_size)
        model.compile(optimizer=OPTIMIZERS[name](), **options)
        data = {"x": x, "y": y, "batch_size": size}

    def train(steps, callbacks=()):
        model.fit(**data, steps_per_epoch=steps, callbacks=list(callbacks), verbose=0)

    return train


def interleaved_times(contenders, steps, repeats):
    """Step durations in milliseconds, per contender an array [repeats, steps].

    Args:
        contenders: dict of functions `train(steps, callbacks)`.
        steps: steps of one block.
        repeats: blocks of each contender, taken in turns.
    """
    for train in contenders.values():
        train(SETTLING_STEPS)  # traces and compiles
    blocks = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, train in contenders.items():
            timer = StepTimer()
            train(SETTLING_STEPS + steps, [timer])
            blocks[name].append(timer.milliseconds())
    return {name: np.stack(block) for name, block in blocks.items()}


def time_rows(workload, methods, steps, repeats):
    """Times (method, physical batch size) pairs interleaved with plain Keras; one row for each."""
    methods = [(plain, None) for plain in PLAIN] + methods
    times = interleaved_times(
        {m: contender(workload, *m) for m in methods}, steps=steps, repeats=repeats
    )
    fastest = min((times[plain, None] for plain in PLAIN), key=np.median)
    for (method, physical_batch_size), block in times.items():
        by_round = np.median(block, axis=1) / np.median(fastest, axis=1)
        yield {
            "measure": "time",
            "model": workload.name,
            "method": method,
            "physical_batch_size": physical_batch_size,
            "lot_size": workload.lot_size,
            "steps": steps,
            "repeats": repeats,
            "step_ms": round(float(np.median(block)), 3),
            "round_ms": [round(float(m), 3) for m in np.median(block, axis=1)],
            "plain_ms": round(float(np.median(fastest)), 3),
            "ratio": round(float(np.median(block) / np.median(fastest)), 2),
            "ratio_range": [round(float(by_round.min()), 2), round(float(by_round.max()), 2)],
        }


def measure_memory(workload, method, physical_batch_size, steps):
    """Peak memory in MiB of training in THIS process, above what it holds now."""
    tf.reduce_sum(tf.ones([8, 8]) @ tf.ones([8, 8])).numpy()
    before = common.peak_memory_mb()
    contender(workload, method, physical_batch_size)(steps)
    data = 4 * LOTS_OF_DATA * workload.lot_size * math.prod(workload.input_shape)
    peak = {
        "memory_mb": round(common.peak_memory_mb() - before, 1),
        "data_mb": round(data / 2**20, 1),
    }
    if tf.config.list_physical_devices("GPU"):
        device = tf.config.experimental.get_memory_info("GPU:0")["peak"]
        peak["device_memory_mb"] = round(device / 2**20, 1)
    return peak


def memory_row(workload, method, physical_batch_size, steps):
    """The same in a process of its own."""
    child = subprocess.run(
        [
            sys.executable,
            __file__,
            f"--memory_of={workload.name},{method},{physical_batch_size or 'auto'}",
            f"--steps={steps}",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {
        "measure": "memory",
        "model": workload.name,
        "method": method,
        "physical_batch_size": physical_batch_size,
        "lot_size": workload.lot_size,
        "steps": steps,
        **json.loads(child.stdout.splitlines()[-1]),
    }


def run(workloads, methods, physical_batch_sizes, steps, repeats, results):
    """Measures what `results` does not hold yet."""
    wanted = [(method, size) for method in methods for size in physical_batch_sizes]
    for workload in workloads:
        settings = {"model": workload.name, "lot_size": workload.lot_size, "steps": steps}

        def is_missing(measure, method, size, **more):
            return not results.find(
                measure=measure, method=method, physical_batch_size=size, **more
            )

        missing = [m for m in wanted if is_missing("time", *m, repeats=repeats, **settings)]
        if missing:
            for row in time_rows(workload, missing, steps, repeats):
                results.put(row)
                _report(row, "step_ms", "ratio", "ratio_range")
        for method in [(plain, None) for plain in PLAIN] + wanted:
            if is_missing("memory", *method, **settings):
                row = memory_row(workload, *method, steps)
                results.put(row)
                _report(row, "memory_mb")


def memory_ratio(results, row):
    """Peak of a row over that of the leaner plain Keras run; None where that is not known."""
    plain = [results.find(measure="memory", model=row["model"], method=m) for m in PLAIN]
    if None in plain:
        return None
    return row["memory_mb"] / max(min(p["memory_mb"] for p in plain), 1e-9)


def plot(results, path):
    """Bars of step time and memory relative to plain Keras, limits as dashed lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in results.rows))
    figure, axes = plt.subplots(
        len(models), 2, figsize=(11, 1.2 + 2.8 * len(models)), squeeze=False, layout="constrained"
    )
    for (left, right), model in zip(axes, models, strict=True):
        workload = WORKLOADS[model]
        rows = [r for r in results.rows if r["model"] == model]
        timed = [r for r in rows if r["measure"] == "time" and r["method"] not in PLAIN]
        limits = [workload.limits.get(r["method"], workload.limits[""]) for r in timed]
        spread = [np.abs(np.subtract(r["ratio_range"], r["ratio"])) for r in timed]
        _bars(left, timed, [r["ratio"] for r in timed], limits, spread)
        left.set_title(f"{workload.title}, lot {workload.lot_size}: step time / plain Keras")
        sized = [r for r in rows if r["measure"] == "memory" and r["method"] not in PLAIN]
        limits = [
            MEMORY_LIMIT if r["physical_batch_size"] == MEMORY_LIMIT_BATCH else None for r in sized
        ]
        _bars(right, sized, [memory_ratio(results, r) or np.nan for r in sized], limits)
        right.set_title("peak memory / plain Keras")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _bars(axis, rows, values, limits, spread=None):
    places = np.arange(len(rows))
    errors = np.transpose(spread) if spread else np.zeros([2, len(rows)])
    axis.barh(places, values, xerr=errors, height=0.6, color="#4878a8", ecolor="#333333")
    for place, value, limit in zip(places, values, limits, strict=True):
        axis.text(value + errors[1][place], place, f" {value:.1f}×", va="center", fontsize=8)
        if limit is not None:
            axis.plot([limit, limit], [place - 0.45, place + 0.45], "--", color="#c44e52")
    axis.set_yticks(places, [_label(row) for row in rows], fontsize=8)
    axis.invert_yaxis()
    ends = [*(values + errors[1]), *(limit for limit in limits if limit is not None)]
    axis.set_xlim(0, 1.15 * max(np.nan_to_num(ends), default=1.0))


def table(results):
    """The rows as a Markdown table."""
    lines = []
    for row in results.rows:
        if row["measure"] != "time":
            continue
        memory = results.find(
            measure="memory",
            **{k: row[k] for k in ("model", "method", "physical_batch_size")},
        )
        ratio = memory and memory_ratio(results, memory)
        low, high = row["ratio_range"]
        lines.append(
            [
                WORKLOADS[row["model"]].title,
                _label(row),
                f"{row['step_ms']:.1f}",
                f"{row['ratio']:.1f} ({low:.1f}–{high:.1f})",
                f"{memory['memory_mb']:.0f}" if memory else "",
                f"{ratio:.2f}" if ratio else "",
            ]
        )
    header = ["model", "method", "step, ms", "× plain (rounds)", "memory, MiB", "× plain"]
    return common.markdown_table(header, lines)


def _label(row):
    if row["method"] in PLAIN:
        return row["method"]
    return f"{row['method']}, B={row['physical_batch_size'] or 'auto'}"


def _report(row, *fields):
    values = ", ".join(f"{name} {row[name]}" for name in fields)
    print(f"{row['model']} {_label(row)}: {values}", flush=True)


def _parse_size(text):
    return None if text == "auto" else int(text)


def _define_flags():
    flags.DEFINE_list("models", list(WORKLOADS), f"What to train: {', '.join(WORKLOADS)}.")
    flags.DEFINE_list(
        "methods",
        list(DEFAULT_METHODS),
        f"Private methods: {', '.join(OPTIMIZERS)}, with :xla or :noxla to force jit_compile.",
    )
    flags.DEFINE_list(
        "physical_batch_sizes", ["32"], "Physical batch sizes to try; auto for DPModel's choice."
    )
    flags.DEFINE_integer("steps", 10, "Steps of one block.", lower_bound=1)
    flags.DEFINE_integer("repeats", 3, "Blocks of each contender.", lower_bound=1)
    flags.DEFINE_string("out", str(common.RESULTS_DIR / "step_time.json"), "JSON; a PNG beside it.")
    flags.DEFINE_bool("force", False, "Start the results anew.")
    flags.DEFINE_string("memory_of", None, "Internal: measure one contender, print JSON, end.")


def main(argv):
    del argv
    tf.get_logger().setLevel("ERROR")  # many models in one process: retracing is expected
    args = flags.FLAGS
    if args.memory_of:
        model, method, size = args.memory_of.split(",")
        print(json.dumps(measure_memory(WORKLOADS[model], method, _parse_size(size), args.steps)))
        return
    for model in args.models:
        if model not in WORKLOADS:
            raise app.UsageError(f"--models: {model!r} is none of {', '.join(WORKLOADS)}.")
    for method in args.methods:
        name, _, jit = method.partition(":")
        if name not in OPTIMIZERS or jit not in JIT_COMPILE:
            raise app.UsageError(f"--methods: {method!r} is none of {', '.join(OPTIMIZERS)}[:xla].")
    results = common.Results(
        args.out,
        key=("measure", "model", "method", "physical_batch_size"),
        one_machine=True,
        force=args.force,
    )
    run(
        [WORKLOADS[name] for name in args.models],
        args.methods,
        [_parse_size(size) for size in args.physical_batch_sizes],
        args.steps,
        args.repeats,
        results,
    )
    plot(results, pathlib.Path(args.out).with_suffix(".png"))
    print(table(results))


if __name__ == "__main__":
    _define_flags()
    app.run(main)
