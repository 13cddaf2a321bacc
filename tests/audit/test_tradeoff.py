"""Bounds for mechanisms of a known law: no larger than the truth, and near it.

Seeds are fixed, so these tests pass or fail for good. Over random seeds an assertion on a frequency
would raise a false alarm once in a million (`too_many`), any other "bound ≤ claim" at 95 % one time
in 20 at most, and about one in 300 where the draws are many.
"""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import special, stats

import tf_adadp as dp
from tf_adadp import accounting, audit
from tf_adadp.audit import families

DELTA = 1e-5
FALSE_ALARM = 1e-6
Q, STEPS = 0.1, 4


def too_many(count, trials, probability):
    """Tells whether so many events of at most this probability are no coincidence."""
    return stats.binom.sf(count - 1, trials, probability) < FALSE_ALARM


def full_batch(target):
    """(σ, ε) of one step at q = 1."""
    sigma = accounting.calibrate_noise_multiplier(target, DELTA, 1.0, 1, "pld")
    return sigma, accounting.epsilon(sigma, 1.0, 1, DELTA, "pld")


def gaussian_pair(seed, sigma, draws):
    rng = np.random.default_rng(seed)
    return rng.normal(0, sigma, draws), rng.normal(1, sigma, draws)


def sampled_event(sigma, q=Q, steps=STEPS):
    law = accounting.PoissonSampling(1000, 1000 * q)
    return dp_accounting.SelfComposedDpEvent(law.event(sigma), steps)


def sampled_scores(rng, sigma, present, q=Q, steps=STEPS):
    """Log-ratios of `steps` releases, one row for each entry of `present`: 0 for D, 1 for D'."""
    drawn = rng.random((steps, len(present))) < q
    released = rng.normal(drawn * present, sigma)
    return np.log1p(q * np.expm1((released - 0.5) / sigma**2)).sum(axis=0)


def sampled_pair(seed, sigma, draws):
    rng = np.random.default_rng(seed)
    return sampled_scores(rng, sigma, np.zeros(draws)), sampled_scores(rng, sigma, np.ones(draws))


# Gaussian releases on all records.


@pytest.mark.parametrize("target", [1.0, 4.0])
def test_a_million_draws_come_within_a_tenth_of_the_claim(target):
    """`epsilon_lower_bound` stays below 2/3 of it for the same draws."""
    sigma, claim = full_batch(target)
    pair = gaussian_pair(1, sigma, 10**6)
    found = audit.gaussian_epsilon_lower_bound(*pair, DELTA)
    assert claim / 1.10 <= found.epsilon <= claim
    assert found.mu <= 1 / sigma
    assert audit.epsilon_lower_bound(*pair, DELTA).epsilon < claim / 1.25


@pytest.mark.representative(2)
@pytest.mark.parametrize("target", [1.0, 4.0])
@pytest.mark.parametrize(("share", "draws"), [(0.9, 10**6), (0.8, 10**5), (0.67, 10**5)])
def test_less_noise_than_charged_is_caught(target, share, draws):
    """And passes `epsilon_lower_bound`."""
    sigma, claim = full_batch(target)
    pair = gaussian_pair(2, share * sigma, draws)
    assert audit.gaussian_epsilon_lower_bound(*pair, DELTA).epsilon > claim
    assert audit.epsilon_lower_bound(*pair, DELTA).epsilon < claim


def test_the_gaussian_bound_exceeds_the_truth_no_more_often_than_it_says():
    """No more than a fifth of 500 bounds at 80 % confidence are wrong."""
    truth = accounting.epsilon(1.0, 1.0, 1, DELTA, "pld")
    found = [
        audit.gaussian_epsilon_lower_bound(*gaussian_pair(seed, 1.0, 400), DELTA, 0.8).epsilon
        for seed in range(500)
    ]
    assert not too_many(sum(e > truth for e in found), 500, 0.2)
    assert too_many(sum(e > truth / 2 for e in found), 500, 0.2)  # so that this test can fail


