"""Prepares a compiled model for private training: builds it, checks it, chooses its engine."""

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tf_adadp import validation
from tf_adadp.distribution import replicas
from tf_adadp.gradients import make_engine
from tf_adadp.gradients.compiled_losses import check_reduces_no_batch, probe
from tf_adadp.gradients.settings import LayerSettings
from tf_adadp.metrics.released import LotMetrics
from tf_adadp.training.compiled import Compiled
from tf_adadp.utils.keras_compat import (
    build_symbolically,
    compile_loss_of,
    compile_metrics_of,
    compute_output_spec,
    functional_inputs,
)

_PER_EXAMPLE_BYTES = 100 * 2**20  # default memory of a physical batch's gradients
_MAX_PHYSICAL_BATCH = 64
_PADDING = 16  # at most: lots are padded to a multiple of it where physical batches are joined


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """Holds the objects that graphs are traced with, once model, loss and metrics are built.

    Attributes:
        engine: the gradient engine.
        plan: the `GradientPlan` of the engine.
        y_pred: the model's output as KerasTensors.
        released: the released metrics, a `LotMetrics`; None: none.
        layers: the layers, as the engine sees them.
    """

    engine: Any
    plan: Any
    y_pred: Any
    released: LotMetrics | None
    layers: LayerSettings

    @property
    def released_names(self) -> tuple[str, ...]:
        """Returns the names of released metrics in the logs."""
        return () if self.released is None else self.released.names


def prepare(model: keras.Model, compiled: Compiled, element_spec: tuple) -> Prepared:
    """Builds and checks model, loss, metrics and optimizer, and makes the gradient engine.

    Args:
        model: a compiled `DPModel`.
        compiled: the arguments of `compile`.
        element_spec: TensorSpecs of an ordinary batch, `(x, y, sample_weight)`.

    Raises:
        TypeError, ValueError: they cannot be trained privately. Nothing was trained.
    """
    probed = probe(element_spec)
    x, y, sample_weight = probed
    loss, optimizer = compile_loss_of(model), compiled.optimizer
    if y is None and loss is not None:
        raise ValueError("y=None: the compiled loss needs labels. Pass y.")
    validation.check_labels(y, sample_weight)
    try:
        build_symbolically(model, probed)
    except ValueError:
        validation.check_batch_sizes(model.model, element_spec[0])
        raise
    y_pred = compute_output_spec(model.model, x)
    if loss is not None:
        check_reduces_no_batch(loss, y, y_pred)
    validation.check_layers(model.model)  # again: a layer may have been adapted since
    validation.check_weights(model.model)
    # Checks, if it was built before, that it was for these variables.
    optimizer.build(model.trainable_variables)
    validation.check_metric_names(model.get_metrics_result(), optimizer.step_logs())
    optimizer.bind(model.model, loss)
    engine, plan = make_engine(
        model.model,
        loss,
        jit_compile=_engine_jit(model, compiled),
        gradient_engine=model.gradient_engine,
        element_spec=element_spec,
        microbatch_size=optimizer.microbatch_size,
        augmentation_multiplicity=optimizer.augmentation_multiplicity,
        max_rows=model.physical_batch_size,
    )
    validation.check_reached(model.model, plan.unreached)
    released = _released(model, compiled, probed, y_pred)
    if not replicas.is_strategy(model.distribute_strategy):  # no batch can be traced there
        validation.warn_of_mixing(model.model, plan, loss, element_spec, y_pred)
    return Prepared(engine, plan, y_pred, released, LayerSettings(model.model))


def check_strategy(model: keras.Model, compiled: Compiled) -> None:
    """Refuses strategies, and models that cannot be trained under theirs.

    Raises:
        ValueError: naming the strategy.
    """
    strategy, optimizer = model.distribute_strategy, compiled.optimizer
    kind = type(strategy).__name__
    replicas.check_strategy(model.model, strategy)
    kept_alone = optimizer.kept_on_one_device
    if strategy.num_replicas_in_sync > 1 and kept_alone:
        raise ValueError(
            f"{kept_alone} trains on one device: its branches cannot wait for other replicas. "
            f"Train it without {kind}."
        )
    if replicas.is_strategy(strategy) and model.steps_per_execution > 1:
        raise ValueError(
            f"steps_per_execution={model.steps_per_execution} under {kind}: TensorFlow cannot run "
            "Keras's loop over several steps there. Compile with 1."
        )
    replicas.check_microbatches(strategy, optimizer.microbatch_size)


def physical_batch_size(model: keras.Model, engine: Any, expected_size: float) -> int:
    """Returns B: rows of a lot come in multiples of it.

    For the plain engine, B is as given, or fits the memory bound, and is no larger than a typical
    lot. The ghost engine joins as many rows as it computes on at once; a small divisor of that
    number wastes fewer rows on padding.
    """
    given = model.physical_batch_size
    if engine.joins_batches:
        return next(d for d in range(_PADDING, 0, -1) if given is None or given % d == 0)
    if given is not None:
        return given
    scalars = sum(math.prod(v.shape) for v in model.trainable_variables)
    fits = max(1, _PER_EXAMPLE_BYTES // (4 * max(1, scalars)))
    return int(min(fits, _MAX_PHYSICAL_BATCH, math.ceil(expected_size)))


def plan_from_inputs(model: keras.Model, compiled: Compiled) -> Any:
    """Returns the `GradientPlan` of a model with known inputs, before any data.

    Raises:
        ValueError: the shapes of its inputs are not known.
    """
    inputs = functional_inputs(model.model)
    if inputs is None:
        raise ValueError(
            "gradient_plan: the form of the inputs of this model is not known yet; call "
            "it after training has begun."
        )
    spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), inputs)
    if any(None in s.shape[1:].as_list() for s in tf.nest.flatten(spec)):
        raise ValueError(
            "gradient_plan: the form of the inputs of this model is not known yet, since they have "
            "axes of any size; call it after training has begun."
        )
    # Forms depend on the layers alone; a loss needs labels, whose form is not known yet.
    _, plan = make_engine(
        model.model,
        None,
        jit_compile=_engine_jit(model, compiled),
        gradient_engine=model.gradient_engine,
        element_spec=(spec, None, None),
        microbatch_size=compiled.optimizer.microbatch_size,
    )
    return dataclasses.replace(plan, unreached=())  # not known either


def _engine_jit(model, compiled):
    return False if model.run_eagerly else compiled.jit_compile


def _released(model, compiled, probed, y_pred):
    if compiled.released_metrics is None:
        return None
    _, y, sample_weight = probed
    spec = tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec((None, *t.shape[1:]), t.dtype),
        (y, y_pred, sample_weight),
    )
    return LotMetrics(
        compiled.released_metrics,
        compile_metrics_of(model),
        spec,
        compiled.optimizer.seed,
        compiled.optimizer.secure_noise,
    )
