"""Refuses validation data that cannot be evaluated, before an epoch spends privacy budget."""

import re
import types

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.gradients.compiled_losses import PROBE_BATCH
from tf_adadp.sampling.base import Lots
from tf_adadp.sampling.sources import leaf_names
from tf_adadp.utils.keras_compat import (
    ArrayDataAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
    compile_loss_of,
    convert_to_sliceable,
    get_data_adapter,
)
from tf_adadp.validation.arguments import check_class_labels
from tf_adadp.validation.tokens import check_tokens

_WANTED = (
    "Give arrays, (x, y) or (x, y, sample_weight) with one row per example, or batches of them: a "
    "tf.data.Dataset, a keras.utils.PyDataset or a generator."
)
_NO_STRINGS = (
    "Encode strings as numbers; those that the model itself reads, give as tensors, tf.constant(x)."
)


def check_validation_data(
    model: keras.Model, data: object, training_spec: tuple, y_pred: object
) -> None:
    """Refuses validation data that Keras would stop at after the first epoch.

    Only arrays are checked by value. For other sources the shapes and types of a batch are checked:
    the test step is traced for them, as Keras would, unless training data has the same. Generators
    and other loaders are not checked, since reading a batch would consume it.

    Args:
        model: a `DPModel` that is built for training.
        data: as for `fit`, or None.
        training_spec: TensorSpecs of an ordinary batch of training, `(x, y, sample_weight)`.
        y_pred: the model's output as KerasTensors.
    """
    if data is None:
        return
    if isinstance(data, Lots):
        raise TypeError(
            f"validation_data is a {type(data).__name__}: lots are random draws for private steps, "
            f"and every validation record is evaluated. {_WANTED}"
        )
    if isinstance(data, (tuple, list)) and len(data) not in (1, 2, 3):
        raise ValueError(f"validation_data={_kinds(data)} has {len(data)} parts. {_WANTED}")
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    if isinstance(x, types.GeneratorType):
        return
    if any(np.isscalar(leaf) for leaf in keras.tree.flatten((x, y, sample_weight))):
        raise ValueError(
            f"validation_data={_kinds(data)} has single values where arrays belong. {_WANTED}"
        )
    try:
        adapter = get_data_adapter(x, y, sample_weight)
        dataset = _dataset(adapter, (x, y, sample_weight))
    except Exception as error:  # the user's PyDataset may raise anything
        fix = _NO_STRINGS if "Invalid dtype" in str(error) else _WANTED
        raise ValueError(f"validation_data={_kinds(data)}: {_said(error)} {fix}") from error
    if dataset is None:
        return
    if adapter.num_batches == 0:
        raise ValueError(
            f"validation_data={_kinds(data)} has no rows: give at least one, or leave it out."
        )
    _check_form(model, dataset.element_spec, training_spec, adapter)
    if isinstance(adapter, ArrayDataAdapter):
        if _dense(y):
            check_class_labels(compile_loss_of(model), y, y_pred, "validation_data")
        if _dense(x):
            check_tokens(model.model, x, "validation_data")


def _dataset(adapter, arrays):
    """Returns a `tf.data.Dataset` of the form that Keras evaluates, or None if unknown."""
    if isinstance(adapter, ArrayDataAdapter):
        # One row is enough, and Keras copies whole arrays into a dataset.
        first = keras.tree.map_structure(
            lambda part: None if part is None else part[0:1], convert_to_sliceable(arrays)
        )
        return ArrayDataAdapter(*first).get_tf_dataset()
    if isinstance(adapter, (PyDatasetAdapter, TFDatasetAdapter)):
        dataset = adapter.get_tf_dataset()
        return dataset if isinstance(dataset, tf.data.Dataset) else None
    return None


