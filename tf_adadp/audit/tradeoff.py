"""Lower bounds on ε for a mechanism whose trade-off function is known up to its noise.

The trade-off function f of a mechanism is the least rate of false negatives, f(α), of any test of D
against D' whose rate of false positives is α (Dong, Roth and Su 2019, "Gaussian differential
privacy"). The functions here assume a family of such functions, one for each noise multiplier:
μ-Gaussian differential privacy, or the releases that a ledger was charged with. So they see far
smaller faults than `epsilon_lower_bound`, which has to allow for any mechanism.
"""

import dataclasses
import math

import dp_accounting
import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.accounting.bounds import gaussian_dp
from tf_adadp.audit.bounds import (
    EpsilonBound,
    _level,
    check_guesses,
    clopper_pearson,
    tested_event,
)
from tf_adadp.audit.families import ClaimFamily, Family, GaussianFamily
from tf_adadp.utils.checks import check_delta


@dataclasses.dataclass(frozen=True)
class GaussianBound(EpsilonBound):
    """Holds the result of `gaussian_epsilon_lower_bound`; see `EpsilonBound`.

    Attributes:
        mu: every μ' below it is refuted, without any assumption.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> scores, neighbor_scores = rng.normal(0, 1, 20000), rng.normal(1, 1, 20000)
        >>> bound = dp.audit.gaussian_epsilon_lower_bound(scores, neighbor_scores, delta=1e-5)
        >>> print(f"{bound.mu:.2f}")
        0.92
    """

    mu: float


@dataclasses.dataclass(frozen=True)
class LawBound(EpsilonBound):
    """Holds the result of `law_epsilon_lower_bound`; see `EpsilonBound`.

    Attributes:
        claim: ε of the claim at δ.
        refuted: whether the claim itself is refuted, without any assumption.
        noise_scale: the claim with this many times its noise, or more, is refuted; ∞ for none.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> scores, neighbor_scores = rng.normal(0, 1, 500), rng.normal(1, 1, 500)
        >>> claim = accounting.FixedSizeSampling(100, 100).event(9.0)  # more noise than there is
        >>> dp.audit.law_epsilon_lower_bound(scores, neighbor_scores, claim, delta=1e-5).refuted
        True
    """

    claim: float
    refuted: bool
    noise_scale: float


def gaussian_epsilon_lower_bound(
    scores: ArrayLike, neighbor_scores: ArrayLike, delta: float, confidence: float = 0.95
) -> GaussianBound:
    """Bounds ε from below by independent releases of a Gaussian mechanism on D and D'.

    An event "score ≥ t" or "score ≤ t" is chosen on the first half of both samples. On the second
    half its rates of false positives and false negatives, α and β, are bounded by Clopper and
    Pearson's intervals, each one-sided at level (1 − confidence)/2, and

        μ ≥ Φ⁻¹(1 − α_high) − Φ⁻¹(β_high)

    (Nasr et al. 2023, "Tight auditing of differentially private machine learning"). ε is
    that of μ-Gaussian differential privacy at δ (Balle and Wang 2018, Theorem 8).

    Guarantee: with probability ≥ confidence the mechanism is not μ'-Gaussian differentially private
    for any μ' below the bound, in every case. That ε is at least the bound's ASSUMES that the
    mechanism's trade-off function is Gaussian: one Gaussian release on all records (q = 1), or
    several composed, adaptively too. Lots that are sampled (q < 1) have another trade-off function;
    use `law_epsilon_lower_bound` for them, and `epsilon_lower_bound` where nothing is known.

    Args:
        scores: numbers [n], one per release on D; releases are independent. Infinities are legal.
        neighbor_scores: numbers [n'], likewise on D'.
        delta: δ in (0, 1).
        confidence: in (0, 1).

    Returns:
        A `GaussianBound`.

    Raises:
        ValueError: a sample has fewer than 4 numbers, or a NaN; delta or confidence out of range.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> scores, neighbor_scores = rng.normal(0, 1, 20000), rng.normal(1, 1, 20000)
        >>> bound = dp.audit.gaussian_epsilon_lower_bound(scores, neighbor_scores, delta=1e-5)
        >>> print(f"{bound.epsilon:.2f} <= epsilon")
        3.97 <= epsilon
    """
    delta = check_delta(delta)
    level = _level(confidence) / 2

    def mu(level, *counts):
        alpha, beta = _largest_errors(*counts, level)
        return -special.ndtri(alpha) - special.ndtri(beta)

    event, frequent, rare = tested_event(scores, neighbor_scores, _for_the_best(mu, level))
    least = max(0.0, float(mu(level, *frequent, *rare)))
    return GaussianBound(
        epsilon=gaussian_dp.epsilon_of_mu(least, delta),
        delta=delta,
        confidence=float(confidence),
        event=event,
        frequent=frequent,
        rare=rare,
        mu=least,
    )


