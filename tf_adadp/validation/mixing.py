"""Reports operations that may give a batch other results than its examples one by one.

The findings come from the proof that the gradient engine makes (`gradients.proof`); nothing is run.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.gradients import ghost
from tf_adadp.gradients.compiled_losses import loss_obstacles, probe
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.gradients.proof.obstacles import Obstacle, first_line
from tf_adadp.utils.keras_compat import (
    CompileLoss,
    compute_output_spec,
    layers_of,
    own_variables,
)
from tf_adadp.utils.problems import Problem, raise_first
from tf_adadp.validation.layers import adapter_problems, override_problems

_LENGTH = 8  # of axes of unknown size
_DIVISIBLE = 5040  # rows: by all numbers to 10
_ALONE = "in private training every example is worked on alone, as a batch of one"
_OTHER_AXES = (
    "Work along other axes than the first; to normalise, use GroupNormalization or "
    "LayerNormalization."
)
# Fixes by words of the reason; the first match counts.
_FIXES = (
    (("no seed generator", "same for every batch"),
     "Use keras.random with a keras.random.SeedGenerator that is an attribute of the layer."),
    (("random",), "Draw for each example: let the shape begin with keras.ops.shape(x)[0]."),
    (("add_loss",), "Add a mean or a sum over the batch, of one value per example."),
    (("more than once", "every other one"), _OTHER_AXES),
    (("number of examples", "size of the batch"), "Leave the batch size out of it."),
    (("place in the batch",), "Give constants one entry, or none, along the first axis."),
    (("in Python on values",),
     "Write `if` with keras.ops.where, and `while` as a known number of steps; or expect it to be "
     "mapped over the examples, which is slower."),
    (("traced for a batch",), "Let it work for batches of any size, keras.ops.shape(x)[0]."),
    (("past Keras",), "Read the weight by its attribute of the layer."),
    (("not depend on the examples",), "Let every output depend on the inputs."),
    (("loop", "While", "StatelessIf", "Case"),
     "Write the steps out in Python, with keras.ops.where for branches; or expect it to be mapped "
     "over the examples, which is slower."),
    (("has no rule", "gradient of its own"),
     "Use keras.ops that work along other axes than the first, or expect it to be mapped over the "
     "examples, which is slower."),
    (("shape", "rank", "is cut", "examples along axis", "are not known"),
     "Keep the first axis for the examples; give other sizes and places as constants."),
)  # fmt: skip


def at_one_length(model: keras.Model, spec: Any, y_pred: Any) -> tuple[Any, Any]:
    """Gives axes of unknown size a length, if the model takes it; returns `(spec, y_pred)`.

    The output gets the length that the model computes from the inputs'; labels and weights get the
    output's.

    Args:
        model: a built `keras.Model`.
        spec: `(x, y, sample_weight)` of TensorSpecs of a batch.
        y_pred: the model's output as KerasTensors.
    """
    if all(None not in s.shape[1:] for s in tf.nest.flatten(spec) if s is not None):
        return spec, y_pred
    x, *others = spec
    x = tf.nest.map_structure(lambda s: _lengthened(s, ()), x)
    try:
        y_pred = compute_output_spec(model, probe(x))
    except Exception:  # whatever code of the user's raises
        return spec, y_pred
    outputs = [t.shape for t in tf.nest.flatten(y_pred)]

    def as_outputs(structure):
        leaves = tf.nest.flatten(structure)
        shapes = outputs if len(outputs) == len(leaves) else [()] * len(leaves)
        found = [s and _lengthened(s, shape) for s, shape in zip(leaves, shapes, strict=True)]
        return tf.nest.pack_sequence_as(structure, found)

    return (x, *map(as_outputs, others)), y_pred


def _lengthened(spec, like):
    """Returns a TensorSpec of a batch with the sizes of a shape where its own are not known."""
    known = [*like, *[None] * len(spec.shape)]
    sizes = [b or _LENGTH if a is None else a for a, b in zip(spec.shape, known, strict=False)]
    return tf.TensorSpec([None, *sizes[1:]], spec.dtype)


def batch_size_problems(model: keras.Model, x_spec: Any) -> Iterator[Problem]:
    """Yields a `Problem` where a model takes batches of some sizes alone.

    Args:
        model: a built `keras.Model`.
        x_spec: TensorSpecs of a batch of its inputs.
    """
    try:
        compute_output_spec(model, probe(x_spec))
        return
    except Exception as error:  # whatever code of the user's raises
        reason = first_line(error)
    try:
        compute_output_spec(model, probe(x_spec, _DIVISIBLE))
    except Exception:
        return  # the size of the batch is not at fault
    yield Problem(
        f"The model {model.name!r}",
        f"takes batches of some sizes alone, so a layer joins examples: {reason}",
        "Keep the axis of examples in every reshape: keras.ops.reshape(x, (keras.ops.shape(x)[0], "
        "-1)), or keras.layers.Reshape.",
    )


def check_batch_sizes(model: keras.Model, x_spec: Any) -> None:
    """Raises ValueError for `batch_size_problems`."""
    raise_first(batch_size_problems(model, x_spec))


def mixing_problems(model: keras.Model, obstacles: Iterable[Obstacle]) -> Iterator[Problem]:
    """Yields a `Problem` for each obstacle that is not proven to keep examples apart."""
    for obstacle in obstacles:
        if obstacle.apart:
            continue
        yield _unproven(_where(model, obstacle.layer), obstacle, _fix(obstacle.reason))


def dropped_problems(model: keras.Model, dropped: Iterable[str]) -> Iterator[Problem]:
    """Yields a `Problem` for each variable, by its path, that a model writes in training."""
    for path in dropped:
        owners = [y for y in layers_of(model) if any(v.path == path for v in y.variables)]
        yield Problem(
            _where(model, min(owners, key=lambda layer: len(layer.variables)).name),
            f"writes the variable {path!r} in training: a private step drops that, so the variable "
            "keeps its value",
            "Set it from public data before training, or do without it.",
            "warning",
        )


def unreached_problems(model: keras.Model, unreached: Collection[str]) -> Iterator[Problem]:
    """Yields problems of trainable weights, by their paths, that no loss depends on.

    One for each layer that owns such weights; an error where there are no others.
    """
    if len(unreached) == len(model.trainable_variables) > 0:
        yield Problem(
            f"The model {model.name!r}",
            "has no loss that depends on its weights: training would add noise to them, and spend "
            "privacy, for nothing",
            "Compile with a loss, or let a layer call add_loss.",
        )
        return
    for layer in layers_of(model):
        paths = [v.path for v in own_variables(layer) if v.path in unreached]
        if paths:
            yield Problem(
                _where(model, layer.name),
                f"has trainable weights that no loss depends on by a gradient, {', '.join(paths)}: "
                "private steps move them by noise alone",
                "Compile a loss for every output, call layers outside of tf.recompute_grad and "
                "custom gradients, or freeze them (trainable = False).",
                "warning",
            )


def check_reached(model: keras.Model, unreached: Collection[str], stacklevel: int = 6) -> None:
    """Raises ValueError where no loss depends on any weight, warns where some have none."""
    problems = list(unreached_problems(model, unreached))
    raise_first(problems)
    _warn(problems, stacklevel + 1)


def loss_problems(obstacles: Iterable[tuple[str, Obstacle]]) -> Iterator[Problem]:
    """Yields a `Problem` for each of `loss_obstacles`."""
    for name, obstacle in obstacles:
        fix = (
            "Let the loss work for batches of any size, and that of an example depend on its own "
            "labels and predictions."
        )
        yield _unproven(f"The loss {name!r}", obstacle, fix)


def warn_of_mixing(
    model: keras.Model, plan: ghost.GradientPlan, loss: CompileLoss | None, spec: Any, y_pred: Any
) -> None:
    """Warns, before training, where a model may do otherwise than without privacy.

    Args:
        model: a built `keras.Model`.
        plan: that of its engine.
        loss: a built Keras `CompileLoss`, or None.
        spec: `(x, y, sample_weight)` of TensorSpecs of a batch.
        y_pred: the model's output as KerasTensors.
    """
    spec, y_pred = at_one_length(model, spec, y_pred)
    obstacles = plan.obstacles
    if obstacles is None:  # the engine was asked for
        obstacles = ghost.obstacles_of(ExampleLoss(model, loss), spec)
    losses = [] if loss is None else loss_obstacles(loss, spec[1], y_pred)
    problems = (
        *override_problems(model),
        *adapter_problems(model),
        *dropped_problems(model, plan.dropped),
        *mixing_problems(model, (o for o in obstacles if o.is_announced)),
        *loss_problems(pair for pair in losses if pair[1].is_announced),
    )
    _warn(problems, 7)


def _warn(problems, stacklevel):
    for problem in problems:
        warnings.warn(f"{problem} tf_adadp.validate lists all.", UserWarning, stacklevel)


def _where(model, layer):
    return f"The model {model.name!r}" if layer in (None, model.name) else f"Layer {layer!r}"


def _unproven(where, obstacle, fix):
    line = f", {obstacle.line}" if obstacle.line else ""
    what = f"is not proven to keep examples apart: {obstacle.reason}{line}; {_ALONE}"
    return Problem(where, what, fix, "warning")


def _fix(reason):
    """Returns the fix that the reason allows."""
    return next((fix for words, fix in _FIXES if any(w in reason for w in words)), _OTHER_AXES)
