"""Compares each sampling law with lower bounds on ε of its worst known pair of data sets.

Every lower bound is P(A) − e^ε Q(A) for an event A, in closed form: nothing random here.
"""

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from scipy import stats

from tf_adadp.accounting import (
    FixedSizeSampling,
    PoissonSampling,
    PrivacyLedger,
    ShuffledSampling,
    TruncatedPoissonSampling,
    UserSampling,
)

EPSILONS = (0.1, 0.5, 1.0, 2.0)


def claimed(law, sigma, steps, epsilon, accountant="pld", position=0):
    """δ by the ledger."""
    ledger = PrivacyLedger()
    for event, count in law.charges(law.event(sigma), steps, position):
        ledger.add(event, count, law=law)
    return ledger.delta(epsilon, accountant)


def best_threshold_test(p, q, epsilon, sigma):
    """The largest P(A) − e^ε Q(A), in both directions, over half-lines A: a lower bound of δ.

    p, q: {mean: weight} of mixtures of Gaussians of standard deviation σ.
    """
    t = np.linspace(min((*p, *q)) - 6 * sigma, max((*p, *q)) + 6 * sigma, 4001)
    above = [sum(w * stats.norm.sf(t, s, sigma) for s, w in mix.items()) for mix in (p, q)]
    pairs = (above, above[::-1], [1 - a for a in above], [1 - a for a in above[::-1]])
    return max(0.0, *(np.max(a - np.exp(epsilon) * b) for a, b in pairs))


def truncated_sums(num_others, probability, max_size, target):
    """{sum: probability} of a lot where the others are −1 each, without and with a record of +1."""
    without, with_record = {}, {}

    def put(table, value, weight):
        table[value] = table.get(value, 0.0) + weight

    for others in range(num_others + 1):
        weight = stats.binom.pmf(others, num_others, probability)
        put(without, -min(others, max_size), weight)
        put(with_record, -min(others, max_size), weight * (1 - probability))
        stays = min(1.0, max_size / (others + 1))  # of a uniform subset of all that were drawn
        put(with_record, target - min(others, max_size - 1), weight * probability * stays)
        if stays < 1:
            put(with_record, -max_size, weight * probability * (1 - stays))
    return without, with_record


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("law", "sigma"),
    [
        (TruncatedPoissonSampling(40, 4, 9), 1.5),
        (TruncatedPoissonSampling(40, 36, 36), 2.0),
    ],
)
def test_truncated_lots_stay_below_their_claim(law, sigma):
    pair = truncated_sums(law.num_examples - 1, law.probability, law.max_size, 1)
    for epsilon in EPSILONS:
        assert best_threshold_test(*pair, epsilon, sigma) <= claimed(law, sigma, 1, epsilon) + 1e-9


def test_truncated_lots_charged_as_poisson_are_caught():
    law, sigma = TruncatedPoissonSampling(40, 36, 36), 2.0
    pair = truncated_sums(law.num_examples - 1, law.probability, law.max_size, 1)
    poisson = PoissonSampling(law.num_examples, law.expected_size)
    for epsilon in (0.5, 1.0):
        assert best_threshold_test(*pair, epsilon, sigma) > 2 * claimed(poisson, sigma, 1, epsilon)


def test_truncation_that_never_happens_costs_nothing():
    law = TruncatedPoissonSampling(2000, 20, 90)
    poisson = PoissonSampling(2000, 20)
    for epsilon in EPSILONS:
        delta = claimed(law, 2.0, 1, epsilon)
        assert delta == pytest.approx(claimed(poisson, 2.0, 1, epsilon), rel=1e-6, abs=1e-12)


def test_only_pld_knows_truncated_lots_and_the_refusal_says_so():
    law = TruncatedPoissonSampling(2000, 20, 40)
    for accountant in ("rdp", "theorem1"):
        with pytest.raises(ValueError, match='Use accountant="pld"'):
            claimed(law, 1.0, 10, 1.0, accountant)
    fixed = FixedSizeSampling(2000, 20)
    with pytest.raises(ValueError, match='Use accountant="rdp" or "theorem1"'):
        claimed(fixed, 1.0, 10, 1.0, "pld")


def shuffled_pass(lots, sigma, epsilon):
    """δ of the test "the largest of the sums of a pass exceeds t", at the best t.

    The record replaced is +1 in one data set and −1 in the other, where all records are −1: sums
    are N(0, σ²) but for one, uniformly one of the lots, which is N(2, σ²).
    """
    t = np.linspace(-4 * sigma, 2 + 8 * sigma, 4000)
    cdf = stats.norm.cdf(t / sigma)
    equal = 1 - cdf**lots
    differ = 1 - stats.norm.cdf((t - 2) / sigma) * cdf ** (lots - 1)
    return max(np.max(differ - np.exp(epsilon) * equal), 0.0)


