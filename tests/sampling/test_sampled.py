"""The laws, by statistics. Seeds are fixed; with other seeds each test fails once in about 10^6."""

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from tf_adadp.accounting import FixedSizeSampling, PoissonSampling
from tf_adadp.sampling import FixedSizeLots, PoissonLots

ALPHA = 1e-6


def inclusion(lots, steps):
    """Boolean [steps, N]: which record is in which lot, read off the lots themselves."""
    table = np.zeros((steps, lots.num_examples), int)
    for step, ((x, _, _), mask) in enumerate(lots.take(steps, physical_batch_size=16)):
        np.add.at(table[step], x.numpy()[mask.numpy() == 1], 1)
    assert table.max() <= 1, "a record is twice in a lot"
    return table.astype(bool)


def counts_agree(counts, trials, probability):
    """Tells whether all Binomial(trials, probability) counts lie in their joint interval."""
    counts = np.asarray(counts)
    tail = ALPHA / counts.size / 2
    low = stats.binom.ppf(tail, trials, probability)
    high = stats.binom.isf(tail, trials, probability)
    return bool(((low <= counts) & (counts <= high)).all())


def pairs(table):
    joint = table.astype(float).T @ table
    return joint[np.triu_indices(table.shape[1], 1)]


def sizes_are_binomial(table, probability):
    """Chi-square test of the lot sizes, cells of at least 10 expected lots."""
    steps, records = table.shape
    cells = np.arange(records + 1)
    expected = steps * stats.binom.pmf(cells, records, probability)
    keep = expected >= 10
    observed = np.bincount(table.sum(1), minlength=records + 1)
    observed = np.append(observed[keep], observed[~keep].sum())
    expected = np.append(expected[keep], expected[~keep].sum())
    return stats.chisquare(observed, expected).pvalue > ALPHA


def variance_agrees(sizes, variance, fourth_moment):
    """Tells whether the sizes' variance is within 5 of its standard errors (5.7e-7 two-sided)."""
    error = np.sqrt((fourth_moment - variance**2) / len(sizes))
    return abs(np.mean((sizes - np.mean(sizes)) ** 2) - variance) < 5 * error


def binomial_moments(records, q):
    variance = records * q * (1 - q)
    return variance, variance * (1 + 3 * (records - 2) * q * (1 - q)) if records else 0


@pytest.fixture(scope="module")
def poisson_table():
    return inclusion(PoissonLots(np.arange(40), expected_size=5.0, seed=1), 6000)


def test_poisson_includes_each_record_with_probability_q(poisson_table):
    assert counts_agree(poisson_table.sum(0), 6000, 5 / 40)
    assert counts_agree(poisson_table.sum(), 6000 * 40, 5 / 40)


def test_poisson_includes_records_independently(poisson_table):
    assert counts_agree(pairs(poisson_table), 6000, (5 / 40) ** 2)


def test_poisson_lots_of_different_steps_are_independent(poisson_table):
    both = poisson_table[0::2] & poisson_table[1::2]
    assert counts_agree(both.sum(0), 3000, (5 / 40) ** 2)
    # Some other record in the next lot: the same probability, another kind of dependence.
    shifted = poisson_table[0::2] & np.roll(poisson_table[1::2], 1, axis=1)
    assert counts_agree(shifted.sum(0), 3000, (5 / 40) ** 2)


def test_poisson_lot_sizes_are_binomial(poisson_table):
    assert sizes_are_binomial(poisson_table, 5 / 40)
    assert variance_agrees(poisson_table.sum(1), *binomial_moments(40, 5 / 40))