def test_what_is_assumed_for_epsilon_is_not_assumed_for_mu():
    """Randomised response at ε = 1: no Gaussian, so only μ is right.

    Its one test has error rates α = β = 1/(1 + e), which is μ = 2Φ⁻¹(1 − α).
    """
    rng = np.random.default_rng(3)
    wrong = 1 / (1 + math.e)
    draws = rng.random((2, 200_000))
    found = audit.gaussian_epsilon_lower_bound(draws[0] < wrong, draws[1] >= wrong, DELTA)
    assert 0.98 < found.mu / (-2 * special.ndtri(wrong)) <= 1
    assert found.epsilon > 1.0
    assert audit.epsilon_lower_bound(draws[0] < wrong, draws[1] >= wrong, DELTA).epsilon <= 1.0


def test_equal_samples_prove_nothing():
    rng = np.random.default_rng(4)
    pair = rng.normal(size=(2, 2000))
    found = audit.gaussian_epsilon_lower_bound(*pair, DELTA, 0.999)
    assert (found.epsilon, found.mu) == (0.0, 0.0)
    event = dp_accounting.GaussianDpEvent(4.0)
    law = audit.law_epsilon_lower_bound(*pair, event, DELTA, 0.999)
    assert (law.epsilon, law.refuted, law.noise_scale) == (0.0, False, math.inf)


@pytest.mark.representative(1)
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_either_data_set_and_either_tail_may_be_the_likely_one(flipped, sign):
    pair = [sign * s for s in gaussian_pair(5, 2.0, 20_000)][:: -1 if flipped else 1]
    assert audit.gaussian_epsilon_lower_bound(*pair, DELTA).mu > 0.4
    event = dp_accounting.GaussianDpEvent(4.0)
    assert audit.law_epsilon_lower_bound(*pair, event, DELTA).noise_scale < 0.6


# The trade-off function of a claim.


def test_the_trade_off_function_of_gaussians_is_gaussian():
    """Approaches 50 Gaussians of σ = 5, one of μ = √2, from below within 0.1 %."""
    alpha = np.logspace(-6, -0.01, 200)
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(5.0), 50)
    f = families.ClaimFamily(event).trade_off(0)(alpha)
    exact = special.ndtr(-special.ndtri(alpha) - math.sqrt(2))
    assert (f <= exact + 1e-12).all()
    assert f == pytest.approx(exact, rel=2e-3, abs=1e-6)
    half = families.ClaimFamily(event).trade_off(64)(alpha)  # twice the noise
    assert half == pytest.approx(special.ndtr(-special.ndtri(alpha) - math.sqrt(0.5)), rel=2e-3)


def test_the_trade_off_function_of_a_sampled_step():
    """Never above the exact one, in neither direction, and at it for likelihood ratios above 1.

    N(0, σ²) against (1 − q)·N(0, σ²) + q·N(1, σ²), told apart by a threshold.
    """
    sigma, q = 0.7, 0.1
    thresholds = np.linspace(-3, 4.5, 200)
    out = special.ndtr(thresholds / sigma)
    within = (1 - q) * out + q * special.ndtr((thresholds - 1) / sigma)
    f = families.ClaimFamily(sampled_event(sigma, q, 1)).trade_off(0)
    assert (f(1 - out) <= within + 1e-12).all()
    assert (f(within) <= 1 - out + 1e-12).all()
    steep = (thresholds > 0.55) & (thresholds < 2.5)
    np.testing.assert_allclose(f(1 - out[steep]), within[steep], rtol=5e-4)
    assert f(np.array([0.0, 1.0])) == pytest.approx([1.0, 0.0], abs=1e-8)


