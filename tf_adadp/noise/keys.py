"""Keys of noise and of other randomness: secret, never saved, each number given out once."""

import hashlib
import secrets
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tf_adadp.distribution import replicas
from tf_adadp.utils import process
from tf_adadp.utils.checks import check_integer

# Step of a Philox counter by RngReadAndSkip at a delta of 1. Generators that TensorFlow saves
# rely on it, so it is the same on every device and in every version.
_SKIP = 256


def new_key(seed: int | None = None, purpose: str | None = None) -> np.ndarray:
    """Draws a fresh key, int64 [2] (128 bits), from the operating system's entropy.

    Args:
        seed: for tests only: an int from which the key is derived (SHA-256). Anyone who knows
            it can subtract the noise.
        purpose: a name that is hashed with the seed, so that keys of one seed for several purposes
            are unrelated; None for the noise of gradients.

    Raises:
        ValueError: seed is not None and not an int.
    """
    if seed is None:
        drawn = secrets.token_bytes(16)
    else:
        seed = check_integer("seed", seed, "an integer, or None for secret noise")
        names = ("tf_adadp", seed) + (() if purpose is None else (purpose,))
        drawn = hashlib.sha256(repr(names).encode()).digest()[:16]
    return np.frombuffer(drawn, dtype="<i8").astype(np.int64)


class SecretKey:
    """Holds a noise key and the number of releases under it, hidden from everything that saves.

    It is no `tf.Module`, no Keras object and no container, so checkpoints, Keras files, configs and
    variable lists of an object that holds it pass it by; it prints nothing; a copy, deep copy or
    pickle of it is a holder of a NEW key (of the same seed and purpose, where there is a seed).
    After `os.fork` it serves the parent alone: the child would draw the same noise, which then
    cancels between the releases of the two.

    Make it where the model's variables are made (under a `tf.distribute` strategy: in its scope).

    Args:
        seed: None, or an int for reproducible noise, see `new_key`. A new holder of the same seed
            and purpose starts over, with the same noise.
        purpose: the use of the key, see `new_key`. Two holders that one seed is given to, and that
            draw at the same steps, need different purposes.
    """

    __slots__ = ("__key", "__process", "__purpose", "__releases", "__seed", "__weakref__")

    def __init__(self, seed: int | None = None, purpose: str | None = None):
        self.__process = process.token()
        self.__seed, self.__purpose = seed, purpose
        with tf.init_scope():
            self.__key = tf.Variable(new_key(seed, purpose), trainable=False)
            # Each replica counts in its own copy, all alike, also inside loops. The form is that
            # of a Philox generator's state, whose counter can be read and advanced in one.
            self.__releases = tf.Variable(
                tf.zeros([3], tf.int64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    @property
    def key(self) -> tf.Tensor:
        """Returns the key, an int64 [2] tensor. Never log it, or return it from a graph."""
        self.check_process()
        return tf.convert_to_tensor(self.__key)

    @property
    def reproducible(self) -> bool:
        """Tells whether the noise comes from a seed and is therefore no secret."""
        return self.__seed is not None

    @property
    def releases(self) -> int:
        """Returns the number of releases counted so far (outside of graphs).

        Raises:
            RuntimeError: in a child of `os.fork`, as `key` and `next_step`.
        """
        self.check_process()
        # One operation: `numpy` takes three, and every step asks several times.
        first = replicas.copies(self.__releases)[0]
        count = tf.raw_ops.ReadVariableOp(resource=first.handle, dtype=tf.int64)
        return int(count.numpy()[0]) // _SKIP

    def next_step(self) -> tf.Tensor:
        """Counts one release and returns its number, an int64 scalar tensor: 1, 2, …

        Any number of threads may call it, eagerly or in graphs: each call gets another number.

        Raises:
            RuntimeError: under a `tf.distribute` strategy that this holder was not made in: each
                replica would count, and draw noise, by itself.
        """
        self.check_process()
        strategy = tf.distribute.get_strategy()
        made_here = strategy.extended.variable_created_in_scope(self.__releases)
        if strategy.num_replicas_in_sync > 1 and not made_here:
            raise RuntimeError(
                f"the noise key was not made under this {type(strategy).__name__}, so its replicas "
                "would draw different noise: create the optimizer inside `strategy.scope()`."
            )
        if made_here and tf.distribute.get_replica_context() is not None:
            counters = [self.__releases]  # this replica's
        else:
            counters = replicas.copies(self.__releases)
        # One operation, because another thread may count between an addition and a read.
        before = [
            tf.raw_ops.RngReadAndSkip(
                resource=counter.handle,
                alg=tf.random.Algorithm.PHILOX.value,
                delta=tf.ones([], tf.uint64),
            )
            for counter in counters
        ]
        return before[0][0] // _SKIP + 1

    def check_process(self) -> None:
        """Raises a RuntimeError in a child of `os.fork`, which must not use the parent's key."""
        if self.__process is not process.token():
            raise RuntimeError(
                "this noise key was made before os.fork, in the parent process: both would draw "
                "the same noise. Make the optimizer in the process that trains, or start "
                'processes with multiprocessing.get_context("spawn").'
            )

    def renew(self, agree: Callable[[np.ndarray], np.ndarray] | None = None) -> None:
        """Draws a new key, unless there is a seed. The count continues.

        Args:
            agree: where several processes train together, a function that returns the key that one
                of them drew; called by all at the same time.
        """
        if not self.reproducible:
            key = new_key()
            self.__key.assign(key if agree is None else agree(key))
            self.__process = process.token()

    def hand_over(self) -> tuple[list[int], int]:
        """Returns (key, releases) for the private state file, and continues under a new key."""
        self.check_process()
        state = [int(word) for word in self.__key.numpy()], self.releases
        self.renew()
        return state

    def take_over(self, key: list[int], releases: int) -> None:
        """Continues under a key of `hand_over`, after as many releases."""
        self.check_process()
        self.__key.assign(key)
        self.__releases.assign([releases * _SKIP, 0, 0])

    def __repr__(self):
        return f"SecretKey(reproducible={self.reproducible})"

    def __reduce__(self):
        return SecretKey, (self.__seed, self.__purpose)