@pytest.mark.parametrize("sigma", [0.7, 2.0])
@pytest.mark.parametrize("lots", [1, 2, 10])
def test_shuffled_epochs_stay_below_their_claim(lots, sigma):
    law = ShuffledSampling(num_examples=3 * lots, size=3)
    for epsilon in EPSILONS:
        lower = shuffled_pass(lots, sigma, epsilon)
        assert lower <= claimed(law, sigma, lots, epsilon) + 1e-9


@pytest.mark.parametrize(("lots", "sigma"), [(10, 0.5), (10, 0.7)])
def test_shuffled_epochs_charged_as_poisson_are_caught(lots, sigma):
    poisson = PoissonSampling(3 * lots, 3)
    for epsilon in (2.0, 4.0):
        assert shuffled_pass(lots, sigma, epsilon) > 2 * claimed(poisson, sigma, lots, epsilon)


def test_shuffled_epochs_whose_noise_is_not_halved_are_caught():
    """A pass of one lot is a Gaussian, and the claim is exact."""
    for epsilon in EPSILONS:
        lower = shuffled_pass(1, 1.0, epsilon)
        one = pld.privacy_loss_distribution.from_gaussian_mechanism(1.0)
        assert lower > 1.5 * one.get_delta_for_epsilon(epsilon)
        assert lower == pytest.approx(claimed(ShuffledSampling(3, 3), 1.0, 1, epsilon), rel=1e-3)


def test_a_pass_charged_in_part_is_caught():
    """Charged without its first lot, a pass would be free."""
    law = ShuffledSampling(30, 3)
    assert claimed(law, 1.0, 9, 0.5, position=1) == 0.0 < shuffled_pass(10, 1.0, 0.5)


@pytest.mark.parametrize("records_per_user", [1, 3])
def test_users_stay_below_their_claim_and_record_level_claims_are_caught(records_per_user):
    """A user puts +1 for each of k records into a lot of N(0, σ²)."""
    law, sigma = UserSampling(10, 2, records_per_user, 2 * records_per_user), 2.0
    pair = {0: 1.0}, {0: 1 - law.probability, records_per_user: law.probability}
    for epsilon in EPSILONS:
        lower = best_threshold_test(*pair, epsilon, sigma)
        assert lower <= claimed(law, sigma, 1, epsilon) + 1e-9
        assert lower == pytest.approx(claimed(law, sigma, 1, epsilon), rel=1e-2, abs=1e-6)
        if records_per_user > 1:
            of_one_record = claimed(PoissonSampling(10, 2), sigma, 1, epsilon)
            assert lower > 2 * of_one_record


def test_units_do_not_add_up():
    users, records = UserSampling(1000, 10, 2, 15), PoissonSampling(1000, 10)
    pca = dp_accounting.GaussianDpEvent(5.0)
    for other in ({"event": records.event(1.0), "law": records}, {"event": pca}):
        ledger = PrivacyLedger()
        ledger.add(users.event(1.0), 5, law=users)
        assert ledger.epsilon(1e-5) > 0
        with pytest.raises(ValueError, match="one record and others one user"):
            ledger.preview(other["event"], 1, 1e-5, law=other.get("law"))
        ledger.add(**other)
        with pytest.raises(ValueError, match="do not add up"):
            PrivacyLedger.from_json(ledger.to_json()).epsilon(1e-5)
        statement = ledger.statement(1e-5)
        assert "NOT AVAILABLE" in statement
        assert "one user: all records" in statement
        assert "one record of the training data" in statement


def test_bounds_per_user_may_change_between_releases():
    ledger = PrivacyLedger()
    for law in (UserSampling(1000, 10, 2, 15), UserSampling(1000, 20, 5, 60)):
        ledger.add(law.event(3.0), 5, law=law)
    assert ledger.epsilon(1e-5) > 0


def test_the_statement_names_the_user():
    law = UserSampling(1000, 10, 2, 15)
    ledger = PrivacyLedger()
    ledger.add(law.event(3.0), 5, law=law)
    words = " ".join(ledger.statement(1e-5).split())
    assert "Unit of privacy: one user: all records of the training data with that user's" in words
    assert "data sets that differ by adding or removing one user" in words
    assert "at most 2 of the user's records" in words
    assert "one record" not in words
    with pytest.warns(UserWarning, match="not below 1/1000, one over the number of users"):
        ledger.epsilon(1e-3)


def test_one_more_record_may_cost_less_under_truncation():
    """Why the law is stated for N records and not, to be safe, for N + 1."""
    truncated = pld.privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism
    two, three = (
        truncated(n, 0.5, 1, 1.0, value_discretization_interval=1e-3).get_delta_for_epsilon(0.2)
        for n in (2, 3)
    )
    assert three < 0.97 * two
