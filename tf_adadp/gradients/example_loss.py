"""Computes the loss of one example as a function of the trainable weights.

Differential privacy needs the gradient of every example by itself, so each part of a Keras model's
loss is computed here for a batch of one: the forward pass, the losses of `compile`, the weights of
the example, and the losses that layers add (activity regularisers, `add_loss`). Weight regularisers
are left out: they depend on no data and are added after the noise.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.gradients.compiled_losses import each_alone
from tf_adadp.gradients.grouped_volumes import split_groups
from tf_adadp.gradients.indices import no_index_stops
from tf_adadp.gradients.mapping import map_rows, present_leaves
from tf_adadp.utils.keras_compat import (
    CompileLoss,
    call_arguments,
    get_keras_logits,
    get_keras_mask,
    seed_generators,
    set_keras_logits,
    set_keras_mask,
)


class ExampleLoss:
    """Computes loss and prediction of one example; pure in the weights and the example's seeds.

    Args:
        model: a built `keras.Model`, the plain one.
        loss: a built Keras `CompileLoss`, or None where the model's losses are all `add_loss`.
        training: whether layers such as dropout are in training mode.

    The value is `w * loss(y, y_pred)` plus the data-dependent losses of the layers. `w` multiplies
    and never normalises: a mean weighted by the weights of a lot would let one example change the
    weight of another. Reductions over the batch axis are left out: a lot's gradient is always the
    sum over examples divided by the expected lot size.

    Attributes:
        written: paths of the variables that the model writes in training, without seeds of random
            numbers; private steps drop these writes.
    """

    def __init__(self, model: keras.Model, loss: CompileLoss | None, training: bool = True):
        self.model = model
        self.written: tuple[str, ...] = ()
        self.trainable_variables = list(model.trainable_variables)
        self._non_trainable_variables = list(model.non_trainable_variables)
        self._loss = None if loss is None else each_alone(loss)
        self._call_arguments = call_arguments(model, training)
        self._num_weight_losses = sum(v.regularizer is not None for v in model.trainable_weights)
        self._seed_ids = {id(generator.state) for _, generator in seed_generators(model)}
        self._seed_slots = [
            i for i, v in enumerate(self._non_trainable_variables) if id(v) in self._seed_ids
        ]

    @property
    def num_seed_generators(self) -> int:
        """Returns the number of `[2]` uint32 seeds that each example needs, as for dropout."""
        return len(self._seed_slots)

    def check_multiplicity(self, multiplicity: int) -> None:
        """Raises ValueError where several draws per example would all be the same."""
        if multiplicity > 1 and self.num_seed_generators == 0:
            raise ValueError(
                f"augmentation_multiplicity={multiplicity}: the model draws no random numbers, so "
                "every copy of an example would be the same. Put layers such as "
                "keras.layers.RandomTranslation or Dropout into the model, or give 1."
            )

    def draw_seeds(self, seed: tf.Tensor, number: tf.Tensor, *rows: int | tf.Tensor) -> tf.Tensor:
        """Draws the seeds of a physical batch or chunk: uint32 `[*rows, num_seed_generators, 2]`.

        Args:
            seed: int64 `[2]`, that of the lot.
            number: scalar int32 tensor, which batch of the lot; 0 is the first. (In the first word
                0 itself is the seed of the microbatch slots.)
            rows: the leading axes.
        """
        return tf.random.stateless_uniform(
            [*rows, self.num_seed_generators, 2],
            seed + tf.stack([tf.cast(number, tf.int64) + 1, tf.zeros([], tf.int64)]),
            minval=None,
            maxval=None,
            dtype=tf.uint32,
        )

    def trainable_values(self) -> list[tf.Tensor]:
        """Reads the current trainable weights, in the order of the gradients."""
        return [tf.convert_to_tensor(v.value) for v in self.trainable_variables]

    def __call__(
        self,
        trainable: Sequence[tf.Tensor],
        x: Any,
        y: Any,
        sample_weight: Any,
        seeds: tf.Tensor,
    ) -> tuple[tf.Tensor, Any]:
        """Returns the loss (float32 scalar) and prediction (no batch axis) of one example.

        Args:
            trainable: list of tensors, the weights.
            x, y: the example, without batch axis; y may be None.
            sample_weight: its weight, a scalar (or per output, or per timestep), or None.
            seeds: uint32 `[num_seed_generators, 2]`; distinct for every example and step.
        """
        x, y, sample_weight = tf.nest.map_structure(
            lambda t: None if t is None else tf.expand_dims(t, 0), (x, y, sample_weight)
        )
        y_pred, layer_losses = self.predictions(trainable, x, seeds)
        total = self._batch_of_one(y, y_pred, sample_weight)
        for loss in layer_losses:
            total += tf.reduce_sum(tf.cast(loss, tf.float32))
        return total, tf.nest.map_structure(lambda t: tf.squeeze(t, 0), y_pred)

    def non_trainable_values(self) -> list[tf.Tensor]:
        """Reads the current non-trainable variables, for `predictions`."""
        return [tf.convert_to_tensor(v.value) for v in self._non_trainable_variables]

    @property
    def has_no_loss(self) -> bool:
        """Tells whether the model's losses are all `add_loss`."""
        return self._loss is None

    def predictions(
        self,
        trainable: Sequence[tf.Tensor],
        x: Any,
        seeds: tf.Tensor,
        non_trainable: Sequence[tf.Tensor] | None = None,
    ) -> tuple[Any, list[tf.Tensor]]:
        """Returns the model's output for a batch, and the losses that its layers add.

        Args:
            trainable: list of tensors, the weights.
            x: the inputs, leaves [B, ...].
            seeds: uint32 `[num_seed_generators, 2]`.
            non_trainable: `non_trainable_values()`, the default.
        """
        if non_trainable is None:
            non_trainable = self.non_trainable_values()
        non_trainable = list(non_trainable)
        for slot, index in enumerate(self._seed_slots):
            non_trainable[index] = seeds[slot]
        mapping = [
            *zip(self.trainable_variables, trainable, strict=True),
            *zip(self._non_trainable_variables, non_trainable, strict=True),
        ]
        with (
            no_index_stops(),
            split_groups(),
            # What layers write into it is dropped: it was made from raw data.
            keras.StatelessScope(state_mapping=mapping, collect_losses=True),
        ):
            before = [(v, v.value) for v, _ in mapping if id(v) not in self._seed_ids]
            # Not `stateless_call`, which leaves out what a call does around `call`: the training
            # mode that inner layers are in, the model's casts, masks, and activity regulariser.
            y_pred = self.model(x, **self._call_arguments)
            new = (v.path for v, value in before if v.value is not value)
            self.written = tuple(dict.fromkeys([*self.written, *new]))
            layer_losses = self.model.losses
        # Keras lists the regularisers of weights last.
        return y_pred, layer_losses[: len(layer_losses) - self._num_weight_losses]

    def losses(
        self,
        y: Any,
        y_pred: Any,
        sample_weight: Any,
        batch_size: int | tf.Tensor,
    ) -> tf.Tensor:
        """Returns the compiled losses of each example by itself, float32 [B], from predictions.

        The losses are mapped over the examples, so that no reduction can mix examples.
        """
        if self._loss is None:
            return tf.zeros([batch_size])
        present, packed = present_leaves((y, y_pred, sample_weight, *notes_of(y_pred)))
        return map_rows(
            lambda row: self._batch_of_one(*packed([t[None] for t in row])),
            present,
            sequential=False,
        )

    def loss_and_gradients(
        self,
        y: Any,
        y_pred: Any,
        sample_weight: Any,
        masks: Sequence,
        logits: Sequence,
        scale: float,
    ) -> tuple[tf.Tensor, list]:
        """Returns the compiled loss of one example and its gradients.

        Args:
            y, y_pred, sample_weight: as in `losses`, of one example, without its axis.
            masks, logits: `notes_of(y_pred)`.
            scale: factor on the loss of which the gradients are taken.

        Returns:
            `(loss, gradients)`: float32, and ∂(scale·ℓ)/∂(leaf) per leaf of floats of y_pred, then
            per leaf of logits; None for leaves that the loss does not depend on.
        """
        y, y_pred, sample_weight, masks, logits = tf.nest.map_structure(
            lambda t: None if t is None else t[None],
            (y, y_pred, sample_weight, list(masks), list(logits)),
        )
        leaves = [t for t in tf.nest.flatten((y_pred, logits)) if _is_floating(t)]
        loss = self._batch_of_one(y, y_pred, sample_weight, masks, logits)
        # No tape: it would record nothing inside of `tf.init_scope`.
        found = tf.gradients(scale * loss, leaves)
        return loss, [None if g is None else tf.convert_to_tensor(g)[0] for g in found]

    def _batch_of_one(self, y, y_pred, sample_weight, masks=(), logits=()):
        """Returns the compiled losses of a batch of one, float32."""
        note(y_pred, masks, logits)
        if self._loss is None:
            return tf.zeros([], tf.float32)
        return tf.cast(self._loss(y, y_pred, sample_weight), tf.float32)


def notes_of(outputs: Any) -> tuple[list, list]:
    """Returns what Keras keeps with tensors, for losses: masks and logits of each leaf, or None.

    Losses read the logits in the place of a softmax or sigmoid, whose gradient would vanish.
    """
    leaves = tf.nest.flatten(outputs)
    return [
        [None if t is None else get(t) for t in leaves]
        for get in (get_keras_mask, get_keras_logits)
    ]


def note(outputs: Any, masks: Sequence, logits: Sequence) -> None:
    """Keeps masks and logits with the leaves of outputs, as `notes_of` returned them."""
    leaves = tf.nest.flatten(outputs)
    for values, keep in ((masks, set_keras_mask), (logits, set_keras_logits)):
        for leaf, value in zip(leaves, values, strict=False):
            if value is not None:
                keep(leaf, value)


def _is_floating(tensor):
    return tensor is not None and tensor.dtype.is_floating


def weight_regularization(model: keras.Model) -> tf.Tensor | None:
    """Adds up a model's weight regularisers: a float32 scalar, or None where it has none."""
    losses = [v.regularizer(v) for v in model.trainable_weights if v.regularizer is not None]
    return tf.add_n([tf.cast(loss, tf.float32) for loss in losses]) if losses else None
