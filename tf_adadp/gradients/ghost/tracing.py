"""The ghost pass: one batched forward and backward pass that yields per-example gradients in parts.

Layers with trainable weights of their own are intercepted while the model runs. Those with a rule
(see `registry`) say how the gradient of a tapped tensor gives the gradients of their weights; those
without one are mapped example by example, alone.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from tf_adadp.clipping.row_gradients import Rows
from tf_adadp.gradients import forms
from tf_adadp.gradients.ghost import registry
from tf_adadp.gradients.ghost.independence import (
    IMAGE_AUGMENTATION,
    CannotFollow,
    mixing_reason,
    unmappable_reason,
)
from tf_adadp.gradients.ghost.ranks import checked_layers, on_known_ranks
from tf_adadp.gradients.indices import no_index_stops
from tf_adadp.gradients.mapping import map_rows
from tf_adadp.gradients.patching import PATCHING, replaced
from tf_adadp.utils.keras_compat import (
    layers_of,
    own_layers,
    own_trainable_variables,
    seed_generators,
)


class GhostPass:
    """Runs a model on batches and gives the per-example gradients of its loss, not formed.

    Args:
        example_loss: an `ExampleLoss`.
        sequential: map layers without a rule over one example after the other instead of
            vectorising (recurrent layers with a mask).
        loss_scale: fixed factor on the loss, undone on float32 output gradients.
    """

    def __init__(self, example_loss, *, sequential=False, loss_scale=1.0):
        self.example_loss = example_loss
        self.map = functools.partial(map_rows, sequential=sequential)
        self._loss_scale = loss_scale
        trainable = {id(v) for v in example_loss.trainable_variables}
        self.trainable = trainable
        self.layers = _owners(example_loss.model, trainable)
        # By layer: whether its rule may run it on a batch, and whether its `call` may. Not when
        # it is intercepted: then it is not what it was.
        self.runs_on_batches = {}
        for layer in self.layers:
            with_rule = registry.rule_for(layer) is not None and mixing_reason(layer, True) is None
            self.runs_on_batches[id(layer)] = with_rule, mixing_reason(layer) is None
        self._checked_layers = checked_layers(
            example_loss.model, lambda layer: registry.rule_for(layer) is not None
        )

    def __call__(self, trainable, x, y, sample_weight, seeds, *, cut=False):
        """The losses, predictions and gradients of a batch of examples.

        Args:
            trainable: list of tensors, the weights.
            x, y, sample_weight: the batch; leaves [B, ...] or None.
            seeds: uint32 [number of seed generators, 2], one draw for the whole batch: layers draw
                other numbers for every row of it.
            cut: stop all gradients at the tapped tensors; what then still reaches the weights
                reaches them past the rules.

        Returns:
            `(losses, predictions, gradients, records)`: losses [B], float32; `RowGradients` per
            trainable variable; the `Record`s of what was intercepted. With `cut`, gradients are
            those of the summed losses with respect to the weights, None where there is none.

        Raises:
            CannotFollow: where a layer's work happens in another graph (a loop, a map, a
                `tf.function` of its own) or a layer adds a loss of its own.
        """
        batch_size = tf.shape(tf.nest.flatten(x)[0])[0]
        records = []
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            if cut:
                tape.watch(trainable)

            def tapped(record, z):
                _check_graph(z, batch_size, record)
                z = tf.stop_gradient(z) if cut else tf.identity(z)
                if not cut:
                    tape.watch(z)
                record.outputs.append(z)
                return z

            intercepting = self._intercepted(records, tapped)
            with intercepting as penalties:
                y_pred, layer_losses = self.example_loss.predictions(trainable, x, seeds)
            if len(layer_losses) > len(penalties):
                raise CannotFollow("a layer adds a loss of its own (`add_loss`)")
            losses = self.example_loss.losses(y, y_pred, sample_weight, batch_size, self.map)
            losses = tf.add_n([losses, *penalties])
            total = tf.reduce_sum(losses) * self._loss_scale
        if cut:
            return losses, y_pred, tape.gradient(total, trainable), records
        outputs = [z for record in records for z in record.outputs]
        found = tape.gradient(total, outputs, unconnected_gradients="zero")
        found = iter(zip(outputs, found, strict=True))
        parts = {id(v): [] for v in self.example_loss.trainable_variables}
        for record in records:
            for gradients in record.gradients:
                z, d = next(found)
                d = tf.cast(tf.convert_to_tensor(d), tf.float32) / self._loss_scale
                d.set_shape(z.shape)  # which a gradient may have lost on its way
                for variable, rows in gradients(d):
                    if id(variable) in parts:
                        record.parts.append((variable, rows))
                        parts[id(variable)].append(rows)
        gradients = []
        for variable in self.example_loss.trainable_variables:
            rows = parts[id(variable)]
            if rows:
                gradients.append(forms.add(rows))
            else:
                gradients.append(Rows(tf.zeros([batch_size, *variable.shape])))
        return losses, y_pred, gradients, records

    @contextlib.contextmanager
    def _intercepted(self, records, tapped):
        """Replaces `call` and the activity regularisers of layers; yields the latter's values."""
        penalties = []
        with PATCHING, contextlib.ExitStack() as stack:
            for layer in self.layers:
                call = _Interception(layer, self, records, tapped)
                stack.enter_context(replaced(layer, call=call))
            stack.enter_context(on_known_ranks(self._checked_layers))
            for layer in layers_of(self.example_loss.model):
                if isinstance(layer, IMAGE_AUGMENTATION):
                    call = _images_only(layer)
                    stack.enter_context(replaced(layer, call=call))
                if layer.activity_regularizer is not None:
                    penalty = _per_example_penalty(layer.activity_regularizer, penalties)
                    stack.enter_context(replaced(layer, activity_regularizer=penalty))
            yield penalties


