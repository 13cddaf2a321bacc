"""Choice of the engine for a model, and the clipped sum for custom loops."""

import math

import keras
import tensorflow as tf

from tf_adadp.clipping import ClippedSums
from tf_adadp.distribution import replicas
from tf_adadp.gradients import ghost
from tf_adadp.gradients.example_graph import ExampleGraph
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.gradients.vectorized import VectorizedEngine
from tf_adadp.utils.keras_compat import CompileLoss, compute_output_spec, layers_of

FLOAT16_LOSS_SCALE = 1024.0
_CHUNK_BYTES = 32 * 2**20  # what the ghost engine may hold for norms and sums by default
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
    model,
    loss,
    *,
    jit_compile="auto",
    gradient_engine="auto",
    element_spec=None,
    microbatch_size=1,
    augmentation_multiplicity=1,
    max_rows=None,
):
    """The engine that suits a model, and why.

    Args:
        model: a built `keras.Model`.
        loss: a built Keras `CompileLoss`, or None.
        jit_compile: whether XLA compiles the work on a physical batch. "auto": never for the ghost
            engine; for the plain one, for models of dense layers and wherever there is attention,
            not for convolutional and recurrent ones, which XLA runs slower on a CPU (measured by
            `benchmarks/step_time.py`).
        gradient_engine: "ghost", "vectorized" (the plain engine), or "auto": ghost wherever it can
            follow the model.
        element_spec: `(x, y, sample_weight)` of TensorSpecs of a batch; without it the plain
            engine is the choice of "auto".
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
    layers = layers_of(model)
    scaled = any(layer.compute_dtype == "float16" for layer in layers)
    options = {
        "sequential": _has_masked_recurrence(layers),
        "loss_scale": FLOAT16_LOSS_SCALE if scaled else 1.0,
    }
    example_loss = ExampleLoss(model, loss)
    example_loss.check_multiplicity(augmentation_multiplicity)
    control_flow = shaped_by_values = None
    if element_spec is not None:
        example = tf.nest.map_structure(
            lambda s: None if s is None else tf.TensorSpec(s.shape[1:], s.dtype), element_spec
        )
        graph = ExampleGraph(example_loss, example)
        graph.check()  # before anything runs, on random data too
        control_flow, shaped_by_values = graph.control_flow(), graph.shaped_by_values()
        # Vectorised, a lot would stop where two of its records differ in their number of words.
        options["sequential"] |= shaped_by_values is not None
    num_scalars = sum(math.prod(v.shape) for v in model.trainable_variables)
    reason = "as asked for"
    if gradient_engine != "vectorized":
        try:
            if microbatch_size > 1:
                raise ghost.CannotFollow(f"microbatch_size={microbatch_size}")
            if element_spec is None:
                raise ghost.CannotFollow("the form of the data is not known")
            ghost_pass = ghost.GhostPass(example_loss, **options)
            _check_no_mapped_attention(ghost_pass)
            planned = ghost.probe(ghost_pass, element_spec)
            if any(part.rule == "map" for part in planned):
                _check_compiles(control_flow, jit_compile)
            if gradient_engine == "auto":
                reason = "it can follow every layer"
            plan = ghost.GradientPlan("ghost", reason, planned, num_scalars)
            engine = ghost.GhostEngine(
                ghost_pass,
                jit_compile=jit_compile is True,
                max_rows=max_rows or _rows_that_fit(plan.floats_per_example),
            )
            return engine, plan
        except ghost.CannotFollow as cannot:
            reason = str(cannot)
            if gradient_engine == "ghost":
                raise ValueError(
                    f'gradient_engine="ghost": {reason}. Use "auto" or "vectorized"; a layer that '
                    "the ghost engine does not know can be given a rule, see "
                    "`tf_adadp.gradients.ghost.register`."
                ) from None
    _check_compiles(control_flow, jit_compile)
    if control_flow is not None and not options["sequential"]:
        cannot = VectorizedEngine(example_loss, **options).why_not_vectorized(example)
        if cannot is not None:
            options["sequential"] = True
            reason += f"; one example after the other for {control_flow!r}: {cannot}"
    plan = ghost.GradientPlan("vectorized", reason, (), num_scalars)
    has_attention = any(isinstance(layer, ghost.ATTENTION) for layer in layers)
    has_attention &= not options["sequential"]
    if jit_compile == "auto":
        jit_compile = has_attention or (
            control_flow is None and shaped_by_values is None and _compiles_well(layers)
        )
    elif not jit_compile and has_attention:
        # tf.vectorized_map over attention ends the process without XLA (free(): invalid pointer).
        raise ValueError(
            "jit_compile=False: attention layers need XLA inside tf.vectorized_map on this "
            'TensorFlow. Compile with jit_compile="auto" or True.'
        )
    return VectorizedEngine(example_loss, jit_compile=bool(jit_compile), **options), plan


def _cached_engine(model, loss, element_spec, **options):
    """`make_engine`, once per model, loss, form of data and trained variables.

    A loop that runs eagerly asks at every step.
    """
    # Past Keras's tracking; the engine holds the model, so it has to live as long as that.
    engines = model.__dict__.setdefault("_tf_adadp_engines", {})
    variables = tuple(id(v) for v in model.trainable_variables)
    # A layer that was changed since may mix examples, and was looked at when the engine was made.
    trust = tuple((id(layer), ghost.mixing_reason(layer)) for layer in layers_of(model))
    key = (id(loss), str(element_spec), variables, trust, *options.values())
    if key not in engines:
        with tf.init_scope():
            compile_loss = None
            if loss is not None:
                compile_loss = CompileLoss(loss)
                x_spec, y_spec = tf.nest.map_structure(
                    lambda s: keras.KerasTensor((2, *s.shape[1:]), dtype=s.dtype.name),
                    element_spec[:2],
                )
                y_pred = compute_output_spec(model, x_spec)
                compute_output_spec(compile_loss, y_spec, y_pred)
            engine, _ = make_engine(model, compile_loss, element_spec=element_spec, **options)
        engines[key] = engine, loss  # the loss as well: another one could get its id
    return engines[key][0]


def _check_no_mapped_attention(ghost_pass):
    """Attention inside of a mapped layer would end the process without XLA."""
    for layer in ghost_pass.layers:  # attention itself has no rule: its parts have
        if any(isinstance(part, ghost.ATTENTION) for part in layers_of(layer)):
            raise ghost.CannotFollow(f"the layer {layer.name!r} has no rule and attention in it")


def _check_compiles(control_flow, jit_compile):
    """Refuses XLA where a loop or a branch is inside of a map over examples."""
    if control_flow is not None and jit_compile is True:
        raise ValueError(
            f"jit_compile=True: XLA cannot compile the loop or branch {control_flow!r} of a layer "
            'inside of the map over examples. Compile with jit_compile="auto"; recurrent layers '
            "have unroll=True besides."
        )


def _rows_that_fit(floats_per_example):
    """How many examples to work on at once by default."""
    rows = _CHUNK_BYTES // (4 * max(1, floats_per_example))
    return int(min(max(rows, 16), _LARGEST_CHUNK))


def engine_for_lot(model, loss, lot, optimizer, *, jit_compile="auto", gradient_engine="auto"):
    """Returns the engine for lots of this form; the same one at every call.

    Args, raises: see `clipped_sum`.
    """
    try:
        (_, _, _), mask = lot
        leaves = [tf.TensorShape(t.shape)[:2] for t in tf.nest.flatten(lot[0]) if t is not None]
        rows = tf.TensorShape(mask.shape)
        fits = rows.rank == 2 and all(rows.is_compatible_with(leaf) for leaf in leaves)
    except (TypeError, ValueError, AttributeError):
        fits = False
    if not fits:
        raise ValueError(
            "lot must be ((x, y, sample_weight), mask) with leaves [P, B, ...], as lots give them: "
            "PoissonLots(...).take(num_lots, physical_batch_size=...) yields them. Or pack a batch "
            "that you sampled, tf_adadp.make_lot(x, y, sample_weight, physical_batch_size=...)."
        )
    spec = tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec((None, *t.shape[2:]), t.dtype), lot[0]
    )
    return _cached_engine(
        model,
        loss,
        spec,
        jit_compile=jit_compile,
        gradient_engine=gradient_engine,
        microbatch_size=optimizer.microbatch_size,
        augmentation_multiplicity=optimizer.augmentation_multiplicity,
    )


@tf.autograph.experimental.do_not_convert
def clipped_sum(
    model,
    loss,
    lot,
    optimizer,
    *,
    expected_lot_size=None,
    jit_compile="auto",
    gradient_engine="auto",
):
    """The clipped sum of per-example gradients of one lot, for custom training loops.

        Σ_x mask_x · clip_K(∇_θ w_x·ℓ(y_x, model(x))),   K = optimizer.clipping_set()

    Args:
        model: a built `keras.Model`, the plain one (`DPModel.model`).
        loss: a Keras loss (object, name or function), or None.
        lot: `((x, y, sample_weight), mask)` with leaves `[P, B, ...]`, as `take` of
            `PoissonLots` yields them or as `make_lot` packs a batch.
        optimizer: a private optimizer, built on `model.trainable_variables`.
        expected_lot_size: L; needed where the optimizer's microbatch_size is above 1.
        jit_compile: as in `DPModel.compile`.
        gradient_engine: as in `DPModel`.

    Returns:
        `ClippedSums`, a list of float32 tensors, one per trainable variable. RAW: pass it to
        `optimizer.apply_private(sums, expected_lot_size)` and nowhere else, as it is: it knows its
        lot and the set that the noise has to fit. `tf_adadp.private_step` does all in one call.

    Under a `tf.distribute` strategy, call it in `Strategy.run` with each replica's share of the lot
    (`dp.replicas.distribute`): the sums are those of the whole lot, on every replica. They
    are not to be added up again.

    Guarantee: adding or removing one example moves the sums by a vector of K (see `clipping`); with
    microbatch_size > 1 by the difference of two.
    """
    k = optimizer.microbatch_size
    if k > 1 and expected_lot_size is None:
        raise ValueError(
            f"expected_lot_size=None with microbatch_size={k}: give the expected lot size; the "
            "number of slots follows from it, never from the lot."
        )
    if not optimizer.built:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} is not built. Call "
            "optimizer.build(model.trainable_variables) first."
        )
    engine = engine_for_lot(
        model, loss, lot, optimizer, jit_compile=jit_compile, gradient_engine=gradient_engine
    )
    clipping_set = optimizer.clipping_set()
    sums, _ = engine.clipped_sum(
        lot,
        clipping_set,
        optimizer.example_seed(),
        microbatch_size=k,
        augmentation_multiplicity=optimizer.augmentation_multiplicity,
        num_slots=optimizer.num_slots(expected_lot_size) // replicas.num_replicas()
        if k > 1
        else None,
    )
    return ClippedSums(sums, clipping_set, lot)


def _compiles_well(layers):
    unsuited = _SLOW_UNDER_XLA + _NOT_UNDER_XLA
    return all(layer.supports_jit and not isinstance(layer, unsuited) for layer in layers)


def _has_masked_recurrence(layers):
    masks = any(
        isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)
        for layer in layers
    )
    recurrent = any(
        isinstance(layer, keras.layers.RNN) and not getattr(layer, "unroll", False)
        for layer in layers
    )
    return masks and recurrent
