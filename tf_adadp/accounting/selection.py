"""Computes the privacy cost of choosing one of several candidates by scores of a random lot."""

import dp_accounting

from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.utils.checks import check_number


def selection_event(law: SamplingLaw, selection_epsilon: float) -> dp_accounting.DpEvent:
    """Returns the event of one exponential mechanism on a lot drawn by `law`.

    The mechanism chooses k with probability ∝ exp(−ε_s·score_k/Δ), score_k a sum over the lot of
    values in [0, C]; Δ = C if neighbouring lots differ by one added or removed example, 2C if one
    is replaced. In both cases the log-ratios of the probabilities on neighbouring lots lie in an
    interval of length ε_s that contains 0.

    Each sampling law has its own bound and proof: `PoissonSampling.selection_event`,
    `FixedSizeSampling.selection_event`.

    Args:
      law: Poisson or fixed-size sampling, or another law with such a bound.
      selection_epsilon: ε_s > 0.

    Raises:
      ValueError: a law without a bound, or ε_s out of range.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> accounting.selection_event(law, selection_epsilon=0.1)
        ZCDpEvent(rho=1.3811625424755317e-07, xi=0.0)
    """
    epsilon = check_number("selection_epsilon", selection_epsilon, above=0)
    return law.selection_event(epsilon)
