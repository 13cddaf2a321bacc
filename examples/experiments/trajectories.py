"""Measures how far noise moves descent paths on test functions: ADADP's Figure 1.

    python examples/experiments/trajectories.py

The paper compares paths on the Beale function (150 steps; γ = 0.1, γ' = 0.9, β = 1.5, G = 1e-6) by

    D(P, Q) = (1/n)·Σ_i ‖p_i − q_i‖₂

and prints 0.90 between DP-SGD and its non-private version, 0.21 between ADADP and its own. Start,
rates, σ* and C are not given; those here are ours. (The print has a cube for the third square of
the function. That one has no minimum, so the square is taken.)

Every lot is one example whose loss is the function, so that the whole of a path's deviation is
noise and clipping. Each optimizer is this library's, through `apply_private`; its path is compared
with its own at σ* = 0 ("noise alone") and with that of Keras's SGD or RMSprop at the same rate,
which does not clip ("noise and clipping"). ADAL is the RMSprop step on DP-SGD's release: it tells
what the step does from what the noise does. The distances measure the rates as much as the noise:
RMSprop's step is about η long whatever the noise is, DP-SGD's deviates by ησ*C at each step.

"ADADP, printed" reads raw gradients: its noise scale shows them, and it is charged ε = ∞.
"""

import math

import experiment
import numpy as np

import tf_adadp as dp  # loads TensorFlow when a name of it is first used

