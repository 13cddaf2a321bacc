"""Plans training by Poisson lots: ε, δ, and the noise, lots and steps that a budget allows.

All functions analyse `steps` releases, each the sum of clipped vectors over a Poisson lot plus
Gaussian noise, for data sets that differ by adding or removing one record. Arguments in common:

  noise_multiplier: σ*, noise standard deviation over the L2 bound of one clipped vector; 0 is no
    noise and costs ε = ∞ (δ = 1).
  sampling_probability: q = expected lot size / number of records, in [0, 1].
  steps: the number of releases, ≥ 0.
  delta: δ in (0, 1). Take it far below one over the number of records.
  accountant: "rdp" (Rényi; Mironov, Talwar and Zhang 2019, with the conversion of Canonne, Kamath
    and Steinke 2020, Proposition 12), "pld" (privacy loss distributions: the tightest and the
    slowest), "theorem1" (the ADADP paper's bound and conversion: the loosest), or one of the
    bounds it comes from, "wang_theorem9" and "wang_theorem27". All are sound, but for σ* above 1e5
    the result of "rdp" is dominated by rounding.

Every function raises ValueError for an argument out of range or an unknown accountant.
"""

import dataclasses
import math
from collections.abc import Callable

import dp_accounting

from tf_adadp.accounting import _search
from tf_adadp.accounting.accountants import Composition, check_accountant, exceeds_pld_grid
from tf_adadp.accounting.bounds.gaussian_dp import clt_sampling_probability
from tf_adadp.accounting.events import event_key
from tf_adadp.accounting.laws import poisson_event
from tf_adadp.utils.checks import (
    check_delta,
    check_epsilon,
    check_integer,
    check_noise_multiplier,
    check_number,
    check_sampling_probability,
    check_target_epsilon,
)


def epsilon(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    accountant: str = "rdp",
) -> float:
    """Returns ε such that `steps` releases are (ε, δ)-differentially private.

    Args, guarantee and errors: see the module docstring. `steps` = 0 costs 0.

    Example:
        >>> epsilon = accounting.epsilon(1.1, sampling_probability=0.01, steps=1000, delta=1e-5)
        >>> round(epsilon, 3)
        1.712
    """
    releases = _releases(noise_multiplier, sampling_probability, steps)
    return releases.epsilon(check_delta(delta), accountant)


def delta(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    epsilon: float,
    accountant: str = "rdp",
) -> float:
    """Returns δ such that `steps` releases are (ε, δ)-differentially private.

    Args, guarantee and errors: see the module docstring; epsilon is finite and ≥ 0.

    Example:
        >>> delta = accounting.delta(1.1, sampling_probability=0.01, steps=1000, epsilon=2.0)
        >>> print(f"{delta:.2e}")
        8.15e-07
    """
    releases = _releases(noise_multiplier, sampling_probability, steps)
    return releases.delta(check_epsilon(epsilon), accountant)


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling_probability: float,
    steps: int,
    accountant: str = "rdp",
) -> float:
    """Returns the least noise multiplier σ* for which `steps` releases cost at most target_epsilon.

    The result is conservative: 0.999 · target_epsilon ≤ epsilon(result) ≤ target_epsilon, unless
    the accountant's ε jumps over that window (near 0, ε drops to 0), or the target is so large
    that σ* = 2^-10, the smallest value tried, still meets it.

    Args:
      target_epsilon: ε > 0 to aim for.
      delta, sampling_probability, steps, accountant: see the module docstring; with
        sampling_probability = 0 or steps = 0 nothing is released, and the call is refused.

    Raises:
      ValueError: an argument is out of range, or no noise up to 2^30 reaches the target (the
        conversion of "theorem1" alone costs log(1/δ)/63).

    Example:
        >>> sigma = accounting.calibrate_noise_multiplier(
        ...     target_epsilon=2.0, delta=1e-5, sampling_probability=0.01, steps=1000
        ... )
        >>> round(sigma, 3)
        1.023
    """
    target_epsilon = check_target_epsilon(target_epsilon)
    delta = check_delta(delta)
    check_accountant(accountant)
    steps = check_integer("steps", steps, at_least=1)
    q = _positive_probability(sampling_probability)
    return least_noise_multiplier(
        Composition(()),
        lambda sigma: poisson_event(q, sigma),
        steps,
        target_epsilon,
        delta,
        accountant,
    )


