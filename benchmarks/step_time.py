"""Time and memory of private training steps, against a plain Keras step.

    python -m benchmarks.step_time
    python -m benchmarks.step_time --models=mlp --lot_sizes=64,512,8192 --examples=81920
    python -m benchmarks.peers.environments && python -m benchmarks.step_time --peers

Time: every contender trains through its own `fit`, sampling included, on random data. They take
turns, block by block, in one process, so that a busy machine slows all alike. A block's first steps
(iterator start, prefetch) are dropped. Reported: the median step over all blocks, the ratio of
medians to the faster of two plain Keras steps (with and without XLA), and the least and greatest
ratio within one round of blocks.

Memory: each contender in a process of its own, the peak above what the process held after importing
TensorFlow, Keras and tf_adadp and running one operation. The data counts; there are 10 lots of it,
unless --examples says otherwise: lots of different sizes compare on the same data. Plain Keras gets
it without a further copy (its fastest feed, used for the times, holds one).

Peers: other libraries, each in its own environment and process, next to the private contenders; see
peer_times.py.

Results already in the JSON for the same settings are not measured again. Works unchanged on a GPU,
where the peak of the device's memory is reported besides.
"""

import argparse
import functools
import itertools
import json
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

import tf_adadp as dp
from benchmarks import harness, peer_times, step_report
from benchmarks.peers.measuring import SETTLING_STEPS, peak_memory_mb
from benchmarks.workloads import ENGINES, JIT_COMPILE, OPTIMIZERS, PLAIN, WORKLOADS, Contender


class StepTimer(keras.callbacks.Callback):
    """Notes when each step ended. Keras has read the step's logs by then, so its work is done.

    Attributes:
        ends: times (`time.perf_counter`).
    """

    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        """Notes the time."""
        self.ends.append(time.perf_counter())

    def milliseconds(self):
        """Durations of the steps after the settling ones."""
        return 1e3 * np.diff(self.ends)[SETTLING_STEPS - 1 :]


def make_block(workload, contender, data, *, lean=False):
    """A function `block(steps)` that trains so many steps and returns their milliseconds.

    Args:
        workload: a `Workload`.
        contender: a `Contender`.
        data: the workload's `x, y`.
        lean: feed plain Keras without a copy of the data, for measuring memory, instead of as fast
            as can be.
    """
    _, train = make_trainer(
        workload.build(),
        contender,
        data,
        lot_size=workload.lot_size,
        options=workload.options(),
        lean=lean,
    )

    def block(steps):
        timer = StepTimer()
        train(SETTLING_STEPS + steps, [timer])
        return timer.milliseconds()

    train(SETTLING_STEPS)  # traces and compiles
    return block


def make_trainer(model, contender, data, *, lot_size, options, lean=False):
    """A model compiled as a contender, and a function `train(steps, callbacks=())` that fits it.

    Args:
        model: a plain `keras.Model`.
        contender, data, lean: as in `make_block`.
        lot_size: the expected number of examples of a step.
        options: a dict, arguments of `compile` besides the optimizer.
    """
    options = {**options, "jit_compile": contender.jit_compile}
    x, y = data
    if contender.name == "keras":
        model.compile(optimizer=keras.optimizers.SGD(), **options)
        # Batches that need no work at all: the plain step at its fastest.
        lots = keras.tree.map_structure(lambda a: _whole_lots(a, lot_size), (x, y))
        if lean:
            dataset = _Views(lots)
        else:
            dataset = tf.data.Dataset.from_tensor_slices(lots).repeat().prefetch(2)
        arguments = {"x": dataset, "shuffle": False}
        # Keras's own, past the one of keras_hub's tasks, which takes no PyDataset.
        fit = functools.partial(keras.Model.fit, model)
    else:
        model = dp.DPModel(
            model,
            physical_batch_size=contender.physical_batch_size,
            gradient_engine=contender.engine,
        )
        model.compile(optimizer=OPTIMIZERS[contender.name].make(), **options)
        arguments = {"x": x, "y": y, "batch_size": lot_size}
        fit = model.fit

    def train(steps, callbacks=()):
        fit(**arguments, steps_per_epoch=steps, callbacks=list(callbacks), verbose=0)

    return model, train


class _Views(keras.utils.PyDataset):
    """Lots [number of lots, lot size, ...] one after the other, again and again."""

    def __init__(self, lots):
        super().__init__()
        self._lots = lots

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return keras.tree.map_structure(lambda a: a[index % len(a)], self._lots)


