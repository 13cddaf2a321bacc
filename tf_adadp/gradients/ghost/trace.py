"""Traces a model and its losses for a batch, and proves that no example feels another one.

The proof covers the graph that runs: the graph traced here, with the number of examples unknown, is
the one that training calls.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.clipping.row_gradients import RowGradients, Rows
from tf_adadp.gradients import forms
from tf_adadp.gradients.dilation import rows_together
from tf_adadp.gradients.example_graph import read_by
from tf_adadp.gradients.example_loss import ExampleLoss, note, notes_of
from tf_adadp.gradients.ghost import chains, penalties, recurrent, weights
from tf_adadp.gradients.ghost.alone import AloneCall, CannotMap
from tf_adadp.gradients.ghost.broadcasts import broadcasts_by
from tf_adadp.gradients.mapped import num_mapped, traced_map
from tf_adadp.gradients.patching import PATCHING, functions_inlined, replaced
from tf_adadp.gradients.proof.follow import Follower, inputs_of_rows
from tf_adadp.gradients.proof.obstacles import (
    Obstacle,
    of_effect,
    of_error,
    of_operation,
    of_value,
)
from tf_adadp.gradients.proof.values import Mixed, Mixes, Public, public
from tf_adadp.utils.keras_compat import (
    is_part_of_keras,
    layers_of,
    original_operation,
    own_layers,
)

# Steps of a recurrent layer that are written out; more take long to trace.
_LONGEST_UNROLLED = 64


class CannotFollow(BaseException):
    """Raised if the ghost pass cannot follow a model; the message names the place and the reason.

    It never leaves this package. It is not an `Exception`, because Keras would rewrite the message
    of one that is raised while a layer is called.

    Attributes:
        layer: the layer at fault, or None.
        obstacles: the `Obstacle`s that were found.
    """

    def __init__(
        self,
        reason: str | Obstacle,
        layer: keras.Layer | None = None,
        obstacles: Sequence[Obstacle] | None = None,
        **options: bool,
    ):
        super().__init__(str(reason))
        self.layer = layer
        if isinstance(reason, str):
            reason = Obstacle(reason, None if layer is None else layer.name, **options)
        self.obstacles = (reason,) if obstacles is None else tuple(obstacles)


@dataclasses.dataclass(frozen=True)
class Part:
    """The gradients of one weight from one operation.

    Attributes:
        number: of the weight.
        layer: the layer that the operation is in.
        operation: its type, or "map" for a layer mapped over the examples.
        rows: the `RowGradients`, of tensors of the traced graph.
    """

    number: int
    layer: keras.Layer
    operation: str
    rows: RowGradients


def trace_model(example_loss: ExampleLoss, element_spec: Any, loss_scale: float = 1.0) -> "Trace":
    """Traces a model; maps the layers that cannot be followed over the examples.

    Args, raises: see `Trace`.
    """
    model = example_loss.model
    alone: list[keras.Layer] = []
    reasons: list[str] = []
    obstacles: list[Obstacle] = []
    while True:
        try:
            trace = Trace(example_loss, element_spec, alone, loss_scale)
        except CannotFollow as cannot:
            before = [r for r, other in zip(reasons, alone, strict=True) if other is cannot.layer]
            reason = "; ".join([*before, str(cannot)])
            obstacles += cannot.obstacles
            layer = _around(cannot.layer, model, alone)
            if layer is None:
                raise CannotFollow(reason, cannot.layer, obstacles) from None
            alone.append(layer)
            reasons.append(reason)
        else:
            trace.obstacles = tuple(obstacles)
            return trace


def obstacles_of(example_loss: ExampleLoss, element_spec: Any) -> tuple[Obstacle, ...]:
    """Returns the obstacles to following a batch through a model; none if all is proven.

    Args:
        example_loss, element_spec: see `Trace`.
    """
    try:
        return trace_model(example_loss, element_spec).obstacles
    except CannotFollow as cannot:
        return cannot.obstacles


def _around(layer, model, alone):
    """Returns the layer, or the next one around it that is not mapped; None for the model."""
    while layer is not None and any(layer is other for other in alone):
        layer = next(
            (
                outer
                for outer in layers_of(model)
                if any(part is layer for part in own_layers(outer))
            ),
            None,
        )
    return None if layer is model else layer


class Trace:
    """One trace of a batch: forward pass, losses, backward pass and row gradients.

    Args:
        example_loss: an `ExampleLoss`.
        element_spec: `(x, y, sample_weight)` of TensorSpecs of a batch, [None, ...].
        alone: the layers to map over examples.
        loss_scale: fixed factor on the loss, undone on float32 gradients.

    Attributes:
        parts: list of `Part`.
        graph: the traced graph.
        alone: the layers that are mapped over the examples.
        obstacles: why, for those that were found out (`trace_model`).
        captured: names of the constants that the model holds.
        loops_over_losses: whether losses are worked on one example after the other.
        unreached: paths of the trainable weights that no loss depends on.

    Raises:
        CannotFollow: examples meet, or may meet.
    """

    def __init__(
        self,
        example_loss: ExampleLoss,
        element_spec: Any,
        alone: Sequence[keras.Layer] = (),
        loss_scale: float = 1.0,
    ):
        self.example_loss = example_loss
        self.alone = tuple(alone)
        self.obstacles: tuple[Obstacle, ...] = ()
        self.loops_over_losses = False
        self._loss_scale = loss_scale
        self._calls: list[AloneCall] = []
        self._spans: list[tuple[int, int, keras.Layer]] = []
        self._open = None
        self._numbers = {id(v): i for i, v in enumerate(example_loss.trainable_variables)}
        self.parts: list[Part] = []
        x, y, sample_weight = tf.nest.map_structure(
            lambda s: None if s is None else tf.TensorSpec((None, *s.shape[1:]), s.dtype),
            element_spec,
        )
        values = example_loss.trainable_values(), example_loss.non_trainable_values()
        specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), values)
        seeds = tf.TensorSpec([example_loss.num_seed_generators, 2], tf.uint32)
        traced = tf.function(self._traced, autograph=False)
        try:
            self._function = traced.get_concrete_function(*specs, x, y, sample_weight, seeds)
        except Exception as error:  # any error of the user's code on a batch
            raise CannotFollow(of_error(error)) from error
        self.graph = self._function.graph
        self.captured = tuple(
            inner.name for outer, inner in self.graph.captures if outer.dtype != tf.resource
        )

    def __call__(self, trainable, x, y, sample_weight, seeds):
        """Returns `(losses [B], predictions, RowGradients per trainable variable)`."""
        others = self.example_loss.non_trainable_values()
        losses, y_pred, notes, tensors = self._function(
            list(trainable), others, x, y, sample_weight, seeds
        )
        note(y_pred, *notes)
        gradients = [copy.copy(rows) for rows in self._gradients]
        for rows, found in zip(gradients, tensors, strict=True):
            vars(rows).update(found)
        return losses, y_pred, gradients

    def _traced(self, trainable, non_trainable, x, y, sample_weight, seeds):
        graph = tf.compat.v1.get_default_graph()
        follower = self._follower = Follower()
        for number, tensor in enumerate(trainable):
            follower.set(tensor, public(tensor, weights=frozenset([number])))
        for tensor in tf.nest.flatten((x, y, sample_weight)):
            if tensor is not None:
                follower.set(tensor, inputs_of_rows(tensor))
        follower.set(seeds, public(seeds, secret=True))
        with self._watched(graph):
            y_pred, layer_losses = self.example_loss.predictions(trainable, x, seeds, non_trainable)
        operations = graph.get_operations()
        self._layers = self._layers_of_operations(operations)
        follower.advance(operations)
        batch_size = tf.shape(tf.nest.flatten(x)[0])[0]
        predictions = [t for t in tf.nest.flatten(y_pred) if tf.is_tensor(t)]
        for tensor in predictions:
            self._check(tensor, "the model's output")
        losses, ys, upstream = self._losses(y, y_pred, sample_weight, batch_size)
        try:
            added = [penalties.per_example(t, tf.ones([batch_size]), follower)
                     for t in layer_losses]  # fmt: skip
        except Mixes as mixes:
            raise CannotFollow(str(mixes)) from None
        follower.advance(graph.get_operations())
        for penalty in added:
            self._check(penalty, "a loss that a layer adds")
            ys.append(penalty)
            upstream.append(tf.fill(tf.shape(penalty), self._loss_scale))
        has_loss = bool(ys)
        if not ys:  # no loss at all, as where a plan is asked for before there are labels
            ys = [t for t in predictions if t.dtype.is_floating]
            upstream = [tf.zeros_like(t) for t in ys]
        losses = tf.add_n([losses, *added])
        mapped = {call.operation.name for call in self._calls}  # give gradients of their own
        uses = [op for op in follower.uses if not (_only_passes_on(op) or op.name in mapped)]
        self._find_parts(graph, ys, upstream, uses, trainable)
        self._check_reads(graph)
        reached = {part.number for part in self.parts} if has_loss else ()
        variables = self.example_loss.trainable_variables
        self.unreached = tuple(v.path for i, v in enumerate(variables) if i not in reached)
        self._gradients = [
            self._sum_of_parts(number, variable, batch_size)
            for number, variable in enumerate(variables)
        ]
        tensors = [
            {name: t for name, t in vars(rows).items() if tf.is_tensor(t)}
            for rows in self._gradients
        ]
        return losses, y_pred, notes_of(y_pred), tensors

    def _sum_of_parts(self, number, variable, batch_size):
        parts = [part.rows for part in self.parts if part.number == number]
        return forms.add(parts) if parts else Rows(tf.zeros([batch_size, *variable.shape]))

    def _losses(self, y, y_pred, sample_weight, batch_size):
        """Returns the examples' losses [B], tensors they depend on, and gradients, by a map."""
        masks, logits = notes_of(y_pred)
        for tensors, what in ((masks, "mask"), (logits, "logits")):
            for tensor in tensors:
                if tensor is not None:
                    self._check(tensor, f"the {what} of the model's output")
        if self.example_loss.has_no_loss:
            return tf.zeros([batch_size]), [], []

        examples = (y, y_pred, sample_weight, masks, logits)
        leaves = [t for t in tf.nest.flatten((y_pred, logits)) if t is not None]
        leaves = [t for t in leaves if t.dtype.is_floating]
        reached = []

        def of_example(*example):
            loss, found = self.example_loss.loss_and_gradients(*example, scale=self._loss_scale)
            reached[:] = [t for t, g in zip(leaves, found, strict=True) if g is not None]
            return loss, [g for g in found if g is not None]

        call, self.loops_over_losses = traced_map(of_example, examples)
        losses, found = call()
        self._follower.trust(losses.op, num_mapped(examples))
        self._follower.advance(losses.graph.get_operations())
        self._check(losses, "the loss")  # which may capture tensors of the model
        return losses, reached, list(found)

    def _find_parts(self, graph, ys, upstream, uses, trainable):
        """Fills `parts`: one `tf.gradients` for all places where weights meet examples."""
        follower = self._follower
        for op in uses:
            if weights.has_own_gradient(op) or len(op.outputs) > 1:
                layer = self._layer_of(op)
                reason = (
                    f"the operation {op.type} joins weights with examples and has a gradient of "
                    "its own or several outputs"
                )
                raise CannotFollow(of_operation(op, reason, layer, unknown=True), layer)
        places = [op.outputs[0] for op in uses]
        tapped = [t for call in self._calls for t in call.outputs if t.dtype.is_floating]

        def dims_of(tensor):
            own = tf.is_symbolic_tensor(tensor) and tensor.graph is graph
            return follower.dims(tensor) if own else None

        with broadcasts_by(dims_of):
            found = tf.gradients(ys, [*places, *tapped], upstream) if ys else []
        found = [None if g is None else tf.convert_to_tensor(g) for g in found]
        follower.advance(graph.get_operations(), uses=False)
        for tensor, gradient in zip([*places, *tapped], found, strict=False):
            if gradient is not None:
                self._check(gradient, "a gradient", follower.of(tensor))
        for op, gradient in zip(uses, found, strict=False):
            if gradient is None:
                continue
            d = tf.cast(gradient, tf.float32)
            if self._loss_scale != 1.0:
                d /= self._loss_scale
            d.set_shape(op.outputs[0].shape)
            values = [follower.of(t) for t in op.inputs]
            layer = self._layer_of(op)
            try:
                for tensor, rows in weights.gradients_of(op, values, follower.of(op.outputs[0]), d):
                    for number, part in chains.pulled_back(tensor, rows, follower, trainable):
                        self.parts.append(Part(number, layer, op.type, part))
            except weights.NoForm as no_form:
                obstacle = of_operation(op, str(no_form), layer, apart=True)
                raise CannotFollow(obstacle, layer) from None
        gradients = {t.name: g for t, g in zip(tapped, found[len(places) :], strict=False)}
        for call in self._calls:
            floating = [t for t in call.outputs if t.dtype.is_floating]
            given = [gradients.get(t.name) for t in floating]
            if all(g is None for g in given):
                continue
            given = [
                tf.zeros_like(t) if g is None else g for t, g in zip(floating, given, strict=True)
            ]
            for number, rows in call.gradients(given):
                rows = rows.scaled(1.0 / self._loss_scale)
                self.parts.append(Part(number, call.layer, "map", rows))

    # --- failures -------------------------------------------------------------------------------

    def _check(self, tensor, what, like=None):
        """Checks that a tensor, which the follower has seen, has one row per example."""
        if self._follower.effects:
            op = self._follower.effects[0]
            layer = self._layer_of(op)
            raise CannotFollow(of_effect(op, layer), layer)
        value = self._follower.of(tensor)
        if isinstance(value, Mixed):
            layer = self._layer_of(value.op)
            raise CannotFollow(of_value(value, layer), layer)
        if isinstance(value, Public):
            raise CannotFollow(f"{what} does not depend on the examples")
        wanted = (0, 1) if like is None else (like.axis, like.stride)
        if (value.axis, value.stride) != wanted:
            raise CannotFollow(f"{what} has the examples along axis {value.axis}")

    def _check_reads(self, graph):
        """Refuses trainable variables that are read past Keras: their gradient would be lost."""
        for variable in read_by(graph, self.example_loss.trainable_variables):
            reason = f"the trainable weight {variable.path!r} is read past Keras, or by the loss"
            raise CannotFollow(reason, unknown=True)

    def _layer_of(self, op):
        """Returns the innermost layer whose call made an operation, or the model."""
        while (original := original_operation(op)) is not None:
            op = original
        return self._layers.get(op.name, self.example_loss.model)

    def _layers_of_operations(self, operations):
        """Returns the innermost layer by the name of each operation that a call made."""
        # A call is noted when it ends: those inside of it come before it.
        return {
            op.name: layer
            for start, end, layer in reversed(self._spans)
            for op in operations[start:end]
        }

    @contextlib.contextmanager
    def _watched(self, graph) -> Iterator[None]:
        """Notes which layer makes which operations, and maps the layers that are to be alone."""
        with PATCHING, functions_inlined(), rows_together(), contextlib.ExitStack() as stack:
            for layer in layers_of(self.example_loss.model):
                stack.enter_context(replaced(layer, call=self._standing_in(layer, graph)))
            yield

    def _standing_in(self, layer, graph):
        call = layer.call

        def noted(*args, **kwargs):
            if self._open is not None:  # inside of a layer that is mapped
                return call(*args, **kwargs)
            if tf.compat.v1.get_default_graph() is not graph:
                reason = f"the layer {layer.name!r} is called inside of a loop or a branch"
                raise CannotFollow(reason, unknown=True)
            if any(layer is other for other in self.alone):
                self._open = layer
                try:
                    with functions_inlined(False):
                        mapped = AloneCall(layer, call, self._numbers, args, kwargs, self._follower)
                        outputs = mapped()
                except CannotMap as cannot:
                    raise CannotFollow(str(cannot), layer, apart=True) from None
                finally:
                    self._open = None
                self._calls.append(mapped)
                return outputs
            start = len(graph.get_operations())
            try:
                with _without_loop(layer, args):
                    outputs = call(*args, **kwargs)
            except Exception as error:  # any error of the user's code on a batch
                raise CannotFollow(of_error(error, layer), layer) from error
            self._spans.append((start, len(graph.get_operations()), layer))
            return outputs

        return noted


def _without_loop(layer, args):
    """Lets a recurrent layer write its steps out, which can be followed, as a loop cannot."""
    if not isinstance(layer, keras.layers.RNN):
        return contextlib.nullcontext()
    shape = args[0].shape if args and tf.is_tensor(args[0]) else [None, None]
    if len(shape) < 2 or shape[1] is None or shape[1] > _LONGEST_UNROLLED:
        by_keras = all(map(_is_from_keras, layers_of(layer)))
        reason = f"the layer {layer.name!r} loops"
        raise CannotFollow(reason, layer, unknown=True, by_keras=by_keras)
    return recurrent.written_out(layer)


def _is_from_keras(layer):
    """Tells whether a layer's code is Keras's, its activations Keras's or TensorFlow's."""
    activations = (f for name, f in vars(layer).items() if name.endswith("activation"))
    libraries = {f.__module__.partition(".")[0] for f in activations if callable(f)}
    return is_part_of_keras(type(layer).call, "layers") and libraries <= {"keras", "tensorflow"}


def _only_passes_on(op):
    return op.type == "IdentityN" and not weights.has_own_gradient(op)
