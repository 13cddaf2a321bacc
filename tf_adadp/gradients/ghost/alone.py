"""Layers that cannot be followed, mapped over the examples: no row can feel another one there."""

import functools

import keras
import tensorflow as tf

from tf_adadp.clipping.row_gradients import Rows
from tf_adadp.gradients.example_loss import note, notes_of
from tf_adadp.gradients.forms.common import with_shape
from tf_adadp.gradients.grouped_volumes import split_groups
from tf_adadp.gradients.indices import no_index_stops
from tf_adadp.gradients.mapped import num_mapped, traced_map
from tf_adadp.gradients.proof.follow import Follower
from tf_adadp.gradients.proof.values import Public
from tf_adadp.gradients.proof.values import Rows as RowsValue
from tf_adadp.utils.keras_compat import (
    get_keras_mask,
    layers_of,
    seed_generators,
    set_keras_mask,
    training_of_call,
)

ATTENTION = tuple(
    getattr(keras.layers, name)
    for name in ("Attention", "AdditiveAttention", "MultiHeadAttention", "GroupQueryAttention")
)


class CannotMap(Exception):
    """Raised if a layer cannot be mapped over examples by itself; the one around it may be."""


class AloneCall:
    """One call of a layer, example by example, with the per-example gradients of its weights.

    Args:
        layer: the layer.
        call: its own `call`.
        variables: {id of a trainable Keras variable: its number}.
        args, kwargs: of the call.
        follower: has the values of the tensors among them.

    Attributes:
        layer: the layer.
        outputs: list of tensors; their gradients are those of the weights' row gradients.
        operation: that of the map.
    """

    def __init__(self, layer, call, variables, args, kwargs, follower: Follower):
        if any(isinstance(part, ATTENTION) for part in layers_of(layer)):
            # It ends the process inside of tf.vectorized_map without XLA.
            raise CannotMap(f"the layer {layer.name!r} has attention in it")
        self.layer = layer
        self._call = call
        self._structure = (args, kwargs)
        self._flat = tf.nest.flatten(self._structure)
        follower.advance(tf.compat.v1.get_default_graph().get_operations())
        self._places = [i for i, t in enumerate(self._flat) if _is_rows(t, follower)]
        if not self._places:
            raise CannotMap(f"the layer {layer.name!r} is called without examples")
        whole = [t for i, t in enumerate(self._flat) if i not in self._places]
        if any(follower.of(t).weights for t in whole if tf.is_symbolic_tensor(t)):
            raise CannotMap(f"the layer {layer.name!r} is called with a weight")
        trainable = [v for v in layer.trainable_variables if id(v) in variables]
        self._variables = trainable
        self._numbers = [variables[id(v)] for v in trainable]
        self._states, seeds = [], []
        rows = tf.shape(self._flat[self._places[0]])[0]
        for _, generator in seed_generators(layer):
            self._states.append(generator.state)
            base = tf.cast(generator.next(), tf.int64)
            seeds.append(
                tf.random.stateless_uniform(
                    [rows, 2], base, minval=None, maxval=None, dtype=tf.uint32
                )
            )
        examples = [self._flat[i] for i in self._places]
        masks = [get_keras_mask(t) for t in examples]
        if not all(m is None or _is_rows(m, follower) for m in masks):
            raise CannotMap(f"the layer {layer.name!r} has a mask that is not one of examples")
        self._elements = examples, masks, seeds
        self._training = training_of_call()
        # Also those that are not trained: an inner scope does not have the values of an outer one.
        others = {id(v) for v in (*trainable, *self._states)}
        self._others = [(v, v.value) for v in layer.variables if id(v) not in others]
        self._values = [tf.convert_to_tensor(v.value) for v in trainable]
        self._follower = follower
        self._gradients = None

    def __call__(self):
        """Returns the layer's output."""
        forward, _ = traced_map(functools.partial(self._one, self._call), self._elements)
        inputs = [t for t in self._elements[0] if t.dtype.is_floating]

        @tf.custom_gradient
        def run(*inputs):
            del inputs
            *found, self._masks = forward()
            flat = tf.nest.flatten(found)
            self.operation = flat[0].op
            self._follower.trust(self.operation, num_mapped(self._elements))
            self._packed = found

            def backward(*upstream):
                return self._vjp(list(upstream))[0]

            return flat, backward

        flat = run(*inputs)
        self._check_weights()
        self.outputs = list(flat)
        outputs, logits = tf.nest.pack_sequence_as(self._packed, list(flat))
        notes = iter([*self._masks, *logits])
        note(outputs, *[[next(notes) if there else None for there in row] for row in self._noted])
        return outputs

    def _check_weights(self):
        """Refuses weights that are not the layer's: their gradient would be lost."""
        self._follower.advance(tf.compat.v1.get_default_graph().get_operations())
        given = [self._follower.of(t) for t in self.operation.inputs]
        used = set().union(*(v.weights for v in given if isinstance(v, Public)))
        if not used <= set(self._numbers):
            raise CannotMap(f"the layer {self.layer.name!r} is called with a weight of another one")

    def gradients(self, upstream):
        """Yields pairs (number of a weight, `Rows`), given the gradients of the outputs."""
        if not self._variables:
            return
        for number, variable, rows in zip(
            self._numbers, self._variables, self._vjp(upstream)[1], strict=True
        ):
            yield number, Rows(with_shape(rows, [None, *variable.shape]))

    def _one(self, call, tensors, masks, seeds, values=None):
        """Returns output, its logits and its masks for one example, without its axis."""
        flat = list(self._flat)
        for i, t, mask in zip(self._places, tensors, masks, strict=True):
            flat[i] = t[None]
            if mask is not None:
                set_keras_mask(flat[i], mask[None])
        args, kwargs = tf.nest.pack_sequence_as(self._structure, flat)
        mapping = [*self._others, *zip(self._states, seeds, strict=True)]
        mapping += zip(self._variables, values or self._values, strict=True)
        with (
            no_index_stops(),
            split_groups(),
            keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope,
        ):
            outputs = call(*args, **kwargs)
        if scope.losses:
            raise CannotMap(f"the layer {self.layer.name!r} adds a loss (`add_loss`)")
        leaves = tf.nest.flatten(outputs)
        if not all(tf.is_tensor(t) for t in leaves):
            raise CannotMap(f"the layer {self.layer.name!r} returns something else than tensors")
        masks, logits = notes_of(outputs)
        self._noted = [[t is not None for t in notes] for notes in (masks, logits)]
        present = [[t for t in notes if t is not None] for notes in (logits, masks)]
        return tf.nest.map_structure(lambda t: tf.squeeze(t, 0), (outputs, *present))

    def _vjp(self, upstream):
        """Returns `(gradients of floating inputs, gradients of the weights)`, one call for both."""
        if self._gradients is None:
            self._gradients = self._made_vjp(upstream)
        return self._gradients

    def _made_vjp(self, upstream):
        tensors, masks, seeds = self._elements
        floating = [i for i, t in enumerate(tensors) if t.dtype.is_floating]

        def one_example(tensors, masks, seeds, upstream):
            values = [tf.identity(v) for v in self._values]
            # Not `call`: outside of the model's pass nothing else casts weights, and says whether
            # layers inside train.
            call = functools.partial(self.layer, training=self._training)
            found = self._one(call, tensors, masks, seeds, values)[:2]
            # No tape: it would record nothing inside of `tf.init_scope`.
            back = tf.gradients(
                [t for t in tf.nest.flatten(found) if t.dtype.is_floating],
                [*(tensors[i] for i in floating), *values],
                upstream,
                unconnected_gradients="zero",
            )
            back = [tf.convert_to_tensor(g) for g in back]
            inputs, weights = back[: len(floating)], back[len(floating) :]
            return inputs, [tf.cast(g, tf.float32) for g in weights]

        signature = (
            [tf.TensorSpec(tensors[i].shape[1:], tensors[i].dtype) for i in floating],
            [tf.TensorSpec(v.shape, tf.float32) for v in self._variables],
        )
        upstream = [d for d in upstream if d is not None and d.dtype.is_floating]
        elements = (tensors, masks, seeds, upstream)
        found = traced_map(one_example, elements, signature)[0]()
        leaves = tf.nest.flatten(found)
        if leaves:
            self._follower.trust(leaves[0].op, num_mapped(elements))
        return found


def _is_rows(tensor, follower):
    if not tf.is_symbolic_tensor(tensor):
        return False
    value = follower.of(tensor)
    if isinstance(value, Public):
        return False
    if not isinstance(value, RowsValue) or (value.axis, value.stride) != (0, 1):
        raise CannotMap("a layer gets examples along another axis than the first")
    return True
