"""Computes lower bounds on ε from an attacker's observations, with a stated confidence.

It needs NumPy and SciPy only.

Two settings: many independent releases on two neighbouring data sets (`epsilon_lower_bound`), and
one release that depends on many independent coins (`one_run_epsilon_lower_bound`). Both hold for
any attack, however weak: a poor attack gives a low bound, never a wrong one.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

from tf_adadp.accounting import accountants, laws
from tf_adadp.utils.checks import check_delta, check_integer, check_number

_MOST_THRESHOLDS = 500  # tried in each tail, half of them order statistics, half of them quantiles
_LARGEST_EPSILON = 64.0


@dataclasses.dataclass(frozen=True)
class EpsilonBound:
    """Holds the result of `epsilon_lower_bound`: at this δ it refutes every smaller ε.

    Attributes:
        epsilon: the bound, ≥ 0.
        delta: δ.
        confidence: the probability, over the draws, that the bound is at most the true ε.
        event: the event that was tested, in words; it was chosen on other draws than tested on.
        frequent: (count, draws) of the event where it is likely.
        rare: (count, draws) of the event on the other data set.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> scores, neighbor_scores = rng.normal(0, 1, 20000), rng.normal(1, 1, 20000)
        >>> bound = dp.audit.epsilon_lower_bound(scores, neighbor_scores, delta=1e-5)
        >>> print(bound.confidence)
        0.95
    """

    epsilon: float
    delta: float
    confidence: float
    event: str
    frequent: tuple[int, int]
    rare: tuple[int, int]


def epsilon_lower_bound(
    scores: ArrayLike, neighbor_scores: ArrayLike, delta: float, confidence: float = 0.95
) -> EpsilonBound:
    """Bounds ε from below by independent releases on two neighbouring data sets D and D'.

    (ε, δ)-differential privacy means P(E | D) ≤ e^ε·P(E | D') + δ for every event E, and with D and
    D' exchanged. An event "score ≥ t" or "score ≤ t" is chosen on the first half of both samples;
    on the second half the two probabilities are bounded by Clopper and Pearson's intervals, each
    one-sided at level (1 − confidence)/2, and

        ε ≥ log((p_low − δ) / p'_high)

    holds with probability ≥ confidence, whatever the law of the scores and however they were made
    from the releases (Jagielski, Ullman and Oprea 2020, "Auditing differentially private machine
    learning"). At best it reaches log(draws/8), so a large ε needs many draws.

    Args:
        scores: numbers [n], one per release on D; releases are independent. Infinities are legal.
        neighbor_scores: numbers [n'], likewise on D'.
        delta: δ in [0, 1).
        confidence: in (0, 1).

    Returns:
        An `EpsilonBound`.

    Raises:
        ValueError: a sample has fewer than 4 numbers, or a NaN; delta or confidence out of range.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> scores, neighbor_scores = rng.normal(0, 1, 20000), rng.normal(1, 1, 20000)
        >>> bound = dp.audit.epsilon_lower_bound(scores, neighbor_scores, delta=1e-5)
        >>> print(f"{bound.epsilon:.2f}")
        2.25
    """
    delta = check_number("delta", delta, at_least=0, below=1)
    level = _level(confidence) / 2

    def bound(frequent, draws, rare, neighbor_draws):
        return _log_ratio(frequent, draws, rare, neighbor_draws, delta, level)

    event, frequent, rare = tested_event(scores, neighbor_scores, bound)
    return EpsilonBound(
        epsilon=max(0.0, float(bound(*frequent, *rare))),
        delta=delta,
        confidence=float(confidence),
        event=event,
        frequent=frequent,
        rare=rare,
    )


def tested_event(
    scores: ArrayLike, neighbor_scores: ArrayLike, gain: Callable[..., np.ndarray]
) -> tuple[str, tuple[int, int], tuple[int, int]]:
    """Chooses an event on the first half of both samples, and counts it on the second half.

    Candidates are "≥ t" and "≤ t", likely under either sample.

    Args:
        scores, neighbor_scores: see `epsilon_lower_bound`.
        gain: gain(count, draws, count, draws) of arrays, one entry per candidate: how much the
            event would prove with these counts, first where it is likely. The largest is chosen;
            −∞ for nothing.

    Returns:
        (event in words, (count, draws) where it is likely, (count, draws) on the other data set).
    """
    samples = [_sample("scores", scores), _sample("neighbor_scores", neighbor_scores)]
    chosen, tested = zip(*((s[: len(s) // 2], s[len(s) // 2 :]) for s in samples), strict=True)

    events, counts = [], []
    for frequent in (0, 1):
        for sign in (1, -1):
            a, b = sign * chosen[frequent], sign * chosen[1 - frequent]
            thresholds = _thresholds(np.concatenate([a, b]))
            hits = [len(s) - np.searchsorted(np.sort(s), thresholds) for s in (a, b)]
            draws = [np.full(len(thresholds), len(s)) for s in (a, b)]
            counts.append(np.stack([hits[0], draws[0], hits[1], draws[1]]))
            events += [(frequent, sign, threshold) for threshold in thresholds]
    gains = gain(*np.concatenate(counts, axis=1))
    best = int(np.argmax(gains))
    # Where no event proves anything there is nothing to test.
    frequent, sign, threshold = events[best] if gains[best] > -math.inf else (0, 1, -math.inf)

    a, b = sign * tested[frequent], sign * tested[1 - frequent]
    names = ("scores", "neighbor_scores")
    event = f"{names[frequent]} {'≥' if sign > 0 else '≤'} {sign * threshold:.6g}"
    return event, *((int(np.sum(s >= threshold)), len(s)) for s in (a, b))


def gaussian_epsilon_estimate(scores: ArrayLike, neighbor_scores: ArrayLike, delta: float) -> float:
    """Estimates ε, ASSUMING that both samples are Gaussian of one variance.

    μ = |difference of the means| / pooled standard deviation, and ε that of a Gaussian mechanism of
    multiplier 1/μ at δ (privacy loss distribution). It says what `epsilon_lower_bound` would come
    to with endless draws if the assumption held; it is no bound, has no confidence, and proves
    nothing about a mechanism.

    Args, errors: as for `epsilon_lower_bound`; δ in (0, 1); finite scores.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> scores, neighbor_scores = rng.normal(0, 1, 20000), rng.normal(1, 1, 20000)
        >>> print(f"{dp.audit.gaussian_epsilon_estimate(scores, neighbor_scores, delta=1e-5):.2f}")
        4.34
    """
    delta = check_delta(delta)
    a, b = _sample("scores", scores), _sample("neighbor_scores", neighbor_scores)
    spread = math.sqrt((np.var(a) + np.var(b)) / 2)
    gap = abs(np.mean(a) - np.mean(b))
    if not math.isfinite(gap + spread):
        raise ValueError("scores hold infinities: no Gaussian fits them.")
    if gap == 0:
        return 0.0
    if spread == 0:
        return math.inf
    event = laws.poisson_event(1.0, spread / gap)
    return accountants.Composition.of([(event, 1)]).epsilon(delta, "pld")


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Bounds the probability of so many correct guesses if the mechanism is (ε, δ)-private.

    m canaries are each in the data or not by a fair coin of its own; from the output of ONE run an
    attacker guesses r of the coins and abstains on the others. Under (ε, δ)-differential privacy
    for adding or removing one record

        P(correct ≥ v) ≤ P(B ≥ v) + 2mδ · max_{i=1..v} P(v − i ≤ B < v) / i,
        B ~ Binomial(r, e^ε/(1 + e^ε))

    (Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2
    and Corollary 5.4). Which coins are guessed, and what, may depend on the output in any way; r
    may not depend on how many of the guesses turn out correct.

    Args:
        canaries: m ≥ 1.
        guesses: r in 0..m.
        correct: v in 0..r.
        epsilon: ε ≥ 0, finite.
        delta: δ in [0, 1].

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> p_value = dp.audit.one_run_p_value(1000, 200, 180, epsilon=1.0, delta=1e-5)
        >>> print(f"{p_value:.1e}")
        4.4e-04
    """
    m, r, v = check_guesses(canaries, guesses, correct)
    epsilon = check_number("epsilon", epsilon, at_least=0)
    delta = check_number("delta", delta, at_least=0, at_most=1)
    right = special.expit(epsilon)  # of one guess
    p_value = float(special.bdtrc(v - 1, r, right)) if v > 0 else 1.0
    if delta > 0 and v > 0:
        i = np.arange(1, v + 1)
        below = np.cumsum(stats.binom.pmf(v - i, r, right))
        p_value += 2 * m * delta * float(np.max(below / i))
    return min(p_value, 1.0)


def one_run_epsilon_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Returns the largest ε that `one_run_p_value` refutes at 1 − confidence; 0 if none.

    True with probability ≥ confidence over the coins and the run: ε below the bound would have made
    this many correct guesses too unlikely. (Privacy at ε implies privacy at every larger one, so
    the bound holds whether the p-value rises with ε everywhere or not.)

    Args, errors: as for `one_run_p_value`; confidence in (0, 1).

    Example:
        >>> bound = dp.audit.one_run_epsilon_lower_bound(1000, guesses=200, correct=180, delta=1e-5)
        >>> round(bound, 3)
        1.796
    """
    level = _level(confidence)

    def refuted(epsilon):
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) <= level

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _LARGEST_EPSILON
    if refuted(high):
        return high
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def check_guesses(canaries: int, guesses: int, correct: int) -> tuple[int, int, int]:
    """Returns (m, r, v) as integers; raises ValueError unless 0 ≤ v ≤ r ≤ m and m ≥ 1."""
    m = check_integer("canaries", canaries, at_least=1)
    r = check_integer("guesses", guesses, f"an integer in 0..{m}", at_least=0)
    v = check_integer("correct", correct, f"an integer in 0..{r}", at_least=0)
    if not v <= r <= m:
        raise ValueError(
            f"canaries={m}, guesses={r}, correct={v}: give correct ≤ guesses ≤ canaries."
        )
    return m, r, v


def best_guesses(scores: ArrayLike, coins: ArrayLike, num_guesses: int | None) -> tuple[int, int]:
    """Counts the correct ones of `num_guesses` guesses: high scores "in", low scores "out".

    Half of the guesses (rounded up) say that the canaries with the highest scores are in, the
    others that those with the lowest are out; ties are broken by position, not by the coins.

    Args:
        scores: numbers [m], higher for a canary that seems to be in.
        coins: bool [m], which were in.
        num_guesses: r in 0..m.

    Raises:
        ValueError: lengths that differ, a NaN, num_guesses out of range.

    Example:
        >>> coins = np.array([True, True, False, False])
        >>> dp.audit.best_guesses([3.0, 2.0, 1.0, 0.0], coins, num_guesses=2)
        2
    """
    scores, coins = np.asarray(scores, np.float64), np.asarray(coins)
    if scores.ndim != 1 or scores.shape != coins.shape or coins.dtype != bool:
        raise ValueError(
            f"scores of shape {scores.shape} and coins of shape {coins.shape} and type "
            f"{coins.dtype}: give two vectors of one length, coins of bool."
        )
    if np.isnan(scores).any():
        raise ValueError("scores hold NaN: replace them by the score of a canary that is not in.")
    wanted = f"an integer in 0..{len(scores)}"
    num_guesses = check_integer("num_guesses", num_guesses, wanted, at_least=0)
    if num_guesses > len(scores):
        raise ValueError(f"num_guesses={num_guesses}: give {wanted}.")
    order = np.argsort(scores, kind="stable")
    low, high = num_guesses // 2, num_guesses - num_guesses // 2
    return int(np.sum(~coins[order[:low]]) + np.sum(coins[order[len(order) - high :]]))


def clopper_pearson(count: ArrayLike, draws: ArrayLike, level: float) -> tuple[float, float]:
    """Returns one-sided bounds (low, high) of a probability, each wrong with probability ≤ level.

    Clopper and Pearson 1934: exact for any number of draws. `count` may be an array.

    Example:
        >>> low, high = dp.audit.clopper_pearson(90, 100, level=0.025)
        >>> print(f"{low:.3f}, {high:.3f}")
        0.824, 0.951
    """
    count = np.asarray(count, np.float64)
    low = np.where(count > 0, special.betaincinv(np.maximum(count, 1), draws - count + 1, level), 0)
    rest = np.maximum(draws - count, 1)
    high = np.where(count < draws, special.betaincinv(count + 1, rest, 1 - level), 1)
    return low, high


def _log_ratio(frequent, draws, rare, neighbor_draws, delta, level):
    """Returns log((p_low − δ)/p'_high), −∞ where δ covers p_low."""
    low, _ = clopper_pearson(frequent, draws, level)
    _, high = clopper_pearson(rare, neighbor_draws, level)
    excess = np.maximum(low - delta, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(excess) - np.log(high)


def _thresholds(pooled):
    """Values of the pooled sample that events are cut at, the upper tail in full."""
    pooled = np.sort(pooled)
    half = _MOST_THRESHOLDS // 2
    tail = pooled[-half:]
    spread = pooled[np.linspace(0, len(pooled) - 1, half).astype(int)]
    return np.unique(np.concatenate([spread, tail]))


def _sample(name, values):
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or len(values) < 4:
        raise ValueError(f"{name} has shape {values.shape}: give a vector of at least 4 numbers.")
    if np.isnan(values).any():
        raise ValueError(f"{name} hold NaN: map every release to a number.")
    return values


def _level(confidence):
    return 1.0 - check_number("confidence", confidence, above=0, below=1)
