"""Holds all private names of Keras and TensorFlow that the package uses.

A new version may rename any of them, so no other module imports from `keras.src` or
`tensorflow.python`, or reads an underscored attribute of an object of theirs. Exceptions are the
methods and attributes that a subclass of ours inherits: `INHERITED` lists them. A test compares the
tables with the installed version and searches the package for further private names.
"""

import collections
import contextlib
from collections.abc import Iterator, Mapping

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec  # symbolic call of any function
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.losses.loss import unscale_loss_for_distribution
from keras.src.metrics.reduction_metrics import reduce_to_samplewise_values
from keras.src.models.functional import Functional
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics
from keras.src.trainers.data_adapters import (
    ArrayDataAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
    get_data_adapter,
)
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable
from keras.src.utils.io_utils import print_msg  # honours keras.config.disable_interactive_logging
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

# Patched by gradients.
from tensorflow.python.ops import (
    array_ops,
    gen_array_ops,
    gen_math_ops,
    gen_nn_ops,
    math_grad,
    nn_ops,
)

__all__ = [
    "INHERITED",
    "ArrayDataAdapter",
    "CompileLoss",
    "CompileMetrics",
    "Functional",
    "KerasSaveable",
    "PyDatasetAdapter",
    "TFDatasetAdapter",
    "array_ops",
    "build_symbolically",
    "call_arguments",
    "compile_loss_of",
    "compile_metrics_of",
    "compute_output_spec",
    "convert_to_sliceable",
    "copied_lambda",
    "evaluates_for_fit",
    "first_epoch",
    "flat_losses",
    "flat_metrics",
    "flatten_outputs",
    "function_def_to_graph",
    "function_number",
    "functional_inputs",
    "gen_array_ops",
    "gen_math_ops",
    "gen_nn_ops",
    "get_data_adapter",
    "get_keras_logits",
    "get_keras_mask",
    "has_given_vocabulary",
    "inbound_nodes",
    "is_part_of_keras",
    "layers_of",
    "learning_rate_of",
    "loss_tracker_of",
    "math_grad",
    "metric_direction",
    "metric_function",
    "metric_values",
    "name_counts",
    "nn_ops",
    "op_def_registry",
    "original_operation",
    "own_layers",
    "own_variables",
    "print_msg",
    "reduce_to_samplewise_values",
    "renew_constants",
    "saves_legacy_format",
    "seed_generators",
    "set_first_epoch",
    "set_keras_logits",
    "set_keras_mask",
    "set_name_counts",
    "shallow_copy",
    "skip_function_numbers",
    "trained_variables",
    "training_of_call",
    "uncompiled",
    "unscale_loss_for_distribution",
    "user_loss",
    "with_losses",
]

# Class of Keras: {inherited private name: its use in the subclass of this package}.
INHERITED: dict[type, dict[str, str]] = {
    keras.Model: {
        "_assert_compile_called": "the error of an uncompiled model, in `fit` and the like",
        "_flatten_layers": "all layers, to see whether `trainable` changed",
        "_flatten_metrics_in_order": "the return value of `train_on_batch`",
        "_maybe_symbolic_build": "overridden: under a strategy it would drop the first lot",
    },
    keras.optimizers.Optimizer: {
        "_all_reduce_sum_gradients": "overridden: a release is the same on all replicas",
        "_backend_update_step": "overridden: refuses raw gradients",
        "_distributed_tf_update_step": "overridden: carries the permission into its thread",
        "_get_variable_index": "the place of a variable in lists of state",
        "_learning_rate": "the variable that a rejected step of SADPSGD leaves alone",
        "_model_variables_moving_average": "the averages that a rejected step restores",
        "_trainable_variables": "the variables that the optimizer was built for",
    },
}


def original_operation(operation: object) -> object | None:
    """Returns the operation whose gradient this one is, or None."""
    return getattr(operation, "_original_op", None)


