"""Lots that somebody else drew."""

import dataclasses
import threading

import keras
import tensorflow as tf

from tf_adadp.accounting import FixedSizeSampling, PoissonSampling
from tf_adadp.sampling.base import Lots
from tf_adadp.sampling.packing import checked_integer
from tf_adadp.sampling.sources import batch_spec, leaf_dtype, leaf_names, padding


class DeclaredLots(Lots):
    """The batches of a `tf.data.Dataset`, each one lot, under a law that the user states.

    Guarantee: none of its own. What is charged is what `law` says, marked as declared; it holds
    only if every batch really was drawn by that law, independently of all others. Shuffling and
    batching is
    NEITHER Poisson sampling NOR sampling without replacement per step: use `PoissonLots` or
    `FixedSizeLots` wherever the data can be read at random.

    The dataset is read as one stream: it is repeated when it ends, and a second `as_dataset` goes
    on where the first one stopped instead of starting over. `step` counts; setting it forward does
    not skip anything in the dataset.

    Args:
        dataset: elements `(x, y)` or `(x, y, sample_weight)`, dense tensors with one row per
            example; an empty batch is an empty lot. Floats become `keras.config.floatx()`.
        law: `tf_adadp.accounting.PoissonSampling(num_examples, expected_size)` or
            `FixedSizeSampling(num_examples, size)`; `declared` is set to True.
        steps_per_epoch: an integer; None for ⌈N/L⌉.

    Raises:
        TypeError: `dataset` or `law` is of another type, or an element has another form.
        ValueError: the dataset is empty. While reading: rows do not agree in number, or a batch
            contradicts a fixed-size law (a last batch that is short: batch with
            drop_remainder=True).
    """

    def __init__(self, dataset, law, steps_per_epoch=None):
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"dataset must be a tf.data.Dataset, got a {type(dataset).__name__}. For arrays "
                "and random-access sources use PoissonLots, which knows its law."
            )
        if not isinstance(law, (PoissonSampling, FixedSizeSampling)):
            raise TypeError(
                f"law must be a PoissonSampling or a FixedSizeSampling, got {law!r}. It states how "
                "the dataset draws its batches; without it no ε can be given."
            )
        if dataset.cardinality() == 0:
            raise ValueError("dataset is empty. It must have at least one batch.")
        super().__init__(dataclasses.replace(law, declared=True), _element_spec(dataset))
        self._steps_per_epoch = (
            super().steps_per_epoch
            if steps_per_epoch is None
            else checked_integer("steps_per_epoch", steps_per_epoch, least=1)
        )
        self._dataset = dataset.repeat()
        self._iterator = None
        self._lock = threading.Lock()

    @property
    def steps_per_epoch(self):
        """What the user said, or ⌈N/L⌉."""
        return self._steps_per_epoch

    def _rows(self, step, multiple):
        with self._lock:
            if self._iterator is None:
                self._iterator = iter(self._dataset)
            batch = next(self._iterator, None)
        if batch is None:
            raise ValueError("dataset is empty. It must have at least one batch.")
        leaves = [leaf.numpy() for leaf in keras.tree.flatten(batch) if leaf is not None]
        sizes = {len(leaf) for leaf in leaves}
        if len(sizes) > 1:
            raise ValueError(f"the tensors of a batch of dataset differ in rows: {sorted(sizes)}.")
        if isinstance(self.law, FixedSizeSampling) and sizes != {self.law.size}:
            raise ValueError(
                f"a batch of dataset has {sizes.pop()} rows, but its law says {self.law.size} in "
                "every lot. Batch with drop_remainder=True, or declare the law that holds."
            )
        count = sizes.pop()
        padded = []
        for leaf, spec in zip(leaves, self._present_specs(), strict=True):
            shaped = tf.TensorSpec((None, *leaf.shape[1:]), spec.dtype)
            padded.append(padding(shaped, count, multiple))
            padded[-1][:count] = leaf
        return count, padded


def _element_spec(dataset):
    element = dataset.element_spec
    if not isinstance(element, tuple) or len(element) not in (2, 3):
        raise TypeError(
            f"dataset must give (x, y) or (x, y, sample_weight), got {element}. Map it to that "
            "form."
        )
    element = (*element, None)[:3]
    leaves = []
    for spec, name in zip(keras.tree.flatten(element), leaf_names(element), strict=True):
        if spec is None or type(spec).__name__ == "NoneTensorSpec":
            leaves.append(None)
        elif not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            raise TypeError(
                f"{name} in dataset is {spec}, which is no dense tensor with one row per example. "
                "Batch the dataset; make sparse data dense, pad ragged data."
            )
        else:
            leaves.append((spec.shape[1:], leaf_dtype(spec.dtype, name)))
    return batch_spec(leaves, element)
