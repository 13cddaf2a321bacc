"""Kills trainings with SIGKILL at random moments, resumes them, and checks their ledger each time.

    python -m verification.kill_resume --kills=50

Every life of a run is a process of its own that trains a small model with `PrivacyCallback(
ledger_path=…, ledger_interval=K)`, that goes on from the last weights saved (every fifth epoch,
with their ledger), and that notes, apart from the ledger, each execution as it begins and ends.
Four lives of five are killed at a random moment of training, the fifth at any moment after its
start, loading and the ledger's opening included. After each kill the file must hold

    (found at the start) + (begun) ≤ steps ≤ (found) + (ended) + max(K, steps_per_execution),

and its ε must lie between that of what all lives released and that of one interval more per kill.
A breach ends the program with an AssertionError. Writes `results/kill_resume.json`: every life,
the overcharge, and what a synced write costs. About 6 s a kill on two idle cores.
"""

import json
import multiprocessing
import pathlib
import random
import statistics
import tempfile
import time

import numpy as np

from tf_adadp import accounting
from verification import faults

ROWS, LOT, SIGMA, DELTA = 600, 30, 2.0, 1e-4
SETTINGS = [(1, 1), (3, 1), (10, 2), (100, 1), (2, 4)]  # ledger_interval, steps_per_execution


def train(folder, interval, at_once, life):
    """One life of a run: trains until it is killed."""
    import keras

    import tf_adadp as dp

    marks = open(folder / f"life{life}", "ab", buffering=0)  # noqa: SIM115 (until it is killed)

    class Marks(keras.callbacks.Callback):
        """Stands behind PrivacyCallback, so the file is written ahead when a step is noted."""

        def on_train_batch_begin(self, batch, logs=None):
            marks.write(b"b")

        def on_train_batch_end(self, batch, logs=None):
            marks.write(b"e")

    class Saves(keras.callbacks.Callback):
        """Weights and their ledger, which `save_weights` replaces at once."""

        def on_epoch_end(self, epoch, logs=None):
            if epoch % 5 == 0:
                self.model.save_weights(folder / "saved.weights.h5")

    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 6)).astype(np.float32)
    model = dp.DPModel(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))
    model.compile(
        dp.DPSGD(0.1, noise_multiplier=SIGMA),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
        steps_per_execution=at_once,
    )
    privacy = dp.PrivacyCallback(
        DELTA, ledger_path=folder / "ledger.json", ledger_interval=interval, dataset="synthetic"
    )
    if (folder / "saved.weights.h5").exists():
        model.load_weights(folder / "saved.weights.h5")
    model.fit(
        x,
        np.argmax(x[:, :3], 1),
        batch_size=LOT,
        epochs=10**6,
        verbose=0,
        callbacks=[privacy, Marks(), Saves()],
    )


def epsilon(steps):
    return accounting.epsilon(SIGMA, LOT / ROWS, steps, DELTA) if steps else 0.0


def stored(folder):
    """The ledger in the file; an empty one if it was never written."""
    path = folder / "ledger.json"
    return accounting.PrivacyLedger.load(path) if path.exists() else accounting.PrivacyLedger()


def _steps(marks):
    return marks.exists() and marks.stat().st_size >= 2  # one step begun and ended: traced


def kill_once(context, folder, setting, life, rng):
    """One life and its end. Returns what was found and counted."""
    interval, at_once = setting
    found = stored(folder).steps
    marks = folder / f"life{life}"
    process = context.Process(target=train, args=(folder, interval, at_once, life))
    process.start()
    anywhere = life % 5 == 4
    deadline = time.monotonic() + (rng.uniform(0, 6) if anywhere else 120)
    while time.monotonic() < deadline and (anywhere or not _steps(marks)):
        assert process.is_alive(), f"life {life} of {setting} ended by itself"
        time.sleep(0.005)
    if not anywhere:
        time.sleep(rng.uniform(0, 1.5))
    process.kill()
    process.join()
    noted = marks.read_bytes() if marks.exists() else b""
    ledger = stored(folder)  # an unreadable file would raise
    row = {
        "interval": interval,
        "steps_per_execution": at_once,
        "life": life,
        "found": found,
        "begun": noted.count(b"b") * at_once,
        "ended": noted.count(b"e") * at_once,
        "steps": ledger.steps,
        "epsilon": ledger.epsilon(DELTA),
    }
    bound = found + row["ended"] + max(interval, at_once)
    assert found + row["begun"] <= row["steps"] <= bound, row
    return row


def run(kills, seed, folder):
    """`kills` kills, spread over runs of all settings. Returns the rows."""
    rng = random.Random(seed)
    # Children start from a server that has imported TensorFlow, and never computed with it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tf_adadp.model", "tf_adadp.callbacks"])
    rows = []
    settings = SETTINGS[:kills]
    for place, setting in enumerate(settings):
        home = pathlib.Path(folder) / str(place)
        home.mkdir()
        released = 0
        for life in range(kills // len(settings) + (place < kills % len(settings))):
            row = kill_once(context, home, setting, life, rng)
            least, released = released + row["ended"], released + row["begun"]
            most = released + (life + 1) * max(setting)
            row["epsilon_released"], row["epsilon_bound"] = epsilon(least), epsilon(most)
            slack = 1e-12
            assert row["epsilon"] >= row["epsilon_released"] * (1 - slack), row
            assert row["epsilon"] <= row["epsilon_bound"] * (1 + slack), row
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def write_times(folder, repetitions=100):
    """Milliseconds of a synced write of a small ledger: median and 90th percentile."""
    ledger, law = accounting.PrivacyLedger(), accounting.PoissonSampling(ROWS, LOT)
    path, times = pathlib.Path(folder) / "timed.json", []
    for _ in range(repetitions):
        ledger.add(law.event(SIGMA), law=law)
        start = time.perf_counter()
        ledger.save(path)
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "median_ms": statistics.median(times),
        "p90_ms": statistics.quantiles(times, n=10)[-1],
        "repetitions": repetitions,
    }


def main():
    arguments = faults.parser(__doc__, __file__, "kills", 50).parse_args()
    runs = pathlib.Path("runs")  # on a disk, not in memory
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as folder:
        rows = run(arguments.kills, arguments.seed, folder)
        writes = write_times(folder)
    overcharges = [row["steps"] - row["found"] - row["ended"] for row in rows]
    summary = {
        "kills": len(rows),
        "killed_in_training": sum(row["begun"] > 0 for row in rows),
        "killed_within_a_step": sum(row["begun"] > row["ended"] for row in rows),
        "steps_released": sum(row["ended"] for row in rows),
        "largest_overcharge_over_bound": max(
            steps / max(row["interval"], row["steps_per_execution"])
            for steps, row in zip(overcharges, rows, strict=True)
        ),
        "synced_write": writes,
    }
    faults.write(arguments.out, summary, rows)


if __name__ == "__main__":
    main()
