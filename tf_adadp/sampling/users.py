"""Draws lots of users: privacy for all records of a person."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tf_adadp.accounting import UserSampling
from tf_adadp.sampling.sampled import SampledLots, poisson_subset, subset
from tf_adadp.sampling.sources import as_source


class UserLots(SampledLots, enforces_law=True):
    """Draws each USER into each lot independently, with at most `max_records_per_user` records.

    For a user with more records, every lot takes a new, uniformly random subset.

    Guarantee: that of `tf_adadp.accounting.UserSampling`: neighbours differ by one user with all
    records, and a step costs PoissonSampled(expected_users/U, Gaussian(σ*/max_records_per_user)),
    where U is the number of users. Such steps do not compose with releases that protect single
    records (other lots, `DPPCA`): a ledger that holds both reports no ε.

    Args:
        x, y, sample_weight, seed, transform: as for `PoissonLots`.
        user_ids: [N], integers or strings, the user of each example; or the name of a feature of x,
            a dict, which is removed from it. Only the named user of a record is protected, also
            where it concerns several people.
        expected_users: the expected number of users in a lot, in (0, U].
        max_records_per_user: k ≥ 1. The noise relative to the sum grows with it.
        expected_size: the divisor of sums, a PUBLIC guess of the number of examples in a lot, in
            (0, k · expected_users]. The true average is private: do not compute it from user_ids.

    Raises:
        TypeError: as for `PoissonLots`; user_ids are neither integers nor strings.
        ValueError: as for `PoissonLots`; user_ids are not [N], a number is missing or out of range.

    Example:
        >>> lots = dp.UserLots(
        ...     np.zeros((6, 4)),
        ...     np.zeros(6),
        ...     user_ids=["a", "a", "a", "b", "b", "c"],
        ...     expected_users=1,
        ...     max_records_per_user=2,
        ...     expected_size=1.5,
        ... )
        >>> lots.law.num_users
        3
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        *,
        user_ids: Any,
        expected_users: float,
        max_records_per_user: int,
        expected_size: float,
        sample_weight: Any = None,
        seed: int | None = None,
        transform: Callable[[Any], tuple] | None = None,
    ):
        if isinstance(user_ids, str):
            x, user_ids = _taken_out(x, user_ids)
        source = as_source(x, y, sample_weight, transform)
        users = _user_numbers(user_ids, len(source))
        # Records ordered by user: those of user u are _records[_starts[u] : _starts[u + 1]].
        self._records = np.argsort(users, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(users))])
        law = UserSampling(
            len(self._starts) - 1, expected_users, max_records_per_user, expected_size
        )
        super().__init__(source, law, seed)

    @property
    def steps_per_epoch(self) -> int:
        """Returns ⌈U/expected_users⌉."""
        return int(np.ceil(self.law.num_users / self.law.expected_users))

    def _indices(self, step: int) -> np.ndarray:
        generator = self._key.generator(step)
        drawn = poisson_subset(generator, self.law.num_users, self.law.probability)
        return np.concatenate(
            [np.empty(0, np.int64), *(self._records_of(user, generator) for user in drawn)]
        )

    def _records_of(self, user: int, generator: np.random.Generator) -> np.ndarray:
        records = self._records[self._starts[user] : self._starts[user + 1]]
        if len(records) <= self.law.max_records_per_user:
            return records
        return records[subset(generator, len(records), self.law.max_records_per_user)]


def _taken_out(x, name):
    """Returns a dict without one of its features, and the feature."""
    if not isinstance(x, dict) or name not in x or len(x) == 1:
        known = sorted(x) if isinstance(x, dict) else f"a {type(x).__name__}"
        raise ValueError(
            f"user_ids={name!r}, and x is {known}: x must be a dict with this feature and others. "
            "Map a dataset to ({'image': …, 'user': …}, label), and read it by from_dataset."
        )
    return {key: value for key, value in x.items() if key != name}, x[name]


def _user_numbers(user_ids: Any, num_examples: int) -> np.ndarray:
    """Numbers the users 0..U − 1; returns the user of each example, int64 [N]."""
    ids = np.asarray(user_ids)
    if ids.dtype.kind in "OSU":
        ids = np.asarray(user_ids, dtype=object)
    if any(all(isinstance(i, kind) for i in ids.flat) for kind in (str, bytes)):
        # Not by NumPy's strings, in which ids that differ by a NUL at the end are the same.
        numbers = {user: number for number, user in enumerate(sorted(set(ids.flat)))}
        ids = np.array([numbers[i] for i in ids.flat]).reshape(ids.shape)
    if ids.dtype.kind not in "iu":
        raise TypeError(
            f"user_ids have dtype {ids.dtype}: give one integer or string per example, the id of "
            "its user."
        )
    if ids.shape != (num_examples,):
        raise ValueError(
            f"user_ids have shape {ids.shape}, and there are {num_examples} examples: give one id "
            "per example."
        )
    return np.unique(ids, return_inverse=True)[1]