@pytest.mark.extended
@pytest.mark.parametrize("tests", [50, pytest.param(200, marks=pytest.mark.nightly)])
def test_a_true_claim_is_refuted_no_more_often_than_is_said(tests, monkeypatch):
    """Sampled lots: at 80 % confidence no more than a fifth of the tests are wrong."""
    monkeypatch.setattr(families.ClaimFamily, "steps", 8)  # fewer distributions to compute
    sigma, q = 0.7, 0.3
    event = sampled_event(sigma, q, 1)
    truth = accounting.epsilon(sigma, q, 1, DELTA, "pld")
    rng, found = np.random.default_rng(6), []
    for _ in range(tests):
        pair = (sampled_scores(rng, sigma, np.full(2000, d), q, 1) for d in (0, 1))
        found.append(audit.law_epsilon_lower_bound(*pair, event, DELTA, 0.8))
    assert not too_many(sum(bound.refuted for bound in found), tests, 0.2)
    assert too_many(sum(bound.noise_scale < 2 for bound in found), tests, 0.2)  # it can fail
    for bound in found:
        assert bound.refuted == (bound.noise_scale <= 1)
        assert bound.refuted == (bound.epsilon >= bound.claim)
        assert bound.claim == truth


@pytest.mark.extended
@pytest.mark.parametrize("target", [1.0, pytest.param(4.0, marks=pytest.mark.nightly)])
def test_sampled_lots_with_less_noise_than_charged_are_caught(target):
    """And pass `epsilon_lower_bound`; 10⁵ draws."""
    sigma = accounting.calibrate_noise_multiplier(target, DELTA, Q, STEPS, "pld")
    event = sampled_event(sigma)
    honest = audit.law_epsilon_lower_bound(*sampled_pair(6, sigma, 10**5), event, DELTA)
    assert not honest.refuted
    assert honest.claim / 2 < honest.epsilon < honest.claim
    faulty = sampled_pair(6, 0.8 * sigma, 10**5)
    found = audit.law_epsilon_lower_bound(*faulty, event, DELTA)
    assert found.refuted
    assert found.epsilon > found.claim
    assert audit.epsilon_lower_bound(*faulty, DELTA).epsilon < found.claim


@pytest.mark.extended
def test_a_ledger_is_a_claim():
    optimizer = dp.DPSGD(noise_multiplier=1.0)
    ledger = accounting.PrivacyLedger()
    optimizer.charge(ledger, accounting.PoissonSampling(10, 10), 1)
    pair = gaussian_pair(7, 1.0, 4000)
    event = dp_accounting.GaussianDpEvent(1.0)
    by_ledger, by_event = (
        audit.law_epsilon_lower_bound(*pair, claim, DELTA) for claim in (ledger, event)
    )
    assert by_ledger == by_event
    assert by_ledger.claim == ledger.epsilon(DELTA, "pld")
    gaussian = audit.gaussian_epsilon_lower_bound(*pair, DELTA)
    assert gaussian.epsilon / 1.03 < by_ledger.epsilon <= gaussian.epsilon


def test_the_search_ends_at_its_ends():
    family = families.GaussianFamily()
    assert family.least_refuted(lambda f: True) == -6 * 512
    assert family.least_refuted(lambda f: False) is None
    for mu in (0.01, 0.9, 1.0, 1.1, 30.0):
        alpha = special.ndtr(-mu / 2)
        k = family.least_refuted(lambda f, alpha=alpha: f(alpha) > alpha)
        assert 1 / family.scale(k) <= mu < 1 / family.scale(k - 1)
    assert family.epsilon(None, DELTA) == 0.0


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("gaussian", "claim='gaussian'"),
        (accounting.PrivacyLedger(), "epsilon=0.0"),
        (dp_accounting.NonPrivateDpEvent(), "epsilon=inf"),
        (dp_accounting.ZCDpEvent(0.5, 0.0), "cannot analyse"),
    ],
)
def test_claims_that_are_refused(claim, message):
    with pytest.raises(ValueError, match=message):
        audit.law_epsilon_lower_bound(*gaussian_pair(8, 1.0, 9), claim, DELTA)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2, 3], [1.0] * 9, DELTA), "scores has shape"),
        (([1.0] * 9, [math.nan] * 9, DELTA), "neighbor_scores hold NaN"),
        (([1.0] * 9, [1.0] * 9, 0.0), "delta=0.0"),
        (([1.0] * 9, [1.0] * 9, DELTA, 1.0), "confidence=1.0"),
    ],
)
def test_what_the_gaussian_bound_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        audit.gaussian_epsilon_lower_bound(*arguments)


