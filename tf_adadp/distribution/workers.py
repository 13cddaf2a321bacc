"""Keeps the processes of a `MultiWorkerMirroredStrategy` in agreement on several hosts.

All workers run the same script. Each draws its own part of every lot, from records that no other
worker has, with a key of its own; sums, noise and update are those of `replicas`. Values computed
on a host decide on privacy, and must be equal on all workers; otherwise these would wait for each
other forever. So the first worker, the chief, gives its weights, state, ledger and noise keys to
the others when `fit` begins, and all check that they were given the same laws.

Therefore only the chief restores and writes files: it has the checkpoints and the ledger file.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_adadp.distribution import replicas


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Counts the processes, W, that train together under this strategy."""
    resolver = strategy.cluster_resolver
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or resolver is None:
        return 1
    spec = resolver.cluster_spec().as_dict()
    return max(1, sum(len(spec.get(kind, ())) for kind in ("chief", "worker")))


def worker_number(strategy: tf.distribute.Strategy | None = None) -> int:
    """Returns the number of this process among the workers: 0 for the chief, and without others."""
    strategy = strategy or tf.distribute.get_strategy()
    if num_workers(strategy) == 1:
        return 0
    resolver = strategy.cluster_resolver
    has_chief = bool(resolver.cluster_spec().as_dict().get("chief"))
    return int(resolver.task_id or 0) + (has_chief and resolver.task_type == "worker")


def from_chief(strategy: tf.distribute.Strategy, values: list[Any]) -> list[np.ndarray]:
    """Returns the chief's values on all workers: arrays of the same shapes and types everywhere.

    The values travel as bits, so they arrive unchanged.
    """
    if num_workers(strategy) == 1:
        return values
    values = [np.asarray(v) for v in values]
    data = b"".join(v.tobytes() for v in values)
    received = _bits_from_chief(strategy, data, len(data))
    found, start = [], 0
    for v in values:
        found.append(np.frombuffer(received, v.dtype, v.size, start).reshape(v.shape))
        start += v.nbytes
    return found


def bytes_from_chief(strategy: tf.distribute.Strategy, data: bytes) -> bytes:
    """Returns the chief's bytes on all workers; those of the others are ignored."""
    if num_workers(strategy) == 1:
        return data
    (size,) = from_chief(strategy, [np.array(len(data), np.int64)])
    return _bits_from_chief(strategy, data, int(size))


def _bits_from_chief(strategy, data, size):
    words = np.zeros(-(-size // 4), np.int32)
    if worker_number(strategy) == 0:
        words = np.frombuffer(data.ljust(4 * len(words), b"\0"), np.int32)
    return _summed(strategy, words).tobytes()[:size]


def total(strategy: tf.distribute.Strategy, value: int) -> int:
    """Adds up a whole number over all workers."""
    if num_workers(strategy) == 1:
        return int(value)
    return int(_summed(strategy, np.array(value, np.int64)))


def check_alike(strategy: tf.distribute.Strategy, **values: float) -> None:
    """Raises ValueError, on all workers, where numbers differ between them."""
    if num_workers(strategy) == 1:
        return
    ours = np.array(list(values.values()), np.float64)
    (chiefs,) = from_chief(strategy, [ours])
    differ = _summed(strategy, (ours != chiefs).astype(np.int64))
    if not differ.any():
        return
    found = ", ".join(
        f"{name}: {mine:g} here, {chiefs[i]:g} on the chief"
        for i, (name, mine) in enumerate(values.items())
        if differ[i]
    )
    raise ValueError(
        f"The workers do not agree ({found}). Give all the same arguments, and lots of one law: "
        "arrays of all records to every worker, or to each its own part as "
        "PoissonLots(..., num_examples=<those of all workers>)."
    )


def _summed(strategy, value):
    """Returns the sum of a numpy array over workers, one contribution each."""
    devices = strategy.num_replicas_in_sync // num_workers(strategy)

    @tf.function(autograph=False)
    def summed(value):
        def on_replica():
            # Only the first replica of a worker contributes its value.
            mine = replicas.replica_number() % devices == 0
            return replicas.all_reduced(tf.where(mine, value, tf.zeros_like(value)))

        return strategy.run(on_replica)

    return strategy.experimental_local_results(summed(tf.convert_to_tensor(value)))[0].numpy()


def stacked(strategy: tf.distribute.Strategy, logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs as Keras reduces them: on several hosts it takes a mean over a first axis."""
    if num_workers(strategy) == 1:
        return logs
    return {name: tf.expand_dims(value, 0) for name, value in logs.items()}