def _whole_lots(array, lot_size):
    lots = len(array) // lot_size
    return array[: lots * lot_size].reshape(lots, lot_size, *array.shape[1:])


def interleaved_times(blocks, steps, repeats):
    """Step durations in milliseconds, per contender an array [repeats, steps].

    Args:
        blocks: dict of functions `block(steps)` that return the durations of a block's steps.
        steps: steps of one block.
        repeats: blocks of each contender, taken in turns.
    """
    times = {name: [] for name in blocks}
    for _ in range(repeats):
        for name, block in blocks.items():
            times[name].append(block(steps))
    return {name: np.stack(rounds) for name, rounds in times.items()}


def time_fields(times, plain_times, lot_size):
    """The figures of a row.

    Args:
        times: milliseconds, [repeats, steps].
        plain_times: the same of each of the plain Keras runs; the fastest is the yardstick.
        lot_size: examples of a step.
    """
    fastest = min(plain_times, key=np.median)
    by_round = np.median(times, axis=1) / np.median(fastest, axis=1)
    step = float(np.median(times))
    return {
        "step_ms": round(step, 3),
        "ms_per_example": round(step / lot_size, 6),
        "round_ms": [round(float(m), 3) for m in np.median(times, axis=1)],
        "plain_ms": round(float(np.median(fastest)), 3),
        "ratio": round(step / float(np.median(fastest)), 2),
        "ratio_range": [round(float(by_round.min()), 2), round(float(by_round.max()), 2)],
    }


def time_rows(workload, contenders, steps, repeats):
    """Times private contenders interleaved with plain Keras; one row for each."""
    data = workload.data()
    blocks = {c: make_block(workload, c, data) for c in (*PLAIN, *contenders)}
    times = interleaved_times(blocks, steps, repeats)
    for contender, mine in times.items():
        yield {
            "measure": "time",
            **workload.fields(),
            **contender.fields(),
            "steps": steps,
            "repeats": repeats,
            **time_fields(mine, [times[plain] for plain in PLAIN], workload.lot_size),
        }


def measure_memory(workload, contender, steps):
    """Peak memory in MiB of training in THIS process, above what it holds now."""
    before = memory_of_imports()
    data = workload.data()
    make_block(workload, contender, data, lean=True)(steps)
    return memory_fields(before, data)


def memory_of_imports():
    """Peak memory in MiB of this process with everything imported and one operation run."""
    tf.reduce_sum(tf.ones([8, 8]) @ tf.ones([8, 8])).numpy()
    dp.DPModel, dp.DPSGD, dp.PrivacyCallback  # noqa: B018, names load on first use
    return peak_memory_mb()


def memory_fields(before, data):
    """The fields of a row that say how far the peak is above an earlier one."""
    size = sum(array.nbytes for array in keras.tree.flatten(data))
    peak = {
        "memory_mb": round(peak_memory_mb() - before, 1),
        "data_mb": round(size / 2**20, 1),
    }
    if tf.config.list_physical_devices("GPU"):
        device = tf.config.experimental.get_memory_info("GPU:0")["peak"]
        peak["device_memory_mb"] = round(device / 2**20, 1)
    return peak


def memory_row(workload, contender, steps):
    """The same in a process of its own."""
    asked = json.dumps({**workload.fields(), **contender.fields()})
    measured = harness.from_process(
        "benchmarks.step_time", f"--memory_of={asked}", f"--steps={steps}"
    )
    return {
        "measure": "memory",
        **workload.fields(),
        **contender.fields(),
        "steps": steps,
        **measured,
    }


def _print_memory_of(asked, steps):
    asked = json.loads(asked)
    workload = WORKLOADS[asked.pop("model")].at(asked.pop("lot_size"), asked.pop("examples"))
    print(json.dumps(measure_memory(workload, Contender(**asked), steps)))


def run(workloads, contenders, steps, repeats, results):
    """Measures what `results` does not hold yet."""
    for workload in workloads:
        settings = {**workload.fields(), "steps": steps}

        def is_missing(measure, contender, settings=settings, **more):
            return not results.find(measure=measure, **contender.fields(), **settings, **more)

        missing = [c for c in contenders if is_missing("time", c, repeats=repeats)]
        if missing:
            for row in time_rows(workload, missing, steps, repeats):
                results.put(row)
                step_report.announce(row, "step_ms", "ratio", "ratio_range")
        run_memory(workload, [*PLAIN, *contenders], steps, results)