# One run.


def slow_refutes(trade_off, m, r, v, level):
    """The paper's recursion for r and h, list by list."""
    right, wrong = [0.0] * (v + 1), [0.0] * (v + 1)
    right[v], wrong[v] = level * v / m, level * (r - v) / m
    for i in range(v - 1, -1, -1):
        wrong[i] = max(wrong[i + 1], float(trade_off(1 - min(right[i + 1], 1.0))))
        right[i] = right[i + 1] + i / (r - i) * (wrong[i] - wrong[i + 1])
    return right[0] + wrong[0] > r / m


@pytest.mark.parametrize(("m", "r"), [(7, 7), (40, 10), (40, 33), (200, 200)])
def test_the_recursion_is_the_papers(m, r):
    for v in range(0, r + 1, max(1, r // 7)):
        for mu in (0.1, 0.5, 1.0, 2.0, 4.0):
            for level in (0.4, 0.05, 1e-4):

                def trade_off(alpha, mu=mu):
                    return special.ndtr(-special.ndtri(alpha) - mu)

                fast = audit.tradeoff._guesses_refute(trade_off, m, r, v, level)
                assert fast == slow_refutes(trade_off, m, r, v, level), (v, mu, level)


@pytest.mark.parametrize(("m", "r", "v"), [(5, 5, 4), (8, 6, 5), (12, 6, 6), (9, 9, 8)])
def test_the_recursion_finds_the_worst_distribution(m, r, v):
    """The theorem's constraints are linear for f of (ε, δ): the largest P_v is a linear program."""
    from scipy import optimize

    epsilon, delta = 0.8, 0.01
    grown = math.exp(epsilon)
    lines = [(1 - delta, grown), ((1 - delta) / grown, 1 / grown)]  # f(α) ≥ a − b·α

    def trade_off(alpha):
        return max(0.0, *(a - b * alpha for a, b in lines))

    k = np.arange(r + 1)
    rows, limits = [], []
    for i in range(1, r + 1):
        right, wrong = k * (k >= i) / m, (r - k) * (k >= i - 1) / m
        for a, b in lines:  # wrong ≥ a − b·(1 − right)
            rows.append(b * right - wrong)
            limits.append(b - a)
    worst = -optimize.linprog(
        -(k >= v).astype(float), rows, limits, np.ones((1, r + 1)), [1.0], bounds=(0, 1)
    ).fun
    assert 0.05 < worst < 0.95
    assert audit.tradeoff._guesses_refute(trade_off, m, r, v, worst + 1e-6)
    assert not audit.tradeoff._guesses_refute(trade_off, m, r, v, worst - 1e-6)


def canaries(rng, mu, m):
    """Scores of m canaries, each in by a coin and seen through a Gaussian mechanism of its own."""
    coins = rng.random(m) < 0.5
    return rng.normal(mu * (coins - 0.5), 1.0), coins


@pytest.mark.extended
@pytest.mark.parametrize("num_guesses", [None, 30])
def test_one_run_of_gaussians(num_guesses):
    """600 runs at 80 %: wrong in no more than a fifth of them, and above Steinke's on average."""
    rng, mu = np.random.default_rng(9), 1.0
    truth = accounting.epsilon(1 / mu, 1.0, 1, DELTA, "pld")
    found, steinke = [], []
    for _ in range(600):
        run = canaries(rng, mu, 120)
        found.append(audit.one_run_bound(*run, DELTA, 0.8, num_guesses, "gaussian"))
        steinke.append(audit.one_run_bound(*run, DELTA, 0.8, num_guesses).epsilon)
    epsilons = np.array([bound.epsilon for bound in found])
    assert not too_many(np.sum(epsilons > truth), 600, 0.2)
    assert np.mean(epsilons) > 1.5 * np.mean(steinke)
    assert {bound.method for bound in found if bound.epsilon > 0} == {"f-dp"}
    assert all(bound.steinke_epsilon <= e for bound, e in zip(found, steinke, strict=True))


def test_one_run_of_sampled_releases():
    """Canaries at the claim, 600 runs at level 0.2: no more than a fifth refute it, of any r."""
    rng, sigma, q, steps = np.random.default_rng(10), 1.0, 0.25, 8
    trade_off = families.ClaimFamily(sampled_event(sigma, q, steps)).trade_off(0)
    guesses = (20, 40, 80)
    refuted, by_more = np.zeros(3, int), np.zeros(3, int)
    for _ in range(600):
        coins = rng.random(80) < 0.5
        honest, faulty = (sampled_scores(rng, s, coins, q, steps) for s in (sigma, sigma / 4))
        for scores, count in ((honest, refuted), (faulty, by_more)):
            correct = [audit.best_guesses(scores, coins, r) for r in guesses]
            count += [
                audit.tradeoff._guesses_refute(trade_off, 80, r, v, 0.2)
                for r, v in zip(guesses, correct, strict=True)
            ]
    assert not any(too_many(count, 600, 0.2) for count in refuted)
    assert all(too_many(count, 600, 0.2) for count in by_more)


@pytest.mark.extended
def test_a_run_with_less_noise_than_charged_is_caught():
    """A tenth of the noise: Steinke's bound, of at most about log(guesses), passes it."""
    run = canaries(np.random.default_rng(11), 10.0, 400)
    event = dp_accounting.GaussianDpEvent(1.0)
    claim = accounting.epsilon(1.0, 1.0, 1, DELTA, "pld")
    assert audit.one_run_bound(*run, DELTA, num_guesses=200).epsilon < claim
    found = audit.one_run_bound(*run, DELTA, num_guesses=200, claim=event)
    assert found.epsilon > claim
    assert found.method == "f-dp"
    assert found.steinke_epsilon < claim


@pytest.mark.parametrize(
    ("correct", "before", "after"), [(108, 0.5251, 0.6783), (150, 3.2391, 5.1699)]
)
def test_the_bounds_of_docs_audits_are_no_smaller_than_steinkes(correct, before, after):
    """The membership attacks in docs/explanation/audits.md: 150 guesses, 600 records, 3 tries."""
    level = 0.05 / 3
    steinke = audit.one_run_epsilon_lower_bound(600, 150, correct, 1e-4, 1 - level)
    assert steinke == pytest.approx(before, abs=1e-4)
    at = 1 - 0.9 * level
    found = audit.one_run_fdp_epsilon_lower_bound(600, 150, correct, "gaussian", 1e-4, at)
    assert found == pytest.approx(after, abs=1e-4)


@pytest.mark.parametrize(("m", "delta"), [(100, 1e-5), (300, 1e-4), (600, 1e-4)])
def test_nine_tenths_of_the_level_are_enough(m, delta):
    """Whatever the number of correct guesses, where Steinke's bound is at least 0.05."""
    level = 0.05 / 3
    for r in (m // 16, m // 4, m):
        for v in range(r // 2, r + 1, max(1, r // 25)):
            steinke = audit.one_run_epsilon_lower_bound(m, r, v, delta, 1 - level)
            found = audit.one_run_fdp_epsilon_lower_bound(
                m, r, v, "gaussian", delta, 1 - 0.9 * level
            )
            assert found >= steinke or steinke < 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 11, 3, "gaussian", DELTA), "guesses=11"),
        ((10, 5, 3, "gauss", DELTA), "claim='gauss'"),
        ((10, 5, 3, "gaussian", 0.0), "delta=0.0"),
        ((10, 5, 3, "gaussian", DELTA, 0.0), "confidence=0"),
    ],
)
def test_what_one_run_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        audit.one_run_fdp_epsilon_lower_bound(*arguments)


def test_one_run_is_for_records_added_or_removed():
    ledger = accounting.PrivacyLedger()
    law = accounting.FixedSizeSampling(100, 10)
    ledger.add(law.event(1.0), 1, law=law)
    with pytest.raises(ValueError, match="claim is for REPLACE"):
        audit.one_run_fdp_epsilon_lower_bound(10, 5, 5, ledger, DELTA)
