"""Measures how far noise of three shapes turns a vector: ADADP's example (Section III-B).

    python examples/experiments/cosine.py

The paper has the vector f = (10, 5), coordinates bounded by (12, 6), σ* = 1, and three noise stds
that meet Lemma 1, Σ c_i²/s_i² ≤ 1. It reports the mean cosine similarity of f + noise and f over
10,000 draws. Here the mean is also computed without drawing: the angle φ of a Gaussian vector with
mean μ and covariance Σ has the density

    p(φ) = exp(−μᵀΣ⁻¹μ/2) / (2π·√det Σ·A) · (1 + D·Φ(D)/ϕ(D)),   D = uᵀΣ⁻¹μ/√A,  A = uᵀΣ⁻¹u

with u = (cos φ, sin φ) (the projected normal law), so the mean is one integral over a period, where
the trapezoidal rule converges exponentially.
"""

import experiment
import numpy as np

import tf_adadp as dp  # loads TensorFlow when a name of it is first used

VECTOR, BOUNDS = (10.0, 5.0), (12.0, 6.0)
PRINTED = {(17.0, 8.5): 0.52, (13.5, 13.5): 0.36, (12.4, 24.8): 0.28}


def expected_cosine(stddevs, vector=VECTOR, points=4096):
    """E cos∠(f + N(0, diag(s²)), f) for vectors of two coordinates, by quadrature."""
    from scipy.stats import norm

    mean, variances = np.asarray(vector), np.square(stddevs)
    angles = 2 * np.pi * np.arange(points) / points
    u = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    a = (u**2 / variances).sum(-1)
    d = (u * mean / variances).sum(-1) / np.sqrt(a)
    density = (1 + d * norm.cdf(d) / norm.pdf(d)) / (2 * np.pi * np.prod(stddevs) * a)
    density *= np.exp(-(mean**2 / variances).sum() / 2)
    return (density * (u @ mean)).mean() * 2 * np.pi / np.linalg.norm(mean)


def sampled_cosine(stddevs, rng, draws, vector=VECTOR):
    """The same mean over draws, as in the paper."""
    noisy = np.asarray(vector) + rng.standard_normal((draws, 2)) * stddevs
    return np.mean(noisy @ vector / np.linalg.norm(noisy, axis=-1)) / np.linalg.norm(vector)


def box_stddevs(allocation):
    """The noise that `tf_adadp.clipping.Box` gives the bounds of the example at σ* = 1."""
    box = dp.clipping.Box([np.array(BOUNDS)], allocation)
    return box.noise_stddev(1.0, 1)[0].numpy().astype(float)


def stddevs_of_ratio(ratio):
    """The noise with s_1/s_2 = ratio that meets Lemma 1 with equality."""
    shape = np.array([ratio, 1.0])
    return shape * np.sqrt(np.sum((np.array(BOUNDS) / shape) ** 2))


def main(seed=0, out="figures/cosine.png", draws=10_000):
    rng = np.random.default_rng(seed)
    rows = [
        [f"{s}", printed, expected_cosine(s), sampled_cosine(s, rng, draws)]
        for s, printed in PRINTED.items()
    ]
    for name in ("adadp", "least_squares"):
        s = box_stddevs(name)
        rows.append(
            [f"Box({name!r})", "", expected_cosine(s), sampled_cosine(s, rng, draws)],
        )
    ratios = np.geomspace(0.2, 8, 200)
    cosines = [expected_cosine(stddevs_of_ratio(r)) for r in ratios]
    best = int(np.argmax(cosines))
    rows.append([f"best ratio, {ratios[best]:.2f}", "", cosines[best], ""])
    experiment.print_table(["noise stds", "printed", "exact", f"{draws} draws"], rows)

    figure, [panel] = experiment.new_figure()
    panel.semilogx(ratios, cosines, label="exact, for noise that meets Lemma 1")
    for s, printed in PRINTED.items():
        panel.plot(s[0] / s[1], printed, "x", color="tab:red")
        panel.plot(s[0] / s[1], expected_cosine(s), "o", color="tab:blue")
    panel.plot([], [], "x", color="tab:red", label="printed")
    panel.set(xlabel="$s_1/s_2$", ylabel="mean cosine similarity", title="f = (10, 5), c = (12, 6)")
    panel.legend()
    experiment.save(figure, out)


if __name__ == "__main__":
    experiment.run(main, draws="Draws of each sampled mean.")
