"""Long runs, many records, many weights: what grows, and what should not.

    python -m benchmarks.long_and_large --parts=steps,records,datasets,weights

"steps": a million private steps of a tiny model, in fits of 100,000. Resident memory after each,
how often the step was traced, and the ledger's entries, which must not grow either.
"records": lots of 1,024 from ten million records in a memory-mapped file (1.3 GB, deleted
afterwards): what drawing and reading a lot takes beside a step of a 32-1000-10 network.
"datasets": the same number of records from a tf.data pipeline over files, read into a folder by a
process whose own memory may grow by less than half of what they take: time to read them, to open
the folder again, and of a step.
"weights": 10⁸ weights: all of them trained, a frozen backbone with a head, and LoRA on every layer:
seconds per step and peak memory, each in a process of its own.

Writes `results/long_and_large.json`. About 50 minutes on two idle cores, most of it the steps.
"""

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # off by default on some CPUs, twice as slow

import keras
import numpy as np
import tensorflow as tf

import tf_adadp as dp
from benchmarks import harness, models
from benchmarks.peers import measuring

DELTA = 1e-5


def memory_kb(field):
    """Reads a field of this process's memory: VmRSS, resident; VmData, its own without files."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise OSError(f"no {field} in /proc/self/status")


def resident_mb():
    """Returns how much memory this process holds now."""
    return memory_kb("VmRSS") / 1024


def steps(total=1_000_000, fits=10, at_once=100):
    """Rows per fit of a tiny model: memory, traces, ledger."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10_000, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    model = dp.DPModel(keras.Sequential([keras.Input([8]), keras.layers.Dense(2)]))
    model.compile(
        dp.ADADP(noise_multiplier=50.0),
        models.loss(),
        steps_per_execution=at_once,
        log_raw_metrics=False,
    )
    traces = []
    train_step = type(model).train_step
    model.train_step = lambda lot: (traces.append(1), train_step(model, lot))[1]
    rows = []
    for fit in range(fits):
        start = time.perf_counter()
        model.fit(
            x,
            y,
            batch_size=16,
            steps_per_epoch=total // fits,
            verbose=0,
            callbacks=[dp.PrivacyCallback(DELTA)],
        )
        rows.append(
            {
                "part": "steps",
                "case": f"fit {fit}",
                "steps": model.optimizer.steps_taken,
                "resident_mb": round(resident_mb(), 1),
                "traces": len(traces),
                "ledger_entries": len(model.ledger.entries),
                "ledger_steps": model.ledger.steps,
                "epsilon": round(model.epsilon(DELTA), 4),
                "weights_are_finite": bool(
                    all(np.isfinite(w).all() for w in model.model.get_weights())
                ),
                "ms_per_step": round(1e3 * (time.perf_counter() - start) * fits / total, 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


def records(number=10_000_000, columns=32, lot=1024, timed=100):
    """A row: milliseconds to draw and read a lot, and of a step that does so meanwhile."""
    runs = pathlib.Path("runs")  # on a disk, not in memory
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as folder:
        rng = np.random.default_rng(0)
        x = np.lib.format.open_memmap(
            pathlib.Path(folder) / "x.npy", "w+", np.float32, (number, columns)
        )
        for begin in range(0, number, 500_000):
            x[begin : begin + 500_000] = rng.standard_normal(
                (min(500_000, number - begin), columns), np.float32
            )
        x.flush()
        x = np.load(pathlib.Path(folder) / "x.npy", mmap_mode="r")
        y = rng.integers(0, 10, number).astype(np.int32)
        lots = dp.PoissonLots(x, y, lot)
        taken = lots.take(timed + 10, 16)
        times = []
        for _ in range(timed + 10):
            start = time.perf_counter()
            next(taken)
            times.append(1e3 * (time.perf_counter() - start))
        before = resident_mb()
        model = dp.DPModel(models.mlp(columns, 1000, 10))
        model.compile(dp.ADADP(noise_multiplier=2.0), models.loss(), log_raw_metrics=False)
        model.fit(lots, steps_per_epoch=20, verbose=0)
        start = time.perf_counter()
        model.fit(lots, steps_per_epoch=timed, verbose=0)
        step = 1e3 * (time.perf_counter() - start) / timed
        row = {
            "part": "records",
            "case": f"{number:,} x {columns}, lots of {lot}",
            "draw_ms_median": round(float(np.median(times[10:])), 3),
            "draw_ms_p90": round(float(np.quantile(times[10:], 0.9)), 3),
            "step_ms": round(step, 2),
            "share_of_step": round(float(np.median(times[10:])) / step, 4),
            "resident_mb": round(before, 1),
        }
    print(row, flush=True)
    return [row]


def datasets(number=10_000_000, columns=32, lot=1024, timed=100, room=6 * 10**8):
    """A row: seconds to read records of a tf.data pipeline into a folder, within `room` bytes."""
    runs = pathlib.Path("runs")  # on a disk, not in memory
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as folder:
        files = [pathlib.Path(folder) / f"{part}.bin" for part in range(10)]
        rng = np.random.default_rng(0)
        for file in files:
            rng.standard_normal((number // 10, columns + 1), np.float32).tofile(file)

        def parsed(records):
            values = tf.io.decode_raw(records, tf.float32)
            values = tf.ensure_shape(values, [None, columns + 1])
            return values[:, :columns], tf.cast(values[:, columns] > 0, tf.int32)

        def dataset():
            names = [str(file) for file in files]
            read = tf.data.FixedLengthRecordDataset(names, 4 * (columns + 1))
            return read.batch(1024).map(parsed)  # faster than a function of one record

        model = dp.DPModel(models.mlp(columns, 1000, 10))
        model.compile(dp.ADADP(noise_multiplier=2.0), models.loss(), log_raw_metrics=False)
        first = np.zeros((64, columns), np.float32), np.zeros(64, np.int32)
        model.fit(*first, batch_size=16, verbose=0)  # TensorFlow's own memory is there now
        used = memory_kb("VmData") * 1024
        unlimited = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + room, unlimited[1]))
        try:
            options = {"cache_dir": pathlib.Path(folder) / "records", "verbose": False}
            start = time.perf_counter()
            dp.PoissonLots.from_dataset(dataset(), expected_size=lot, **options)
            reading = time.perf_counter() - start
            start = time.perf_counter()
            lots = dp.PoissonLots.from_dataset(dataset(), expected_size=lot, **options)
            opening = time.perf_counter() - start
            model.fit(lots, steps_per_epoch=20, verbose=0)
            start = time.perf_counter()
            model.fit(lots, steps_per_epoch=timed, verbose=0)
            step = 1e3 * (time.perf_counter() - start) / timed
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, unlimited)
        row = {
            "part": "datasets",
            "case": f"{number:,} x {columns}, lots of {lot}",
            "record_mb": round(number * 4 * (columns + 1) / 2**20),
            "own_memory_mb": round(used / 2**20),
            "allowed_mb": round((used + room) / 2**20),
            "read_seconds": round(reading, 1),
            "records_per_second": round(number / reading),
            "open_seconds": round(opening, 2),
            "step_ms": round(step, 2),
        }
    print(row, flush=True)
    return [row]


def wide(inputs, width, depth, classes=10):
    """Dense layers of width²·depth weights and more."""
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(depth + 1)]
    return keras.Sequential([keras.Input([inputs]), *layers, keras.layers.Dense(classes)])


def _frozen(model):
    for layer in model.layers[:-1]:
        layer.trainable = False
    return model


def _lora(model):
    for layer in model.layers[:-1]:
        layer.enable_lora(8)
    return model


CASES = {"all trained": lambda m: m, "frozen backbone": _frozen, "LoRA, rank 8": _lora}


def weights_case(case, width=5000, depth=4, lot=256, timed=5):
    """One row, for a process of its own."""
    model = CASES[case](wide(64, width, depth))
    total = sum(int(np.prod(w.shape)) for w in model.weights)
    trained = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
    private = dp.DPModel(model)
    private.compile(dp.ADADP(noise_multiplier=2.0), models.loss(), log_raw_metrics=False)
    x, y = models.random_data(5000, models.Features((64,)))
    private.fit(x, y, batch_size=lot, steps_per_epoch=2, verbose=0)
    start = time.perf_counter()
    private.fit(x, y, batch_size=lot, steps_per_epoch=timed, verbose=0)
    return {
        "part": "weights",
        "case": case,
        "weights": total,
        "trained": trained,
        "engine": private.session.prepared.plan.engine,
        "lot_size": lot,
        "seconds_per_step": round((time.perf_counter() - start) / timed, 3),
        "peak_mb": round(measuring.peak_memory_mb(), 0),
        "epsilon": round(private.epsilon(DELTA), 4),
    }


def weights():
    """A row per case."""
    rows = []
    for case in CASES:
        command = [sys.executable, "-m", "benchmarks.long_and_large", f"--case={case}"]
        out = subprocess.run(
            command, cwd=harness.ROOT, check=True, capture_output=True, text=True
        ).stdout
        rows.append(json.loads(out.splitlines()[-1]))
        print(rows[-1], flush=True)
    return rows


PARTS = {"steps": steps, "records": records, "datasets": datasets, "weights": weights}


def main():
    parser = harness.parser(__doc__, __file__)
    parser.add_argument("--parts", type=harness.names(PARTS), default=list(PARTS))
    parser.add_argument("--case", choices=list(CASES), help="one case of weights, as JSON")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(weights_case(args.case)))
        return
    results = harness.Results(args.out, key=("part", "case"), one_machine=False)
    for part in args.parts:
        for row in PARTS[part]():
            results.put(row)


if __name__ == "__main__":
    main()
