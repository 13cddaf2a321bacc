"""Finds state, Python calls and loops in the graph of an example's loss and gradient."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.distribution import replicas
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.utils.keras_compat import op_def_registry
from tf_adadp.utils.problems import Problem, raise_first

# Operations that TensorFlow marks as stateful and that keep no data: they read, draw random
# numbers, call functions (whose operations are checked separately), or live for one execution. All
# other stateful operations may write a variable, a table, a queue or a file.
_KEEPS_NOTHING = (
    "AllCandidateSampler", "AnonymousHashTable", "AnonymousMutable", "Assert", "Case",
    "CheckNumerics", "CudnnRNN", "DeviceIndex", "Empty", "FixedUnigramCandidateSampler",
    "GuaranteeConst", "HashTable", "If", "LogUniformCandidateSampler", "LookupTableExport",
    "LookupTableFind", "LookupTableSize", "Multinomial", "MutableDenseHashTable",
    "MutableHashTable", "NonDeterministicInts", "ParameterizedTruncatedNormal", "Print", "Random",
    "ReadVariable", "ResourceGather", "Rng", "SampleDistortedBoundingBox", "Stateful", "Stateless",
    "TensorArray", "TruncatedNormal", "UniformCandidateSampler", "VarHandleOp", "VarIsInitialized",
    "VariableShape", "While", "XlaCallModule", "XlaLaunch", "_Arg", "_If", "_Retval", "_While",
)  # fmt: skip
# The size of their outputs depends on values; `tf.vectorized_map` stops where two examples differ
# in it.
_SHAPED_BY_VALUES = (
    "DynamicPartition", "ListDiff", "NonMaxSuppression", "RaggedRange", "StringNGrams",
    "StringSplit", "UnicodeDecode", "Unique", "Where",
)  # fmt: skip
_CALLS_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
_CONTROL_FLOW = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")


class ExampleGraph:
    """Traces the loss of one example, and its gradient where an operation defines its own.

    Nothing is run.

    Args:
        example_loss: an `ExampleLoss`.
        example: `(x, y, sample_weight)` of TensorSpecs of one example.
    """

    def __init__(self, example_loss: ExampleLoss, example: Any):
        self._model = example_loss.model
        self._reached: set[int] = set()  # numbers of the weights that get a gradient
        weights = [tf.TensorSpec(v.shape, v.dtype) for v in example_loss.trainable_variables]
        seeds = tf.TensorSpec([example_loss.num_seed_generators, 2], tf.uint32)

        @tf.function(autograph=False)
        def one_example(weights, x, y, sample_weight, seeds):
            loss = example_loss(weights, x, y, sample_weight, seeds)[0]
            read = _operations_behind(loss)
            self._reached = {i for i, weight in enumerate(weights) if weight.op in read}
            return loss

        @tf.function(autograph=False)
        def gradient(weights, x, y, sample_weight, seeds):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(weights)
                loss = example_loss(weights, x, y, sample_weight, seeds)[0]
            found = tape.gradient(loss, weights)
            self._reached = {i for i, g in enumerate(found) if g is not None}
            return [g for g in found if g is not None]

        self._graph = self._whole = one_example.get_concrete_function(
            weights, *example, seeds
        ).graph
        if any(_has_a_gradient_of_its_own(node) for node in _nodes(self._graph)):
            self._whole = gradient.get_concrete_function(weights, *example, seeds).graph

    def check(self) -> None:
        """Raises ValueError for the first of `problems`."""
        raise_first(self.problems())

    def problems(self) -> Iterator[Problem]:
        """Yields the `state_problems` of layers and loss, and weights whose gradient gets lost."""
        yield from state_problems(self._whole, "a layer or the loss", self._model.variables)
        for variable in read_by(self._whole, self._model.trainable_variables):
            yield Problem(
                f"The trainable weight {variable.path!r}",
                "is read by the loss, or past Keras (`_value`): its gradient from there would be "
                "lost",
                "Read it in the `call` of a layer, by its attribute; what the loss has of it can "
                "be a regularizer, or an `add_loss` of that layer.",
            )

    @property
    def unreached(self) -> tuple[str, ...]:
        """Returns the paths of the trainable weights that no gradient of the loss reaches."""
        variables = self._model.trainable_variables
        return tuple(v.path for i, v in enumerate(variables) if i not in self._reached)

    def control_flow(self) -> str | None:
        """Returns the name of a loop or a branch in the graph, or None."""
        return control_flow(self._graph)

    def shaped_by_values(self) -> str | None:
        """Returns the name of an operation whose output's shape depends on values, or None."""
        return shaped_by_values(self._graph)


