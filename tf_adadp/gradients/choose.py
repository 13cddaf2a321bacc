"""Chooses the gradient engine of a model.

The ghost engine takes every model that it can follow, because it forms no gradient per example; the
plain (vectorized) engine takes the others. `GradientPlan` reports the engine and the reason.
"""

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.gradients import ghost
from tf_adadp.gradients.example_graph import ExampleGraph, control_flow, refuse_state
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.gradients.vectorized import VectorizedEngine
from tf_adadp.utils.keras_compat import CompileLoss, layers_of

Engine = ghost.GhostEngine | VectorizedEngine

FLOAT16_LOSS_SCALE = 1024.0
_CHUNK_BYTES = 32 * 2**20  # default memory of the ghost engine for norms and sums
_LARGEST_CHUNK = 1024

_SLOW_UNDER_XLA = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
    keras.layers.RNN,
    keras.layers.Bidirectional,
)
_NOT_UNDER_XLA = (keras.layers.CategoryEncoding, keras.layers.Discretization)


def make_engine(
    model: keras.Model,
    loss: CompileLoss | None,
    *,
    jit_compile: bool | str = "auto",
    gradient_engine: str = "auto",
    element_spec: Any = None,
    microbatch_size: int = 1,
    augmentation_multiplicity: int = 1,
    max_rows: int | None = None,
) -> tuple[Engine, ghost.GradientPlan]:
    """Makes the engine that suits a model, and reports the reason for the choice.

    Args:
        model: a built `keras.Model`.
        loss: a built Keras `CompileLoss`, or None.
        jit_compile: whether XLA compiles the work on a physical batch. "auto": never for the ghost
            engine; for the plain one, for models of dense layers and wherever there is attention,
            not for convolutional and recurrent ones, which XLA runs slower on a CPU (measured by
            `benchmarks/step_time.py`).
        gradient_engine: "ghost", "vectorized" (the plain engine), or "auto": ghost wherever it can
            follow the model.
        element_spec: `(x, y, sample_weight)` of TensorSpecs of a batch; without it "auto" chooses
            the plain engine.
        microbatch_size: more than 1 needs the plain engine.
        augmentation_multiplicity: more than 1 needs a model with random layers.
        max_rows: how many examples the ghost engine works on at once; None to let it choose.

    Returns:
        `(engine, plan)`, plan a `GradientPlan`.

    Raises:
        ValueError: a layer or the loss writes state or calls Python; augmentation_multiplicity > 1
            and the model draws no random numbers; gradient_engine="ghost" and
            the ghost engine cannot follow the model; in the plain engine, attention with
            jit_compile=False, and loops or branches with jit_compile=True.
    """
    example_loss = ExampleLoss(model, loss)
    example_loss.check_multiplicity(augmentation_multiplicity)
    reason, obstacles = "as asked for", ()
    if gradient_engine != "vectorized":
        try:
            if microbatch_size > 1:
                raise ghost.CannotFollow(f"microbatch_size={microbatch_size}", obstacles=())
            trace = _trace(example_loss, element_spec)
            engine, planned = _ghost_engine(trace, jit_compile, max_rows)
            if gradient_engine == "auto":
                reason = "every operation of the model is followed"
            if trace.loops_over_losses:
                reason += "; losses one example after the other"
            return engine, dataclasses.replace(
                _plan("ghost", reason, example_loss, trace.obstacles),
                gradients=planned,
                mapped=tuple(layer.name for layer in trace.alone),
                unreached=trace.unreached,
                captured=trace.captured,
            )
        except ghost.CannotFollow as cannot:
            reason, obstacles = str(cannot), cannot.obstacles
            if gradient_engine == "ghost":
                _Traits.of(example_loss, element_spec)  # may raise a more precise error
                raise ValueError(
                    f'gradient_engine="ghost": {reason}. Use "auto" or "vectorized".'
                ) from None
    traits = _Traits.of(example_loss, element_spec)  # raises before anything runs
    engine, why_sequential = _vectorized_engine(example_loss, traits, jit_compile)
    plan = _plan("vectorized", reason + why_sequential, example_loss, obstacles or None)
    return engine, dataclasses.replace(plan, unreached=traits.unreached)


@dataclasses.dataclass(frozen=True)
class _Traits:
    """Holds the properties of a model that decide on its engine.

    Attributes:
        layers: all layers of the model.
        element_spec: see `make_engine`.
        control_flow: the name of a loop or branch in the loss of one example, or None.
        shaped_by_values: the name of an operation whose output's shape depends on values, or None.
        sequential: whether examples are mapped one after the other.
        loss_scale: the fixed factor on the loss.
        unreached: paths of the trainable weights that no gradient of the loss reaches.
    """

    layers: list
    element_spec: Any
    control_flow: str | None
    shaped_by_values: str | None
    sequential: bool
    loss_scale: float
    unreached: tuple[str, ...]

    @classmethod
    def of(cls, example_loss, element_spec):
        """Traces the loss of one example; raises ValueError if it keeps state or calls Python."""
        layers = layers_of(example_loss.model)
        control_flow = shaped_by_values = None
        unreached = ()
        if element_spec is not None:
            graph = ExampleGraph(example_loss, _one_example(element_spec))
            graph.check()
            control_flow, shaped_by_values = graph.control_flow(), graph.shaped_by_values()
            unreached = graph.unreached
        return cls(
            layers=layers,
            element_spec=element_spec,
            control_flow=control_flow,
            shaped_by_values=shaped_by_values,
            # A vectorised map raises where a shape differs between two records, e.g. words in
            # a text.
            sequential=_has_masked_recurrence(layers) or shaped_by_values is not None,
            loss_scale=_loss_scale(example_loss.model),
            unreached=unreached,
        )


