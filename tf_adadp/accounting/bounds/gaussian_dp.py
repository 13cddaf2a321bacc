"""Computes the central-limit figure of Gaussian differential privacy: an APPROXIMATION.

Bu, Dong, Long and Su, "Deep Learning with Gaussian Differential Privacy" (2020, arXiv:1911.11607),
section 3: as T → ∞ with q√T → constant, T steps on Poisson lots tend to μ-Gaussian differential
privacy. At finite T the limit can be below the true ε, so no accountant of this package uses it
and no ledger accepts it. It serves comparisons only.
"""

import math
from collections.abc import Iterable

import dp_accounting
import numpy as np

from tf_adadp.utils.checks import (
    check_delta,
    check_integer,
    check_noise_multiplier,
    check_sampling_probability,
)


def clt_mu(noise_multiplier: float, sampling_probability: float, steps: int) -> float:
    """Returns μ = q·√(T(e^{1/σ²} − 1)), for q = 1 the exact √T/σ; ∞ for σ = 0.

    Args:
      noise_multiplier: σ* ≥ 0 of Poisson lots, add-or-remove-one neighbours.
      sampling_probability: q in [0, 1].
      steps: T ≥ 0.

    Raises:
      ValueError: an argument is out of range.

    Example:
        >>> round(accounting.clt_mu(1.1, sampling_probability=0.01, steps=1000), 3)
        0.358
    """
    sigma = check_noise_multiplier(noise_multiplier)
    q = check_sampling_probability(sampling_probability)
    steps = check_integer("steps", steps, at_least=0)
    if q == 0 or steps == 0:
        return 0.0
    if sigma == 0:
        return math.inf
    with np.errstate(over="ignore"):
        inverse_square = np.float64(sigma) ** -2
        one_step = np.sqrt(inverse_square) if q == 1 else q * np.sqrt(np.expm1(inverse_square))
        return float(math.sqrt(steps) * one_step)


def clt_epsilon(
    noise_multiplier: float, sampling_probability: float, steps: int, delta: float
) -> float:
    """Returns ε of the limit at δ. AN APPROXIMATION: the true ε may be larger.

    The ε of one Gaussian of noise multiplier 1/μ, by dp_accounting's closed form.

    Args:
      noise_multiplier, sampling_probability, steps: as `clt_mu`.
      delta: δ in (0, 1).

    Raises:
      ValueError: an argument is out of range.

    Example:
        >>> round(accounting.clt_epsilon(1.1, sampling_probability=0.01, steps=1000, delta=1e-5), 3)
        1.377
    """
    return epsilon_of_mu(clt_mu(noise_multiplier, sampling_probability, steps), delta)


def clt_mu_of_events(charges: Iterable[tuple[dp_accounting.DpEvent, int]]) -> float | None:
    """Returns μ of a composition, √Σ μ²; None unless all are Gaussians on all records or a lot."""
    total = 0.0
    for event, count in charges:
        q, gaussian = 1.0, event
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            q, gaussian = event.sampling_probability, event.event
        if isinstance(event, dp_accounting.NoOpDpEvent):
            continue
        if not isinstance(gaussian, dp_accounting.GaussianDpEvent):
            return None
        total += clt_mu(gaussian.noise_multiplier, q, count) ** 2
    return math.sqrt(total)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Returns ε at δ of μ-Gaussian differential privacy."""
    delta = check_delta(delta)
    if mu == 0:
        return 0.0
    # ε of order μ²/2: beyond this the closed form's search leaves the floats.
    if mu > 1e100:
        return math.inf
    # Here, because older versions of dp_accounting, which the rest of this package works with, lack
    # this module.
    from dp_accounting import gaussian_mechanism

    with np.errstate(divide="ignore"):  # log 0 = −∞ is meant
        return float(gaussian_mechanism.get_epsilon_gaussian(1 / mu, delta))


def clt_sampling_probability(
    epsilon: float, delta: float, noise_multiplier: float, steps: int
) -> float:
    """Estimates the q at which `clt_epsilon` is ε > 0, the start of a search.

    From ε ≈ μ²/2 + μ√(2 log(1/δ)), within a factor of two; 0 if μ is infinite for every q.
    """
    tail = 2 * math.log(1 / delta)
    mu = math.sqrt(tail + 2 * epsilon) - math.sqrt(tail)
    one = clt_mu(noise_multiplier, 0.5, steps) / 0.5
    return mu / one if 0 < one < math.inf else 0.0