def test_the_tests_reject_what_is_not_poisson(poisson_table):
    fixed = inclusion(FixedSizeLots(np.arange(40), size=5, seed=1), 6000)
    assert not sizes_are_binomial(fixed, 5 / 40)
    assert not variance_agrees(fixed.sum(1), *binomial_moments(40, 5 / 40))
    assert not counts_agree(poisson_table.sum(), 6000 * 40, 5.3 / 40)
    assert not counts_agree(poisson_table.sum(0), 6000, 6.5 / 40)
    twins = np.repeat(poisson_table[:, ::2], 2, axis=1)
    assert not counts_agree(pairs(twins), 6000, (5 / 40) ** 2)
    shuffled = np.zeros((6000, 40), bool)  # every 8 lots are one shuffled epoch
    rng = np.random.default_rng(0)
    for epoch in range(750):
        shuffled[8 * epoch + np.arange(40) // 5, rng.permutation(40)] = True
    assert not counts_agree((shuffled[0::2] & shuffled[1::2]).sum(0), 3000, (5 / 40) ** 2)


def test_poisson_of_large_q_where_numpy_uses_another_algorithm():
    # Beyond 10,000 records and n > N/20 numpy shuffles instead of using Floyd's method.
    records, steps = 10_500, 60
    table = inclusion(PoissonLots(np.arange(records), expected_size=3000, seed=2), steps)
    assert counts_agree(table.sum(), steps * records, 3000 / records)
    assert counts_agree(table.sum(0), steps, 3000 / records)


def test_poisson_with_probability_one_takes_everything():
    lots = PoissonLots(np.arange(23), expected_size=23)
    assert lots.steps_per_epoch == 1
    assert lots.law.event(2.0) == dp_accounting.GaussianDpEvent(2.0)
    assert inclusion(lots, 20).all()


def test_fixed_size_lots_are_uniform_subsets():
    table = inclusion(FixedSizeLots(np.arange(30), size=12, seed=3), 6000)
    assert set(table.sum(1)) == {12}
    assert counts_agree(table.sum(0), 6000, 12 / 30)
    assert counts_agree(pairs(table), 6000, 12 * 11 / (30 * 29))


def test_fixed_size_of_all_takes_everything():
    assert inclusion(FixedSizeLots(np.arange(9), size=9), 5).all()


def test_the_law_says_what_is_sampled():
    lots = PoissonLots(np.zeros((70, 2)), expected_size=7.5)
    assert lots.law == PoissonSampling(num_examples=70, expected_size=7.5)
    assert not lots.law.declared
    assert (lots.num_examples, lots.expected_size, lots.steps_per_epoch) == (70, 7.5, 10)
    assert isinstance(lots.expected_size, float)
    lots = FixedSizeLots(np.zeros((70, 2)), size=np.int32(8))
    assert lots.law == FixedSizeSampling(num_examples=70, size=8)
    assert (lots.num_examples, lots.expected_size, lots.steps_per_epoch) == (70, 8.0, 9)
    assert isinstance(lots.expected_size, float)


@pytest.mark.parametrize("size", [None, 0, -1.0, 10.5, float("nan"), "5", True])
def test_a_bad_expected_size_is_refused(size):
    with pytest.raises((TypeError, ValueError), match="expected_size") as error:
        PoissonLots(np.zeros(10), expected_size=size)
    assert repr(size) in str(error.value)


@pytest.mark.parametrize("size", [None, 0, -1, 11, 2.5, "5", True])
def test_a_bad_size_is_refused(size):
    with pytest.raises((TypeError, ValueError), match="size") as error:
        FixedSizeLots(np.zeros(10), size=size)
    assert repr(size) in str(error.value)


def test_records_that_are_not_present_are_in_no_lot():
    """The other records are in the same lots as before; law and divisor do not change."""
    x = np.arange(200)
    present = x % 3 != 0
    whole = PoissonLots(x, expected_size=50, seed=4)
    some = PoissonLots(x, expected_size=50, seed=4, present=present)
    assert some.law == whole.law
    assert some.expected_size == whole.expected_size == 50
    for (all_rows, all_mask), (rows, mask) in zip(whole.take(5, 8), some.take(5, 8), strict=True):
        drawn, kept = (r[0].numpy()[m.numpy() > 0] for r, m in ((all_rows, all_mask), (rows, mask)))
        np.testing.assert_array_equal(kept, drawn[drawn % 3 != 0])
    present[:] = False  # a copy was taken
    assert sum(float(np.sum(mask)) for _, mask in some.take(3, 8)) > 0


@pytest.mark.parametrize("present", [np.ones(3, bool), np.ones(4), [[True] * 4]])
def test_present_is_one_boolean_for_each_record(present):
    with pytest.raises(ValueError, match="for each of the 4 records"):
        PoissonLots(np.arange(4), expected_size=2, present=present)