def _check_form(model, element_spec, training_spec, adapter):
    spec = keras.utils.unpack_x_y_sample_weight(element_spec)
    if _same_form(spec, training_spec):
        return
    if model.run_eagerly and not all(s.shape[1:].is_fully_defined() for s in _present(spec)):
        return  # it may run eagerly though it cannot be traced
    if isinstance(adapter, ArrayDataAdapter):
        element_spec = keras.tree.map_structure(_with_rows, element_spec)

    def evaluate(batch):
        return model.distribute_strategy.run(model.test_step, args=(batch,))

    try:
        _check_strings(spec, training_spec)
        tf.function(evaluate, autograph=False).get_concrete_function(element_spec)
    except Exception as error:  # the user's layers, losses and metrics may raise anything
        fix = "Give it in that form."
        if spec[1] is None and training_spec[1] is not None:
            fix = "Give the labels too, validation_data=(x, y)."
        elif isinstance(adapter, TFDatasetAdapter) and _lacks_batch_axis(spec, training_spec):
            fix = "Batch it, validation_data=dataset.batch(256)."
        raise ValueError(
            f"validation_data has {_form(spec)}, on which the model cannot be evaluated: "
            f"{_said(error)} The training data has {_form(training_spec)}. {fix}"
        ) from error


def _same_form(spec, training_spec):
    """Tells whether batches are of the form for which model, loss and metrics were built."""
    pairs = _pairs(spec, training_spec)
    return bool(pairs) and all(
        one is other
        or (
            type(one) is type(other)
            and one.dtype == other.dtype
            and one.shape.rank == other.shape.rank
            and one.shape[1:] == other.shape[1:]
        )
        for one, other in pairs
    )


def _lacks_batch_axis(spec, training_spec):
    pairs = _pairs(spec[0], training_spec[0])
    return bool(pairs) and all(one.shape.rank == other.shape.rank - 1 for one, other in pairs)


def _check_strings(spec, training_spec):
    """Refuses a cast of strings, which fails when it runs but not when it is traced."""
    for part, known in zip(spec, training_spec, strict=True):
        for one, other in _pairs(part, known):
            kinds = [getattr(leaf, "dtype", None) for leaf in (one, other)]
            if None not in kinds and (kinds[0] == tf.string) != (kinds[1] == tf.string):
                raise TypeError(f"{kinds[0].name} in place of {kinds[1].name}")


def _pairs(spec, training_spec):
    """Returns pairs of leaves; none where the structures differ."""
    spec = keras.tree.lists_to_tuples(spec)
    try:
        keras.tree.assert_same_structure(spec, training_spec)
    except ValueError:
        return []
    return list(zip(keras.tree.flatten(spec), keras.tree.flatten(training_spec), strict=True))


def _present(spec):
    return [leaf for leaf in keras.tree.flatten(spec) if hasattr(leaf, "shape")]


def _with_rows(spec):
    """Gives all arrays the same static number of rows, so that tracing finds unequal shapes."""
    if type(spec) is not tf.TensorSpec:
        return spec
    return tf.TensorSpec((PROBE_BATCH, *spec.shape[1:]), spec.dtype)


def _form(spec):
    """Describes a batch, as in `x float32 (None, 4), y int64 (None,)`."""
    leaves = zip(leaf_names(spec), keras.tree.flatten(spec), strict=True)
    return ", ".join(
        f"{name} {leaf.dtype.name} {leaf.shape}" for name, leaf in leaves if hasattr(leaf, "dtype")
    )


def _kinds(data):
    if isinstance(data, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in data)})"
    return type(data).__name__


def _said(error):
    """Returns the text of an error, without colours and without Keras's frame."""
    text = re.sub(r"\x1b\[\d+m", "", str(error)).split("\n\nArguments received by")[0]
    text = re.sub(r"Exception encountered when calling \S+\(\)\.\s+", "", text)
    text = " ".join(text.split(": x=")[0].split())  # not the data
    text = text if len(text) <= 300 else f"{text[:300]}…"
    return text if text.endswith((".", "…")) else f"{text}."


def _dense(arrays):
    leaves = [a for a in keras.tree.flatten(arrays) if a is not None]
    return all(hasattr(a, "__array__") and np.ndim(a) > 0 for a in leaves)
