"""The Rényi filter, and what a noisy choice costs, against exact computation."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

from tf_adadp.accounting import FixedSizeSampling, PoissonSampling, UnknownSampling
from tf_adadp.accounting.accountants import Composition
from tf_adadp.accounting.amplification import amplified
from tf_adadp.accounting.filters import RenyiFilter
from tf_adadp.accounting.selection import selection_event

ADD, REPLACE = (
    dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    (dp_accounting.NeighboringRelation.REPLACE_ONE),
)
LAW = PoissonSampling(1000, 100)
DELTA = 1e-5


# The filter.


@pytest.mark.parametrize(("order", "epsilon", "delta"), [(6.0, 3.0, 1e-5), (20.0, 1.0, 1e-6)])
def test_a_spent_budget_is_the_epsilon_promised(order, epsilon, delta):
    budget = RenyiFilter(order, epsilon, delta, ADD).budget
    assert compute_epsilon([order], [budget], delta)[0] == pytest.approx(epsilon, rel=1e-8)
    assert compute_epsilon([order], [budget], delta)[0] <= epsilon


def test_arguments():
    for order in (7.77, 1.0, math.nan, 0.5):
        with pytest.raises(ValueError, match="order"):
            RenyiFilter(order, 1.0, DELTA, ADD)
    with pytest.raises(ValueError, match="no Rényi budget"):
        RenyiFilter(2.0, 1.0, DELTA, ADD)
    with pytest.raises(ValueError, match="finite number > 0"):
        RenyiFilter(8.0, math.inf, DELTA, ADD)


def test_the_error_names_the_least_epsilon_of_renyi_accounting():
    event, nothing = LAW.event(1e6), Composition.of([], ADD)
    with pytest.raises(ValueError, match='no budget below 0.0035 .*accountant="pld"'):
        RenyiFilter.for_event(event, 0.0034, DELTA, nothing)
    assert RenyiFilter.for_event(event, 0.0036, DELTA, nothing).remaining(nothing, event) > 0


def test_what_has_no_finite_cost_never_passes():
    guard = RenyiFilter(12.0, 3.0, DELTA, ADD)
    small = dp_accounting.ZCDpEvent(1e-9)
    assert guard.has_room(0.0, [small])
    assert not guard.has_room(math.nan, [small])
    assert not guard.has_room(math.inf, [small])
    assert not guard.has_room(0.0, [dp_accounting.NonPrivateDpEvent()])
    with pytest.raises(ValueError, match="cannot analyse"):
        guard.has_room(0.0, [dp_accounting.UnsupportedDpEvent()])
    assert guard.cost_of(Composition.of([(small, 2), (dp_accounting.NonPrivateDpEvent(), 1)])) == (
        math.inf
    )


def test_a_composition_costs_what_its_events_cost_one_by_one():
    guard = RenyiFilter(12.0, 3.0, DELTA, ADD)
    noisy, choice = LAW.event(3.0), selection_event(LAW, 0.1)
    spent = Composition.of([(noisy, 3), (choice, 2), (noisy, 4)])
    expected = math.fsum([7 * guard.cost(noisy), 2 * guard.cost(choice)])
    assert guard.cost_of(spent) == pytest.approx(expected, rel=1e-12)
    assert guard.cost_of(Composition.of([])) == 0.0


def test_orders_without_a_finite_cost_are_not_chosen():
    event = PoissonSampling(120, 30).event(1.0)  # dp_accounting finds no cost at orders below 1.8
    spent = Composition.of([(event, 2)])
    chosen = RenyiFilter.for_event(event, 11.0, 1e-3, spent)
    assert math.isfinite(chosen.cost(event))
    assert chosen.remaining(spent, event) > 10


def run_until_refused(guard, next_event, steps=300):
    """The events that a filter let pass, from a strategy that sees all there is to see."""
    spent, passed, refusals = 0.0, [], 0
    for _ in range(steps):
        event = next_event(spent, passed)
        if guard.has_room(spent, [event]):
            spent += guard.cost(event)
            passed.append(event)
        else:
            refusals += 1
    return passed, refusals


@pytest.mark.parametrize("seed", range(4))
def test_no_adaptive_sequence_exceeds_the_budget(seed):
    rng = np.random.default_rng(seed)
    guard = RenyiFilter(float(rng.choice([5.0, 8.0, 16.0])), 4.0, DELTA, ADD)
    zcdp = [dp_accounting.ZCDpEvent(rho) for rho in (1e-3, 0.01, 0.05, 0.3, 2.0)]
    gaussians = [LAW.event(sigma) for sigma in (0.6, 1.0, 1.5, 4.0)]

    def greedy(spent, passed):
        """The dearest that seems to fit, or what would just pass the border."""
        left = (guard.budget - spent) / guard.order
        choices = [
            dp_accounting.ZCDpEvent(max(0.0, left * factor)) for factor in (0.5, 0.99, 1.01, 3)
        ]
        return [*choices, *zcdp, *gaussians][rng.integers(len(choices) + 9)]

    passed, refusals = run_until_refused(guard, greedy)
    assert refusals > 0
    spent = sum(guard.cost(e) for e in passed)
    assert 0.9 * guard.budget < spent <= guard.budget * (1 + 1e-12)
    assert Composition.of([(e, 1) for e in passed], ADD).epsilon(DELTA, "rdp") <= 4.0


def test_calibration_fits_the_plan_and_hardly_more():
    def rounds(sigma, count=60):
        return [(LAW.event(sigma), count), (selection_event(LAW, 2 / sigma), count)]

    sigma, guard = RenyiFilter.calibrate(rounds, 2.0, DELTA, ADD)

    def spent(count):
        return sum(n * guard.cost(event) for event, n in rounds(sigma, count))

    assert spent(60) <= guard.budget < spent(61)
    with pytest.raises(ValueError, match="too small"):
        RenyiFilter.calibrate(rounds, 1e-7, DELTA, ADD)


# The cost of a choice.


def distribution(scores, epsilon, sensitivity):
    weights = np.exp(-epsilon * (scores - scores.min(-1, keepdims=True)) / sensitivity)
    return weights / weights.sum(-1, keepdims=True)


def renyi(p, q, order):
    return math.log(np.sum(p**order * q ** (1 - order))) / (order - 1)


def poisson_output(records, q, epsilon):
    """The law of the choice, exactly: all subsets of `records` [n, candidates]."""
    total = 0.0
    for kept in itertools.product([0, 1], repeat=len(records)):
        kept = np.array(kept)
        probability = q ** kept.sum() * (1 - q) ** (len(records) - kept.sum())
        total = total + probability * distribution(kept @ records, epsilon, 1.0)
    return total


def fixed_output(records, size, epsilon):
    subsets = list(itertools.combinations(range(len(records)), size))
    return np.mean([distribution(records[list(s)].sum(0), epsilon, 2.0) for s in subsets], 0)


def losses(rng, rows, candidates=4):
    """Clipped losses: ends of [0, 1] as often as not, where the worst cases are."""
    shape = (rows, candidates)
    return np.where(rng.random(shape) < 0.7, rng.integers(0, 2, shape), rng.random(shape))


@pytest.mark.parametrize(("q", "epsilon"), [(0.25, 0.5), (0.5, 2.0), (1.0, 1.0)])
def test_poisson_choice_costs_no_more_than_charged(q, epsilon):
    law = PoissonSampling(4, 4 * q)
    rho = selection_event(law, epsilon).rho
    rng = np.random.default_rng(1)
    worst = 0.0
    for _ in range(400):
        records = losses(rng, 3, rng.integers(2, 6)) * 1.0
        without, with_it = (poisson_output(r, q, epsilon) for r in (records[:-1], records))
        for order in (1.5, 2.0, 8.0, 40.0):
            for pair in ((without, with_it), (with_it, without)):
                worst = max(worst, renyi(*pair, order) / (order * rho))
    assert worst <= 1 + 1e-9
    assert worst > 0.5  # so half of the charge would be caught


@pytest.mark.parametrize(("size", "epsilon"), [(1, 0.5), (2, 2.0), (4, 1.0)])
def test_fixed_size_choice_costs_no_more_than_charged(size, epsilon):
    law = FixedSizeSampling(4, size)
    rho = selection_event(law, epsilon).rho
    rng = np.random.default_rng(2)
    worst = pure = 0.0
    for _ in range(400):
        records = losses(rng, 4, rng.integers(2, 6)) * 1.0
        other = records.copy()
        other[0] = losses(rng, 1, records.shape[1])
        p, r = (fixed_output(x, size, epsilon) for x in (records, other))
        pure = max(pure, np.abs(np.log(p / r)).max())
        for order in (1.5, 2.0, 8.0, 40.0):
            worst = max(worst, renyi(p, r, order) / (order * rho))
    assert worst <= 1 + 1e-9
    assert pure <= amplified(epsilon, size / 4) + 1e-9
    assert pure > 0.4 * amplified(epsilon, size / 4)


def test_amplification():
    for q, epsilon in itertools.product([0.0, 1e-3, 0.3, 1.0], [1e-6, 0.5, 1.0, 30.0]):
        naive = math.log(1 + q * (math.exp(epsilon) - 1))
        assert amplified(epsilon, q) == pytest.approx(naive, rel=1e-9, abs=1e-15)
    assert amplified(5000.0, 0.01) == pytest.approx(5000 + math.log(0.01))


def test_sampling_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="not known"):
        selection_event(UnknownSampling("why"), 1.0)
    for epsilon in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="selection_epsilon"):
            selection_event(LAW, epsilon)
