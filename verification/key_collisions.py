"""Kills trainings with SIGKILL and resumes them, and looks for a seed that was ever used twice.

    python -m verification.key_collisions --kills=50

Every life of a run is a process of its own. It notes a hash of every seed before noise, selections
or dropout are drawn with it, and of every lot's key and step (through a hook that only this script
has), goes on from the last weights, `.keras` file or private state saved, trains, and is killed at
a random moment: in training, while it saves, or while it loads. Besides, each life steps with
copies, deep copies and rebuilt optimizers, and draws lots in a forked child. Over all processes,
steps, variables and optimizers no hash may occur twice: equal noise on two sums cancels in their
difference. A repetition ends the program with an AssertionError.

Writes `results/key_collisions.json`. About 10 s a kill on two idle cores.
"""

import collections
import copy
import hashlib
import json
import multiprocessing
import os
import pathlib
import random
import tempfile
import time

import numpy as np

from verification import faults

ROWS, LOT = 300, 30
METHODS = ("adadp", "dpopt", "sadpsgd", "agd")
SIZE = 16  # bytes of a record: its kind, and 15 of the hash


def watch(path):
    """Lets this process write a record to `path` for every seed and lot key before its use."""
    import tensorflow as tf

    from tf_adadp import noise
    from tf_adadp.noise import draws
    from tf_adadp.sampling.keys import LotKey

    # Unbuffered and appended: what was drawn is noted, whenever the process dies.
    file = open(path, "ab", buffering=0)  # noqa: SIM115 (until it is killed)
    stream, generator = noise.stream, LotKey.generator

    def note(kind, content):
        file.write(kind + hashlib.sha256(content).digest()[: SIZE - 1])

    def note_seed(seed):
        note(b"n", seed.tobytes())
        return seed

    def watched_stream(key, step, index):
        seed = tf.numpy_function(note_seed, [stream(key, step, index)], tf.int64)
        return tf.ensure_shape(seed, [2])

    def watched_generator(self, step):
        made = generator(self, step)
        note(b"l", f"{self._key} {step}".encode())
        return made

    # `gaussian` calls the function of its own module.
    noise.stream = draws.stream = watched_stream
    LotKey.generator = watched_generator


def optimizer(method, energy_data):
    import tf_adadp as dp

    if method == "dpopt":
        budget = {"directions": "budgeted", "direction_noise_multiplier": 2.0}
        return dp.DPOPT(noise_multiplier=1.0, **budget)
    if method == "sadpsgd":
        private = {"energy_noise_multiplier": 1.0, "energy_clip": 1.0}
        return dp.SADPSGD(noise_multiplier=1.0, energy_data=energy_data, **private)
    if method == "agd":
        # A budget that lasts: it grows little where a measurement is repeated.
        return dp.AGD(total_epsilon=1e4, total_delta=1e-4, splits=10**5, budget_growth=1e-4)
    return dp.ADADP(noise_multiplier=1.0)


def step_with_copies():
    """Two releases each with an optimizer, copies of it, and one made from its configuration."""
    import keras
    import tensorflow as tf

    import tf_adadp as dp

    first = dp.DPSGD(0.1, noise_multiplier=1.0)
    copies = [first, copy.deepcopy(first), dp.DPSGD.from_config(first.get_config())]
    for one in copies:
        one.build([keras.Variable(np.zeros(3, np.float32))])
        for _ in range(2):
            one.apply_private([tf.zeros(3)], 1.0)


def draw_lots_after_a_fork(x):
    """Lots of a parent and of its child, who have the same object."""
    import tf_adadp as dp

    lots = dp.PoissonLots(x, expected_size=LOT)
    child = os.fork()
    for step in range(2):
        lots._indices(step)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def resume(method, folder, life, data):
    """The model of the last life, by one of the ways to load it; or a new one."""
    import keras

    import tf_adadp as dp

    energy_data = data[0][:50], data[1][:50]
    if life % 2 and (folder / "saved.keras").exists():
        model = dp.load_model(folder / "saved.keras")
        if method == "sadpsgd":
            model.optimizer.set_energy_data(*energy_data)
    else:
        model = dp.DPModel(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(method, energy_data), loss, jit_compile=False)
        if (folder / "saved.weights.h5").exists():
            model.load_weights(folder / "saved.weights.h5")
    private = folder / "private"
    if private.exists():
        try:
            model.load_private_state(private)
            (folder / f"private{life}").touch()
        except ValueError:  # killed between the files: it is of another state
            private.unlink()
    return model


def train(method, folder, life):
    """One life of a run: trains until it is killed."""
    watch(folder / f"seeds{life}")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 6)).astype(np.float32)
    y = np.argmax(x[:, :3], 1)
    draw_lots_after_a_fork(x)
    step_with_copies()
    model = resume(method, folder, life, (x, y))
    private = folder / "private"
    while True:
        # Arrays: after a private state was loaded, the same lots go on.
        model.fit(x[50:], y[50:], batch_size=LOT, steps_per_epoch=3, verbose=0)
        if random.random() < 0.5:
            private.unlink(missing_ok=True)
            model.save_weights(folder / "saved.weights.h5")
            model.save(folder / "saved.keras")
            model.save_private_state(private)


def records(folder):
    """Every record of every life, and how often it occurs."""
    found = collections.Counter()
    for path in pathlib.Path(folder).rglob("seeds*"):
        data = path.read_bytes()
        found.update(data[i : i + SIZE] for i in range(0, len(data) - SIZE + 1, SIZE))
    return found


def live_and_die(context, method, folder, life, rng):
    """One life and its end; returns how many records it left."""
    path = folder / f"seeds{life}"
    process = context.Process(target=train, args=(method, folder, life))
    process.start()
    deadline = time.monotonic() + 300
    enough = rng.choice([1, 20, 60, 200])  # before training, or some way into it
    while not path.exists() or path.stat().st_size < enough * SIZE:
        assert process.is_alive(), f"life {life} of {method} ended by itself"
        assert time.monotonic() < deadline, f"life {life} of {method} did not get to work"
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.5))
    process.kill()
    process.join()
    return path.stat().st_size // SIZE


def run(kills, seed, folder, methods=METHODS):
    """`kills` kills, spread over runs of all methods. Returns the rows; asserts as it goes."""
    rng = random.Random(seed)
    # Children start from a server that has imported TensorFlow, and never computed with it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tf_adadp.model", "tf_adadp.callbacks"])
    rows = []
    for kill in range(kills):
        method, life = methods[kill % len(methods)], kill // len(methods)
        home = pathlib.Path(folder) / method
        home.mkdir(exist_ok=True)
        drawn = live_and_die(context, method, home, life, rng)
        resumed = (home / f"private{life}").exists()
        rows.append({"method": method, "life": life, "records": drawn, "private_state": resumed})
        repeated = sum(count > 1 for count in records(folder).values())
        assert not repeated, f"{repeated} seeds were used twice, found after {rows[-1]}"
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main():
    arguments = faults.parser(__doc__, __file__, "kills", 50).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(arguments.kills, arguments.seed, folder)
        found = records(folder)
    summary = {
        "kills": len(rows),
        "noise_seeds": sum(record[:1] == b"n" for record in found),
        "lot_keys_and_steps": sum(record[:1] == b"l" for record in found),
        "used_twice": sum(count > 1 for count in found.values()),
        "resumed_from_a_private_state": sum(row["private_state"] for row in rows),
    }
    faults.write(arguments.out, summary, rows)


if __name__ == "__main__":
    main()