def calibrate_sampling_probability(
    target_epsilon: float,
    delta: float,
    noise_multiplier: float,
    steps: int,
    accountant: str = "rdp",
) -> float:
    """Returns the largest sampling probability q for which `steps` releases cost ≤ target_epsilon.

    The result is conservative: 0.999 · target_epsilon ≤ epsilon(result) ≤ target_epsilon, unless
    full lots (q = 1) meet the target, or the accountant's ε jumps over that window. Use a lot size
    of floor(q·N), whose ε is not larger.

    Args:
      target_epsilon: ε > 0 to aim for.
      noise_multiplier: σ* > 0.
      delta, steps, accountant: see the module docstring; steps ≥ 1.

    Raises:
      ValueError: an argument is out of range, or no q down to 2^-50 reaches the target.

    Example:
        >>> q = accounting.calibrate_sampling_probability(
        ...     target_epsilon=2.0, delta=1e-5, noise_multiplier=1.1, steps=1000
        ... )
        >>> round(q, 4)
        0.0116
    """
    target_epsilon = check_target_epsilon(target_epsilon)
    delta = check_delta(delta)
    check_accountant(accountant)
    sigma = check_number("noise_multiplier", noise_multiplier, above=0)
    steps = check_integer("steps", steps, at_least=1)

    cost = _cost(lambda q: _releases(sigma, q, steps), delta, accountant)
    # A full lot is a plain Gaussian, for which even the loose bounds are exact. For the other
    # accountants ε rises up to q = 1; the PLD accountant would only be slow there.
    if accountant not in ("rdp", "pld") and cost(1.0) <= target_epsilon:
        return 1.0
    return _search.largest_sampling_probability(
        cost,
        target_epsilon,
        guess=clt_sampling_probability(target_epsilon, delta, sigma, steps),
    )


@dataclasses.dataclass(frozen=True)
class BudgetSplit:
    """Noise for a first release on all records and for the training after it.

    Attributes:
      release_noise_multiplier: σ of the first release, e.g. of DPPCA.
      noise_multiplier: σ* of training.

    Example:
        >>> accounting.BudgetSplit(release_noise_multiplier=10.0, noise_multiplier=1.1)
        BudgetSplit(release_noise_multiplier=10.0, noise_multiplier=1.1)
    """

    release_noise_multiplier: float
    noise_multiplier: float


def split_budget(
    target_epsilon: float,
    delta: float,
    sampling_probability: float,
    steps: int,
    *,
    share: float | None = None,
    release_noise_multiplier: float | None = None,
    accountant: str = "rdp",
) -> BudgetSplit:
    """Splits (ε, δ) between one Gaussian release on all records and `steps` steps of training.

        split = split_budget(2.0, 1e-5, q, steps, share=0.2)
        DPPCA(60, noise_multiplier=split.release_noise_multiplier)
        ADADP(noise_multiplier=split.noise_multiplier)

    The release, such as that of DPPCA, is not amplified by sampling. Both together cost at most
    target_epsilon at δ, and at least 0.999 of it. The accountant composes them, so training gets
    more than target_epsilon minus the ε of the release.

    Args:
      target_epsilon, delta, sampling_probability, steps, accountant: as
        `calibrate_noise_multiplier`.
      share: the ε of the release alone, as a fraction of target_epsilon in (0, 1). Give this or
        release_noise_multiplier.
      release_noise_multiplier: σ > 0 of the release, noise over its sensitivity under
        add-or-remove-one.

    Raises:
      ValueError: an argument is out of range, both or neither of the last two are given, or the
        release leaves nothing for training.

    Example:
        >>> split = accounting.split_budget(
        ...     2.0, 1e-5, sampling_probability=0.01, steps=1000, share=0.2
        ... )
        >>> print(f"{split.release_noise_multiplier:.2f}, {split.noise_multiplier:.3f}")
        9.43, 1.034
    """
    if (share is None) == (release_noise_multiplier is None):
        raise ValueError(
            f"give exactly one of share (got {share!r}) and release_noise_multiplier "
            f"(got {release_noise_multiplier!r})."
        )
    target_epsilon = check_target_epsilon(target_epsilon)
    delta = check_delta(delta)
    if share is not None:
        share = check_number("share", share, above=0, below=1)
        release = calibrate_noise_multiplier(share * target_epsilon, delta, 1.0, 1, accountant)
    else:
        release = check_number("release_noise_multiplier", release_noise_multiplier, above=0)
    q = _positive_probability(sampling_probability)
    steps = check_integer("steps", steps, at_least=1)
    training = least_noise_multiplier(
        _releases(release, 1.0, 1),
        lambda sigma: poisson_event(q, sigma),
        steps,
        target_epsilon,
        delta,
        accountant,
    )
    return BudgetSplit(release, training)