def layers_of(layer: keras.Layer, include_self: bool = True) -> list[keras.Layer]:
    """Returns a layer and all layers inside it."""
    return list(layer._flatten_layers(include_self=include_self))


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights of a layer, without those of layers inside it."""
    return layer._trainable_variables + layer._non_trainable_variables


def lora_weights(layer: keras.Layer) -> tuple | None:
    """Returns `(kernel, A, B, merged)` of a layer with a LoRA adapter; None without one.

    The first three are variables; merged() is kernel + α/rank·A·B, the kernel that is used.
    """
    name = "embeddings" if hasattr(layer, "lora_embeddings_a") else "kernel"
    if not getattr(layer, "lora_enabled", False) or not hasattr(layer, f"lora_{name}_a"):
        return None
    a, b = getattr(layer, f"lora_{name}_a"), getattr(layer, f"lora_{name}_b")
    return getattr(layer, f"_{name}"), a, b, lambda: getattr(layer, name)


def copied_lambda(layer: keras.layers.Lambda) -> keras.layers.Lambda:
    """Copies a Lambda with the same functions, where Keras would serialize their bytecode."""
    return keras.layers.Lambda(
        layer.function,
        output_shape=layer._output_shape,
        mask=layer.mask,
        arguments=layer.arguments,
        name=layer.name,
        dtype=layer.dtype_policy,
        trainable=layer.trainable,
    )


def own_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the direct parts of a layer."""
    return layer._layers


def seed_generators(layer: keras.Layer) -> Iterator[tuple[keras.Layer, keras.random.SeedGenerator]]:
    """Yields the seed generators of a layer and all layers inside it, each with its layer."""
    for part in layers_of(layer):
        for generator in getattr(part, "_seed_generators", ()):
            yield part, generator


def has_given_vocabulary(layer: keras.Layer) -> bool:
    """Tells whether a lookup layer got its vocabulary in the constructor."""
    return layer._has_input_vocabulary


def is_part_of_keras(function: object, part: str) -> bool:
    """Tells whether a function or class is defined in a part of Keras, such as "layers"."""
    return function.__module__.startswith(f"keras.src.{part}.")


def call_arguments(model: keras.Model, training: bool) -> dict[str, bool]:
    """Returns {"training": training} for a model whose `call` takes it, else nothing."""
    return {"training": training} if model._call_has_training_arg else {}


def training_of_call() -> bool | None:
    """Returns the training mode that a layer which is being called hands on to inner layers."""
    return getattr(global_state.get_global_attribute("current_call_ctx"), "training", None)


def get_keras_logits(tensor: object) -> object | None:
    """Returns the logits of which a tensor is the softmax or sigmoid, as losses read them.

    Keras's own activations note them. Else its losses look at the operation, in a graph.
    """
    noted, operation = getattr(tensor, "_keras_logits", None), getattr(tensor, "op", None)
    if noted is None and operation is not None and operation.type in ("Softmax", "Sigmoid"):
        return operation.inputs[0]
    return noted


def set_keras_logits(tensor: object, logits: object) -> None:
    """Keeps with a tensor the logits that losses read in its place."""
    tensor._keras_logits = logits


def functional_inputs(model: keras.Model) -> object | None:
    """Returns the symbolic inputs of a functional or Sequential model in their structure."""
    functional = getattr(model, "_functional", None) or model  # of a Sequential
    return getattr(functional, "_inputs_struct", None)


def inbound_nodes(operation: keras.Operation) -> list:
    """Returns the nodes by which an operation or layer was called symbolically."""
    return operation._inbound_nodes


def compile_loss_of(model: keras.Model) -> CompileLoss | None:
    """Returns the loss of a compiled model, or None."""
    return getattr(model, "_compile_loss", None)


def compile_metrics_of(model: keras.Model) -> CompileMetrics | None:
    """Returns the metrics of a compiled model, or None."""
    return model._compile_metrics


def loss_tracker_of(model: keras.Model) -> keras.metrics.Mean:
    """Returns the metric that keeps the mean loss of a compiled model for its logs."""
    return model._loss_tracker


def build_symbolically(model: keras.Model, batch: tuple) -> None:
    """Builds model, loss and metrics from the shapes of a batch, without one."""
    model._symbolic_build(data_batch=batch)
    renew_constants(model)


def renew_constants(model: keras.Model) -> None:
    """Builds layers again that keep tensors of the graph that they were built in.

    `Normalization` does so with the statistics that it is given, and could not be called.
    """
    for layer in layers_of(model):
        mean = getattr(layer, "mean", None)
        if isinstance(layer, keras.layers.Normalization) and tf.is_symbolic_tensor(mean):
            layer.build_from_config(layer.get_build_config())


def evaluates_for_fit(arguments: Mapping[str, object]) -> bool:
    """Tells, by further arguments of `evaluate`, whether Keras's `fit` called it."""
    return bool(arguments.get("_use_cached_eval_dataset"))


