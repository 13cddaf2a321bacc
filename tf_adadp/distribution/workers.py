"""Training on several hosts: what the processes of a `MultiWorkerMirroredStrategy` agree on.

All workers run the same script. Each draws its own part of every lot, from records that no other
worker has, with a key of its own; sums, noise and update are those of `replicas`. What is
worked out on the host must come out alike everywhere, or the workers would wait for each other for
ever, and it decides on privacy: so the first worker, the chief, gives its weights, state, ledger
and noise keys to the others when `fit` begins, and all check that they were given the same laws.

Restoring and writing files is therefore for the chief alone: it is the one that has checkpoints and
the ledger file.
"""

import hashlib
import json

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.distribution import replicas


def num_workers(strategy):
    """W, how many processes train together under this strategy."""
    resolver = strategy.cluster_resolver
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or resolver is None:
        return 1
    spec = resolver.cluster_spec().as_dict()
    return max(1, sum(len(spec.get(kind, ())) for kind in ("chief", "worker")))


def worker_number(strategy=None):
    """Which of the workers this process is, 0 for the chief; 0 where there is but one."""
    strategy = strategy or tf.distribute.get_strategy()
    if num_workers(strategy) == 1:
        return 0
    resolver = strategy.cluster_resolver
    has_chief = bool(resolver.cluster_spec().as_dict().get("chief"))
    return int(resolver.task_id or 0) + (has_chief and resolver.task_type == "worker")


def from_chief(strategy, values):
    """The chief's values, on all workers: numpy arrays, everywhere of the same shapes and types.

    They travel as bits, so they arrive as they are.
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


def bytes_from_chief(strategy, data):
    """The chief's bytes, on all workers, whatever the others pass."""
    if num_workers(strategy) == 1:
        return data
    (size,) = from_chief(strategy, [np.array(len(data), np.int64)])
    return _bits_from_chief(strategy, data, int(size))


def _bits_from_chief(strategy, data, size):
    words = np.zeros(-(-size // 4), np.int32)
    if worker_number(strategy) == 0:
        words = np.frombuffer(data.ljust(4 * len(words), b"\0"), np.int32)
    return _summed(strategy, words).tobytes()[:size]


def total(strategy, value):
    """The sum of a whole number over all workers, an int."""
    if num_workers(strategy) == 1:
        return int(value)
    return int(_summed(strategy, np.array(value, np.int64)))


def check_alike(strategy, **values):
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
        f"The workers do not agree ({found}). All must be given the same arguments, and lots of "
        "one law: arrays of all records on every worker, or on each its own part as "
        "PoissonLots(..., num_examples=<those of all workers>)."
    )


def _summed(strategy, value):
    """The sum of a numpy array over workers, one contribution each."""
    devices = strategy.num_replicas_in_sync // num_workers(strategy)

    @tf.function(autograph=False)
    def summed(value):
        def on_replica():
            # One of a worker's replicas speaks for it.
            mine = replicas.replica_number() % devices == 0
            return replicas.all_reduced(tf.where(mine, value, tf.zeros_like(value)))

        return strategy.run(on_replica)

    return strategy.experimental_local_results(summed(tf.convert_to_tensor(value)))[0].numpy()


def privacy_arguments(model):
    """{what: number} of a compiled model in a running `fit`: alike where privacy is set alike.

    Hashes, of 48 bits, which float64 holds exactly. The learning rate comes from the chief.
    """
    config = model.optimizer.get_config()
    shown = {k: v for k, v in config.items() if k not in ("name", "learning_rate")}
    privacy = [c for c in model.fit_callbacks if getattr(c, "reports_privacy", False)]
    budgets = [(str(c.target_delta), str(c.max_epsilon), c.accountant) for c in privacy]
    return {
        "sampling law, hashed": _hashed(model.step_law.to_config()),
        "optimizer's arguments, hashed": _hashed([type(model.optimizer).__name__, shown]),
        "released_metrics, hashed": _hashed(model._released_metrics),
        "budgets of PrivacyCallbacks, hashed": _hashed(budgets),
        "trainable weights, hashed": _hashed([list(v.shape) for v in model.trainable_variables]),
    }


def _hashed(value):
    serialized = keras.saving.serialize_keras_object(value)
    # What JSON cannot hold has a form that may differ between processes.
    text = json.dumps(serialized, sort_keys=True, default=lambda v: type(v).__name__)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


class ShareChiefsState(keras.callbacks.Callback):
    """When training begins, after callbacks that restore: all workers take the chief's state.

    Weights, optimizer state, ledger, noise keys (new ones) and the epoch to begin with. All must
    clip, add noise and stop alike: each charges for what IT was told, and shares come from all.
    """

    def on_train_begin(self, logs=None):
        """See the class."""
        model, strategy = self.model, self.model.distribute_strategy
        variables = [*model.variables, *model.optimizer.variables]
        variables = list({id(v): v for v in variables}.values())
        check_alike(
            strategy,
            variables=len(variables),
            steps_per_execution=model.steps_per_execution,
            **privacy_arguments(model),
        )
        chief = worker_number(strategy) == 0
        values = from_chief(strategy, [v.numpy() for v in variables])
        if not chief:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        model.take_chiefs_ledger(strategy)
        check_alike(strategy, releases=model.optimizer.releases)
        model.optimizer.renew_keys(lambda key: from_chief(strategy, [key])[0])
        epoch = from_chief(strategy, [np.array(model._initial_epoch or 0, np.int64)])[0]
        model._initial_epoch = int(epoch) or None
        for callback in model.fit_callbacks:
            if getattr(callback, "reports_privacy", False):
                callback.share_budget(lambda value: from_chief(strategy, [value])[0])
