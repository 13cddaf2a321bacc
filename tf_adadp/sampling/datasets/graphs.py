"""Reads the graph of a `tf.data.Dataset`: its steps, and the functions that they call."""

import dataclasses
import re
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

DATASET = re.compile(r"Dataset(V\d+)?$")  # the type of an operation that makes a dataset


@dataclasses.dataclass(frozen=True)
class Elements:
    """Describes the elements after a step.

    Attributes:
        origins: the sources that their records are read from.
        files: the files that they are read from, where these are named in the graph.
        batched: whether an element is a batch.
        ordered: whether every pass gives the same elements in the same order.
        read: whether a file or a generator holds the records, and not a tensor of the graph.
        direct: whether the elements are those of one source, so that no function made them.
        thinned: True if records were left out for their content: then positions depend on others.
    """

    origins: tuple["Step", ...] = ()
    files: frozenset[str] = frozenset()
    batched: bool = False
    ordered: bool = True
    read: bool = False
    direct: bool = False
    thinned: bool = False

    def but(self, **changes) -> "Elements":
        """Returns the same with some attributes changed."""
        return dataclasses.replace(self, **changes)


class Graph:
    """The nodes of a dataset's graph, or of a function that makes a dataset."""

    def __init__(self, nodes, library, arguments=()):
        self._nodes, self._library = {node.name: node for node in nodes}, library
        self.arguments = list(arguments)  # of a function

    def step(self, name):
        """Returns the step that makes a tensor, or None for an argument of the function."""
        node = self._nodes.get(name.split(":")[0].removeprefix("^"))
        while node is not None and node.op == "Identity":
            node = self._nodes.get(node.input[0].split(":")[0])
        return None if node is None else Step(node, self)

    def inputs(self, step):
        """Returns the names of the datasets that a step takes."""
        return [n for n in step.node.input if n[0] != "^" and self._is_dataset(n)]

    def _is_dataset(self, name):
        step = self.step(name)
        return step is not None and bool(DATASET.search(step.node.op))

    def sources(self, name):
        """Yields the kinds of the steps that a dataset starts from."""
        step = self.step(name)
        names = self.inputs(step)
        if not names:
            yield step.kind
        for name in names:
            yield from self.sources(name)

    def argument(self, name):
        """Returns the number of the argument that a tensor is, in another shape or not; or None."""
        name = name.split(":")[0]
        while name not in self.arguments:
            node = self._nodes.get(name)
            if node is None or node.op not in ("ExpandDims", "Identity", "Reshape"):
                return None
            name = node.input[0].split(":")[0]
        return self.arguments.index(name)

    def function(self, name):
        """Returns a function, a FunctionDef, by its name."""
        return self._library[name]

    def body(self, function):
        """Returns the graph of a function that makes a dataset."""
        names = [argument.name for argument in function.signature.input_arg]
        return Graph(function.node_def, self._library, names)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One operation of a graph that makes a dataset."""

    node: tf.compat.v1.NodeDef
    graph: Graph

    @property
    def kind(self) -> str:
        """Returns its type, without "Dataset" and version."""
        return DATASET.sub("", self.node.op)

    @property
    def name(self) -> str:
        """Returns its name as a method of `tf.data.Dataset`, approximately."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.kind).lower()

    def refuse(self, why: str, fix: str) -> None:
        """Raises a ValueError about this step."""
        raise ValueError(f"The dataset's step {self.name}() {why}. {fix}")

    def constant(self, index: int):
        """Returns an operand as an array, or None where it is not constant."""
        step = self.graph.step(self.node.input[index])
        if step is None or "value" not in step.node.attr:
            return None
        proto = step.node.attr["value"].tensor
        value = tf.io.parse_tensor(proto.SerializeToString(), tf.as_dtype(proto.dtype)).numpy()
        return np.array(value, object) if isinstance(value, bytes) else value

    def functions(self) -> Iterator[tf.compat.v1.GraphDef]:
        """Yields the functions that the step calls, as FunctionDefs."""
        for attribute in self.node.attr.values():
            if attribute.HasField("func"):
                yield self.graph.function(attribute.func.name)

    def operations(self) -> Iterator[str]:
        """Yields the type of every operation in its functions, and in those that they call."""
        todo, seen = list(self.functions()), set()
        while todo:
            function = todo.pop()
            if function.signature.name in seen:
                continue
            seen.add(function.signature.name)
            for node in function.node_def:
                yield node.op
                for value in node.attr.values():
                    called = [value.func] if value.HasField("func") else value.list.func
                    todo += [self.graph.function(f.name) for f in called if f.name]

    def is_same_source(self, other: "Step") -> bool:
        """Tells whether two sources hold the same records, by their origin."""
        return self.node.op == other.node.op and self._made_of() == other._made_of()

    def _made_of(self):
        attributes = sorted(self.node.attr.items())
        functions = [value.func.name for _, value in attributes if value.HasField("func")]
        steps = [self.graph.step(name) for name in self.node.input]
        operands = [
            None if s is None else s.node.attr["value"].tensor if s.kind == "Const" else s.node.name
            for s in steps
        ]
        return functions, operands