def law_epsilon_lower_bound(
    scores: ArrayLike,
    neighbor_scores: ArrayLike,
    claim: PrivacyLedger | dp_accounting.DpEvent,
    delta: float,
    confidence: float = 0.95,
) -> LawBound:
    """Tests claimed releases by their own trade-off function, and bounds ε within their family.

    The privacy loss distribution of the claim gives δ(ε), the larger of adding and removing a
    record, and so a trade-off function that holds in both directions (Wasserman and Zhou 2010; Dong
    et al. 2019, Proposition 6):

        f(α) = max over ε of max(0, 1 − δ(ε) − e^ε·α, e^(−ε)·(1 − δ(ε) − α))

    An event is chosen on the first half of both samples; on the second half its errors are bounded
    as in `gaussian_epsilon_lower_bound`, and the claim is refuted where β_high < f(α_high). The
    same is asked of the claim with all its noise multipliers times 2^(k/64), from a quarter up; the
    least that is refuted gives the bound on ε.

    Guarantee: a claim that is true is refuted with probability ≤ 1 − confidence. The distribution
    is rounded pessimistically and the maximum is over 200 values of ε, so f is never too large.
    That ε is at least the bound's ASSUMES that the mechanism is the claim with all its noise times
    an unknown factor. ε is that of the "pld" accountant, as the claim's.

    Args:
        scores, neighbor_scores: as for `gaussian_epsilon_lower_bound`. Either may be the data set
            with the record.
        claim: a `PrivacyLedger`, or a `dp_accounting.DpEvent`, for all the releases that a score
            is made of.
        delta: δ in (0, 1).
        confidence: in (0, 1).

    Returns:
        A `LawBound`.

    Raises:
        ValueError: as for `gaussian_epsilon_lower_bound`; a claim without releases, with a
            non-private one, or with one that the "pld" accountant cannot analyse.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> scores, neighbor_scores = rng.normal(0, 1, 20000), rng.normal(1, 1, 20000)
        >>> claim = accounting.FixedSizeSampling(100, 100).event(2.0)
        >>> bound = dp.audit.law_epsilon_lower_bound(scores, neighbor_scores, claim, delta=1e-5)
        >>> bound.refuted
        False
    """
    delta = check_delta(delta)
    level = _level(confidence) / 2
    family = ClaimFamily(claim)

    def refuted(level, *counts):
        """Returns the least refuted member, or the claim, and its f(α_high) − β_high."""
        alpha, beta = _largest_errors(*counts, level)
        k = family.least_refuted(lambda f: np.any(f(alpha) > beta))
        return k, family.trade_off(0 if k is None else k)(alpha) - beta

    gain = _for_the_best(lambda *arguments: refuted(*arguments)[1], level)
    event, frequent, rare = tested_event(scores, neighbor_scores, gain)
    k, _ = refuted(level, *frequent, *rare)
    return LawBound(
        epsilon=family.epsilon(k, delta),
        delta=delta,
        confidence=float(confidence),
        event=event,
        frequent=frequent,
        rare=rare,
        claim=family.epsilon(0, delta),
        refuted=k is not None and k <= 0,
        noise_scale=math.inf if k is None else family.scale(k),
    )


