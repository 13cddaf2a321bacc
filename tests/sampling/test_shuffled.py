"""Shuffled epochs. Fixed seeds; with other seeds a test fails once in about 10^6."""

import copy
import pickle

import numpy as np
import pytest
from scipy import stats

from tf_adadp.accounting import ShuffledSampling
from tf_adadp.sampling import ShuffledLots

ALPHA = 1e-6


def lots_of(elements):
    """The records of each lot, as arrays."""
    return [x.numpy()[mask.numpy() == 1] for (x, _, _), mask in elements]


def read(lots, how, num_lots):
    return lots_of(lots.take(num_lots, 4) if how == "take" else lots.as_dataset(4, num_lots))


def make(records=23, size=5, seed=3):
    return ShuffledLots(np.arange(records), size=size, seed=seed)


@pytest.mark.parametrize("how", ["take", "dataset"])
def test_a_pass_has_no_record_twice(how):
    lots = make()
    read_lots = read(lots, how, 4 * 10)
    assert {len(lot) for lot in read_lots} == {5}
    passes = [np.concatenate(read_lots[i : i + 4]) for i in range(0, 40, 4)]
    assert all(len(set(p)) == 20 for p in passes)
    assert len({tuple(p) for p in passes}) == 10
    assert set(np.concatenate(passes)) == set(range(23)), "those left out of a pass change"


def test_permutations_are_uniform_and_independent():
    passes = 3000
    lots = make(records=9, size=2)
    drawn = np.array([lots._rows(step, 1)[1][0] for step in range(4 * passes)])
    drawn = drawn.reshape(passes, 4, 2)
    place = np.full((passes, 9), 4)  # the lot of each record; 4 where it is left out
    for lot in range(4):
        np.put_along_axis(place, drawn[:, lot], lot, axis=1)
    expected = passes * np.array([2, 2, 2, 2, 1]) / 9
    for record in range(9):
        counts = np.bincount(place[:, record], minlength=5)
        assert stats.chisquare(counts, expected).pvalue > ALPHA / 20
    # A record's place in the next pass, and another record's in the same one.
    together = np.sum(place[:, 0] == place[:, 1])
    low, high = stats.binom.interval(1 - ALPHA, passes, 4 * (2 / 9) * (1 / 8))
    assert low <= together <= high
    for before, after in ((place[:-1, 0], place[1:, 0]), (place[:-1, 0], place[1:, 5])):
        table = np.zeros((5, 5))
        np.add.at(table, (before, after), 1)
        assert stats.chi2_contingency(table).pvalue > ALPHA


@pytest.mark.parametrize("how", ["take", "dataset"])
def test_every_iteration_begins_a_new_pass(how):
    whole = read(make(), "take", 12)
    lots = make()
    assert [list(a) for a in read(lots, how, 3)] == [list(a) for a in whole[:3]]
    assert lots.step == 4, "the rest of the pass is skipped"
    assert [list(a) for a in read(lots, how, 5)] == [list(a) for a in whole[4:9]]
    assert lots.step == 12


def test_iterators_that_run_at_the_same_time_share_no_pass():
    lots = make()
    first, second = lots.take(8, 4), lots.take(8, 4)
    turns = [lots_of([next(it)])[0] for _ in range(8) for it in (first, second)]
    for mine in (turns[0::2], turns[1::2]):
        for i in (0, 4):
            assert len(set(np.concatenate(mine[i : i + 4]))) == 20
    assert lots.step == 16


def test_without_end():
    endless = iter(make().as_dataset(4))
    got = lots_of(next(endless) for _ in range(9))
    assert [list(a) for a in got] == [list(a) for a in read(make(), "take", 9)]


def test_resuming_begins_at_a_pass():
    lots = make()
    lots.step = 8
    assert [list(a) for a in read(lots, "take", 4)] == [
        list(a) for a in read(make(), "take", 12)[8:]
    ]
    with pytest.raises(ValueError, match=r"step=6 is within a pass of 4 lots: .* 4 for this one"):
        lots.step = 6


def test_copies_without_a_seed_draw_for_themselves():
    lots = ShuffledLots(np.arange(200), size=50)
    mine = read(lots, "take", 4)
    for other in (copy.deepcopy(lots), pickle.loads(pickle.dumps(lots))):
        assert other._permutation is None
        theirs = read(other, "take", 4)
        assert not np.array_equal(mine[0], theirs[0])


def test_the_law_says_what_is_sampled():
    lots = ShuffledLots(np.zeros((70, 2)), size=np.int32(8))
    assert lots.law == ShuffledSampling(70, 8)
    assert (lots.expected_size, lots.steps_per_epoch) == (8.0, 8)


@pytest.mark.parametrize("size", [None, 0, 11, 2.5, True])
def test_a_bad_size_is_refused(size):
    with pytest.raises(ValueError, match="size=.*: give an integer from 1 to"):
        ShuffledLots(np.zeros(10), size=size)
