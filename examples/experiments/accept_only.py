"""Shows what it costs to charge accepted updates only, against SA-DPSGD's Theorem 1.

    python examples/experiments/accept_only.py

SA-DPSGD (Algorithm 2) draws candidates until one is accepted, or μ0 were rejected in a row and the
next is taken anyway, and charges the accepted one alone, as the others are never seen. But what is
released was SELECTED, by a rule whose outcome depends on the data through the candidates.

The counterexample is one step in one dimension without subsampling, sensitivity 1:

- Candidates are independent, x ~ N(0, σ²) on a data set D and x ~ N(1, σ²) on its neighbour D'.
- The energy J is low for x ≥ t and so high elsewhere that exp(−ΔE·Q) is 0 in effect: a candidate
  is accepted where x ≥ t. Nothing in the algorithm excludes such a J.
- With r = P(x < t), the release has density f(x)·Σ_{k=0..μ0} r^k for x ≥ t, and f(x)·r^μ0 below.

The ratio of the two densities falls with x on either side of t, so the hockey-stick divergence
δ(ε) = ∫ (p − e^ε·p')₊ is a sum of normal probabilities: nothing is sampled. t is searched for the
largest δ in both orders. The claim is δ of the plain Gaussian mechanism (every μ0 = 0 is that one);
charging every candidate gives that of μ0 + 1 of them, a Gaussian of σ/√(μ0 + 1).
"""

import experiment
import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr, logsumexp, ndtr

SIGMA = 1.23  # SA-DPSGD, Table 2, MNIST


def gaussian_delta(sigma, epsilon):
    """δ(ε) of one Gaussian mechanism of sensitivity 1."""
    half = 1 / (2 * sigma)
    return ndtr(half - epsilon * sigma) - np.exp(epsilon) * ndtr(-half - epsilon * sigma)


def accept_only_delta(threshold, sigma, epsilon, max_rejections):
    """δ(ε) of the released update, the larger of D against D' and D' against D."""
    log_rejected = log_ndtr((threshold - np.array([0.0, 1.0])) / sigma)
    tries = np.arange(max_rejections + 1)
    pieces = [
        (-np.inf, threshold, max_rejections * log_rejected),
        (threshold, np.inf, logsumexp(tries * log_rejected[:, None], axis=-1)),
    ]

    def mass(mean, low, high):
        return ndtr((high - mean) / sigma) - ndtr((low - mean) / sigma)

    deltas = np.zeros(2)
    for low, high, log_weights in pieces:
        weights, shift = np.exp(log_weights), log_weights[1] - log_weights[0]
        # log(p/p') = (1 − 2x)/(2σ²) − shift: above ε left of one point, below −ε right of another.
        left = np.clip(0.5 - sigma**2 * (epsilon + shift), low, high)
        right = np.clip(0.5 + sigma**2 * (epsilon - shift), low, high)
        e = np.exp(epsilon)
        deltas[0] += weights[0] * mass(0, low, left) - e * weights[1] * mass(1, low, left)
        deltas[1] += weights[1] * mass(1, right, high) - e * weights[0] * mass(0, right, high)
    return deltas.max()


def worst_threshold(sigma, epsilon, max_rejections):
    """The t of the largest δ, and that δ."""
    grid = np.linspace(-6 * sigma, 1 + 6 * sigma, 400)
    start = max(grid, key=lambda t: accept_only_delta(t, sigma, epsilon, max_rejections))
    found = minimize_scalar(
        lambda t: -accept_only_delta(t, sigma, epsilon, max_rejections),
        bounds=(start - 0.1, start + 0.1),
        method="bounded",
    )
    return found.x, -found.fun


def simulate(mean, threshold, sigma, max_rejections, rng, draws):
    """Released updates, drawn the way the algorithm draws them."""
    candidates = rng.normal(mean, sigma, (draws, max_rejections + 1))
    accepted = candidates >= threshold
    accepted[:, -1] = True
    return np.take_along_axis(candidates, accepted.argmax(-1)[:, None], axis=1)[:, 0]


def main(seed=0, out="figures/accept_only.png", sigma=SIGMA, epsilon=1.0, draws=200_000):
    limits = [0, 1, 2, 5, 10, 20, 100]
    worst = {limit: worst_threshold(sigma, epsilon, limit) for limit in limits}
    claimed = gaussian_delta(sigma, epsilon)
    rows = [
        [limit, claimed, delta, gaussian_delta(sigma / np.sqrt(limit + 1), epsilon), t]
        for limit, (t, delta) in worst.items()
    ]
    print(f"δ at ε = {epsilon:g}, σ = {sigma:g}")
    experiment.print_table(["μ0", "claimed", "accept-only", "all charged", "worst t"], rows)

    figure, [left, right] = experiment.new_figure(columns=2)
    left.plot(limits, [worst[m][1] for m in limits], "o-", label="true, worst t")
    left.axhline(claimed, color="tab:red", label="claimed")
    left.set(xlabel="rejections in a row, μ0", ylabel=f"δ(ε = {epsilon:g})", xscale="symlog")
    left.legend()
    rng, threshold = np.random.default_rng(seed), worst[10][0]
    bins = np.linspace(-4, 6, 80)
    for mean, name in ((0, "D"), (1, "D'")):
        released = simulate(mean, threshold, sigma, 10, rng, draws)
        right.hist(released, bins, density=True, histtype="step", label=f"release on {name}")
    right.set(xlabel="released update", title=f"μ0 = 10, t = {threshold:.2f}")
    right.legend()
    experiment.save(figure, out)


if __name__ == "__main__":
    experiment.run(
        main,
        sigma="Noise multiplier σ.",
        epsilon="ε at which δ is computed.",
        draws="Simulated releases in the figure.",
    )
