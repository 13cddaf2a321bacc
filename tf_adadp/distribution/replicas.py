"""Lets several replicas of a model train on shares of one lot (`tf.distribute`).

A lot is split into shares, one per replica. Each replica clips and sums the gradients of its share;
the sums are added up over the replicas, and from then on all replicas compute the same: the same
noise from the same key (see `tf_adadp.noise`), so that there is ONE noise per lot, the same state,
the same weights. The release is that of one device: how a lot was split changes no clipped gradient
of any example.

The sums that travel between the replicas are raw. So is the noise key, which the first replica
gives to the others when it is made. The connections between hosts must be private ones.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_STRATEGIES = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


def num_replicas() -> int:
    """Counts the replicas, R, that run the calling code in step; 1 outside of a strategy."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def replica_number() -> tf.Tensor:
    """Returns which of them this is, an int64 scalar from 0; 0 outside of a strategy."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tf.zeros([], tf.int64)
    return tf.cast(context.replica_id_in_sync_group, tf.int64)


def all_reduced(structure: Any) -> Any:
    """Adds up every tensor of a structure over all replicas: the sums are equal on all of them.

    Called by each replica. With one replica, and outside of `Strategy.run`, the structure itself.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return structure
    # Copied onto the replica's device: TensorFlow refuses tensors that were read on none.
    flat = [tf.identity(t) for t in tf.nest.flatten(structure)]
    summed = list(flat)
    for dtype in {t.dtype: None for t in flat}:  # what travels together has one type
        of_type = [i for i, t in enumerate(flat) if t.dtype == dtype]
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [flat[i] for i in of_type])
        for i, t in zip(of_type, sums, strict=True):
            summed[i] = t
    return tf.nest.pack_sequence_as(structure, summed)


def copies(variable: tf.Variable) -> Any:
    """Returns the `tf.Variable`s that a variable is kept in: one per replica, or itself."""
    return getattr(variable, "values", None) or [variable]


def split_lot(lot: tuple, shares: int) -> tuple:
    """Splits a lot into `shares` lots, whose physical batches are dealt out in order.

    Args:
        lot: `((x, y, sample_weight), mask)`, every leaf [P, B, ...].
        shares: R ≥ 1.

    Returns:
        The same with leaves [R, ⌈P/R⌉, B, ...]. What is missing to R·⌈P/R⌉ is filled up with empty
        physical batches, so a share may have padding alone. P = 0 gives R empty shares.
    """

    def split(leaf):
        if leaf is None:
            return None
        batches = tf.shape(leaf)[0]
        each = -(-batches // shares)
        missing = shares * each - batches
        filler = tf.zeros(tf.concat([[missing], tf.shape(leaf)[1:]], 0), leaf.dtype)
        filled = tf.concat([leaf, filler], 0)
        parts = tf.reshape(filled, tf.concat([[shares, each], tf.shape(leaf)[1:]], 0))
        static = None if leaf.shape[0] is None else -(-leaf.shape[0] // shares)
        return tf.ensure_shape(parts, [shares, static, *leaf.shape[1:]])

    return tf.nest.map_structure(split, lot)


def distribute(
    dataset: tf.data.Dataset, strategy: tf.distribute.Strategy
) -> tuple[Any, Callable[[Any], tuple]]:
    """Makes lots into what `strategy` iterates over: each replica gets a share of every lot.

    Args:
        dataset: a `tf.data.Dataset` of lots; on several hosts, of this one's part of each lot.
        strategy: a strategy.

    Returns:
        `(dataset, share)`: what to iterate over, and a function that makes a lot of what a replica
        is given by it. Without a strategy, the dataset itself and the identity.
    """
    if not is_strategy(strategy):
        return dataset, lambda lot: lot
    number = len(strategy.extended.worker_devices)  # of this process
    flat = tf.nest.flatten(dataset.element_spec)
    present = [i for i, spec in enumerate(flat) if not isinstance(spec, tf.NoneTensorSpec)]

    @tf.autograph.experimental.do_not_convert
    def split(*lot):
        leaves = tf.nest.flatten(split_lot(lot, number))
        # Strategies cannot pass on elements with parts that are None.
        return tf.data.Dataset.from_tensor_slices(tuple(leaves[i] for i in present))

    def share(leaves):
        filled = [None] * len(flat)
        for i, leaf in zip(present, leaves, strict=True):
            filled[i] = leaf
        return tf.nest.pack_sequence_as(dataset.element_spec, filled)

    parts = dataset.flat_map(split).prefetch(number)
    # As if without end: there is never a last step with too few shares to provide for.
    parts = parts.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return strategy.distribute_datasets_from_function(lambda context: parts), share


def check_microbatches(strategy: tf.distribute.Strategy, microbatch_size: int) -> None:
    """Refuses microbatches where the share that an example is in depends on other examples.

    Each replica has slots of its own. Replicas of ONE process are dealt the rows of a lot in order,
    so a record more can move others to another replica, and with them more than one slot. Between
    processes nothing moves: who holds a record does not depend on the lot.

    Raises:
        ValueError: microbatch_size > 1, and several replicas in one process.
    """
    if microbatch_size > 1 and strategy.num_replicas_in_sync > 1:
        local = len(strategy.extended.worker_devices)
        if local > 1:
            raise ValueError(
                f"microbatch_size={microbatch_size} on {local} devices of one process: one record "
                "more would move others to another device, into other slots, and the sum by more "
                "than the noise is for. Use microbatch_size=1, which adds the least noise, or one "
                "device a process."
            )


def is_strategy(strategy: tf.distribute.Strategy) -> bool:
    """Tells whether a DPModel trains under it, and it is not TensorFlow's default."""
    return isinstance(strategy, _STRATEGIES)


def check_strategy(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Refuses strategies, and models made outside of them, that would not train privately.

    Raises:
        ValueError: naming the strategy or the variable, and the fix.
    """
    default = not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy()
    if default:
        return
    kind = type(strategy).__name__
    if not is_strategy(strategy):
        raise ValueError(
            f"{kind}: DPModel trains under {', '.join(s.__name__ for s in _STRATEGIES)} or none. "
            "Under others, one noise per lot is not assured."
        )
    for variable in model.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise ValueError(
                f"The variable {variable.path!r} was not made under the {kind} that it is to be "
                "trained with. Make and compile the model inside of `strategy.scope()`."
            )
