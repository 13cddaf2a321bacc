"""Turns the arguments of `fit` into lots, callbacks and validation data, and checks them."""

import dataclasses
import math
import numbers
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_adadp import validation
from tf_adadp.distribution import workers
from tf_adadp.optimizers import DPOptimizer
from tf_adadp.persistence.saved_model import SavedWithLedger
from tf_adadp.sampling import Lots, PoissonLots
from tf_adadp.sampling.datasets import read_dataset
from tf_adadp.sampling.preprocessing import preprocessed, refuse_raw
from tf_adadp.training.raw_records import validated
from tf_adadp.utils.checks import check_choice, check_instance, check_integer, check_number


@dataclasses.dataclass(frozen=True)
class FitData:
    """Holds the data of one `fit`.

    Attributes:
        lots: the lots to train on.
        x, y: the records, where they were given as arrays; else None.
        class_weight: as given.
        validation_data: as given, or the part of the arrays that was set aside.
    """

    lots: Lots
    x: Any
    y: Any
    class_weight: dict[int, float] | None
    validation_data: Any


def check_model(model: Any, physical_batch_size: Any, gradient_engine: Any) -> None:
    """Validates the arguments of the constructor of `DPModel`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_instance("model", model, keras.Model, "a keras.Model")
    if isinstance(model, SavedWithLedger):
        raise TypeError("model is a DPModel already: wrap the plain one, `model.model`.")
    if physical_batch_size is not None:
        wanted = "an integer of at least 1, or None to have it chosen"
        check_integer("physical_batch_size", physical_batch_size, wanted, at_least=1)
    check_choice("gradient_engine", gradient_engine, ("auto", "ghost", "vectorized"))


def fit_data(
    x: Any,
    y: Any,
    *,
    model: keras.Model,
    batch_size: float | None,
    sample_weight: Any,
    class_weight: dict[int, float] | None,
    validation_split: float,
    validation_data: Any,
    optimizer: DPOptimizer,
    strategy: tf.distribute.Strategy,
    verbose: bool = True,
) -> FitData:
    """Makes Poisson lots of arrays or a dataset, or takes lots as they are; see `DPModel.fit`.

    Raw records of a model that preprocesses them are preprocessed once, before lots are drawn.

    Raises:
        TypeError, ValueError: the sampling law of the data is unknown; an argument is out of range,
            or is given with lots that already determine it.
    """
    validation_data = validated(model, validation_data, verbose)
    if isinstance(x, Lots):
        refuse_raw(model, x.element_spec)
        _refuse_beside(
            "lots: lots hold their data, weights and expected size; make the lots with it and",
            y=y,
            batch_size=batch_size,
            sample_weight=sample_weight,
            class_weight=class_weight,
        )
        if validation_split:
            raise ValueError(
                f"validation_split={validation_split} with lots: set validation records aside "
                "before making the lots, and give validation_data."
            )
        return FitData(x, None, None, None, validation_data)
    if isinstance(x, tf.data.Dataset):
        _refuse_beside(
            "a tf.data.Dataset: its elements are (x, y) or (x, y, sample_weight);",
            y=y,
            sample_weight=sample_weight,
        )
        x, y, sample_weight = read_dataset(x, verbose=verbose)
    validation.check_data_source(x)
    x, y, sample_weight = preprocessed(model, x, y, sample_weight, verbose)
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = _split((x, y, sample_weight), validation_split)
    if class_weight is not None:
        sample_weight = class_weights(y, class_weight, sample_weight)
    lots = _poisson_lots(x, y, sample_weight, batch_size, optimizer, strategy)
    return FitData(lots, x, y, class_weight, validation_data)


def private_callbacks_first(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Flattens the callbacks, those first that write ε into the logs."""

    def flatten(item):
        if item is None:
            return []
        if isinstance(item, keras.callbacks.CallbackList):
            item = item.callbacks
        if isinstance(item, (list, tuple)):
            return [c for part in item for c in flatten(part)]
        return [item]

    return sorted(flatten(callbacks), key=lambda c: not getattr(c, "reports_privacy", False))


def check_fit(
    *,
    epochs: Any,
    initial_epoch: Any,
    steps_per_epoch: Any,
    shuffle: Any,
    validation_data: Any,
    validation_batch_size: Any,
    validation_steps: Any,
    validation_freq: Any,
) -> None:
    """Validates the arguments of `fit` on the length of training and on evaluation.

    Raises:
        ValueError: naming the argument.
    """
    _check_epochs(epochs, initial_epoch, steps_per_epoch)
    _check_evaluations(validation_data, validation_batch_size, validation_steps, validation_freq)
    if not shuffle:
        raise ValueError(
            "shuffle=False: lots are drawn at random, the guarantee rests on it. Leave it out."
        )


def evaluation_batch_size(
    given: int | None, steps: int | None, batch_size: float | None, num_examples: int | None
) -> int | None:
    """Returns the batch size of validation; see `DPModel.fit`."""
    if given:
        return given
    if steps is None:
        return min(256, num_examples or 256)
    # The steps cover the same records as Keras's.
    return None if batch_size is None else math.ceil(batch_size)


