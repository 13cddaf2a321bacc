"""What training by Poisson lots costs: ε, δ, the noise a budget needs, the steps it allows.

All functions analyse `steps` releases, each the sum of clipped vectors over a Poisson lot plus
Gaussian noise, for data sets that differ by adding or removing one record. Arguments in common:

  noise_multiplier: σ*, noise standard deviation over the L2 bound of one clipped vector; 0 is no
    noise and costs ε = ∞ (δ = 1).
  sampling_probability: q = expected lot size / number of records, in [0, 1].
  steps: the number of releases, ≥ 0.
  delta: δ in (0, 1). Take it far below one over the number of records.
  accountant: "rdp" (Rényi; Mironov, Talwar and Zhang 2019, with the conversion of Canonne, Kamath
    and Steinke 2020, Proposition 12), "pld" (privacy loss distributions: the tightest and the
    slowest) or "theorem1" (the ADADP paper's bound and conversion: the loosest). All are sound.

Every function raises ValueError for an argument out of range or an unknown accountant.
"""

from tf_adadp.accounting import _checks, _search
from tf_adadp.accounting.accountants import Composition, check_accountant
from tf_adadp.accounting.laws import poisson_event


def epsilon(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    accountant: str = "rdp",
) -> float:
    """Returns ε such that `steps` releases are (ε, δ)-differentially private.

    Args, guarantee and errors: see the module docstring. `steps` = 0 costs 0.
    """
    releases = _releases(noise_multiplier, sampling_probability, steps)
    return releases.epsilon(_checks.delta(delta), accountant)


def delta(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    epsilon: float,
    accountant: str = "rdp",
) -> float:
    """Returns δ such that `steps` releases are (ε, δ)-differentially private.

    Args, guarantee and errors: see the module docstring; epsilon is finite and ≥ 0.
    """
    releases = _releases(noise_multiplier, sampling_probability, steps)
    return releases.delta(_checks.epsilon(epsilon), accountant)


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling_probability: float,
    steps: int,
    accountant: str = "rdp",
) -> float:
    """Returns the least noise multiplier σ* for which `steps` releases cost at most target_epsilon.

    The result is on the sound side: 0.999 · target_epsilon ≤ epsilon(result) ≤ target_epsilon,
    except where the accountant's ε jumps over that window (ε falls to 0 at once near 0), or where
    the target is so large that σ* = 2^-10, the least tried, still meets it.

    Args:
      target_epsilon: ε > 0 to aim for.
      delta, sampling_probability, steps, accountant: see the module docstring; with
        sampling_probability = 0 or steps = 0 nothing is released, and the call is refused.

    Raises:
      ValueError: an argument is out of range, or no noise up to 2^30 reaches the target (the
        conversion of "theorem1" alone costs log(1/δ)/63).
    """
    target_epsilon = _checks.target_epsilon(target_epsilon)
    delta = _checks.delta(delta)
    check_accountant(accountant)
    steps = _checks.count(steps, "steps")
    q = _checks.sampling_probability(sampling_probability)
    if q == 0:
        raise ValueError("sampling_probability must be positive: at 0 nothing is released, got 0.")

    def search(name: str, guess: float) -> float:
        return _search.smallest_noise_multiplier(
            lambda sigma: epsilon(sigma, q, steps, delta, name), target_epsilon, guess
        )

    guess = search("rdp", 1.0)
    # The PLD accountant is slow, slower still at little noise: start it next to its answer.
    return guess if accountant == "rdp" else search(accountant, guess)


def max_steps(
    noise_multiplier: float,
    sampling_probability: float,
    target_epsilon: float,
    delta: float,
    accountant: str = "rdp",
) -> int:
    """Returns the largest number of releases that cost at most target_epsilon, possibly 0.

    epsilon(result) ≤ target_epsilon < epsilon(result + 1). Capped at 2^53, which is also the
    answer where a release costs nothing (sampling_probability = 0).

    Args:
      target_epsilon: ε > 0 not to be exceeded.
      noise_multiplier, sampling_probability, delta, accountant: see the module docstring.

    Raises:
      ValueError: an argument is out of range.
    """
    target_epsilon = _checks.target_epsilon(target_epsilon)
    delta = _checks.delta(delta)
    one = _releases(noise_multiplier, sampling_probability, 1)
    return largest_count(Composition((), one.relation), one, target_epsilon, delta, accountant)


def largest_count(
    spent: Composition,
    one: Composition,
    target_epsilon: float,
    delta: float,
    accountant: str,
) -> int:
    """Returns how often `one` fits after `spent` within target_epsilon; 0 if it is all spent."""

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
    # The Rényi bound already proves `guess`; the tighter accountant allows a little more.
    return search("pld", guess + guess // 8)


def _releases(noise_multiplier: float, sampling_probability: float, steps: int) -> Composition:
    sigma = _checks.noise_multiplier(noise_multiplier)
    q = _checks.sampling_probability(sampling_probability)
    steps = _checks.integer("steps", steps, "a whole number ≥ 0", lambda x: x >= 0)
    return Composition.of([(poisson_event(q, sigma), steps)])