def least_noise_multiplier(
    spent: Composition,
    step: Callable[[float], dp_accounting.DpEvent],
    steps: int,
    target_epsilon: float,
    delta: float,
    accountant: str,
) -> float:
    """Returns the least σ for which `spent` and `steps` times step(σ) cost ≤ target_epsilon.

    The result is within 1e-3 of the target and conservative, as in `calibrate_noise_multiplier`.

    Raises:
      ValueError: `spent` alone is above the target, or no noise is enough.
    """
    check_accountant(accountant)
    before = spent.epsilon(delta, accountant)
    if before >= target_epsilon:
        raise ValueError(
            f"target_epsilon={target_epsilon} is spent: the releases so far cost "
            f"epsilon={before:.6g} at delta={delta:g}."
        )

    def search(name: str, guess: float) -> float:
        def composition(sigma: float) -> Composition:
            return spent.plus([(event_key(step(sigma)), steps)])

        return _search.smallest_noise_multiplier(
            _cost(composition, delta, name), target_epsilon, guess
        )

    if accountant == "rdp":
        return search("rdp", 1.0)
    # The PLD accountant is slow, slower still at little noise: start it next to its answer.
    try:
        guess = search("rdp", 1.0)
    except ValueError:  # out of reach for the looser accountant, or events it does not know
        guess = 8.0
    return search(accountant, guess)


def _cost(
    composition: Callable[[float], Composition], delta: float, accountant: str
) -> Callable[[float], float]:
    """Returns x ↦ ε of composition(x); ∞ if the grid of "pld" would be too large."""

    def cost(x: float) -> float:
        releases = composition(x)
        if accountant == "pld" and exceeds_pld_grid(releases):
            return math.inf
        return releases.epsilon(delta, accountant)

    return cost


def max_steps(
    noise_multiplier: float,
    sampling_probability: float,
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
) -> int:
    """Returns the largest number of releases that cost at most target_epsilon, possibly 0.

    epsilon(result) ≤ target_epsilon < epsilon(result + 1). The result is at most 2^53, also if a
    release costs nothing (sampling_probability = 0).

    Args:
      target_epsilon: ε > 0 not to be exceeded.
      noise_multiplier, sampling_probability, delta, accountant: see the module docstring.

    Raises:
      ValueError: an argument is out of range.

    Example:
        >>> accounting.max_steps(1.1, sampling_probability=0.01, target_epsilon=2.0, delta=1e-5)
        1404
    """
    target_epsilon = check_target_epsilon(target_epsilon)
    delta = check_delta(delta)
    one = _releases(noise_multiplier, sampling_probability, 1)
    return largest_count(Composition((), one.relation), one, target_epsilon, delta, accountant)


def largest_count(
    spent: Composition,
    one: Composition,
    target_epsilon: float,
    delta: float,
    accountant: str,
) -> int:
    """Returns the number of `one` that fit after `spent` within target_epsilon; 0 if none."""

    def search(name: str, guess: int) -> int:
        def cost(count: int) -> float:
            return spent.plus((key, count * times) for key, times in one.charges).epsilon(
                delta, name
            )

        return _search.largest_count(cost, target_epsilon, guess)

    check_accountant(accountant)
    if spent.epsilon(delta, accountant) > target_epsilon:
        return 0
    if accountant != "pld":
        return search(accountant, 1)
    try:
        guess = search("rdp", 1)
    except ValueError:  # an event that only the PLD accountant knows
        guess = 1
    # The Rényi bound proves that `guess` fits; the tighter accountant allows a little more.
    return search("pld", guess + guess // 8)


def _positive_probability(value: float) -> float:
    wanted = "a number in (0, 1]; at 0 nothing is released"
    return check_number("sampling_probability", value, wanted, above=0, at_most=1)


def _releases(noise_multiplier: float, sampling_probability: float, steps: int) -> Composition:
    sigma = check_noise_multiplier(noise_multiplier)
    q = check_sampling_probability(sampling_probability)
    steps = check_integer("steps", steps, at_least=0)
    return Composition.of([(poisson_event(q, sigma), steps)])
