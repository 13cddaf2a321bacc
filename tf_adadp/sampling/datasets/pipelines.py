"""Proves that the elements of a `tf.data.Dataset` are one record each, or batches of records.

The graph of the dataset is read, step by step from its sources. A step without a rule is refused.
"""

import dataclasses

import tensorflow as tf

from tf_adadp.sampling.datasets.graphs import Graph
from tf_adadp.sampling.datasets.steps import elements_of


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Describes the elements of a dataset.

    Attributes:
        batched: whether an element is a batch of records instead of one.
        ordered: True if every pass gives the same elements in the same order, as far as the steps
            tell. A generator or a function in Python may still change.
    """

    batched: bool
    ordered: bool


def judge(dataset: tf.data.Dataset) -> Pipeline:
    """Proves that the elements of a dataset are records, each at most once, or batches of them.

    A record is one element of a source: a row of `from_tensor_slices`, a line, a row of a CSV file,
    a serialized example of a TFRecord file, what a generator yields. Steps that choose, reorder,
    cache, filter or transform single records are fine. A function that is applied to batches must
    be proven to treat their records independently. The proof holds for the graph; what Python
    functions and generators do, and values that a function looks up in arrays, are not checked.

    Raises:
        ValueError: naming the step, for one that repeats or joins records, makes several elements
            of one record, draws random numbers, keeps state, or has no rule.
    """
    try:
        variant = tf.data.experimental.to_variant(dataset)
        graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=1)
    except tf.errors.FailedPreconditionError as error:
        raise ValueError(
            f"The steps of dataset cannot be read ({error.message.splitlines()[0]}). Leave out "
            "steps that bind it to a device, as prefetch_to_device() and copy_to_device()."
        ) from error
    graph = tf.compat.v1.GraphDef.FromString(graph.numpy())
    if not graph.node:
        raise ValueError(
            "The dataset holds more than 2 GB of tensors, more than its graph takes. Give the "
            "arrays themselves: fit(x, y, batch_size=...) or PoissonLots(x, y, ...)."
        )
    library = {function.signature.name: function for function in graph.library.function}
    elements = elements_of(Graph(graph.node, library), graph.node[-1].input[0])
    ordered = elements.ordered and dataset.options().deterministic is not False
    return Pipeline(elements.batched, ordered)