def first_epoch(model: keras.Model) -> int:
    """Returns the epoch that a running `fit` begins with, as restoring callbacks left it."""
    return model._initial_epoch or 0


def set_first_epoch(model: keras.Model, epoch: int) -> None:
    """Lets a running `fit` begin with another epoch."""
    model._initial_epoch = epoch or None


def user_loss(loss: CompileLoss) -> object:
    """Returns the argument of `compile(loss=...)`."""
    return loss._user_loss


def flat_losses(loss: CompileLoss) -> list:
    """Returns the entries (path, loss, loss weight, name) of a built `CompileLoss`."""
    return loss._flat_losses


def shallow_copy(keras_object: object) -> object:
    """Copies an object of Keras without serializing it, as `copy.copy` would."""
    copied = object.__new__(type(keras_object))
    copied.__dict__.update(keras_object.__dict__)
    return copied


def uncompiled(model: keras.Model) -> keras.Model:
    """Copies a model, uncompiled, with the same layers."""
    copied = shallow_copy(model)
    copied.__dict__["compiled"] = False
    return copied


def with_losses(loss: CompileLoss, losses: list) -> CompileLoss:
    """Copies a built `CompileLoss`, with other single losses in the same order, without metrics."""
    copied = shallow_copy(loss)
    copied._flat_losses = [
        entry._replace(loss=single) for entry, single in zip(loss._flat_losses, losses, strict=True)
    ]
    copied._metrics = [None] * len(losses)
    return copied


def flat_metrics(metrics: CompileMetrics) -> Iterator[tuple[int, keras.metrics.Metric, bool]]:
    """Yields (number of the output, metric, whether it is weighted) of built compiled metrics."""
    for weighted in (False, True):
        per_output = metrics._flat_weighted_metrics if weighted else metrics._flat_metrics
        for output, listed in enumerate(per_output):
            for metric in listed.metrics if listed else ():
                yield output, metric, weighted


def flatten_outputs(metrics: CompileMetrics, y: object) -> list:
    """Flattens labels or predictions into the order of the outputs of compiled metrics."""
    return metrics._flatten_y(y)


def metric_function(metric: keras.metrics.MeanMetricWrapper) -> tuple[object, dict]:
    """Returns the function whose mean a metric is, and its further arguments."""
    return metric._fn, metric._fn_kwargs


def metric_values(metric: keras.metrics.MeanMetricWrapper, y: object, y_pred: object) -> object:
    """Computes the values whose mean a metric is."""
    return metric._fn(y, y_pred, **metric._fn_kwargs)


def metric_direction(metric: keras.metrics.Metric) -> str | None:
    """Returns "up" or "down", the direction in which a metric improves, or None."""
    return getattr(metric, "_direction", None)


def trained_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built for."""
    return optimizer._trainable_variables


def second_moments(optimizer: keras.optimizers.RMSprop) -> list[keras.Variable]:
    """Returns RMSprop's running means of squared gradients."""
    return optimizer._velocities


def learning_rate_of(optimizer: keras.optimizers.Optimizer | None) -> object:
    """Returns the learning rate's variable or schedule."""
    return getattr(optimizer, "_learning_rate", None)


def name_counts() -> dict[str, int]:
    """Returns how many objects of each kind Keras has named: it numbers `dense`, `dense_1`, …"""
    return dict(global_state.get_global_attribute("object_name_uids", default={}))


def set_name_counts(counts: Mapping[str, int]) -> None:
    """Lets Keras go on with the numbers that `name_counts` returned."""
    counts = collections.defaultdict(int, counts)
    global_state.set_global_attribute("object_name_uids", counts)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Leaves functions that are being traced, as `tf.init_scope` does, where no tape would record.

    Here tapes record, as they do in training: a graph is then checked with its gradient.
    """
    with tf.init_scope():
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        try:
            yield
        finally:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def function_number() -> int:
    """Returns the next number that TensorFlow names a function by, and uses it up."""
    return pywrap_tfe.TFE_Py_UID()


def skip_function_numbers(last: int) -> None:
    """Uses up the numbers of functions to the last; they only grow."""
    while pywrap_tfe.TFE_Py_UID() < last:
        pass


def saves_legacy_format() -> bool:
    """Tells whether Keras is reading or writing a configuration of its HDF5 format."""
    return global_state.get_global_attribute("use_legacy_config", False)
