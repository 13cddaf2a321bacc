"""Lets several replicas of a model train on shares of one lot (`tf.distribute`).

A lot is split into shares, one per replica. Each replica clips and sums the gradients of its share;
the sums are added up over the replicas. From then on all replicas compute the same values: the same
noise from the same key (see `tf_adadp.noise`), so that each lot gets ONE noise, and the same state
and weights. The release is that of one device, since splitting a lot changes no example's clipped
gradient.

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
    """Returns the number of this replica, an int64 scalar from 0; 0 outside of a strategy."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tf.zeros([], tf.int64)
    return tf.cast(context.replica_id_in_sync_group, tf.int64)


def all_reduced(structure: Any) -> Any:
    """Adds up every tensor of a structure over all replicas: the sums are equal on all of them.

    Each replica must call it. With one replica, and outside of `Strategy.run`, it returns the
    structure itself.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return structure
    # Copied onto the replica's device: TensorFlow refuses tensors without a device.
    flat = [tf.identity(t) for t in tf.nest.flatten(structure)]
    summed = list(flat)
    for dtype in {t.dtype: None for t in flat}:  # one all-reduce takes tensors of one type
        of_type = [i for i, t in enumerate(flat) if t.dtype == dtype]
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [flat[i] for i in of_type])
        for i, t in zip(of_type, sums, strict=True):
            summed[i] = t
    return tf.nest.pack_sequence_as(structure, summed)


def copies(variable: tf.Variable) -> Any:
    """Returns the copies of a variable, one `tf.Variable` per replica, or the variable itself."""
    return getattr(variable, "values", None) or [variable]


def split_lot(lot: tuple, shares: int) -> tuple:
    """Splits a lot into `shares` lots, whose physical batches are dealt out in order.

    Args:
        lot: `((x, y, sample_weight), mask)`, every leaf [P, B, ...].
        shares: R ≥ 1.

    Returns:
        The same with leaves [R, ⌈P/R⌉, B, ...]. Empty physical batches fill P up to R·⌈P/R⌉, so a
        share may hold padding alone. P = 0 gives R empty shares.
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
    """Distributes lots over the replicas of a strategy: each gets a share of every lot.

    Args:
        dataset: a `tf.data.Dataset` of lots; on several hosts, of this one's part of each lot.
        strategy: a strategy.

    Returns:
        `(dataset, share)`: the dataset to iterate over, and a function that packs a replica's
        element of it as a lot. Without a strategy, the given dataset and the identity.
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
    # Declared infinite, so that TensorFlow prepares for no last step with too few shares.
    parts = parts.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return strategy.distribute_datasets_from_function(lambda context: parts), share


def check_microbatches(strategy: tf.distribute.Strategy, microbatch_size: int) -> None:
    """Refuses microbatches where the share of an example depends on other examples.

    Each replica has slots of its own. Replicas of ONE process receive the rows of a lot in order,
    so one more record can move others to another replica, which changes more than one slot. No
    record moves between processes: the process of a record does not depend on the lot.

    Raises:
        ValueError: microbatch_size > 1, and several replicas in one process.
    """
    if microbatch_size > 1 and strategy.num_replicas_in_sync > 1:
        local = len(strategy.extended.worker_devices)
        if local > 1:
            raise ValueError(
                f"microbatch_size={microbatch_size} on {local} devices of one process: one more "
                "record could move others to slots of another device, and change the sum by more "
                "than the sensitivity that the noise covers. Use microbatch_size=1, which adds the "
                "least noise, or one device per process."
            )


def is_strategy(strategy: tf.distribute.Strategy) -> bool:
    """Tells whether a DPModel trains under this strategy; False for TensorFlow's default."""
    return isinstance(strategy, _STRATEGIES)


def check_strategy(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Refuses unsupported strategies, and models that were made outside of their strategy.

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
