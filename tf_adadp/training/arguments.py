"""What is given to `compile` and `fit`, checked and put into the form that training takes."""

import math
import numbers

import keras
import numpy as np
import tensorflow as tf

from tf_adadp import validation
from tf_adadp.distribution import workers
from tf_adadp.optimizers import DPOptimizer
from tf_adadp.sampling import PoissonLots
from tf_adadp.utils.checks import check_instance, check_integer, check_number


def check_optimizer(optimizer):
    """Raises ValueError for an optimizer that is not private, or has no noise_multiplier."""
    if isinstance(optimizer, type) and issubclass(optimizer, DPOptimizer):
        name = optimizer.__name__
        raise ValueError(f"optimizer={name} is a class: give {name}(noise_multiplier=...).")
    if not isinstance(optimizer, DPOptimizer):
        raise ValueError(
            f"optimizer={optimizer!r} is not private. Compile a DPModel with one of tf_adadp's "
            "optimizers, e.g. tf_adadp.ADADP(noise_multiplier=...); for training without privacy "
            "compile the plain model."
        )
    optimizer._require_noise_multiplier()


def private_callbacks_first(callbacks):
    """The callbacks as a flat list, those that put ε into the logs before those that read them."""

    def flatten(item):
        if item is None:
            return []
        if isinstance(item, keras.callbacks.CallbackList):
            item = item.callbacks
        if isinstance(item, (list, tuple)):
            return [c for part in item for c in flatten(part)]
        return [item]

    return sorted(flatten(callbacks), key=lambda c: not getattr(c, "reports_privacy", False))


def refuse_with_lots(**arguments):
    """Raises ValueError for arguments of `fit` that lots have settled."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name} is given beside lots: lots hold their data, weights and expected size; "
                f"make the lots with it and leave {name} out."
            )


def lots_from_arrays(x, y, sample_weight, batch_size, optimizer, strategy):
    """Poisson lots of expected size `batch_size`; on several hosts this one's part of them.

    A seeded optimizer's lots go on at the step that it has reached.
    """
    validation.check_data_source(x)
    if batch_size is None:
        raise ValueError(
            "batch_size=None: give the expected lot size. It sets the sampling probability "
            "batch_size/N and with it ε, so there is no default."
        )
    shape = getattr(tf.nest.flatten(x)[0], "shape", None)
    size = shape[0] if shape else math.inf  # what has no shape is refused by its type
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


def check_epochs(epochs, initial_epoch, steps_per_epoch):
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


def check_evaluations(data, batch_size, steps, frequency):
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


def check_workers(strategy, lots, epochs, steps_per_epoch):
    """Validates, on several hosts, that their lots are the parts of one lot."""
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
        seeded=lots.seed is not None,  # which the ledger of each says
    )
    held = workers.total(strategy, lots.num_local_examples)
    if held > law.num_examples:
        raise ValueError(
            f"The workers hold {held} records together, and the law says {law.num_examples}: a "
            "record that two of them hold would enter a lot twice. Give every worker records of "
            "its own, PoissonLots(..., num_examples=<those of all workers>), or arrays of all "
            "records to `fit`, which deals them out."
        )


def split(data, validation_split):
    """Keras's split: the last part of the arrays is for validation."""
    check_number("validation_split", validation_split, above=0, below=1)
    sizes = {len(a) for a in tf.nest.flatten(data) if a is not None}
    if len(sizes) != 1:
        raise ValueError(f"Arrays of unequal length: {sorted(sizes)}.")
    border = math.floor(sizes.pop() * (1.0 - validation_split))

    def cut(part):
        return tf.nest.map_structure(lambda a: None if a is None else a[part], data)

    return cut(slice(None, border)), cut(slice(border, None))


def class_weights(y, class_weight, sample_weight):
    """One weight per example, from its class; multiplied into sample_weight."""
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
    return weights if sample_weight is None else weights * np.asarray(sample_weight, np.float32)
