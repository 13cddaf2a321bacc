"""Truncated Poisson lots. Fixed seeds; with other seeds a test fails once in about 10^6."""

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_adadp.accounting import TruncatedPoissonSampling
from tf_adadp.sampling import PoissonLots, TruncatedPoissonLots

ALPHA = 1e-6
STEPS, RECORDS, EXPECTED, LARGEST = 4000, 30, 6.0, 8


def included(lots, steps):
    """Boolean [steps, N]: which record is in which lot."""
    table = np.zeros((steps, lots.num_examples), int)
    for step in range(steps):
        count, (records,) = lots._rows(step, 1)  # what `take` packs into tensors
        np.add.at(table[step], records[:count], 1)
    assert table.max() <= 1, "a record is twice in a lot"
    return table.astype(bool)


def within(counts, trials, probability):
    """Tells whether all Binomial(trials, probability) counts are in their joint interval."""
    tail = ALPHA / np.size(counts) / 2
    low = stats.binom.ppf(tail, trials, probability)
    high = stats.binom.isf(tail, trials, probability)
    return bool(np.all((low <= counts) & (counts <= high)))


def sizes_fit(sizes):
    """Chi-square test of the sizes: min(Binomial(N, q), M)."""
    law = stats.binom(RECORDS, EXPECTED / RECORDS)
    expected = STEPS * np.array([*law.pmf(np.arange(LARGEST)), law.sf(LARGEST - 1)])
    observed = np.bincount(np.minimum(sizes, LARGEST), minlength=LARGEST + 1)
    few = expected < 10
    observed = [observed[few].sum(), *observed[~few]]
    return stats.chisquare(observed, [expected[few].sum(), *expected[~few]]).pvalue > ALPHA


@pytest.fixture(scope="module")
def table():
    lots = TruncatedPoissonLots(
        np.arange(RECORDS), expected_size=EXPECTED, max_size=LARGEST, seed=1
    )
    return included(lots, STEPS)


def test_the_sizes_are_those_of_poisson_lots_cut(table):
    sizes = table.sum(1)
    assert sizes.max() == LARGEST
    assert sizes_fit(sizes)
    # Lots of max_size drawn by Poisson alone would be rarer: the test sees the difference.
    poisson = included(PoissonLots(np.arange(RECORDS), expected_size=EXPECTED, seed=1), STEPS)
    assert not sizes_fit(poisson.sum(1)[poisson.sum(1) <= LARGEST].repeat(2)[:STEPS])


def test_what_stays_in_a_cut_lot_is_a_uniform_subset(table):
    full = table[table.sum(1) == LARGEST]
    assert len(full) > 800
    assert within(full.sum(0), len(full), LARGEST / RECORDS)
    joint = (full.astype(float).T @ full)[np.triu_indices(RECORDS, 1)]
    pair = LARGEST * (LARGEST - 1) / (RECORDS * (RECORDS - 1))
    assert within(joint, len(full), pair)
    first = np.arange(RECORDS) < LARGEST  # as if lots kept the records that come first
    assert not within(np.where(first, len(full), 0), len(full), LARGEST / RECORDS)


def test_lots_of_different_steps_are_independent(table):
    q = table.mean()
    assert within((table[::2] & table[1::2]).sum(), STEPS // 2 * RECORDS, q * q)


def test_every_lot_has_the_same_shape_also_an_empty_one():
    x = {"a": np.arange(30.0), "b": np.array(["s"] * 30)}
    lots = TruncatedPoissonLots(x, np.arange(30), expected_size=0.5, max_size=4, seed=2)
    counts = set()
    for source in (lots.take(40, 3), lots.as_dataset(3, 40)):
        for (bx, by, _), mask in source:
            assert bx["a"].shape == bx["b"].shape == by.shape == mask.shape == (2, 3)
            counts.add(int(mask.numpy().sum()))
    assert {0, 1} <= counts
    assert lots.as_dataset(3).element_spec[1] == tf.TensorSpec((2, 3), tf.float32)


def test_the_law_says_what_is_sampled():
    lots = TruncatedPoissonLots(np.zeros((70, 2)), expected_size=7.5, max_size=12)
    assert lots.law == TruncatedPoissonSampling(70, 7.5, 12)
    assert (lots.expected_size, lots.steps_per_epoch) == (7.5, 10)


@pytest.mark.parametrize(("expected", "largest"), [(5, 4), (5, None), (5, 11), (0, 3), (5, 6.5)])
def test_bad_sizes_are_refused(expected, largest):
    with pytest.raises(ValueError, match="max_size|expected_size"):
        TruncatedPoissonLots(np.zeros(10), expected_size=expected, max_size=largest)
