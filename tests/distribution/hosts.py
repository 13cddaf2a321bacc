"""Runs one of three workers on the loopback device; prints its results as one JSON line."""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()

import tf_adadp as dp  # noqa: E402
from tf_adadp.distribution import workers  # noqa: E402

NUMBER = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
COUNT = 3
FOLDER = pathlib.Path(sys.argv[1])
LEDGER = FOLDER / "ledger.json"


def main():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(500, 6)).astype(np.float32), rng.integers(0, 3, 500)
    keras.utils.set_random_seed(NUMBER)  # workers that begin with other weights
    with STRATEGY.scope():
        layers = [keras.Input([6]), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
        model = dp.DPModel(keras.Sequential(layers))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(dp.ADADP(noise_multiplier=2.0), loss, metrics=["accuracy"])
    seen = {"number": workers.worker_number(STRATEGY), "count": workers.num_workers(STRATEGY)}
    odd = np.array([np.nan, -0.0, NUMBER], np.float16), np.array([True, NUMBER == 0])
    seen["from_chief"] = [v.tolist() for v in workers.from_chief(STRATEGY, list(odd))][0][1:]
    seen["bytes"] = workers.bytes_from_chief(
        STRATEGY, b"chief" if NUMBER == 0 else b"a worker"
    ).decode()

    lots = []
    rows = dp.PoissonLots._rows
    dp.PoissonLots._rows = lambda self, *a: (lots.append(rows(self, *a)), lots[-1])[1]
    privacy = dp.PrivacyCallback(1e-3, max_epsilon=0.8, ledger_path=LEDGER, ledger_interval=5)
    validation = {"validation_data": (x[:90], y[:90]), "validation_batch_size": 30}
    history = model.fit(
        x, y, 60, epochs=4, steps_per_epoch=5, verbose=0, callbacks=[privacy], **validation
    )
    dp.PoissonLots._rows = rows
    drawn = [{round(float(v), 6) for v in leaves[0][:n, 0]} for n, leaves in lots]
    mine = {round(float(v), 6) for v in x[NUMBER::COUNT, 0]}
    seen["only_own_records"] = all(d <= mine for d in drawn)
    seen["mean_share"] = float(np.mean([len(d) for d in drawn]))
    seen["history"] = history.history
    seen["key"] = model.optimizer._noise_key.key.numpy().tolist()
    seen["weights"] = [w.tolist() for w in model.model.get_weights()]
    seen["state"] = [np.sum(v.numpy()).item() for v in model.optimizer.variables]
    seen["steps"] = model.ledger.steps, model.optimizer.steps_taken
    seen["file"] = privacy._file is None and LEDGER.exists()

    refusals = {
        "unequal": lambda: model.fit(x[: 400 + NUMBER], y[: 400 + NUMBER], 60, verbose=0),
        "twice": lambda: model.fit(dp.PoissonLots(x, y, 60), verbose=0),
        "law": lambda: model.fit(dp.FixedSizeLots(x, y, 60), verbose=0),
    }
    for name, attempt in refusals.items():
        try:
            attempt()
            seen[name] = None
        except ValueError as error:
            seen[name] = str(error)
    parts = dp.PoissonLots(x[NUMBER::COUNT], y[NUMBER::COUNT], 60, num_examples=len(x))
    model.fit(parts, steps_per_epoch=2, verbose=0)
    seen["steps_after"] = model.ledger.steps
    seen["epsilon"] = model.epsilon(1e-3)
    with STRATEGY.scope():
        noisy = dp.DPModel(keras.Sequential([keras.Input([6]), keras.layers.Dense(3)]))
        released = dp.ReleasedMetrics(5.0, loss_bound=3.0)
        noisy.compile(dp.DPSGD(noise_multiplier=2.0), loss, released_metrics=released)
    seen["released"] = noisy.fit(x, y, 60, steps_per_epoch=2, verbose=0).history["released_loss"]
    if NUMBER == 0:
        model.save(FOLDER / "model.keras")
    print("RESULT " + json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
