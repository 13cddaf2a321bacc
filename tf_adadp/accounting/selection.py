"""What it costs to choose one of several candidates by noisy scores of a random lot."""

import math

import dp_accounting

from tf_adadp.accounting import _checks
from tf_adadp.accounting.laws import FixedSizeSampling, PoissonSampling, SamplingLaw


def amplified(epsilon: float, sampling_probability: float) -> float:
    """Returns ε' = log(1 + q(e^ε − 1)), without overflow."""
    if sampling_probability == 0:
        return 0.0
    if epsilon < 1:
        return math.log1p(sampling_probability * math.expm1(epsilon))
    q = sampling_probability
    return epsilon + math.log(q + (1 - q) * math.exp(-epsilon))


def selection_event(law: SamplingLaw, selection_epsilon: float) -> dp_accounting.DpEvent:
    """Returns the event of one exponential mechanism on a lot drawn by `law`.

    The mechanism chooses k with probability ∝ exp(−ε_s·score_k/Δ), score_k a sum over the lot of
    values in [0, C]; Δ = C where neighbouring lots differ by one example more or less, 2C where
    one is replaced. Either way the log-ratios of the probabilities on neighbouring lots lie in an
    interval of length ε_s that holds 0.

    Poisson lots, add or remove: ZCDp(ε'²/8), ε' = log(1 + q(e^ε_s − 1)). Proof: for the records S
    drawn beside the one in question, the output is M(S) without it and (1−q)M(S) + qM(S+x) with
    it. The log-ratio of the second to the first is g(t) = log(1 − q + qe^t), t in an interval
    [a, a + ε_s], a ≤ 0; g is convex, so its range is at most g(ε_s) − g(0) = ε'. A log-ratio of
    range ε' gives Rényi divergences ≤ αε'²/8 in both directions (Hoeffding's lemma; Cesar and
    Rogers 2021, "Bounding, Concentrating, and Truncating", on bounded range), and joint
    quasi-convexity carries that over to the mean over S.

    Fixed-size lots, replace one: ZCDp(ε'²/2) with q = n/N. There ε' is a bound of pure differential
    privacy (Balle, Barthe and Gaboardi 2018, "Privacy amplification by subsampling", Theorem 9)
    but not of the range, and Bun and Steinke 2016, Proposition 1.4, applies.

    Args:
      law: Poisson or fixed-size sampling.
      selection_epsilon: ε_s > 0.

    Raises:
      ValueError: another law, or ε_s out of range.
    """
    epsilon = _checks.real("selection_epsilon", selection_epsilon, "> 0", lambda x: x > 0)
    if isinstance(law, PoissonSampling):
        return dp_accounting.ZCDpEvent(amplified(epsilon, law.probability) ** 2 / 8)
    if isinstance(law, FixedSizeSampling):
        return dp_accounting.ZCDpEvent(amplified(epsilon, law.size / law.num_examples) ** 2 / 2)
    raise ValueError(f"what a selection costs under this sampling is not known: {law.describe()}")
