"""The least distortion that a bound on information allows, and what private mechanisms reach.

    python examples/experiments/distortion_rate.py

The directional-noise paper (Xiang et al., Theorem 3) bounds Σ w_i²·E(g̃_i − g_i)² from below, given
I(g; g̃) ≤ R, by reverse water-filling. Here g_i ~ N(0, u_i) independently and w = 1, so its β_i are
the variances u_i and D*(R) = Σ min(λ, u_i), R = Σ ½·ln(u_i/min(λ, u_i)).

Two of the theorem's statements do not go together, or do not hold:

- It assumes E[g̃_i] = g_i given g, and D* does not use it. With it the least square error of an
  estimate from g̃ is at most uD/(u + D), so I ≥ Σ ½·ln(1 + u_i/D_i), and the bound for unbiased
  mechanisms is D_u(R) = min Σ D_i under that (`unbiased_bound`): D_i(D_i + u_i) ∝ u_i. It is
  reached by additive Gaussian noise. Far above the signal D_i ∝ √u_i, AdaCliP's shape; far below
  it D_i is one constant, isotropic noise: DP-SGD's.
- It says that D* cannot be reached. Without unbiasedness it is, by Gaussian noise of variance
  u·λ/(u − λ) and the factor u/(u + noise), and nothing released where u ≤ λ (`shrunk`).

Theorem 2 turns ε into R = ε(e^ε − 1)/2, for pure ε only, which no Gaussian mechanism has. For
v in a set K that meets Σ v²/s² ≤ 1/σ*², and one record whose absence contributes 0,

    I(v; v + N(0, diag(s²))) ≤ E KL(N(v, s²) ‖ N(0, s²)) = E Σ v_i²/(2s_i²) ≤ 1/(2σ*²)

which is the R of the second panel: one record's g, clipped into each sound set and released, each
at the clip scale that is best for it at that σ*. D*(1/(2σ*²)) lies below all of them.
"""

import experiment
import numpy as np
from scipy.optimize import brentq

import tf_adadp as dp  # loads TensorFlow when a name of it is first used

SCALES = np.geomspace(0.01, 8, 25)  # of clipping sets normalised to E‖v/b‖² = 1


def spectrum(size=64, exponent=2.0):
    """Variances u_i ∝ i^(−exponent), Σ u_i = 1: E‖g‖² = 1."""
    powers = np.arange(1.0, size + 1) ** -exponent
    return powers / powers.sum()


def _solve(rate_of, rate):
    """The x > 0 at which a monotone rate takes a value; x spans any scale."""
    return np.exp(brentq(lambda t: np.log(rate_of(np.exp(t)) / rate), -120, 60, xtol=1e-13))


def water_filling(variances, rate):
    """Theorem 3 for Gaussian g: the distortions D_i, of which D*(R) is the sum."""

    depths = np.log(variances / variances.max())

    def rate_of(depth):  # of the water below the largest variance
        return np.sum(np.maximum(depths + depth, 0.0)) / 2

    depth = brentq(lambda t: rate_of(t) - rate, 0.0, 2 * rate + 1, xtol=1e-14)
    return np.minimum(variances.max() * np.exp(-depth), variances)


def noise_rate(variances, noise):
    """I(g; g + N(0, diag(noise))) in nats, noise a vector of variances."""
    return np.sum(np.log1p(variances / noise)) / 2


def unbiased_bound(variances, rate):
    """The noise variances D_i of the best unbiased mechanism: D_i(D_i + u_i) = κ·u_i."""

    def noise_of(kappa):
        half = variances / 2
        return kappa * variances / (np.sqrt(half**2 + kappa * variances) + half)

    return noise_of(_solve(lambda kappa: noise_rate(variances, noise_of(kappa)), rate))


def additive(shape, variances, rate):
    """The noise variances of N(0, x·shape²) at that rate."""
    return shape**2 * _solve(lambda x: noise_rate(variances, x * shape**2), rate)


def shrunk(variances, level):
    """Rate and distortion of Gaussian noise with shrinkage that aims at the water level."""
    kept = variances[variances > level]
    noise = kept * level / (kept - level)
    gain = kept / (kept + noise)
    error = gain**2 * noise + (1 - gain) ** 2 * kept
    return noise_rate(kept, noise), error.sum() + variances[variances <= level].sum()


