"""Computes the cases by `tf_adadp.accounting`, on whichever dp_accounting is installed."""

import dp_accounting

from tf_adadp import accounting

_NO_LIMIT = {"epsilon": 1e9, "delta": 0.5}
_RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


def epsilon(training, accountant="rdp"):
    """ε of a `Training`."""
    sigma, delta = training.noise_multiplier, training.delta
    if training.lots in ("poisson", "full"):
        q = 1.0 if training.lots == "full" else training.sampling_probability
        return accounting.epsilon(sigma, q, training.steps, delta, accountant)
    if training.lots == "fixed":
        law = accounting.FixedSizeSampling(training.num_examples, training.lot_size)
        event = law.event(sigma)
    else:
        law = accounting.PoissonSampling(training.num_examples, training.lot_size)
        event = law.event(sigma, microbatched=True)
    ledger = accounting.PrivacyLedger()
    ledger.add(event, count=training.steps, law=law)
    return ledger.epsilon(delta, accountant)


def noise_multiplier(budget):
    """σ* that a `Budget` needs."""
    return accounting.calibrate_noise_multiplier(
        budget.target_epsilon, budget.delta, budget.sampling_probability, budget.steps
    )


def renyi_divergences(training, orders):
    """The Rényi bound of one step at each order."""
    event = accounting.PoissonSampling(training.num_examples, training.lot_size).event(
        training.noise_multiplier
    )
    return [
        accounting.RenyiFilter(order, neighboring_relation=_RELATION, **_NO_LIMIT).cost(event)
        for order in orders
    ]


def figures(cases):
    """Returns all of them: a dict of lists in the order of the cases.

    Args:
        cases: the module `cases`.
    """
    return {
        "epsilon": [epsilon(training) for training in cases.GRID],
        "pld": [epsilon(training, "pld") for training in cases.PLD_GRID],
        "other_lots": [epsilon(training) for training in cases.OTHER_LOTS],
        "noise_multiplier": [noise_multiplier(budget) for budget in cases.BUDGETS],
        # One of eight of the grid: each noise multiplier and sampling probability once.
        "renyi": [renyi_divergences(training, cases.ORDERS) for training in cases.GRID[::8]],
    }