def _trace(example_loss, element_spec):
    """Traces a model for batches; raises `CannotFollow`, or ValueError if it keeps state."""
    if element_spec is None:
        raise ghost.CannotFollow("the form of the data is not known", obstacles=())
    for spec in tf.nest.flatten(element_spec):
        if spec is not None and None in spec.shape[1:].as_list():
            reason = f"data of shape {spec.shape} have axes of unknown size"
            raise ghost.CannotFollow(reason, obstacles=())
    trace = ghost.trace_model(example_loss, element_spec, _loss_scale(example_loss.model))
    refuse_state(trace.graph, "a layer or the loss", example_loss.model.variables)
    return trace


def _ghost_engine(trace, jit_compile, max_rows):
    """Returns `(engine, planned gradients)`."""
    planned = ghost.planned(trace)
    if jit_compile is True and control_flow(trace.graph) is not None:
        names = "/".join(layer.name for layer in trace.alone)
        _check_compiles(names or "of a loss", jit_compile)
    rows = max_rows or _rows_that_fit(sum(part.floats for part in planned))
    return ghost.GhostEngine(trace, jit_compile=jit_compile is True, max_rows=rows), planned


def _loss_scale(model):
    scaled = any(layer.compute_dtype == "float16" for layer in layers_of(model))
    return FLOAT16_LOSS_SCALE if scaled else 1.0


def _vectorized_engine(example_loss, traits, jit_compile):
    """Returns `(engine, why it maps examples one after the other)`."""
    _check_compiles(traits.control_flow, jit_compile)
    options = {"sequential": traits.sequential, "loss_scale": traits.loss_scale}
    why_sequential = ""
    if traits.control_flow is not None and not traits.sequential:
        cannot = VectorizedEngine(example_loss, **options).why_not_vectorized(
            _one_example(traits.element_spec)
        )
        if cannot is not None:
            options["sequential"] = True
            why_sequential = f"; one example after the other for {traits.control_flow!r}: {cannot}"
    has_attention = any(isinstance(layer, ghost.ATTENTION) for layer in traits.layers)
    has_attention &= not options["sequential"]
    if jit_compile == "auto":
        jit_compile = has_attention or _compiles_well(traits)
    elif not jit_compile and has_attention:
        # tf.vectorized_map over attention ends the process without XLA (free(): invalid pointer).
        raise ValueError(
            "jit_compile=False: attention layers need XLA inside tf.vectorized_map on this "
            'TensorFlow. Compile with jit_compile="auto" or True.'
        )
    engine = VectorizedEngine(example_loss, jit_compile=bool(jit_compile), **options)
    return engine, why_sequential


def _plan(engine, reason, example_loss, obstacles):
    num_scalars = sum(math.prod(v.shape) for v in example_loss.trainable_variables)
    dropped = example_loss.written
    return ghost.GradientPlan(engine, reason, (), num_scalars, obstacles=obstacles, dropped=dropped)


def _one_example(element_spec):
    """Returns the TensorSpecs of one example, from those of a batch."""
    return tf.nest.map_structure(
        lambda s: None if s is None else tf.TensorSpec(s.shape[1:], s.dtype), element_spec
    )


def _check_compiles(loop, jit_compile):
    """Refuses XLA where a loop or a branch of this name is inside of a map over examples."""
    if loop is not None and jit_compile is True:
        raise ValueError(
            f"jit_compile=True: XLA cannot compile the loop or branch {loop!r} of a "
            'layer inside of the map over examples. Compile with jit_compile="auto", or give '
            "recurrent layers unroll=True."
        )


def _rows_that_fit(floats_per_example):
    """Returns how many examples to work on at once by default."""
    rows = _CHUNK_BYTES // (4 * max(1, floats_per_example))
    return int(min(max(rows, 8), _LARGEST_CHUNK))


def _compiles_well(traits):
    """Tells whether XLA compiles the map over examples, and runs it faster."""
    unsuited = _SLOW_UNDER_XLA + _NOT_UNDER_XLA
    return (
        traits.control_flow is None
        and traits.shaped_by_values is None
        and all(layer.supports_jit and not isinstance(layer, unsuited) for layer in traits.layers)
    )


def _has_masked_recurrence(layers):
    """Tells whether a recurrent layer may meet a mask, which `tf.vectorized_map` cannot follow."""
    masks = any(
        isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)
        for layer in layers
    )
    recurrent = any(
        isinstance(layer, keras.layers.RNN) and not getattr(layer, "unroll", False)
        for layer in layers
    )
    return masks and recurrent
