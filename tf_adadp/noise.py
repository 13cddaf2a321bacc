"""Stateless, keyed Gaussian noise, and the holder that keeps its key out of every file.

The noise of one variable at one step is a function of (key, step, variable index) only: all
replicas of a distributed run draw the same, once per lot however many physical batches it has.
Whoever has the key can subtract the noise: it comes from the operating system's entropy and never
leaves memory.

**What this noise is not.** Its generator, Philox-4x32-10, is a fast one and not a cipher, and its
float32 normals lie on a grid that ends at 6.8 standard deviations. Both are the custom of the
field; neither stands up to an attacker who knows the rest of the sum and studies the bits of a
release (Mironov 2012, "On significance of the least significant bits for differential privacy").
"""

import hashlib
import math
import numbers
import secrets

import numpy as np
import tensorflow as tf

from tf_adadp import _process


def gaussian(key, step, index, shape, stddev):
    """Draws N(0, diag(stddev²)), the same for the same (key, step, index).

    The generator's seed is key + (index, step), word by word and modulo 2⁶⁴: distinct for distinct
    (step, index), with all 128 bits of the key in it. TensorFlow sends a seed through ten Philox
    rounds, a bijection, before use, so neighbouring seeds give unrelated streams. (Its
    `stateless_fold_in` would first shrink the key to 64 bits, and may collide.)

    Eager and graph execution draw equal numbers (up to the last bit, as compilers round); under
    `jit_compile=True` the same seed gives another stream, of the same law.

    Args:
        key: int64 [2], secret.
        step: int64 scalar, the number of the release: never twice under one key.
        index: the variable's number, a Python int ≥ 0.
        shape: static shape of the variable.
        stddev: standard deviation, a float or a tensor that broadcasts to `shape`.

    Returns:
        float32 tensor of shape `shape`.
    """
    words = tf.stack([tf.constant(index, tf.int64), tf.cast(step, tf.int64)])
    shape = tf.TensorShape(shape)
    size = shape.num_elements()
    pairs = -(-size // 2)
    bits = tf.random.stateless_uniform(
        [2 * pairs],
        seed=key + words,
        minval=None,
        maxval=None,
        dtype=tf.uint32,
        # Named, because the automatic choice is eight to thirty times slower under XLA on a CPU.
        alg="philox",
    )
    # Box and Muller (1958). TensorFlow's own normals are the same numbers one at a time; these are
    # vectorised, and cost two thirds of the time.
    uniform = (tf.cast(bits[:pairs], tf.float32) + 0.5) * 2.0**-32  # in [2⁻³³, 1]
    angle = tf.cast(tf.bitcast(bits[pairs:], tf.int32), tf.float32) * (math.pi * 2.0**-31)
    radius = tf.sqrt(-2.0 * tf.math.log(uniform))
    stddev = tf.convert_to_tensor(stddev, tf.float32)
    if stddev.shape.rank == 0:
        radius *= stddev
    normal = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=0)
    normal = tf.reshape(normal[:size], shape)
    return normal if stddev.shape.rank == 0 else normal * stddev


def new_key(seed=None):
    """A fresh key, int64 [2] (128 bits), from the operating system's entropy.

    Args:
        seed: for tests only: an int from which the key is derived (SHA-256) instead. Whoever knows
            it can subtract the noise.

    Raises:
        ValueError: seed is not None and not an int.
    """
    if seed is None:
        drawn = secrets.token_bytes(16)
    elif isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
        drawn = hashlib.sha256(repr(("tf_adadp", int(seed))).encode()).digest()[:16]
    else:
        raise ValueError(f"seed={seed!r}: give an integer, or None for secret noise.")
    return np.frombuffer(drawn, dtype="<i8").astype(np.int64)


class SecretKey:
    """A noise key and the number of releases under it, out of sight of everything that saves.

    It is no `tf.Module`, no Keras object and no container, so checkpoints, Keras files, configs and
    variable lists of an object that holds it pass it by; it prints nothing; a copy, deep copy or
    pickle of it is a holder of a NEW key (of the same seed, where there is one). After `os.fork` it
    serves the parent alone: the child would draw the same noise, which then cancels between the
    releases of the two.

    Make it where the model's variables are made (under a `tf.distribute` strategy: in its scope).

    Args:
        seed: None, or an int for reproducible noise, see `new_key`. A new holder of the same seed
            starts over, with the same noise.
    """

    __slots__ = ("__key", "__process", "__releases", "__seed", "__weakref__")

    def __init__(self, seed=None):
        self.__process = _process.token()
        self.__seed = seed
        with tf.init_scope():
            self.__key = tf.Variable(new_key(seed), trainable=False)
            # Each replica counts in its own copy, all alike, also inside loops.
            self.__releases = tf.Variable(
                tf.zeros([], tf.int64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    @property
    def key(self):
        """The key, an int64 [2] tensor. Never log or return it from a function that is exported."""
        self.check_process()
        return tf.convert_to_tensor(self.__key)

    @property
    def reproducible(self):
        """Whether the noise comes from a seed and is therefore no secret."""
        return self.__seed is not None

    @property
    def releases(self):
        """How many releases were counted so far, an int (outside of graphs).

        Raises:
            RuntimeError: in a child of `os.fork`, as `key` and `next_step`.
        """
        self.check_process()
        return int(self.__releases.numpy())  # a distributed variable has no int()

    def next_step(self):
        """Counts one release and returns its number, an int64 scalar tensor: 1, 2, …

        Raises:
            RuntimeError: under a `tf.distribute` strategy that this holder was not made in: each
                replica would count, and draw noise, by itself.
        """
        self.check_process()
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync > 1 and not strategy.extended.variable_created_in_scope(
            self.__releases
        ):
            raise RuntimeError(
                f"the noise key was not made under this {type(strategy).__name__}, so its replicas "
                "would draw different noise: create the optimizer inside `strategy.scope()`."
            )
        self.__releases.assign_add(1)
        return tf.convert_to_tensor(self.__releases)

    def check_process(self):
        """Raises a RuntimeError in a child of `os.fork`, which must not use the parent's key."""
        if self.__process is not _process.token():
            raise RuntimeError(
                "this noise key was made before os.fork, in the parent process: both would draw "
                "the same noise. Make the optimizer in the process that trains, or start "
                'processes with multiprocessing.get_context("spawn").'
            )

    def renew(self, agree=None):
        """Draws a new key, unless there is a seed. The count goes on.

        Args:
            agree: where several processes train together, a function that returns the key that one
                of them drew; called by all at the same time.
        """
        if not self.reproducible:
            key = new_key()
            self.__key.assign(key if agree is None else agree(key))
            self.__process = _process.token()

    def __repr__(self):
        return f"SecretKey(reproducible={self.reproducible})"

    def __reduce__(self):
        return SecretKey, (self.__seed,)