class Record:
    """What was intercepted in one call of one layer.

    Attributes:
        layer: the layer.
        form: the name of the rule, or "map" for a layer mapped example by example.
        outputs, gradients: the tapped tensors and, for each, the function of its gradient.
        parts: the pairs (variable, `RowGradients`) that came of it.
    """

    def __init__(self, layer, form):
        self.layer = layer
        self.form = form
        self.outputs = []
        self.gradients = []
        self.parts = []


class _Interception:
    """Stands in for `layer.call` during a ghost pass."""

    def __init__(self, layer, ghost_pass, records, tapped):
        self._layer = layer
        self._call = layer.call
        with_rule, self._alone = ghost_pass.runs_on_batches[id(layer)]
        self._rule = registry.rule_for(layer) if with_rule else None
        self._ghost_pass = ghost_pass
        self._records = records
        self._tapped = tapped

    def __call__(self, *args, **kwargs):
        layer, call, rule = self._layer, self._call, self._rule
        # Layers inside of this one are its rule's business, or are mapped with it.
        with replaced(layer, call=call):
            if rule is not None:
                record = Record(layer, rule.__name__)
                outputs = rule(layer, call, self._tap_of(record), *args, **kwargs)
                if outputs is not NotImplemented:
                    self._records.append(record)
                    return outputs
            record = Record(layer, "map")
            self._records.append(record)
            mapped = _Mapped(layer, call, self._ghost_pass, args, kwargs)
            return mapped.tapped(self._tap_of(record), on_batch=self._alone)

    def _tap_of(self, record):
        def tap(z, gradients):
            z = self._tapped(record, z)
            record.gradients.append(gradients)
            return z

        return tap


