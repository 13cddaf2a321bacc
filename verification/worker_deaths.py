"""Kills workers of a training on several hosts, starts all again, and checks the ledger each time.

    python -m verification.worker_deaths --deaths=20

Three processes on this machine train one small model under MultiWorkerMirroredStrategy, over the
loopback device. At a random moment of training one of them, the chief or another, is killed with
SIGKILL. The others must end by themselves, with an error; then all three are started again, and the
chief restores what its BackupAndRestore saved. Every process notes each step as it begins and ends,
apart from the ledger. After each death the chief's ledger file must hold

    (found at the start) + (begun by the chief, ended by anyone) ≤ steps
    steps ≤ (found) + (ended by the chief) + ledger_interval,

the restarted run must begin at the epoch that was saved, and all workers that saw a step end must
have had the same weights after it. A breach ends the program with an AssertionError. Writes
`results/worker_deaths.json`. About 40 s a death on two idle cores, most of it starting TensorFlow.
"""

import argparse
import contextlib
import json
import pathlib
import random
import signal
import sys
import tempfile
import time

from benchmarks import harness
from verification import faults
from verification.kill_resume import stored

WORKERS = 3
ROWS, LOT, SIGMA, DELTA, INTERVAL = 600, 30, 2.0, 1e-4, 10
STEPS_PER_EPOCH = 5
PATIENCE = 120.0  # seconds for the others to notice


def train(folder, life, number):
    """One worker's life: trains until it is killed or another is."""
    import keras
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import tf_adadp as dp

    notes = open(folder / f"life{life}.{number}", "ab", buffering=0)  # noqa: SIM115 (until killed)

    class Notes(keras.callbacks.Callback):
        """Stands behind PrivacyCallback, so the file is written ahead when a step is noted."""

        def on_epoch_begin(self, epoch, logs=None):
            notes.write(f"epoch {epoch}\n".encode())

        def on_train_batch_begin(self, batch, logs=None):
            notes.write(b"begin\n")

        def on_train_batch_end(self, batch, logs=None):
            weights = self.model.model.get_weights()
            notes.write(f"end {sum(float(np.abs(w).sum()) for w in weights)!r}\n".encode())

    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 6)).astype(np.float32)
    with strategy.scope():
        model = dp.DPModel(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))
        model.compile(
            dp.ADADP(noise_multiplier=SIGMA),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    callbacks = [dp.PrivacyCallback(DELTA, ledger_path=folder / "ledger.json",
                                    ledger_interval=INTERVAL)]  # fmt: skip
    if number == 0:
        callbacks.append(
            keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
        )
    model.fit(
        x,
        np.argmax(x[:, :3], 1),
        batch_size=LOT,
        epochs=10**6,
        steps_per_epoch=STEPS_PER_EPOCH,
        verbose=0,
        callbacks=[*callbacks, Notes()],
    )


def read_notes(folder, life, number):
    """(first epoch or None, steps begun, what the weights were after each step that ended)."""
    path = folder / f"life{life}.{number}"
    lines = path.read_text().splitlines() if path.exists() else []
    epochs = [int(line.split()[1]) for line in lines if line.startswith("epoch")]
    ended = [line.split()[1] for line in lines if line.startswith("end ")]
    return epochs[0] if epochs else None, lines.count("begin"), ended


def start(folder, life):
    """Starts all workers, as processes with a cluster of their own."""
    commands = [
        [sys.executable, "-m", "verification.worker_deaths"]
        + [f"--life={life}", f"--worker={number}", f"--folder={folder}"]
        for number in range(WORKERS)
    ]
    with contextlib.ExitStack() as stack:  # the processes keep the files open
        logs = [stack.enter_context(open(folder / f"log{life}.{n}", "wb")) for n in range(WORKERS)]
        return faults.start_cluster(commands, logs, cwd=harness.ROOT)


def kill_once(folder, life, victim, rng):
    """One start of all workers and one death. Returns what was found and counted."""
    found, began = stored(folder).steps, time.monotonic()
    workers = start(folder, life)
    try:
        while read_notes(folder, life, 0)[2][1:] == []:  # two steps ended: all are at work
            assert all(w.poll() is None for w in workers), f"life {life} ended by itself: {folder}"
            assert time.monotonic() < began + 300, f"life {life} did not begin to train"
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 2))
        workers[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        for worker in workers:
            worker.wait(max(1.0, killed + PATIENCE - time.monotonic()))
        noticed = time.monotonic() - killed
    finally:
        for worker in workers:
            worker.kill()
    notes = [read_notes(folder, life, number) for number in range(WORKERS)]
    longest = max((n[2] for n in notes), key=len)
    for _, _, ended in notes:
        assert ended == longest[: len(ended)], f"workers of life {life} had different weights"
    codes = [w.returncode for i, w in enumerate(workers) if i != victim]
    assert all(codes), f"a worker of life {life} ended as if nothing had happened: {codes}"
    ledger = stored(folder)
    row = {
        "life": life,
        "victim": victim,
        "first_epoch": notes[0][0],
        "found": found,
        "begun": max(notes[0][1], len(longest)),
        "ended": len(notes[0][2]),
        "steps": ledger.steps,
        "epsilon": ledger.epsilon(DELTA),
        "noticed_after_s": round(noticed, 1),
        "seconds": round(time.monotonic() - began, 1),
    }
    assert found + row["begun"] <= row["steps"] <= found + row["ended"] + INTERVAL, row
    return row


def run(deaths, seed, folder):
    """`deaths` deaths of one training. Returns the rows."""
    from tf_adadp import accounting

    rng = random.Random(seed)
    folder = pathlib.Path(folder)
    rows, released, epochs = [], 0, 0
    for life in range(deaths):
        row = kill_once(folder, life, rng.randrange(WORKERS), rng)
        # The backup is written when an epoch has ended; the chief may have died while it was.
        assert epochs - 1 <= row["first_epoch"] <= epochs, (epochs, row)
        epochs = row["first_epoch"] + row["ended"] // STEPS_PER_EPOCH
        released += row["begun"]
        least = accounting.epsilon(SIGMA, LOT / ROWS, released, DELTA)
        assert row["epsilon"] >= least * (1 - 1e-12), row
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main():
    parser = faults.parser(__doc__, __file__, "deaths", 20)
    for name, kind in (("life", int), ("worker", int), ("folder", pathlib.Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        train(arguments.folder, arguments.life, arguments.worker)
        return
    runs = pathlib.Path("runs").resolve()  # on a disk, not in memory
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as folder:
        rows = run(arguments.deaths, arguments.seed, folder)
    summary = {
        "deaths": len(rows),
        "of_the_chief": sum(row["victim"] == 0 for row in rows),
        "steps_released": sum(row["begun"] for row in rows),
        "largest_overcharge": max(row["steps"] - row["found"] - row["ended"] for row in rows),
        "ledger_interval": INTERVAL,
        "longest_until_noticed_s": max(row["noticed_after_s"] for row in rows),
    }
    faults.write(arguments.out, summary, rows)


if __name__ == "__main__":
    main()
