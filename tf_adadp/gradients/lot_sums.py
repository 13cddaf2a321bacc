"""Computes the clipped sum of a lot, for custom training loops."""

from typing import Any

import keras
import tensorflow as tf

from tf_adadp.clipping import ClippedSums
from tf_adadp.distribution import replicas
from tf_adadp.gradients.choose import Engine, make_engine
from tf_adadp.gradients.compiled_losses import probe
from tf_adadp.gradients.ghost import GradientPlan
from tf_adadp.gradients.settings import LayerSettings
from tf_adadp.utils.attached import ENGINES, attached_dict
from tf_adadp.utils.keras_compat import CompileLoss, compute_output_spec, eagerly


@tf.autograph.experimental.do_not_convert
def clipped_sum(
    model: keras.Model,
    loss: Any,
    lot: Any,
    optimizer: keras.optimizers.Optimizer,
    *,
    expected_lot_size: float | None = None,
    jit_compile: bool | str = "auto",
    gradient_engine: str = "auto",
) -> ClippedSums:
    """Returns the clipped sum of per-example gradients of one lot, for custom training loops.

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
        `ClippedSums`, a list of float32 tensors, one per trainable variable. They are RAW: pass the
        list unchanged to `optimizer.apply_private(sums, expected_lot_size)`, and to nothing else.
        It records its lot and the clipping set that the noise must fit. `tf_adadp.private_step`
        does all of this in one call.

    Under a `tf.distribute` strategy, call it in `Strategy.run` with each replica's share of the lot
    (`dp.replicas.distribute`): the sums are those of the whole lot, on every replica. Do not add
    them up again.

    Guarantee: adding or removing one example moves the sums by a vector of K (see `clipping`); with
    microbatch_size > 1 by the difference of two.

    Example:
        >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.Input((2,)), layer])
        >>> optimizer = dp.DPSGD(noise_multiplier=1.0)
        >>> optimizer.build(model.trainable_variables)
        >>> lot = dp.make_lot(np.eye(2), np.ones((2, 1)))
        >>> sums = dp.clipped_sum(model, keras.losses.MeanSquaredError(), lot, optimizer)
        >>> sums[0].numpy().round(3).tolist()
        [[-1.0], [-1.0]]
    """
    _check_ready(optimizer, expected_lot_size)
    engine, _ = engine_for_lot(
        model, loss, lot, optimizer, jit_compile=jit_compile, gradient_engine=gradient_engine
    )
    clipping_set = optimizer.clipping_set()
    sums, _ = engine.clipped_sum(
        lot,
        clipping_set,
        optimizer.example_seed(),
        microbatch_size=optimizer.microbatch_size,
        augmentation_multiplicity=optimizer.augmentation_multiplicity,
        num_slots=_num_slots(optimizer, expected_lot_size),
    )
    return ClippedSums(sums, clipping_set, lot)


def engine_for_lot(
    model: keras.Model,
    loss: Any,
    lot: Any,
    optimizer: keras.optimizers.Optimizer,
    *,
    jit_compile: bool | str = "auto",
    gradient_engine: str = "auto",
) -> tuple[Engine, GradientPlan]:
    """Returns the engine for lots of this form, and its plan; the same at every call.

    Args, raises: see `clipped_sum`.
    """
    return _cached_engine(
        model,
        loss,
        _element_spec(lot),
        jit_compile=jit_compile,
        gradient_engine=gradient_engine,
        microbatch_size=optimizer.microbatch_size,
        augmentation_multiplicity=optimizer.augmentation_multiplicity,
    )


def _cached_engine(model, loss, element_spec, **options):
    """Returns `make_engine`'s engine, made once per model, loss, form of data and variables.

    An eager loop calls it at every step.
    """
    # Attached to the model without Keras's tracking: the engine references the model, so any other
    # owner would keep both alive forever.
    engines = attached_dict(model, ENGINES)
    variables = tuple(id(v) for v in model.trainable_variables)
    key = (id(loss), str(element_spec), variables, *options.values())
    # An engine's trace does not follow later changes of layers.
    if key not in engines or not engines[key][-1].unchanged:
        with eagerly():
            built = _built_loss(model, loss, element_spec)
            engine, plan = make_engine(model, built, element_spec=element_spec, **options)
        # Holds the loss too, so that no other loss gets its id.
        engines[key] = engine, plan, loss, LayerSettings(model)
    return engines[key][:2]


def _built_loss(model, loss, element_spec):
    """Returns a Keras `CompileLoss` of a loss, built for data of this form; None for None."""
    if loss is None:
        return None
    compile_loss = CompileLoss(loss)
    x_spec, y_spec = probe(element_spec[:2], rows=2)
    y_pred = compute_output_spec(model, x_spec)
    compute_output_spec(compile_loss, y_spec, y_pred)
    return compile_loss


def _element_spec(lot):
    """Returns `(x, y, sample_weight)` of TensorSpecs of a batch of a lot; refuses other forms."""
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
    return tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec((None, *t.shape[2:]), t.dtype), lot[0]
    )


def _check_ready(optimizer, expected_lot_size):
    """Raises ValueError where a lot size is missing or the optimizer is not built."""
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


def _num_slots(optimizer, expected_lot_size):
    """Returns the number of microbatch slots of a replica's share; None without microbatches."""
    if optimizer.microbatch_size == 1:
        return None
    return optimizer.num_slots(expected_lot_size) // replicas.num_replicas()
