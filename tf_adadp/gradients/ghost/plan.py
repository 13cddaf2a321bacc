"""Which engine and which forms a model gets, and why.

Before a model is trained, the ghost pass is tried on a few examples of random data, and compared
with what it must equal. What it cannot follow goes to the plain engine.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from tf_adadp.gradients.ghost.independence import CannotFollow
from tf_adadp.gradients.mapping import TRACING_ERRORS, without_log_of_pfor
from tf_adadp.gradients.random_data import ROWS, random_batches
from tf_adadp.utils.keras_compat import layers_of


@dataclasses.dataclass(frozen=True)
class PlannedGradient:
    """How the per-example gradients of one weight are found.

    Attributes:
        layer, layer_class, variable: names.
        rule: the name of the layer's rule, or "map" for a layer mapped example by example.
        form: "outer" (norms from two vectors), "gram" (from a Gram matrix), "lookups" (from the
            rows looked up), "materialized" (gradients formed).
        size: the weight's number of entries.
        multiplications, floats: per example, for norm and sum, and what is held for it.
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
    """

    engine: str
    reason: str
    gradients: tuple[PlannedGradient, ...]
    num_scalars: int

    @property
    def floats_per_example(self):
        """Floats held per example for norms and sums."""
        if self.engine == "vectorized":
            return self.num_scalars
        return sum(g.floats for g in self.gradients)

    def __str__(self):
        lines = [f"gradient engine: {self.engine} ({self.reason})"]
        if self.gradients:
            header = ("layer", "class", "weight", "entries", "rule", "form", "mult.", "floats")
            rows = [header] + [
                (
                    g.layer,
                    g.layer_class,
                    g.variable,
                    f"{g.size:,}",
                    g.rule,
                    g.form,
                    f"{g.multiplications:,}",
                    f"{g.floats:,}",
                )
                for g in self.gradients
            ]
            widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
            lines += [
                "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
                for row in rows
            ]
        lines.append(
            f"per example: {self.floats_per_example:,} floats for {self.num_scalars:,} weights"
        )
        return "\n".join(lines)


def probe(ghost_pass, element_spec):
    """Tries a ghost pass on random data.

    Checked are: that the gradients add up to those of the summed loss; that no weight reaches the
    loss past a rule; that losses, predictions and norms of one example do not change with the
    others.

    Args:
        ghost_pass: a `GhostPass`.
        element_spec: `(x, y, sample_weight)` of TensorSpecs of a batch, or None for a leaf.

    Returns:
        tuple of `PlannedGradient`.

    Raises:
        CannotFollow: where a check fails or the pass cannot be made.
    """
    example_loss = ghost_pass.example_loss
    for layer in layers_of(example_loss.model):
        if getattr(layer, "quantization_mode", None) is not None:
            # Keras runs its `quantized_call`, past what stands in for `call`.
            raise CannotFollow(
                f"the layer {layer.name!r} ({type(layer).__name__}) is quantized, and quantized "
                "layers have no rule"
            )
    records = []

    def ghost(batch, seeds):
        trainable = example_loss.trainable_values()
        losses, y_pred, gradients, found = ghost_pass(trainable, *batch, seeds)
        records[:] = found
        squares, sums = zip(*(g.measure() for g in gradients), strict=True)
        return losses, y_pred, list(squares), [s(tf.ones([ROWS])) for s in sums]

    def direct(batch, seeds):
        trainable = example_loss.trainable_values()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trainable)
            total = _summed_loss(ghost_pass, trainable, batch, seeds)
        grads = tape.gradient(total, trainable, unconnected_gradients="zero")
        return [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in grads]

    def leaks(batch, seeds):
        trainable = example_loss.trainable_values()
        *_, grads, _ = ghost_pass(trainable, *batch, seeds, cut=True)
        return [i for i, g in enumerate(grads) if g is not None]

    first, second = random_batches(element_spec)
    seeds = tf.reshape(tf.range(2 * example_loss.num_seed_generators, dtype=tf.int32), [-1, 2])
    seeds = tf.cast(seeds, tf.uint32)
    past = []
    try:
        with without_log_of_pfor():
            traced = _traced(ghost, first, seeds)
            losses, y_pred, squares, sums = traced(first, seeds)
            changed = traced(second, seeds)[:3]
            expected = _traced(direct, first, seeds)(first, seeds)
            _traced(lambda *args: past.extend(leaks(*args)), first, seeds)
    except TRACING_ERRORS as error:
        raise CannotFollow(f"the pass on random data failed: {_first_line(error)}") from error
    if past:
        names = ", ".join(example_loss.trainable_variables[i].path for i in past)
        raise CannotFollow(f"{names} is used outside of its layer's own call")
    low = any(layer.compute_dtype != "float32" for layer in layers_of(example_loss.model))
    tolerance = 0.1 if low else 1e-3
    scale = max(np.sqrt(sum(float(tf.reduce_sum(tf.square(e))) for e in expected)), 1e-6)
    for variable, found, wanted in zip(
        example_loss.trainable_variables, sums, expected, strict=True
    ):
        apart = float(tf.reduce_max(tf.abs(found - wanted)))
        if apart > tolerance * scale:
            raise CannotFollow(f"the gradients found for {variable.path} are not its gradients")
    for before, after in zip(
        tf.nest.flatten([losses, y_pred, squares]), tf.nest.flatten(list(changed)), strict=True
    ):
        one, other = (np.asarray(tf.cast(t[0], tf.float64)) for t in (before, after))
        bound = tolerance * (np.abs(one) + np.max(np.abs(one), initial=0.0)) + 1e-12
        if not np.all((np.abs(one - other) <= bound) | ~np.isfinite(one)):
            raise CannotFollow("a layer mixes the examples of a batch")
    return tuple(_planned(records))


def _traced(function, *arguments):
    """A function traced once. TensorFlow warns of retracing where models follow on each other."""
    return tf.function(function, autograph=False).get_concrete_function(*arguments)


def _summed_loss(ghost_pass, trainable, batch, seeds):
    """The sum of the examples' losses: of each alone, or, where random layers would draw otherwise
    for an example alone, of the batch."""
    x, y, sample_weight = batch
    example_loss = ghost_pass.example_loss
    if example_loss.num_seed_generators == 0:
        alone = [
            tf.nest.map_structure(lambda t, i=i: None if t is None else t[i], batch)
            for i in range(ROWS)
        ]
        return tf.add_n([example_loss(trainable, *example, seeds)[0] for example in alone])
    y_pred, layer_losses = example_loss.predictions(trainable, x, seeds)
    if layer_losses:
        raise CannotFollow("it has activity regularisers beside random layers")
    return tf.reduce_sum(example_loss.losses(y, y_pred, sample_weight, ROWS, ghost_pass.map))


def _planned(records):
    for record in records:
        for variable, rows in record.parts:
            multiplications, floats = rows.cost()
            yield PlannedGradient(
                layer=record.layer.name,
                layer_class=type(record.layer).__name__,
                variable=variable.name,
                rule=record.form,
                form=rows.form,
                size=int(np.prod(variable.shape)),
                multiplications=multiplications,
                floats=floats,
            )


def _first_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