def _refuse_beside(data, **arguments):
    """Refuses arguments of `fit` that the data already determine."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is given beside {data} leave {name} out.")


def _poisson_lots(x, y, sample_weight, batch_size, optimizer, strategy):
    """Makes Poisson lots of expected size `batch_size`; on several hosts this one's part of them.

    A seeded optimizer's lots go on at the step that it has reached.
    """
    if batch_size is None:
        raise ValueError(
            "batch_size=None: give fit the expected lot size, e.g. batch_size=256. It sets the "
            "sampling probability batch_size/N and with it ε, so there is no default, and the "
            "batches of a dataset do not count."
        )
    shape = getattr(tf.nest.flatten(x)[0], "shape", None)
    size = shape[0] if shape else math.inf  # data without a shape are refused by their type
    check_number(
        "batch_size",
        batch_size,
        f"the expected lot size, a number above 0 and at most the {size} examples",
        above=0,
        at_most=size,
    )
    count, seed, num_examples = workers.num_workers(strategy), optimizer.seed, None
    if count > 1:
        number = workers.worker_number(strategy)
        num_examples = len(tf.nest.flatten(x)[0])
        (x, y, sample_weight) = tf.nest.map_structure(
            lambda a: None if a is None else a[number::count], (x, y, sample_weight)
        )
        seed = None if seed is None else seed + (number + 1) * 2**64
    lots = PoissonLots(
        x,
        y,
        expected_size=batch_size,
        sample_weight=sample_weight,
        seed=seed,
        num_examples=num_examples,
    )
    if lots.seed is not None:
        lots.step = optimizer.steps_taken
    return lots


def _check_epochs(epochs, initial_epoch, steps_per_epoch):
    """Validates epochs, initial_epoch and steps_per_epoch."""
    check_integer("epochs", epochs, "the epoch to train to, an integer of at least 0", at_least=0)
    check_integer("initial_epoch", initial_epoch, at_least=0)
    if steps_per_epoch is not None:
        check_integer(
            "steps_per_epoch",
            steps_per_epoch,
            "the lots per epoch, an integer of at least 1, or None for one pass",
            at_least=1,
        )


def _check_evaluations(data, batch_size, steps, frequency):
    """Validates validation_batch_size, validation_steps and validation_freq."""
    for name, value in (("validation_batch_size", batch_size), ("validation_steps", steps)):
        if value is not None:
            check_integer(name, value, "an integer of at least 1, or None", at_least=1)
    wanted = (
        "every how many epochs to evaluate, an integer of at least 1, or a list of epochs, "
        "counted from 1"
    )
    if isinstance(frequency, list):
        for i, epoch in enumerate(frequency):
            check_integer(f"validation_freq[{i}]", epoch, wanted, at_least=1)
    else:
        check_integer("validation_freq", frequency, wanted, at_least=1)
    endless = (
        isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.INFINITE_CARDINALITY
    )
    if endless and steps is None:
        raise ValueError(
            "validation_data is a dataset without an end: give validation_steps, the batches to "
            "evaluate."
        )


def check_workers(
    strategy: tf.distribute.Strategy, lots: Lots, epochs: int, steps_per_epoch: int
) -> None:
    """Refuses, on several hosts, lots that are not the parts of one Poisson lot.

    Raises:
        ValueError: on all workers.
    """
    if not lots.splits_over_hosts:
        raise ValueError(
            f"{type(lots).__name__} on several hosts: each draws its part of a lot by itself, and "
            "only Poisson lots are made of independent parts. Give PoissonLots or arrays."
        )
    law = lots.law
    workers.check_alike(
        strategy,
        num_examples=law.num_examples,
        expected_size=law.expected_lot_size,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        seeded=lots.seed is not None,  # as each worker's ledger states
    )
    held = workers.total(strategy, lots.num_local_examples)
    if held > law.num_examples:
        raise ValueError(
            f"The workers hold {held} records together, and the law says {law.num_examples}: a "
            "record that two of them hold would enter a lot twice. Give every worker records of "
            "its own, PoissonLots(..., num_examples=<those of all workers>), or arrays of all "
            "records to `fit`, which deals them out."
        )


def _split(data, validation_split):
    """Splits arrays as Keras does: the last part is for validation."""
    check_number("validation_split", validation_split, above=0, below=1)
    sizes = {len(a) for a in tf.nest.flatten(data) if a is not None}
    if len(sizes) != 1:
        raise ValueError(f"Arrays of unequal length: {sorted(sizes)}.")
    border = math.floor(sizes.pop() * (1.0 - validation_split))

    def cut(part):
        return tf.nest.map_structure(lambda a: None if a is None else a[part], data)

    return cut(slice(None, border)), cut(slice(border, None))


def class_weights(y: Any, class_weight: dict[int, float], sample_weight: Any) -> np.ndarray:
    """Multiplies the weight of every example's class into sample_weight.

    Raises:
        TypeError, ValueError: class_weight is not a dict of finite weights; y is not an array.
    """
    check_instance("class_weight", class_weight, dict, "a dict {class: weight}")
    if y is None or keras.tree.is_nested(y):
        raise ValueError(
            "class_weight is for one array of labels; give sample_weight for several outputs."
        )
    labels = np.asarray(y)
    if labels.ndim > 1 and labels.shape[-1] > 1:
        labels = labels.argmax(-1)
    labels = labels.reshape(len(labels), -1)
    if labels.shape[1] != 1:
        raise ValueError(
            "class_weight needs one label per example; give sample_weight for other labels."
        )
    weights = np.ones(len(labels), np.float32)
    for label, weight in class_weight.items():
        if not isinstance(label, numbers.Real) or label != label // 1:
            raise ValueError(f"class_weight has the key {label!r}: number the classes 0, 1, ….")
        weights[labels[:, 0] == label] = check_number(
            f"class_weight[{label!r}]", weight, "a finite weight of at least 0", at_least=0
        )
    if sample_weight is None:
        return weights
    given = np.asarray(sample_weight, np.float32)
    if given.shape[:1] != weights.shape:
        raise ValueError(
            f"sample_weight has shape {given.shape}, and there are {len(weights)} labels: give one "
            "row of weights for each."
        )
    # Row by row: [N] by [N, 1] would broadcast to [N, N], all labels in every example's weight.
    return weights.reshape(-1, *[1] * (given.ndim - 1)) * given
