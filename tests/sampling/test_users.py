"""Lots of users. Fixed seeds; with other seeds a test fails once in about 10^6."""

import math

import numpy as np
import pytest
from scipy import stats

from tf_adadp.accounting import PoissonSampling, PrivacyLedger, UserSampling
from tf_adadp.sampling import UserLots

ALPHA = 1e-6
STEPS, BOUND = 4000, 3
SIZES = np.array([1, 2, 3, 4, 7, 1, 12, 5])  # records of each user
USERS = np.repeat(np.arange(8), SIZES)


def within(counts, trials, probability):
    tail = ALPHA / np.size(counts) / 2
    low = stats.binom.ppf(tail, trials, probability)
    high = stats.binom.isf(tail, trials, probability)
    return bool(np.all((low <= counts) & (counts <= high)))


def make(user_ids=USERS, expected_users=2, bound=BOUND, expected_size=4, **kwargs):
    return UserLots(
        np.arange(len(user_ids)),
        user_ids=user_ids,
        expected_users=expected_users,
        max_records_per_user=bound,
        expected_size=expected_size,
        **kwargs,
    )


@pytest.fixture(scope="module")
def table():
    """Boolean [steps, N]. Records are in random order and found by their users."""
    order = np.random.default_rng(0).permutation(len(USERS))
    found = np.zeros((STEPS, len(USERS)), bool)
    lots = make(USERS[order], seed=1)
    for step in range(STEPS):
        _, (records,) = lots._rows(step, 1)  # what `take` packs into tensors
        assert len(set(records)) == len(records)
        found[step, order[records]] = True
    return found


def records_per_user(table):
    return np.stack([table[:, user == USERS].sum(1) for user in range(8)], 1)


def test_each_user_enters_by_a_coin_with_at_most_k_records(table):
    counts = records_per_user(table)
    for user in range(8):
        assert set(counts[:, user]) == {0, min(SIZES[user], BOUND)}
    users = counts > 0
    assert within(users.sum(0), STEPS, 2 / 8)
    joint = (users.astype(float).T @ users)[np.triu_indices(8, 1)]
    assert within(joint, STEPS, (2 / 8) ** 2)
    assert within((users[::2] & users[1::2]).sum(0), STEPS // 2, (2 / 8) ** 2)
    sampled_records = table.any(1).sum()  # nearly every lot has some record: not what q means
    assert not within(sampled_records, STEPS, 2 / 8)


def test_the_records_of_a_user_are_a_fresh_uniform_subset(table):
    for user in (4, 6):
        mine = table[:, user == USERS]
        mine = mine[mine.any(1)]
        size = SIZES[user]
        assert within(mine.sum(0), len(mine), BOUND / size)
        joint = (mine.astype(float).T @ mine)[np.triu_indices(size, 1)]
        assert within(joint, len(mine), BOUND * (BOUND - 1) / (size * (size - 1)))
        again = (mine[1:] & mine[:-1]).sum()  # drawn anew: independent of the last time
        assert within(again, size * (len(mine) - 1), (BOUND / size) ** 2)
        assert not within(size * [len(mine)], len(mine), BOUND / size)


def test_string_ids_and_integers_mean_the_same_users():
    names = np.array(["anna", "bo", "cy", "dee", "eve", "fay", "gus", "hal"])[USERS]
    for ids in (names, list(names), names.astype(object), names.astype("S"), USERS.astype("u1")):
        assert make(ids).law == make().law == UserSampling(8, 2, BOUND, 4)


def test_ids_are_compared_whole():
    """NumPy's strings end at a NUL, and are ASCII where they are bytes."""
    for ids in (["k", "k\0", "k"], [b"k", b"k\0", b"k"], ["José", "Jose", "José"]):
        for given in (ids, np.array(ids, object)):
            assert make(given, expected_size=1).law.num_users == 2
    names = np.array(["José".encode(), b"\xff", "José".encode()], object)  # as TensorFlow has them
    assert make(names, expected_size=1).law.num_users == 2


def test_the_law_and_the_public_sizes():
    lots = make(expected_size=3.5)
    assert lots.law.num_users == 8
    assert (lots.expected_size, lots.steps_per_epoch, lots.num_examples) == (3.5, 4, None)
    assert "num_examples=None" in repr(lots)


def test_everybody_at_once():
    lots = make(expected_users=8, bound=20, expected_size=35)
    for _, mask in lots.take(3, 4):
        assert mask.numpy().sum() == len(USERS)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"user_ids": USERS[:-1]}, ValueError, r"user_ids have shape \(34,\).* 35 examples"),
        ({"user_ids": USERS[:, None]}, ValueError, "user_ids have shape"),
        ({"user_ids": USERS * 1.0}, TypeError, "user_ids have dtype float64"),
        ({"user_ids": [None, *USERS[1:]]}, TypeError, "user_ids have dtype object"),
        ({"user_ids": [b"anna", *["anna"] * 34]}, TypeError, "user_ids have dtype object"),
        ({"user_ids": None}, TypeError, "user_ids have dtype object"),
        ({"max_records_per_user": 0}, ValueError, "max_records_per_user=0: give .*"),
        ({"max_records_per_user": 2.5}, ValueError, "max_records_per_user"),
        ({"expected_users": 9}, ValueError, "expected_users=9: give .* at most num_users = 8"),
        ({"expected_users": 0}, ValueError, "expected_users"),
        ({"expected_size": None}, ValueError, "expected_size"),
        ({"expected_size": 6.5}, ValueError, "at most max_records_per_user · expected_users = 6"),
    ],
)
def test_bad_input_is_refused(changes, error, match):
    arguments = {
        "user_ids": USERS, "expected_users": 2, "max_records_per_user": 3, "expected_size": 4,
        **changes,
    }  # fmt: skip
    with pytest.raises(error, match=match):
        UserLots(np.arange(35), **arguments)


def test_a_user_seen_in_the_sums_costs_more_than_a_record_and_less_than_claimed():
    """Real lots of real neighbours: the user with 12 records, or without; one step at σ = 1.

    Clopper-Pearson bounds, each at 1e-6: for a mechanism as private as claimed the test fails with
    probability 2e-6 at most.
    """
    sigma, epsilon, trials = 1.0, 1.0, 4000
    rng = np.random.default_rng(5)

    def above(user_ids, threshold):
        """Counts the lots whose noisy number of user 6's records exceeds the threshold."""
        lots = make(user_ids, expected_users=len(set(user_ids)) / 4, expected_size=1, seed=9)
        mine = [(user_ids[lots._rows(step, 1)[1][0]] == 6).sum() for step in range(trials)]
        return int((np.array(mine) + rng.normal(0, sigma, trials) > threshold).sum())

    threshold = 2.0
    with_user, without = above(USERS, threshold), above(USERS[USERS != 6], threshold)
    low = stats.beta.ppf(ALPHA, with_user, trials - with_user + 1)
    high = stats.beta.isf(ALPHA, without + 1, trials - without)
    lower_bound = low - math.exp(epsilon) * high

    def claimed(law):
        ledger = PrivacyLedger()
        ledger.add(law.event(sigma), law=law)
        return ledger.delta(epsilon)

    assert claimed(PoissonSampling(8, 2)) < lower_bound < claimed(UserSampling(8, 2, BOUND, 4))