def _operations_behind(tensor):
    """Returns the operations of a graph that a tensor is computed from."""
    found, left = set(), [tensor.op]
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left += [t.op for t in op.inputs]
    return found


def read_by(traced: tf.Graph, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns the variables that a `FuncGraph` reads itself instead of taking them as inputs."""
    handles = {id(outer) for outer, _ in traced.captures}

    def is_read(variable):
        copies = replicas.copies(variable.value)
        return any(id(getattr(held, "handle", None)) in handles for held in copies)

    return [v for v in variables if is_read(v)]


def control_flow(traced: tf.Graph) -> str | None:
    """Returns the name of a loop or a branch, or None."""
    return next((node.name for node in _nodes(traced) if node.op in _CONTROL_FLOW), None)


def shaped_by_values(traced: tf.Graph) -> str | None:
    """Returns the name of an operation whose output's shape depends on values, or None."""
    nodes = _nodes(traced)
    return next((node.name for node in nodes if node.op.startswith(_SHAPED_BY_VALUES)), None)


def state_problems(
    traced: tf.Graph, whose: str, known_variables: Sequence[keras.Variable] = ()
) -> Iterator[Problem]:
    """Yields a `Problem` for each operation that keeps state, calls Python or casts strings.

    Updates of Keras variables inside a map over examples are dropped; a `tf.Variable`, a table, a
    file or a Python function would keep a raw statistic and feed it to later lots. Reading a
    variable outside of known_variables is reported too.

    Args:
        traced: a `FuncGraph`.
        whose: the owner of the graph, for the message.
        known_variables: Keras variables that it may read.
    """
    for node in _nodes(traced):
        if _may_keep(node.op) or node.op in _CALLS_PYTHON:
            yield Problem(
                f"The operation {node.name!r} ({node.op}) in {whose}",
                "keeps state or calls Python: in training it would hold raw data and feed it to "
                "later lots",
                "Keep state in Keras variables (`add_weight`), whose updates are dropped, or drop "
                "it.",
            )
        if node.op == "Cast" and node.attr["SrcT"].type == tf.string.as_datatype_enum:
            # TensorFlow raises only in the first step, which is charged by then.
            yield Problem(
                f"The operation {node.name!r} in {whose}",
                "takes numbers, and gets data of dtype string",
                "Encode them first, e.g. with keras.layers.StringLookup.",
            )
    known = {id(c) for v in known_variables for c in replicas.copies(v.value)}
    for variable in traced.variables:
        if variable.dtype.is_floating and id(variable) not in known:
            yield Problem(
                f"{whose[0].upper()}{whose[1:]}",
                f"reads the variable {variable.name!r}, which is not the model's: code that writes "
                "to it (a metric, an evaluation on training data) would feed raw data to later "
                "lots",
                "Use a constant.",
            )


def refuse_state(
    traced: tf.Graph, whose: str, known_variables: Sequence[keras.Variable] = ()
) -> None:
    """Raises ValueError for the first of `state_problems`."""
    raise_first(state_problems(traced, whose, known_variables))


def _may_keep(operation):
    """Tells whether an operation of this name may keep its inputs."""
    definition = op_def_registry.get(operation)
    # None for functions, whose own operations are looked at.
    if definition is None or operation.startswith(_KEEPS_NOTHING):
        return False
    # TensorFlow 1's are not marked as stateful: they write to inputs by reference.
    return definition.is_stateful or any(given.is_ref for given in definition.input_arg)


def _has_a_gradient_of_its_own(node):
    return node.op == "StopGradient" or "_gradient_op_type" in node.attr


def _nodes(traced):
    graph = traced.as_graph_def()
    return [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
