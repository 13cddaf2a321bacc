"""Shows what DPOPT's swap of minimum and maximum breaks, and the forms that hold.

    python examples/experiments/min_max_swap.py

The paper (Xiang et al., "Differentially-Private Deep Learning With Directional Noise", eq. 8) wants
the least Σ|w_i|·s_i for which Σ Δ_i²/s_i² ≤ τ for EVERY ‖Δ‖₂ ≤ α. Its solution (eqs. 11 to 13)
minimises over s for one Δ, then maximises over Δ, and keeps the s that belongs to Δ* ∝ w:

    s_i ∝ |w_i|^(1/3)

which meets the constraint at Δ* alone. The worst Δ puts all of α on the smallest s_i, where

    Σ Δ_i²/s_i² = τ · ‖w‖²  / (min|w|^(2/3) · Σ|w|^(4/3)).

For a ball of Δ the true optimum is isotropic, as the worst Δ sees min s_i alone. Directions pay
only where contributions are clipped to a set that has them: a box |v_i| ≤ c_i or an ellipsoid
‖v/b‖₂ ≤ 1 (with mean square gradients u_i, Σ u_i/b_i² = 1)

    box:        s_i = σ*·√(Σ_j (c_j|w_j|)^(2/3)) · c_i^(2/3)·|w_i|^(−1/3)
    ellipsoid:  s_i = σ*·b_i,  b_i = √(Σ_j (w_j²u_j)^(1/3)) · (u_i/|w_i|)^(1/3)

each meeting sup Σ v_i²/s_i² = 1/σ*² with equality: LESS noise on important weights.
"""

import experiment
import numpy as np

import tf_adadp as dp  # loads TensorFlow when a name of it is first used

SIZE = 71_010  # weights of ADADP's MNIST model


def printed_stddevs(weights, noise_multiplier=1.0):
    """Equations 11 to 13 at α = 1 and τ = 1/σ*²: s_i ∝ |w_i|^(1/3), exact at Δ* = w/‖w‖."""
    shape = np.abs(weights) ** (1 / 3)
    direction = weights / np.linalg.norm(weights)
    return noise_multiplier * shape * np.linalg.norm(direction / shape)


def worst_in_ball(stddevs, radius=1.0):
    """max Σ Δ_i²/s_i² over ‖Δ‖₂ ≤ radius: all of it on the smallest s_i."""
    return (radius / np.min(stddevs)) ** 2


def box(weights, bounds):
    """The box form as `tf_adadp.clipping.Box` has it: the set, and its corner, the worst v."""
    return dp.clipping.Box([bounds], [weights]), bounds


def ellipsoid_scales(weights, moments):
    """b of the ellipsoid with the least Σ|w_i|·b_i under Σ u_i/b_i² = 1."""
    importance = np.cbrt(np.square(weights) * moments)
    return np.sqrt(importance.sum()) * np.cbrt(moments / np.abs(weights))


def ellipsoid(weights, moments):
    """The ellipsoid form: the set, and the tip of an axis, one of the worst v."""
    scales = ellipsoid_scales(weights, moments)
    tip = np.zeros_like(scales)
    tip[0] = scales[0]
    return dp.clipping.Ellipsoid([scales]), tip


def evaluate(weights, noise_multiplier, seed=0):
    """Rows (form, constraint/claim, the σ* it really has, Σ|w_i|·s_i of the form if it holds)."""
    import tensorflow as tf

    size, sigma = len(weights), noise_multiplier
    moments = np.full(size, 1 / size)  # mean square gradients with E‖g‖² = 1
    printed = printed_stddevs(weights, sigma)
    factor = worst_in_ball(printed) * sigma**2

    def row(name, excess, stddevs):
        cost = np.sum(np.abs(weights) * stddevs)
        return name, excess, sigma / np.sqrt(excess), cost

    rows = [
        row("printed", factor, printed),
        row("printed, scaled until it holds", 1.0, printed * np.sqrt(factor)),
        row("ball: isotropic (DP-SGD)", 1.0, np.full(size, sigma)),
    ]
    for name, (shape, worst) in (
        ("box", box(weights, np.sqrt(moments))),
        ("ellipsoid", ellipsoid(weights, moments)),
    ):
        stddevs = shape.noise_stddev(sigma, 1)[0].numpy().astype(float)
        # The worst v goes through the library's own clipping, which leaves it as it is.
        clipped = shape.clip([tf.constant(worst[None], tf.float32)])[0].numpy()[0].astype(float)
        rows.append(row(name, sigma**2 * np.sum((clipped / stddevs) ** 2), stddevs))
    return rows


def main(
    seed=0, out="figures/min_max_swap.png", size=SIZE, noise_multiplier=4.0, delta=1e-5, repeats=200
):
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(size)
    rows = [
        [name, excess, sigma, dp.accounting.epsilon(sigma, 1.0, 1, delta), cost / size]
        for name, excess, sigma, cost in evaluate(weights, noise_multiplier)
    ]
    print(f"m = {size}, w ~ N(0, 1), claimed σ* = {noise_multiplier:g}, one release")
    header = ["form", "Σ Δ²/s² over claim", "true σ*", f"ε (RDP, δ = {delta:g})", "mean |w|·s"]
    experiment.print_table(header, rows)
    drawn = [worst_in_ball(printed_stddevs(rng.standard_normal(size))) for _ in range(repeats)]
    low, middle, high = np.quantile(drawn, [0.05, 0.5, 0.95])
    print(f"printed form over {repeats} draws of w: median {middle:.0f}, 90 % {low:.0f}–{high:.0f}")

    sizes = np.unique(np.geomspace(2, size, 12).astype(int))
    figure, [left, right] = experiment.new_figure(columns=2)
    factors = [
        np.quantile(
            [worst_in_ball(printed_stddevs(rng.standard_normal(m))) for _ in range(50)],
            [0.05, 0.5, 0.95],
        )
        for m in sizes
    ]
    left.loglog(sizes, [f[1] for f in factors], label="printed, median")
    left.fill_between(sizes, *np.transpose(factors)[[0, 2]], alpha=0.3, label="90 % of draws")
    left.axhline(1, color="tab:green", label="sound forms")
    left.set(xlabel="m", ylabel="worst Σ Δ²/s² over the claim")
    left.legend()
    importance = np.geomspace(0.01, 10, 100)
    right.loglog(importance, np.cbrt(importance), label="printed")
    right.loglog(importance, importance ** (-1 / 3), label="box, ellipsoid")
    right.set(xlabel="|w|", ylabel="noise std, up to scale")
    right.legend()
    experiment.save(figure, out)


if __name__ == "__main__":
    experiment.run(
        main,
        size="Number of weights m.",
        noise_multiplier="The σ* that the forms claim.",
        delta="δ at which ε is computed.",
        repeats="Draws of w in the spread of the factor.",
    )