def run_memory(workload, contenders, steps, results):
    """Measures the memory that `results` does not hold yet."""
    for contender in contenders:
        asked = {**workload.fields(), **contender.fields(), "steps": steps}
        if not results.find(measure="memory", **asked):
            row = memory_row(workload, contender, steps)
            results.put(row)
            step_report.announce(row, "memory_mb")


def run_peers(workloads, contenders, envs, steps, repeats, results):
    """Measures the peers and, in the same turns, the private contenders; all of them anew."""
    for workload in workloads:
        for row in peer_rows(workload, contenders, envs, steps, repeats):
            results.put(row)
            step_report.announce(row, *(f for f in ("step_ms", "ratio", "memory_mb") if f in row))
        run_memory(workload, [*PLAIN, *contenders], steps, results)


def peer_rows(workload, contenders, envs, steps, repeats):
    """Rows of peers and private contenders, each after its own blocks of plain Keras.

    Nothing else runs meanwhile: a peer is a process that starts, trains one block and ends.
    """
    data = workload.data()
    plain = {c: make_block(workload, c, data) for c in PLAIN}
    peers = peer_times.peer_contenders(workload, envs)
    blocks = {c: make_block(workload, c, data) for c in contenders} | peers
    turns = {
        (name, role): block
        for name, mine in blocks.items()
        for role, block in (*plain.items(), ("self", mine))
    }
    times = interleaved_times(turns, steps, repeats)
    for name in blocks:
        yield {
            "measure": "peer_time",
            **workload.fields(),
            **name.fields(),
            "steps": steps,
            "repeats": repeats,
            **time_fields(times[name, "self"], [times[name, p] for p in PLAIN], workload.lot_size),
        }
    for name, peer in peers.items():
        yield {
            "measure": "memory",
            **workload.fields(),
            **name.fields(),
            "steps": steps,
            **peer.memory_fields(),
        }


def parse_arguments(arguments=None):
    """Parses the command line.

    Returns:
        The arguments, and the workloads and private contenders that they ask for.
    """
    parser = harness.resumable(__doc__, __file__)
    add = parser.add_argument
    add("--models", type=harness.names(WORKLOADS), default=list(WORKLOADS))
    methods = [f"{name}:{jit}".rstrip(":") for jit in JIT_COMPILE for name in OPTIMIZERS]
    add("--methods", type=harness.names(methods), default=list(OPTIMIZERS))
    add("--engines", type=harness.names(ENGINES), default=list(ENGINES))
    add("--lot_sizes", type=_counts, default=[], help="expected sizes; else each model's own")
    add("--physical_batch_sizes", type=_batches, default=[None], help="auto: DPModel's choice")
    add("--examples", type=harness.count, help="of the data; else 10 lots")
    add("--steps", type=harness.count, default=10, help="of one block")
    add("--repeats", type=harness.count, default=3, help="blocks of each contender")
    add("--peers", action="store_true", help="next to other libraries; mlp and cnn")
    add("--peer_envs", type=pathlib.Path, default=peer_times.ENVS_DIR, help="peers' environments")
    add("--memory_of", help=argparse.SUPPRESS)  # measures one contender and ends
    args = parser.parse_args(arguments)
    try:
        workloads = [
            WORKLOADS[model].at(lot_size, args.examples)
            for model in args.models
            for lot_size in args.lot_sizes or [WORKLOADS[model].lot_size]
        ]
    except ValueError as error:
        parser.error(str(error))
    asked = itertools.product(args.methods, args.engines, args.physical_batch_sizes)
    return args, workloads, [Contender(*fields) for fields in asked]


def _counts(text):
    return [harness.count(size) for size in text.split(",")]


def _batches(text):
    return [None if size == "auto" else harness.count(size) for size in text.split(",")]


def main():
    tf.get_logger().setLevel("ERROR")  # many models in one process: retracing is expected
    args, workloads, contenders = parse_arguments()
    if args.memory_of:
        _print_memory_of(args.memory_of, args.steps)
        return
    results = harness.Results(args.out, key=step_report.KEY, one_machine=True, force=args.force)
    if args.peers:
        shared = [w for w in workloads if w.name in peer_times.MODELS]
        print(f"Of the models, the peers have {', '.join(peer_times.MODELS)}; others are skipped.")
        run_peers(shared, contenders, args.peer_envs, args.steps, args.repeats, results)
    else:
        run(workloads, contenders, args.steps, args.repeats, results)
    step_report.plot(results, args.out.with_suffix(".png"))
    print(step_report.tables(results))


if __name__ == "__main__":
    main()
