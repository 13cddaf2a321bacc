"""The sign of NoisyMin's noise: AGD's choice of a step size from 21 candidates.

    python examples/experiments/noisy_min.py

AGD (Lee and Kifer 2018) picks the candidate with the least noisy score. Scores are sums of losses
clipped to [0, C], so one record raises any of them by at most C and lowers none (a monotone query).
Report-noisy-max with exponential noise of rate ε/C is ε-private for the LARGEST noisy score. For
the smallest, the noise has to be subtracted. In the code that goes with the paper it is added
(`noisy_max` negates scores and noise alike, then takes the largest), which costs (k − 1)·ε with k
candidates:

- added: P(i) = ∫ λe^(−λs) Π_j P(E > s + u_i − u_j) ds. A score u_i that rises by C scales each of
  the k − 1 factors by at least e^(−λC), and by exactly that where u_i is the largest score.
- subtracted: P(i) = E min(1, e^(−λ(u_i + M))), M the others' maximum: one factor e^(−λC) at most.
- Gumbel noise of scale C/ε subtracted is the exponential mechanism, P(i) ∝ e^(−εu_i/C).

P(i) falls with u_i and rises with all others, so of all neighbours the worst for P(i) raises u_i
alone; its log-ratio is searched over the gap between u_i and the k − 1 others. Probabilities are
one-dimensional quadratures.
"""

import experiment
import numpy as np
from scipy import integrate

CANDIDATES, EPSILON = 21, 0.3
GAPS = np.linspace(-8, 8, 33)  # in units of C
NOISES = ("added", "subtracted", "gumbel")
# Density, distribution function, and where all but 1e-14 of the mass lies.
_EXPONENTIAL = (lambda x: np.exp(-x), lambda x: -np.expm1(-np.maximum(x, 0.0)), 0.0, 33.0)
_GUMBEL = (lambda x: np.exp(-x - np.exp(-x)), lambda x: np.exp(-np.exp(-x)), -3.5, 33.0)


def selection_probability(scores, chosen, noise, epsilon=EPSILON):
    """P(the noisy score of `chosen` is the least), scores in units of the loss bound C."""
    others = np.delete(np.asarray(scores, float), chosen)
    density, below, low, high = _GUMBEL if noise == "gumbel" else _EXPONENTIAL
    sign = 1.0 if noise == "added" else -1.0
    low, high = low / epsilon, high / epsilon

    def integrand(z):  # z: the noise of the chosen one
        factors = below(epsilon * (z + sign * (scores[chosen] - others)))
        factors = 1 - factors if noise == "added" else factors
        return epsilon * density(epsilon * z) * factors.prod()

    kinks = np.unique(sign * (others - scores[chosen]))  # where another's noise starts
    edges = [low, *kinks[(kinks > low) & (kinks < high)], high]
    pieces = zip(edges, edges[1:], strict=False)
    return sum(integrate.quad(integrand, a, b, epsabs=1e-14, limit=200)[0] for a, b in pieces)


def log_ratio(gap, noise, candidates=CANDIDATES, epsilon=EPSILON):
    """log P(0)/P'(0): score 0 lies `gap` above the others, and C higher on the neighbour."""
    scores = np.zeros(candidates)
    scores[0] = gap
    before = selection_probability(scores, 0, noise, epsilon)
    scores[0] += 1.0
    return np.log(before / selection_probability(scores, 0, noise, epsilon))


def worst_log_ratio(noise, candidates=CANDIDATES, epsilon=EPSILON, gaps=GAPS):
    """The largest log-ratio over the gaps."""
    return max(log_ratio(gap, noise, candidates, epsilon) for gap in gaps)


def simulated_frequency(gap, noise, rng, draws, candidates=CANDIDATES, epsilon=EPSILON):
    """Counts how often score 0, `gap` above the others, is picked, to check the quadrature."""
    scores = np.zeros(candidates)
    scores[0] = gap
    law = rng.gumbel if noise == "gumbel" else lambda _, *a: rng.exponential(*a)
    drawn = law(0.0, 1 / epsilon, (draws, candidates))
    return np.mean(np.argmin(scores + (drawn if noise == "added" else -drawn), axis=1) == 0)


def main(seed=0, out="figures/noisy_min.png", epsilon=EPSILON, draws=200_000):
    rng = np.random.default_rng(seed)
    rows = []
    for noise in NOISES:
        exact = selection_probability([1.0] + [0.0] * (CANDIDATES - 1), 0, noise, epsilon)
        drawn = simulated_frequency(1.0, noise, rng, draws, epsilon=epsilon)
        rows.append([noise, epsilon, worst_log_ratio(noise, epsilon=epsilon), exact, drawn])
    print(f"{CANDIDATES} candidates; P is of a score C above the others")
    experiment.print_table(["noise", "claimed ε", "worst log-ratio", "P, exact", "P, drawn"], rows)

    counts = [2, 3, 5, 8, 13, 21]
    figure, [panel] = experiment.new_figure()
    for noise in NOISES:
        ratios = [worst_log_ratio(noise, k, epsilon, np.linspace(-6, 6, 7)) for k in counts]
        panel.plot(counts, ratios, "o-", label=noise)
    panel.axhline(epsilon, color="black", linestyle=":", label="claimed ε")
    panel.set(xlabel="candidates", ylabel="worst log-ratio", yscale="log")
    panel.legend()
    experiment.save(figure, out)


if __name__ == "__main__":
    experiment.run(
        main,
        epsilon="The ε that the choice is said to cost.",
        draws="Draws of the check by simulation.",
    )
