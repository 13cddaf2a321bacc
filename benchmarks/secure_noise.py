"""Measures what `secure_noise=True` costs: the noise alone, and within training steps.

    TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1 python -m benchmarks.secure_noise

Adds noise to sums of 795,010 numbers in the shapes of the 784-1000-10 MLP: in float32, as the mean
of four float32 draws (what other toolkits do, for comparison; not in this package), and on the
grid. Then steps of DP-SGD on a lot of 600 with both. All within one process, interleaved.
Milliseconds are of processor time, all threads together, which other work on the machine changes
least; medians over the repetitions, ratios of medians with their range over rounds. Writes
`results/secure_noise.json`.
"""

import functools
import json
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

import tf_adadp as dp
from benchmarks import harness, models
from tf_adadp import noise

SHAPES = ((784, 1000), (1000,), (1000, 10), (10,))
LOT, ROWS = 600, 6000


def noises():
    """{name: function of a step number that releases the sums}."""
    sums = [tf.random.stateless_normal(shape, [1, 2]) for shape in SHAPES]
    stddevs, key = [tf.constant(4.0)] * len(SHAPES), tf.constant(noise.new_key(1))

    def add(step, secure):
        released, _ = noise.add_gaussian(
            sums, stddevs, key, step, noise_multiplier=4.0, secure=secure
        )
        return released

    def four(step):
        released = []
        for i, (value, stddev) in enumerate(zip(sums, stddevs, strict=True)):
            draws = [noise.gaussian(key, step, 4 * i + j, value.shape, stddev) for j in range(4)]
            released.append(value + tf.add_n(draws) / 2.0)
        return released

    functions = {
        "float32": functools.partial(add, secure=False),
        "mean of four": four,
        "secure": functools.partial(add, secure=True),
    }
    spec = tf.TensorSpec([], tf.int64)
    return {
        n: tf.function(f, input_signature=[spec], autograph=False) for n, f in functions.items()
    }


def steps():
    """{name: function that takes one training step}."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 784)).astype(np.float32)
    y = rng.integers(0, 10, ROWS)

    def runner(secure):
        model = dp.DPModel(models.mlp(784, 1000, 10))
        model.compile(dp.DPSGD(0.1, noise_multiplier=4.0, secure_noise=secure), models.loss())
        lots = dp.PoissonLots(x, y, expected_size=LOT)
        times = []

        class Timer(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                self.start = time.process_time()

            def on_train_batch_end(self, batch, logs=None):
                times.append(1e3 * (time.process_time() - self.start))

        def run(repeats):
            times.clear()
            model.fit(lots, steps_per_epoch=repeats + 2, verbose=0, callbacks=[Timer()])
            return times[2:]

        run(1)  # traces
        return run

    return {"float32": runner(False), "secure": runner(True)}


def timed(function, repeats):
    """Milliseconds of each call."""
    times = []
    for step in range(repeats):
        start = time.process_time()
        function(tf.constant(step, tf.int64))[0].numpy()
        times.append(1e3 * (time.process_time() - start))
    return times


def summary(rounds, names):
    """Median milliseconds, and ratios of medians to the first name with their range."""
    medians = {n: [statistics.median(r[n]) for r in rounds] for n in names}
    base = medians[names[0]]
    ratios = {n: [a / b for a, b in zip(medians[n], base, strict=True)] for n in names}
    return {
        n: {
            "median_ms": statistics.median(t for r in rounds for t in r[n]),
            "ratio": statistics.median(ratios[n]),
            "least_ratio": min(ratios[n]),
            "largest_ratio": max(ratios[n]),
        }
        for n in names
    }


def main():
    parser = harness.parser(__doc__, __file__)
    parser.add_argument("--rounds", type=harness.count, default=5, help="of measurements")
    parser.add_argument("--repeats", type=harness.count, default=10, help="in a round")
    args = parser.parse_args()
    functions = noises()
    for function in functions.values():
        timed(function, 3)  # traces
    adding = []
    for _ in range(args.rounds):
        turns = [{n: timed(f, 1) for n, f in functions.items()} for _ in range(args.repeats)]
        adding.append({n: [t for turn in turns for t in turn[n]] for n in functions})
    runners = steps()
    training = [{n: f(args.repeats) for n, f in runners.items()} for _ in range(args.rounds)]
    results = harness.Results(args.out, key=("measured",), one_machine=False, force=True)
    results.put({"measured": "noise_of_795010_numbers", **summary(adding, list(functions))})
    results.put({"measured": "step_of_the_mlp_lot_600", **summary(training, list(runners))})
    print(json.dumps(results.rows, indent=1))


if __name__ == "__main__":
    main()