def shapes(variances):
    """The scales b of the sound ellipsoids, normalised to Σ u_i/b_i² = 1."""
    raw = {
        "isotropic (DP-SGD)": np.ones_like(variances),
        "u^(1/4) (AdaCliP)": variances**0.25,
        "u^(1/3) (DPOPT, w = 1)": variances ** (1 / 3),
        "u^(1/2) (ADADP)": variances**0.5,
    }
    return {name: b * np.sqrt(np.sum(variances / b**2)) for name, b in raw.items()}


def clipping_sets(variances, scale):
    """Every sound set at one clip scale, by name."""
    sets = {n: dp.clipping.Ellipsoid([scale * b]) for n, b in shapes(variances).items()}
    bounds = scale * np.sqrt(variances)
    ones = np.ones_like(bounds)
    for name, allocation in (
        ("box, ADADP's noise", "adadp"),
        ("box, least squares", "least_squares"),
        ("box, DPOPT's, w = 1", [ones]),
    ):
        sets[name] = dp.clipping.Box([bounds], allocation)
    return sets


def released_distortion(variances, sigmas, rng, draws, scales=SCALES):
    """E‖clip(g) + noise − g‖² per set and σ*, at the best of the clip scales."""
    import tensorflow as tf

    g = rng.standard_normal((draws, len(variances))) * np.sqrt(variances)
    rows, found = tf.constant(g, tf.float32), {}
    for scale in scales:
        for name, clipping_set in clipping_sets(variances, scale).items():
            lost = np.mean(np.sum((clipping_set.clip([rows])[0].numpy() - g) ** 2, axis=-1))
            noise = np.sum(clipping_set.noise_stddev(1.0, 1)[0].numpy() ** 2)
            found.setdefault(name, []).append(lost + sigmas**2 * noise)
    return {name: np.min(values, axis=0) for name, values in found.items()}


def main(seed=0, out="figures/distortion_rate.png", size=64, draws=1000, delta=1e-5):
    variances = spectrum(size)
    rates = np.geomspace(0.1, 200, 40)
    marks = [1.0, 10.0, 100.0]
    curves = {
        "Theorem 3, D*": lambda r: water_filling(variances, r).sum(),
        "bound for unbiased g̃": lambda r: unbiased_bound(variances, r).sum(),
    }
    for name, b in shapes(variances).items():
        curves[name] = lambda r, b=b: additive(b, variances, r).sum()
    print("distortion of unbiased, unclipped releases (E‖g‖² = 1) at R nats")
    rows = [[name, *map(curve, marks)] for name, curve in curves.items()]
    experiment.print_table(["", *(f"R = {r:g}" for r in marks)], rows)

    sigmas = np.geomspace(0.03, 2, 15)
    marked = np.array([0.05, 0.1, 0.3, 1.0])
    rng = np.random.default_rng(seed)
    released = released_distortion(variances, np.concatenate([sigmas, marked]), rng, draws)
    least = [water_filling(variances, 1 / (2 * s**2)).sum() for s in sigmas]
    rows = [
        ["ε (RDP)", *(dp.accounting.epsilon(s, 1.0, 1, delta) for s in marked)],
        ["R = 1/(2σ*²)", *(1 / (2 * marked**2))],
        ["Theorem 3, D*(R)", *(water_filling(variances, 1 / (2 * s**2)).sum() for s in marked)],
        *([name, *values[len(sigmas) :]] for name, values in released.items()),
    ]
    print(f"\ndistortion of one record's clipped release; ε at δ = {delta:g}")
    experiment.print_table(["", *(f"σ* = {s:g}" for s in marked)], rows)

    figure, [left, right] = experiment.new_figure(columns=2)
    for name, curve in curves.items():
        style = "k-" if name.startswith("Theorem") else "k--" if name.startswith("bound") else "-"
        left.loglog(rates, [curve(r) for r in rates], style, label=name)
    left.set(xlabel="R (nats)", ylabel="distortion", title="unclipped, at equal information")
    left.legend(fontsize=7)
    right.loglog(sigmas, least, "k-", label="Theorem 3 at R = 1/(2σ*²)")
    for name, values in released.items():
        style = "--" if name.startswith("box") else "-"
        right.loglog(sigmas, values[: len(sigmas)], style, label=name)
    right.set(xlabel="σ*", ylabel="distortion", title="clipped, at equal privacy")
    right.legend(fontsize=7)
    experiment.save(figure, out)


if __name__ == "__main__":
    experiment.run(
        main,
        size="Number of coordinates.",
        draws="Gradients drawn for the clipped releases.",
        delta="δ at which ε is computed.",
    )
