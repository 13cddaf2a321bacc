"""The engine of a model and the form of each of its weights, as a table."""

import collections
import dataclasses
import math

from tf_adadp.gradients.ghost.trace import Trace
from tf_adadp.gradients.proof.obstacles import Obstacle


@dataclasses.dataclass(frozen=True)
class PlannedGradient:
    """Tells how the per-example gradients of one weight are found, where it meets the examples.

    Attributes:
        layer, layer_class, variable: names.
        rule: the operation in which the weight meets the examples, such as "MatMul", or "map" for
            a layer mapped example by example.
        form: "outer" (norms from two vectors), "gram" (from a Gram matrix), "lookups" (from the
            rows looked up), "materialized" (gradients formed).
        size: the weight's number of entries.
        multiplications, floats: per example, for norm and sum, and the memory for it.
    """

    layer: str
    layer_class: str
    variable: str
    rule: str
    form: str
    size: int
    multiplications: int
    floats: int


@dataclasses.dataclass(frozen=True)
class GradientPlan:
    """The engine of a model with the form of each of its weights; prints as a table.

    Attributes:
        engine: "ghost" or "vectorized".
        reason: why it is this engine.
        gradients: tuple of `PlannedGradient`, empty for the plain engine.
        num_scalars: the number of trainable scalars.
        mapped: names of the layers that are mapped example by example.
        obstacles: reasons why the engine cannot follow the whole model; None if it did not try.
        dropped: paths of variables that the model writes in training; private steps drop that.
        unreached: paths of trainable weights that no gradient of a loss reaches: noise alone
            moves them.
        captured: names of tensors that the model holds and that are not weights; whoever made the
            model vouches that they are constants.
    """

    engine: str
    reason: str
    gradients: tuple[PlannedGradient, ...]
    num_scalars: int
    mapped: tuple[str, ...] = ()
    obstacles: tuple[Obstacle, ...] | None = None
    dropped: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    captured: tuple[str, ...] = ()

    @property
    def floats_per_example(self) -> int:
        """Returns the number of floats held per example for norms and sums."""
        if self.engine == "vectorized":
            return self.num_scalars
        return sum(g.floats for g in self.gradients)

    @property
    def mixing(self) -> tuple[str, ...]:
        """Names the obstacles to following the whole model, with operation and line."""
        return tuple(str(obstacle) for obstacle in self.obstacles or ())

    def __str__(self) -> str:
        lines = [f"gradient engine: {self.engine} ({self.reason})"]
        if self.gradients:
            header = (
                "layers",
                "class",
                "weight",
                "entries",
                "operation",
                "form",
                "mult.",
                "floats",
            )
            table = [header, *self._rows()]
            widths = [max(len(row[i]) for row in table) for i in range(len(header))]
            lines += [
                "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
                for row in table
            ]
        lines.append(
            f"per example: {self.floats_per_example:,} floats for {self.num_scalars:,} weights"
        )
        if self.mapped:
            lines.append(f"mapped over the examples: {', '.join(self.mapped)}")
            lines += [f"  {reason}" for reason in self.mixing]
        if self.captured:
            lines.append(f"constants of the model: {', '.join(self.captured)}")
        return "\n".join(lines)

    def _rows(self):
        """Yields the cells of the table; equal rows are one, with the number of their layers."""
        groups = collections.defaultdict(list)
        for g in self.gradients:
            cells = (
                g.layer_class,
                g.variable,
                f"{g.size:,}",
                g.rule,
                g.form,
                f"{g.multiplications:,}",
                f"{g.floats:,}",
            )
            groups[cells].append(g.layer)
        for cells, layers in groups.items():
            names = list(dict.fromkeys(layers))
            label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            times = len(layers) // len(names)
            yield (label if times == 1 else f"{label}, {times} times", *cells)


def planned(trace: Trace) -> tuple[PlannedGradient, ...]:
    """Returns the `PlannedGradient`s of a traced model."""
    found = []
    for part in trace.parts:
        variable = trace.example_loss.trainable_variables[part.number]
        multiplications, floats = part.rows.cost()
        found.append(
            PlannedGradient(
                layer=part.layer.name,
                layer_class=type(part.layer).__name__,
                variable=variable.name,
                rule=part.operation,
                form=part.rows.form,
                size=math.prod(variable.shape),
                multiplications=multiplications,
                floats=floats,
            )
        )
    return tuple(found)
