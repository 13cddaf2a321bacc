"""Draws how ADADP's noise scale σ_i and prior √E' change in training: its Figures 4c and 4d.

    python examples/experiments/noise_scales.py

The paper shows, at steps 100 and 1000 on MNIST, that √E' is distributed like the gradient |g|, and
that most σ_i fall. Here an MLP learns scikit-learn's digits twice: with ADADP's sound prior, which
sees releases only, and with the printed one (ε = ∞).

- Printed: σ_i = β·σ*·√(m·E'_i), E' the raw average, so σ follows the gradient down. The leak is the
  same fact: the scale of the noise tells the gradient.
- Sound: s_i = σ*·C·r_i with mean(r²) = 1. The total noise is fixed, and only its shape can adapt.

THE FIGURE IS NOT PRIVATE, nor are the correlations: |g| is computed from the training data, for the
comparison alone. Nothing of it goes into training.
"""

import experiment
import numpy as np

import tf_adadp as dp  # loads TensorFlow when a name of it is first used

PRIORS = {"sound": {"prior": "released"}, "printed": {"prior": "raw", "clipping": "local"}}


def _flat(tensors, variables):
    """One vector of what is given per variable and broadcasts to it."""
    pairs = zip(tensors, variables, strict=True)
    return np.concatenate([np.broadcast_to(t, v.shape).ravel() for t, v in pairs])


def build(kind, noise_multiplier, hidden, seed):
    """A private model of digits with that prior."""
    import keras

    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = dp.ADADP(
        0.002, noise_multiplier=noise_multiplier, l2_norm_clip=1.0, seed=seed, **PRIORS[kind]
    )
    private = dp.DPModel(model)
    private.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return private


def look(model, x, y):
    """σ_i, √E'_i and |g_i| of the next step, and the accuracy on all of x; g is RAW."""
    import keras
    import tensorflow as tf

    optimizer, variables = model.optimizer, model.trainable_variables
    stddevs = optimizer.clipping_set().noise_stddev(optimizer.noise_multiplier, len(variables))
    if optimizer.prior == "raw":
        root = optimizer._prior.root()
    else:  # unbiased estimates, up to a common factor: some may be negative
        root = [tf.sqrt(tf.maximum(m, 0.0)) for m in optimizer._prior.moments()]
    with tf.GradientTape() as tape:
        logits = model(x, training=False)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        loss = tf.reduce_mean(losses)
    gradient = tape.gradient(loss, [v.value for v in variables])
    return {
        "sigma": _flat([s.numpy() for s in stddevs], variables),
        "root": _flat([r.numpy() for r in root], variables),
        "gradient": np.abs(_flat([g.numpy() for g in gradient], variables)),
        "accuracy": float(np.mean(np.argmax(logits, -1) == y)),
    }


def train(kind, steps, noise_multiplier, lot_size, hidden, seed):
    """{step: what `look` returns} at the given, rising step numbers."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int32)
    lots = dp.PoissonLots(x, y, expected_size=lot_size, seed=seed)
    model, seen, done = build(kind, noise_multiplier, hidden, seed), {}, 0
    for step in steps:
        model.fit(lots, epochs=1, steps_per_epoch=step - done, verbose=0)
        seen[step], done = look(model, x, y), step
    return seen


def rank_correlation(values, others):
    """Spearman's, over coordinates whose gradient is not 0 for every image (border pixels)."""
    from scipy.stats import spearmanr

    live = others > 0
    return float(spearmanr(values[live], others[live]).statistic)


def main(
    seed=0,
    out="figures/noise_scales.png",
    noise_multiplier=2.0,
    lot_size=200,
    hidden=100,
    first_step=100,
    last_step=1000,
):
    steps = (first_step, last_step)
    seen = {kind: train(kind, steps, noise_multiplier, lot_size, hidden, seed) for kind in PRIORS}
    rows = [
        [
            kind,
            step,
            *np.quantile(at["sigma"], [0.1, 0.5, 0.9]),
            np.linalg.norm(at["sigma"]),
            *(np.median(at[name][at["gradient"] > 0]) for name in ("gradient", "root")),
            rank_correlation(at["root"], at["gradient"]),
            100 * at["accuracy"],
        ]
        for kind, looks in seen.items()
        for step, at in looks.items()
    ]
    print("NOT PRIVATE: |g| and its correlations are raw statistics of the training data")
    quantiles = ["σ, 10 %", "median", "90 %", "‖σ‖"]
    header = ["prior", "step", *quantiles, "median |g|", "median √E'", "rank corr.", "acc. %"]
    experiment.print_table(header, rows)

    figure, panels = experiment.new_figure(columns=2, rows=2)
    for row, (kind, looks) in enumerate(seen.items()):
        histogram, scatter = panels[2 * row : 2 * row + 2]
        for step, at in looks.items():
            top = max(np.quantile(a["sigma"], 0.99) for a in looks.values())
            histogram.hist(
                at["sigma"], np.linspace(0, 1.05 * top, 60), histtype="step", label=f"step {step}"
            )
            scatter.loglog(at["gradient"], at["root"], ".", markersize=2, label=f"step {step}")
        histogram.set(title=f"{kind} prior", xlabel="σ_i", ylabel="coordinates")
        scatter.set(title="not private", xlabel="|g_i|", ylabel="√E'_i")
        histogram.legend()
        scatter.legend()
    experiment.save(figure, out)


if __name__ == "__main__":
    experiment.run(
        main,
        noise_multiplier="σ*.",
        lot_size="Expected lot size L.",
        hidden="Hidden units.",
        first_step="First step that is looked at.",
        last_step="Last step.",
    )
