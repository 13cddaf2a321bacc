"""Compares the sizes of lots with the law that a user declared for them."""

import tensorflow as tf

from tf_adadp.accounting import SamplingLaw

_FALSE_ALARM = 1e-9  # over a whole stream of lots
_BATCHES = {
    "BatchDataset",
    "BatchDatasetV2",
    "PaddedBatchDataset",
    "PaddedBatchDatasetV2",
    "ParallelBatchDataset",
}
# Steps of a pipeline that change no element.
_PASS_ON = {
    "AssertCardinalityDataset",
    "CacheDataset",
    "CacheDatasetV2",
    "Identity",
    "ModelDataset",
    "OptionsDataset",
    "PrefetchDataset",
    "RepeatDataset",
    "ShardDataset",
    "ShuffleAndRepeatDataset",
    "ShuffleAndRepeatDatasetV2",
    "ShuffleDataset",
    "ShuffleDatasetV2",
    "ShuffleDatasetV3",
    "SkipDataset",
    "TakeDataset",
    "_Retval",
}

_FIX = (
    "Give the records to lots that sample them: PoissonLots(x, y, expected_size=...), or "
    "FixedSizeLots or ShuffledLots where all lots are to have one size. x and y can be arrays, or "
    "x a source with __len__ and __getitem__."
)


class ContradictedLaw(ValueError):
    """Signals that the lots drawn so far contradict the declared law."""


class SizeCheck:
    """Compares the sizes of lots, in the order that they are drawn, with a law.

    It refuses a size of probability 0 under the law, and, at lot t, a run of r lots of one size n
    with t·(t + 1)·p(n)^(r−1) < 1e-9. Under the true law such a run has probability at most Σ_t Σ_n
    p(n)·1e-9/(t(t + 1)) = 1e-9, however many lots are drawn.

    Args:
        law: a `SamplingLaw`.
    """

    def __init__(self, law: SamplingLaw):
        self._law = law
        self._lots = self._run = 0
        self._size = None

    def see(self, size: int) -> None:
        """Checks the size of the next lot.

        Raises:
            ContradictedLaw: see the class.
        """
        probability = self._law.lot_size_probability(size)
        self._lots += 1
        self._run = self._run + 1 if size == self._size else 1
        self._size = size
        if probability is None:
            return
        if probability == 0:
            most = self._law.max_lot_size
            raise ContradictedLaw(
                f"a batch of dataset has {size} rows, but its law says "
                + (
                    f"{most} in every lot. Batch with drop_remainder=True, or declare the law "
                    "that holds."
                    if most is not None
                    else f"that there are {self._law.num_examples} records. Declare the law that "
                    "holds."
                )
            )
        if self._lots * (self._lots + 1) * probability ** (self._run - 1) < _FALSE_ALARM:
            raise ContradictedLaw(
                f"the last {self._run} batches of dataset have {size} rows each, and by its law, "
                f"{self._law.describe()}, a lot has so many with probability {probability:.3g}. "
                "Batches of one size are not Poisson lots. " + _FIX
            )


def check_batch_size(dataset: tf.data.Dataset, law: SamplingLaw) -> None:
    """Refuses a dataset whose constant batch size is not that of every lot of the law.

    Args:
        dataset: a `tf.data.Dataset`.
        law: a `SamplingLaw`.

    Raises:
        ValueError: the size is constant, and has a probability below 1 under the law.
    """
    size = _constant_size(dataset)
    probability = None if size is None else law.lot_size_probability(size)
    if probability is not None and probability < 1:
        raise ValueError(
            f"dataset is cut into batches of {size}, and that is not {law.describe()}, as declared."
            f" Lots of that law {'vary in size' if probability else 'have another size'}. {_FIX}"
        )


def _constant_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the constant number of rows of a batch, the last one excepted, or None."""
    sizes = {spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec) if _has_rows(spec)}
    if sizes - {None}:
        return min(sizes - {None})
    steps, nodes = _last_steps(dataset)
    if not steps or steps[-1].op not in _BATCHES:
        return None
    size = nodes.get(steps[-1].input[1].split(":")[0])
    if size is None or "value" not in size.attr:
        return None
    return int(tf.make_ndarray(size.attr["value"].tensor))


def ends_in_repeat(dataset: tf.data.Dataset) -> bool:
    """Tells whether a pipeline repeats its lots after the last step that changes them."""
    return any("Repeat" in node.op for node in _last_steps(dataset)[0])


def _last_steps(dataset: tf.data.Dataset) -> tuple[list, dict]:
    """Finds the steps of a pipeline from its end back to one that makes or changes elements.

    Returns:
        Those steps as nodes of the dataset's graph, and all nodes of the graph by name.
    """
    graph = tf.compat.v1.GraphDef.FromString(
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=1
        ).numpy()
    )
    nodes = {node.name: node for node in graph.node}
    steps = [graph.node[-1]] if graph.node else []
    while steps and steps[-1].op in _PASS_ON and steps[-1].input:
        steps.append(nodes[steps[-1].input[0].split(":")[0]])
    return steps, nodes


def _has_rows(spec):
    return isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank)
