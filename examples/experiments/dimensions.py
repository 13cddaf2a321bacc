"""Error against dimension where one coordinate varies: AdaCliP's motivating regression.

    python examples/experiments/dimensions.py

Records x of R^d vary in the first coordinate alone; the model is θ, the loss ‖θ − x‖²/2, and the
minimum the mean of the records (AdaCliP, eq. (1) and Section 6). DP-SGD adds the same noise to all
d coordinates, so its squared error grows with d; noise that follows the coordinates need not.

Compared at equal σ*, lots and rate, with this library's optimizers: DP-SGD; AdaCliP with a prior by
coordinate at a fixed total scale (mean(r²) = 1, floored at 0.4); the same without a floor; and
the paper's free scale, b_i = √(s_i·Σ s_j), which may shrink the total as well. The paper runs lots
of one record; here lots have 20 of 500 records, whose sampling is Poisson.
"""

import experiment
import numpy as np

import tf_adadp as dp  # loads TensorFlow when a name of it is first used

RECORDS, LOT, RATE = 500, 20, 0.1


def _by_coordinate(**arguments):
    return dp.priors.ExponentialPrior(decay=0.95, pooling="coordinate", exponent=0.25, **arguments)


METHODS = {
    "DPSGD": lambda **k: dp.DPSGD(RATE, **k),
    "AdaCliP, normalized": lambda **k: dp.AdaCliP(RATE, prior=_by_coordinate(), **k),
    "AdaCliP, no floor": lambda **k: dp.AdaCliP(RATE, prior=_by_coordinate(floor=0.0), **k),
    "AdaCliP, free": lambda **k: dp.AdaCliP(RATE, scale="free", **k),
}


def records(d):
    """[RECORDS, d]: the first coordinate is 1 for three quarters, −1 for the others; else 0."""
    x = np.zeros((RECORDS, d), np.float32)
    x[:, 0] = np.where(np.arange(RECORDS) % 4 == 0, -1.0, 1.0)
    return x


def errors(method, d, noise_multiplier, steps, runs, seed):
    """‖θ − mean‖² after training, one per run."""
    import keras
    import tensorflow as tf

    x = tf.constant(records(d))
    theta = keras.Variable(np.zeros(d, np.float32), name="theta")
    optimizer = METHODS[method](noise_multiplier=noise_multiplier, seed=seed)
    optimizer.build([theta])
    # The noise follows the step counter, which runs on: every run gets its own.
    state = [(v, v.numpy()) for v in optimizer.variables if v is not optimizer.iterations]
    lots = np.random.default_rng(seed)

    @tf.function
    def train(masks):
        for mask in masks:
            rows = theta.value - x
            sums = optimizer.clipping_set().clipped_sum([rows], mask)
            optimizer.apply_private(sums, float(LOT))

    found = []
    for _ in range(runs):
        theta.assign(np.zeros(d, np.float32))
        for variable, value in state:
            variable.assign(value)
        train(tf.constant(lots.random((steps, RECORDS)) < LOT / RECORDS, tf.float32))
        found.append(float(np.sum((theta.numpy() - records(d).mean(0)) ** 2)))
    return found


def main(
    seed=0, out="figures/dimensions.png", noise_multiplier=1.0, steps=250, runs=3, largest=1000
):
    dimensions = [d for d in (1, 10, 100, 1000) if d <= largest]
    figure, [panel] = experiment.new_figure()
    rows = []
    for method in METHODS:
        found = [errors(method, d, noise_multiplier, steps, runs, seed) for d in dimensions]
        means = [float(np.mean(f)) for f in found]
        rows.append([method, *means])
        panel.loglog(dimensions, means, "o-", label=method)
    print(f"squared error, mean of {runs} runs: σ* = {noise_multiplier:g}, {steps} steps")
    experiment.print_table(["method", *(f"d = {d}" for d in dimensions)], rows)
    panel.set(xlabel="d", ylabel="‖θ − mean‖²")
    panel.legend()
    experiment.save(figure, out)


if __name__ == "__main__":
    experiment.run(
        main,
        noise_multiplier="σ*.",
        steps="Steps of a run.",
        runs="Runs of each.",
        largest="The largest dimension.",
    )
