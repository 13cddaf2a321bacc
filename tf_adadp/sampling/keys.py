"""Holds the randomness of lots: a secret key, and step indices that are each used once."""

import hashlib
import secrets
import threading

import numpy as np

from tf_adadp.utils import process as _process
from tf_adadp.utils.checks import check_integer


class LotKey:
    """Holds a 128-bit key, from which the random generator of every step is derived.

    Without a seed the key comes from the operating system's entropy and never leaves the object: it
    is not in `repr`. A pickled or deep-copied key is a NEW key, and so is the key of a forked
    process, so lots of two processes are independent. The key reveals the examples of every lot,
    and with it the amplification by sampling is lost.

    Raises:
        TypeError: `seed` is neither None nor an integer.
    """

    __slots__ = ("_key", "_process", "seed")

    def __init__(self, seed: int | None = None):
        self._process = _process.token()
        if seed is None:
            self.seed = None
            self._key = secrets.randbits(128)
            return
        wanted = "an integer (tests only), or None for private training"
        self.seed = check_integer("seed", seed, wanted, wrong_type=TypeError)
        # Hashed under a name of our own, so that noise keyed by the same seed is unrelated to the
        # lots.
        digest = hashlib.blake2b(str(self.seed).encode(), digest_size=16, person=b"tf_adadp lots")
        self._key = int.from_bytes(digest.digest(), "little")

    def generator(self, step: int) -> np.random.Generator:
        """Returns the generator of one step, the same at every call within a process."""
        self._leave_parent()
        # Philox counts blocks from the low end of a 256-bit counter. The step sits in the upper
        # half, so the streams of two steps meet only after 2^128 blocks.
        return np.random.Generator(np.random.Philox(key=self._key, counter=step << 128))

    def _leave_parent(self) -> None:
        if self._process is not _process.token() and self.seed is None:
            self._key, self._process = secrets.randbits(128), _process.token()

    def hand_over(self) -> int:
        """Returns the key, for the private state file, and replaces it by a new one."""
        self._leave_parent()
        key, self._key = self._key, secrets.randbits(128)
        return key

    def take_over(self, key: int) -> None:
        """Takes a key that `hand_over` returned."""
        self._key, self._process = key, _process.token()

    def __repr__(self):
        return f"LotKey({'<secret>' if self.seed is None else f'seed={self.seed}'})"

    def __reduce__(self):
        return type(self), (self.seed,)


class StepCounter:
    """Hands out each step index once, to any number of threads."""

    def __init__(self, start: int = 0):
        self._next = start
        self._lock = threading.Lock()

    @property
    def next(self) -> int:
        """Returns the first index not handed out yet."""
        return self._next

    def claim(self, count: int = 1) -> int:
        """Takes `count` consecutive indices and returns the first."""
        with self._lock:
            first = self._next
            self._next += count
            return first

    def advance_to(self, step: int) -> None:
        """Skips to `step`; ValueError if it was handed out already."""
        with self._lock:
            if step < self._next:
                raise ValueError(
                    f"step cannot go back from {self._next} to {step}: lots made without a seed "
                    "are never drawn twice. Make new lots, or give seed= (for tests) to replay "
                    "them."
                )
            self._next = step

    def __reduce__(self):
        return type(self), (self._next,)
