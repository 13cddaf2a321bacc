"""Computes the privacy cost of a random number of trials of which only the best is released."""

import dp_accounting
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from tf_adadp.utils.checks import check_integer, check_number

# η of the truncated negative binomial law, in the paper's notation; 1 is the geometric law.
_GEOMETRIC = 1.0


def search_event(
    event: dp_accounting.DpEvent, steps: int, mean_trials: float
) -> dp_accounting.DpEvent:
    """Returns the event of a search: independent trials, of which the best one is released.

    A trial draws hyper-parameters from a public space and makes `steps` releases of `event`. After
    every trial the search ends with probability 1/mean_trials, so that the number K of trials is
    geometric:

        P(K = k) = (1 − 1/m)^(k−1) / m,    k ≥ 1,    m = mean_trials.

    Guarantee: the winner, its hyper-parameters and its score satisfy the Rényi bound of Papernot
    and Steinke (2022, "Hyperparameter Tuning with Renyi Differential Privacy", Theorem 2 with
    η = 1), under the neighbouring relation of `event`, provided that K and everything about
    the losing trials stay secret. `dp_accounting` computes it for the "rdp" accountant only.

    To find the noise with which a search fits into a budget:

        ledger.calibrate_noise_multiplier(
            2.0, 1e-5, law, steps=1, step=lambda sigma: search_event(law.event(sigma), 100, 10)
        )

    Args:
      event: one release of a trial, usually `law.event(noise_multiplier)`.
      steps: the number of releases of a trial, ≥ 1.
      mean_trials: m, the mean number of trials, finite and ≥ 1.

    Raises:
      ValueError: steps or mean_trials is out of range.

    Example:
        >>> law = accounting.PoissonSampling(num_examples=60000, expected_size=600)
        >>> event = accounting.search_event(law.event(1.0), steps=100, mean_trials=10)
        >>> ledger = dp.PrivacyLedger()
        >>> ledger.add(event)
        >>> round(ledger.epsilon(1e-5), 2)
        2.24
    """
    steps = check_integer("steps", steps, at_least=1)
    return best_of_trials(dp_accounting.SelfComposedDpEvent(event, steps), mean_trials)


def best_of_trials(trial: dp_accounting.DpEvent, mean_trials: float) -> dp_accounting.DpEvent:
    """Returns the event of a search whose trials are described by `trial`; see `search_event`."""
    return RepeatAndSelectDpEvent(trial, check_mean_trials(mean_trials), _GEOMETRIC)


def check_mean_trials(value: float) -> float:
    """Returns the mean number of trials; raises ValueError for one that is not bounded."""
    wanted = (
        "the mean number of trials, a finite number of at least 1. A search without a bounded mean "
        "has no bounded cost"
    )
    return check_number("mean_trials", value, wanted, at_least=1)


def is_search(event: dp_accounting.DpEvent) -> bool:
    """Tells whether an event is that of a search."""
    return isinstance(event, RepeatAndSelectDpEvent)


def releases_of_winner(event: dp_accounting.DpEvent) -> int:
    """Returns the number of releases of a search's winner; 1 for any other event."""
    return _releases(event.event) if is_search(event) else 1


def _releases(event):
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return event.count * _releases(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sum(map(_releases, event.events))
    return 1