# Function of two numbers, and where paths start.
FUNCTIONS = {
    "Beale": (
        lambda x, y: (
            (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2
        ),
        (1.0, 1.0),
    ),
    "Rosenbrock": (lambda x, y: 100 * (y - x**2) ** 2 + (1 - x) ** 2, (-0.5, 1.0)),
    "Himmelblau": (lambda x, y: (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2, (1.0, 1.0)),
    "Booth": (lambda x, y: (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2, (-1.0, 1.0)),
    "three-hump camel": (
        lambda x, y: 2 * x**2 - 1.05 * x**4 + x**6 / 6 + x * y + y**2,
        (-1.5, 1.5),
    ),
}
RATES = {"SGD": 0.02, "RMSprop": 0.02}
METHODS = {  # name: (which plain optimizer it is the private form of, its own, arguments)
    "DPSGD": ("SGD", "DPSGD", {}),
    "ADAL": ("RMSprop", "ADAL", {}),
    "ADADP": ("RMSprop", "ADADP", {"prior_decay": 0.9}),
    "ADADP, printed": (
        "RMSprop",
        "ADADP",
        {"prior": "raw", "clipping": "local", "local_clip_factor": 1.5},
    ),
}


def plain_optimizer(name):
    """Keras's own, with γ = 0.1."""
    import keras

    arguments = {"rho": 0.9} if name == "RMSprop" else {}
    return getattr(keras.optimizers, name)(RATES[name], **arguments)


def private_optimizer(name, noise_multiplier, l2_norm_clip, seed):
    """The private optimizer of that row; σ* = 0 makes its path without noise."""
    plain, private, arguments = METHODS[name]
    return getattr(dp, private)(
        RATES[plain],
        noise_multiplier=noise_multiplier,
        allow_no_noise=noise_multiplier == 0,
        l2_norm_clip=l2_norm_clip,
        seed=seed,
        **arguments,
    )


class Walker:
    """Descends the test functions with one optimizer; one graph serves all functions and starts."""

    def __init__(self, optimizer, steps):
        import keras
        import tensorflow as tf

        self._optimizer = optimizer
        self._point = [keras.Variable(0.0, name=name) for name in ("x", "y")]
        optimizer.build(self._point)
        # The noise follows the step counter, which runs on: every path gets its own noise.
        self._state = [(v, v.numpy()) for v in optimizer.variables if v is not optimizer.iterations]
        self._path = tf.function(lambda index: self._descend(index, steps))

    def _step(self, index):
        import tensorflow as tf

        point = [v.value for v in self._point]
        with tf.GradientTape() as tape:
            tape.watch(point)
            values = tf.stack([f(*point) for f, _ in FUNCTIONS.values()])
            value = tf.tensordot(tf.one_hot(index, len(FUNCTIONS)), values, 1)
        gradients = tape.gradient(value, point)
        if not isinstance(self._optimizer, dp.DPOptimizer):
            self._optimizer.apply(gradients)
            return
        rows = [g[None] for g in gradients]  # a lot of one example
        sums = self._optimizer.clipping_set().clipped_sum(rows, tf.ones(1))
        self._optimizer.apply_private(sums, 1)

    def _descend(self, index, steps):
        import tensorflow as tf

        path = tf.TensorArray(tf.float32, steps)
        for i in tf.range(steps):
            self._step(index)
            path = path.write(i, tf.stack([v.value for v in self._point]))
        return path.stack()

    def path(self, function):
        """The points [steps, 2] after each step, from a fresh state."""
        import tensorflow as tf

        for variable, value in self._state:
            variable.assign(value)
        for variable, value in zip(self._point, FUNCTIONS[function][1], strict=True):
            variable.assign(value)
        return self._path(tf.constant(list(FUNCTIONS).index(function))).numpy()


def distance(first, second):
    """D(P, Q): the mean distance of two paths of one length."""
    return float(np.mean(np.linalg.norm(np.subtract(first, second, dtype=float), axis=-1)))


def measure(functions, noise_multiplier, l2_norm_clip, steps, paths, seed):
    """Per (function, method): distances to σ* = 0, to plain Keras, and [a path, both bases]."""
    found = {}
    plain = {name: Walker(plain_optimizer(name), steps) for name in RATES}
    for method, (name, _, _) in METHODS.items():
        noisy = Walker(private_optimizer(method, noise_multiplier, l2_norm_clip, seed), steps)
        silent = Walker(private_optimizer(method, 0.0, l2_norm_clip, seed), steps)
        for function in functions:
            drawn = [noisy.path(function) for _ in range(paths)]
            bases = [silent.path(function), plain[name].path(function)]
            distances = [[distance(p, base) for p in drawn] for base in bases]
            found[function, method] = (*distances, [drawn[0], *bases])
    return found


def _spread(values):
    if not np.all(np.isfinite(values)):
        return "diverges"
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else "one"


def main(
    seed=0,
    out="figures/trajectories.png",
    noise_multiplier=1.0,
    l2_norm_clip=1.0,
    steps=150,
    paths=10,
):
    found = measure(FUNCTIONS, noise_multiplier, l2_norm_clip, steps, paths, seed)
    printed = {("Beale", "DPSGD"): "0.90", ("Beale", "ADADP, printed"): "0.21"}
    rows = [
        [*key, printed.get(key, ""), _spread(noise), _spread(both)]
        for key, (noise, both, _) in found.items()
    ]
    order = list(FUNCTIONS)
    rows.sort(key=lambda row: order.index(row[0]))
    print(f"mean distance of paths, {paths} each: σ* = {noise_multiplier:g}, C = {l2_norm_clip:g}")
    header = ["function", "method", "printed", "noise alone", "noise and clipping"]
    experiment.print_table(header, rows)

    columns = math.ceil(len(METHODS) / 2)
    figure, panels = experiment.new_figure(columns=columns, rows=2)
    for panel, method in zip(panels, METHODS, strict=False):
        labels = (method, "without noise", "plain Keras")
        for path, label in zip(found["Beale", method][2], labels, strict=True):
            panel.plot(*path.T, label=label)
        panel.plot(3, 0.5, "k*")
        panel.set(title=f"Beale, {method}", xlabel="x", ylabel="y")
        panel.legend(fontsize=7)
    experiment.save(figure, out)


if __name__ == "__main__":
    experiment.run(
        main,
        noise_multiplier="σ*.",
        l2_norm_clip="C.",
        steps="Steps of a path.",
        paths="Noisy paths per function and method.",
    )