class _Mapped:
    """A call of a layer without a rule: example by example, its weights' gradients formed.

    The forward pass is one on the batch, where that is known not to mix examples.
    """

    def __init__(self, layer, call, ghost_pass, args, kwargs):
        self._layer = layer
        self._call = call
        self._map = ghost_pass.map
        self._flat = tf.nest.flatten((args, kwargs))
        self._structure = (args, kwargs)
        self._mapped = [i for i, leaf in enumerate(self._flat) if tf.is_tensor(leaf)]
        self._variables = [v for v in layer.trainable_variables if id(v) in ghost_pass.trainable]

    def tapped(self, tap, on_batch):
        """The layer's output for the batch, tapped; found by one call only with `on_batch`."""
        if not self._mapped:
            raise CannotFollow(f"the layer {self._layer.name!r} is called without tensors")
        states = [generator.state for _, generator in seed_generators(self._layer)]
        before = [tf.convert_to_tensor(state.value) for state in states]
        draws = bool(states)
        if on_batch:
            mapping = list(zip(states, before, strict=True))
            with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
                args, kwargs = self._structure
                outputs = self._single(self._call(*args, **kwargs), scope)
            after = [scope.get_current_value(state) for state in states]
            draws = any(a is not b for a, b in zip(after, before, strict=True))
        self._states, self._seeds = [], None
        if draws:
            # It draws random numbers: forward and backward pass must draw the same for an example.
            self._states = states
            shape = [tf.shape(self._flat[self._mapped[0]])[0], 2]
            self._seeds = [
                tf.random.stateless_uniform(
                    shape, tf.cast(b, tf.int64), minval=None, maxval=None, dtype=tf.uint32
                )
                for b in before
            ]
        if draws or not on_batch:
            outputs = self._map(
                lambda example: self._single(*self._one(*example, self._call))[0],
                self._elements(),
            )
        return tap(outputs, self._gradients)

    def _single(self, outputs, scope):
        if scope.losses:
            raise CannotFollow(f"the layer {self._layer.name!r} adds a loss (`add_loss`)")
        if not tf.is_tensor(outputs):
            raise CannotFollow(
                f"the layer {self._layer.name!r} ({type(self._layer).__name__}) has no rule and "
                "several outputs"
            )
        return outputs

    def _elements(self):
        return [self._flat[i] for i in self._mapped], self._seeds or []

    def _one(self, tensors, seeds, call, values=None):
        """The output [1, ...] for one example, with its seeds and given weights; and its scope."""
        flat = list(self._flat)
        for i, t in zip(self._mapped, tensors, strict=True):
            flat[i] = t[None]
        args, kwargs = tf.nest.pack_sequence_as(self._structure, flat)
        mapping = list(zip(self._states, seeds, strict=True))
        if values is not None:
            mapping += zip(self._variables, values, strict=True)
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            return call(*args, **kwargs), scope

    def _gradients(self, outputs):
        if not self._variables:
            return
        values = [tf.convert_to_tensor(v.value) for v in self._variables]

        def one_example(example):
            tensors, seeds, d = example
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(values)
                # Not `call`: outside of the model's pass nothing else casts weights.
                with no_index_stops():
                    z, _ = self._one(tensors, seeds, self._layer, values)
            grads = tape.gradient(
                z, values, output_gradients=tf.cast(d[None], z.dtype), unconnected_gradients="zero"
            )
            return [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in grads]

        # Known, which spares a trace of the layer's forward and backward pass.
        signature = [tf.TensorSpec(v.shape, tf.float32) for v in self._variables]
        grads = self._map(one_example, (*self._elements(), outputs), signature=signature)
        for variable, g in zip(self._variables, grads, strict=True):
            yield variable, Rows(tf.ensure_shape(g, [None, *variable.shape]))


def _owners(model, trainable):
    """The outermost layers to intercept: those with a rule, or with trainable weights of their own,
    those that run layers inside of loops (wrappers and recurrent layers), and those that may not
    run on batches."""
    found = []

    def visit(layer):
        has_rule = registry.rule_for(layer) is not None
        reason = mixing_reason(layer, has_rule)
        if reason is not None:
            if layer is not model:
                reason = unmappable_reason(layer)
            if reason is not None:
                raise CannotFollow(f"{layer.name!r} ({type(layer).__name__}) {reason}")
            if not any(layer is other for other in found):
                found.append(layer)
            return
        weights = [v for v in layer.trainable_variables if id(v) in trainable]
        own = any(id(v) in trainable for v in own_trainable_variables(layer))
        loops = isinstance(layer, (keras.layers.RNN, keras.layers.Wrapper))
        if weights and (own or loops or has_rule):
            if not any(layer is other for other in found):
                found.append(layer)
            return
        for part in own_layers(layer):
            visit(part)

    visit(model)
    return found


def _images_only(layer):
    """The `call` of a layer that augments images, for batches of images alone.

    Keras takes a tensor of rank 3 for one image, and would move, turn or flip the rows of a batch.
    """
    call = layer.call

    def checked(data, *args, **kwargs):
        if not tf.is_tensor(data) or data.shape.rank != 4:
            raise CannotFollow(
                f"the layer {layer.name!r} ({type(layer).__name__}) gets something else than a "
                "batch of images [batch, height, width, channels]"
            )
        return call(data, *args, **kwargs)

    return checked


def _per_example_penalty(regularizer, penalties):
    """An activity regulariser that notes its value for each example and adds nothing itself."""

    def penalty(outputs):
        values = map_rows(lambda row: regularizer(row[None]), outputs, sequential=False)
        penalties.append(tf.cast(values, tf.float32))
        return tf.zeros([], values.dtype)

    return penalty


def _check_graph(z, like, record):
    """Refuses tensors that are not of the graph that the pass is made in."""
    where = [getattr(t, "graph", None) if not tf.executing_eagerly() else None for t in (z, like)]
    if where[0] is not where[1]:
        raise CannotFollow(
            f"the layer {record.layer.name!r} is called inside of a loop, a map or a function of "
            "its own"
        )