def one_run_fdp_epsilon_lower_bound(
    canaries: int,
    guesses: int,
    correct: int,
    claim: PrivacyLedger | dp_accounting.DpEvent | str,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """Returns the largest ε, within a family of trade-off functions, that one run's guesses refute.

    m canaries are each in the data by a fair coin, and an attacker guesses r coins of one run, as
    for `one_run_p_value`. Let P_i be the probability of at least i correct guesses. A mechanism
    with the symmetric trade-off function f has, for 1 ≤ i ≤ r and S_i = Σ_{k>i} P_k,

        (r − i + 1)·P_{i−1} ≥ m·f(1 − (i·P_i + S_i)/m) + P_i + S_i

    (Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-differential privacy in one run",
    arXiv:2410.22235; their recursion for r and h, written for tails). f is refuted by v correct
    guesses where P_v = 1 − confidence would make P_0 exceed 1.

    Guarantee: a true f is refuted with probability ≤ 1 − confidence over the coins and the run, so
    every member of the family with at least that much noise is refuted without any assumption. That
    ε is at least the bound's ASSUMES that the mechanism's trade-off function, for records added or
    removed, is one of the family.

    Args:
        canaries, guesses, correct: m, r and v, 0 ≤ v ≤ r ≤ m.
        claim: "gaussian" for μ-Gaussian differential privacy, right for releases on all records; a
            `PrivacyLedger` or a `dp_accounting.DpEvent` for the releases of the run, with all their
            noise times an unknown factor.
        delta: δ in (0, 1).
        confidence: in (0, 1).

    Raises:
        ValueError: a number is out of range; a claim as for `law_epsilon_lower_bound`, or one for
            records replaced.

    Example:
        >>> claim = accounting.FixedSizeSampling(100, 100).event(2.0)
        >>> found = dp.audit.one_run_fdp_epsilon_lower_bound(1000, 200, 180, claim, delta=1e-5)
        >>> round(found, 2)
        2.87
    """
    m, r, v = check_guesses(canaries, guesses, correct)
    return one_run_family_bound(one_run_family(claim), m, r, v, delta, confidence)


def one_run_family(claim: PrivacyLedger | dp_accounting.DpEvent | str) -> Family:
    """Returns the family of a claim as `one_run_fdp_epsilon_lower_bound` takes it."""
    if isinstance(claim, str) and claim == "gaussian":
        return GaussianFamily()
    return ClaimFamily(claim, relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)


def one_run_family_bound(
    family: Family, canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """Computes `one_run_fdp_epsilon_lower_bound` within a family that was made before."""
    delta = check_delta(delta)
    level = _level(confidence)
    k = family.least_refuted(lambda f: _guesses_refute(f, canaries, guesses, correct, level))
    return family.epsilon(k, delta)


def _guesses_refute(trade_off, m, r, v, level):
    """Tells whether P_v = level makes P_0 exceed 1.

    Why the formula above holds: draw one of the m coins. Let a be the probability that its guess
    is right, b that it is wrong, each together with at least i − 1 right guesses among the others.
    That is one test of "in" against "out" with error rates b and 1 − a, so 1 − a ≥ f(b), averaged
    over coins by Jensen's inequality; by symmetry b ≥ f(1 − a). Summing over the numbers of right
    guesses, m·a = i·P_i + S_i and m·b = (r − i + 1)·P_{i−1} − P_i − S_i. The right side rises with
    every P, so equality, from i = v down, gives the least P_{i−1} there can be.
    """
    tail, above = level, 0.0  # P_i, S_i
    for i in range(v, 0, -1):
        missed = m * float(trade_off(1 - (i * tail + above) / m))
        lower = (missed + tail + above) / (r - i + 1)
        if lower <= tail:  # P_{i−1} ≥ P_i says more, from here down to P_0
            return False
        above += tail
        tail = lower
        if tail > 1:
            return True
    return False


def _for_the_best(gain, level):
    """Returns `gain` at a level common to all candidates, so that few draws mislead no choice."""
    return lambda *counts: gain(level / len(counts[0]), *counts)


def _largest_errors(frequent, draws, rare, neighbor_draws, level):
    """Returns (α_high, β_high) of the test that rejects D' where the event happens."""
    low, _ = clopper_pearson(frequent, draws, level)
    _, high = clopper_pearson(rare, neighbor_draws, level)
    return high, 1 - low
