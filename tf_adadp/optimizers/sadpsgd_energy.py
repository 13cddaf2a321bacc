"""The energy of SA-DPSGD: the mean loss on held-out records, and the checks of those."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.gradients import ghost
from tf_adadp.gradients.example_graph import ExampleGraph
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.sampling.sources import ArraySource
from tf_adadp.utils.keras_compat import CompileLoss, compute_output_spec


class Annealing:
    """Holds records, model and loss out of sight of everything that saves."""

    __slots__ = ("energy", "loss", "lot", "model", "source")

    def __init__(self):
        self.source = self.lot = self.model = self.loss = self.energy = None


class Energy:
    """Computes J and its changes as functions of the weights, and remembers J of the last weights.

    Args:
        annealing: an `Annealing` that is complete.
        one_by_one: True to make each record's loss independent of the others, for any layers.
    """

    def __init__(self, annealing: Annealing, one_by_one: bool):
        source, model, loss = annealing.source, annealing.model, annealing.loss
        self.variables = list(model.trainable_variables)
        self.count = tf.constant(len(source), tf.float64)
        self._lot = annealing.lot
        self.mean = tf.function(self._mean, autograph=False)
        self.clipped_change = tf.function(self._clipped_change, autograph=False)
        specs = [tf.TensorSpec(v.shape, tf.as_dtype(v.dtype)) for v in self.variables]
        try:
            if not isinstance(loss, CompileLoss):
                loss = CompileLoss(loss)
                x, y = tf.nest.map_structure(
                    lambda s: keras.KerasTensor((2, *s.shape[1:]), dtype=s.dtype.name),
                    source.spec[:2],
                )
                compute_output_spec(loss, y, compute_output_spec(model, x))
            self._one_by_one = one_by_one
            self._loss = ExampleLoss(model, loss, training=False)
            self._seeds = tf.zeros([self._loss.num_seed_generators, 2], tf.uint32)
            self._trace = None
            if one_by_one:
                record = tf.nest.map_structure(
                    lambda s: None if s is None else tf.TensorSpec(s.shape[1:], s.dtype),
                    source.spec,
                )
                ExampleGraph(self._loss, record).check()
                try:
                    self._trace = ghost.trace_model(self._loss, source.spec)
                except ghost.CannotFollow:
                    self._trace = None  # record by record
                change = specs, specs, tf.TensorSpec([], tf.float32)
                self.clipped_change.get_concrete_function(*change)
            else:
                self.mean.get_concrete_function(specs)
        except Exception as error:
            raise ValueError(f"energy_data do not fit the model and its loss: {error}") from error
        # The weights of J. They may change between steps (a load, a callback, averages).
        self._value = tf.Variable(tf.zeros([], tf.float64), trainable=False)
        self._known = tf.Variable(False, trainable=False)
        self._weights = [tf.Variable(tf.zeros(s.shape, s.dtype), trainable=False) for s in specs]

    def _mean(self, weights):
        """Returns J at the given weights, float64."""
        return self._sum(lambda record: self._losses(weights, record)) / self.count

    def _clipped_change(self, old, new, bound):
        """Returns Σ_i clip(ℓ_i(new) − ℓ_i(old)), float64. Raw: the caller adds the noise.

        Sensitivity: `bound` for one record more or less, 2·bound for a replaced one.
        """

        def change(records):
            raw = self._losses(new, records) - self._losses(old, records)
            return tf.clip_by_value(tf.where(tf.math.is_finite(raw), raw, 0.0), -bound, bound)

        return self._sum(change)

    def _sum(self, per_record):
        """Sums a value [B] over the real records, in float64 because its changes are small."""
        records, mask = self._lot

        def body(p, total):
            batch = tf.nest.map_structure(lambda t: None if t is None else t[p], records)
            values = tf.where(mask[p] > 0, per_record(batch), 0.0)
            return p + 1, total + tf.reduce_sum(tf.cast(values, tf.float64))

        return tf.while_loop(
            lambda p, _: p < mask.shape[0],
            body,
            (tf.constant(0), tf.zeros([], tf.float64)),
            parallel_iterations=1,
        )[1]

    def _losses(self, weights, records):
        """Returns the weighted losses [B] of a batch of records."""
        size = self._lot[1].shape[1]
        if not self._one_by_one or self._trace is not None:
            return self._batch_losses(weights, records, size)

        def one(i):
            record = tf.nest.map_structure(lambda t: None if t is None else t[i : i + 1], records)
            return self._batch_losses(weights, record, 1)[0]

        return tf.map_fn(one, tf.range(size), fn_output_signature=tf.float32, parallel_iterations=1)

    def _batch_losses(self, weights, records, size):
        x, y, sample_weight = records
        if self._trace is None:
            y_pred, _ = self._loss.predictions(weights, x, self._seeds)
        else:
            _, y_pred, _ = self._trace(weights, x, y, sample_weight, self._seeds)
        return self._loss.losses(y, y_pred, sample_weight, size)

    def current(self, weights: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns J at the given weights: the remembered one, if it is of bitwise the same."""
        same = [tf.reduce_all(tf.equal(a, b)) for a, b in zip(weights, self._weights, strict=True)]
        known = self._known & tf.reduce_all(same)
        return tf.cond(known, lambda: self._value + 0.0, lambda: self.mean(weights))

    def remember(self, value: tf.Tensor, weights: Sequence[tf.Tensor]) -> None:
        """Keeps J, which is exact: for public records only, or where ε = ∞."""
        self._value.assign(value)
        self._known.assign(True)
        for kept, w in zip(self._weights, weights, strict=True):
            kept.assign(w)


def check_form(source: ArraySource, element_spec: Any) -> None:
    """Refuses energy_data whose x or y have another structure or shape than the training data's."""
    for name, own, other in zip("xy", source.spec, element_spec, strict=False):
        try:
            keras.tree.assert_same_structure(own, other)
            fits = all(
                a.shape[1:].is_compatible_with(b.shape[1:])
                for a, b in zip(leaves(own), leaves(other), strict=True)
            )
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"{name} of energy_data is {brief(own)}, that of the training data "
                f"{brief(other)}: give records of the same form."
            )


def check_overlap(source: ArraySource, trained: Any) -> None:
    """Refuses public energy_data that are training data, as far as their arrays show it."""
    if not isinstance(trained, ArraySource):
        return
    reason = None
    if any(_share_memory(a, b) for a in source._arrays for b in trained._arrays):
        reason = "share memory with"
    else:
        own, other = (s._arrays[: len(leaves(s.spec[0]))] for s in (source, trained))
        if len(own) == len(other) and all(
            a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(own, other, strict=True)
        ):
            reason = "are equal to"
    if reason:
        raise ValueError(
            f"energy_data {reason} the training data: comparing candidates on them would be an "
            "uncharged release. Hold out records that need no protection, or give "
            "energy_noise_multiplier and energy_clip."
        )


def _share_memory(a, b):
    try:
        return np.shares_memory(a, b, max_work=10**5)
    except np.exceptions.TooHardError:
        return True


def leaves(structure: Any) -> list:
    """Returns the leaves of a structure but None."""
    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]


def brief(value: Any) -> str:
    """Returns a value's type or form, never the records in it."""
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, tf.TensorSpec):
        return repr(value)
    return type(value).__name__
