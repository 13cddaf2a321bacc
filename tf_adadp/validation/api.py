"""`validate`: everything that private training would refuse or change in a model, at once."""

import warnings

import keras
import tensorflow as tf

from tf_adadp.gradients.compiled_losses import PROBE_BATCH, batch_reductions
from tf_adadp.gradients.example_graph import ExampleGraph
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.sampling.base import Lots
from tf_adadp.sampling.sources import as_source
from tf_adadp.utils.keras_compat import (
    CompileLoss,
    compile_loss_of,
    compute_output_spec,
    functional_inputs,
    user_loss,
)
from tf_adadp.utils.problems import Problem
from tf_adadp.validation.arguments import label_problems
from tf_adadp.validation.layers import (
    generator_problems,
    layer_problems,
    override_problems,
    weight_problems,
)
from tf_adadp.validation.probing import probe
from tf_adadp.validation.report import Report


def validate(model: keras.Model, loss: object = None, x: object = None, y: object = None) -> Report:
    """Lists everything in a model that private training refuses or changes, each with a fix.

        report = validate(model, "sparse_categorical_crossentropy", x, y)
        print(report)                      # severity, where, problem, fix
        report.raise_if_any()

    Errors are what `DPModel` refuses, found by the same rules, all of them at once. Warnings are
    what it accepts and does otherwise than training without privacy: layers or losses that mix
    examples, state that a layer would keep, random numbers from outside of the model's seed
    generators.

    The model is first looked at, then traced for one example, then run on random data in the form
    of x: with one example the same and the others changed, does its output, gradient or loss
    change? The values of x and y are never looked at, so the report depends on no data, and no
    weight or state of the model is changed. A model that is not built yet is built.

    A report without problems is no proof: trials can miss a layer that mixes loud inputs only. The
    guarantee of a `DPModel` does not rest on them.

    Args:
        model: a `keras.Model`, or a `DPModel`, whose compiled loss is then the default.
        loss: as for `compile`; None to leave losses out.
        x, y: arrays or lots, as for `fit`; only their shapes and types are used. Without x the
            model's own inputs tell the form, where they are known; without y the labels are taken
            to be classes for sparse losses, and else of the form of the outputs.

    Returns:
        A `Report`, a list of `Problem(where, what, fix, severity)`; `report.ok` where no severity
        is "error".

    Raises:
        TypeError: if model is no `keras.Model`.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"model={model!r}: give a keras.Model.")
    inner = getattr(model, "model", None)
    if isinstance(inner, keras.Model) and hasattr(model, "ledger"):  # a DPModel
        if loss is None and compile_loss_of(model) is not None:
            loss = user_loss(compile_loss_of(model))
        model = inner
    return Report(_problems(model, loss, x, y))


def warn_of_mixing(model: keras.Model, element_spec: tuple, loss: CompileLoss | None) -> None:
    """Warns, before training, of layers and losses that mix the examples of a batch.

    It is tried on random data: call this where its operations could not be followed.

    Args:
        model: a built `keras.Model` without side effects.
        element_spec: `(x, y, sample_weight)` of TensorSpecs of a batch.
        loss: a built Keras `CompileLoss`, or None.
    """
    try:
        problems = list(probe(model, element_spec, loss))
    except Exception:  # whatever a layer of the user's raises on random data; training may not
        return
    for problem in problems:
        warnings.warn(f"{problem} tf_adadp.validate lists all.", UserWarning, stacklevel=5)


def _problems(model, loss, x, y):
    seen = set()
    for problem in (
        *layer_problems(model),
        *override_problems(model),
        *generator_problems(model),
    ):
        seen.add(problem.where)
        yield problem
    spec = _element_spec(model, x, y)
    if spec is None:
        yield Problem(
            f"The model {model.name!r}",
            "was not tried on random data, since the form of its inputs is not known",
            "Pass x, and y where there are labels.",
            "warning",
        )
        return
    try:
        compile_loss, spec, y_pred, probed_y = _built(model, loss, spec)
    except Exception as error:  # whatever a layer of the user's raises
        yield _failure(model, error, x)
        return
    yield from weight_problems(model)
    yield from label_problems(probed_y)
    if compile_loss is not None:
        reductions = batch_reductions(compile_loss, probed_y, y_pred)
        yield from reductions
        if reductions:
            compile_loss = None
    example = tf.nest.map_structure(
        lambda s: None if s is None else tf.TensorSpec(s.shape[1:], s.dtype), spec
    )
    try:
        graph = ExampleGraph(ExampleLoss(model, compile_loss), example)
        effects = list(graph.problems())
        yield from effects
        if not effects:  # else a trial would leave its mark
            # What a layer was told of for what it is, is not told again for what it does.
            yield from (p for p in probe(model, spec, compile_loss) if p.where not in seen)
    except Exception as error:
        yield _failure(model, error, x)


def _element_spec(model, x, y):
    """`(x, y, sample_weight)` of TensorSpecs [None, ...], or None; as `fit` finds it."""
    if isinstance(x, Lots):
        return x.element_spec
    if x is not None:
        return as_source(x, y).spec
    inputs = functional_inputs(model)
    if inputs is None:
        return None
    x_spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), inputs)
    y_spec = None if y is None else as_source(y).spec[0]
    return x_spec, y_spec, None


def _built(model, loss, spec):
    """Builds model and loss; `(CompileLoss or None, spec with labels, y_pred, y)`, symbolic."""
    x, y, _ = tf.nest.map_structure(_symbolic, spec)
    y_pred = compute_output_spec(model, x)
    if loss is None:
        return None, (spec[0], None, None), y_pred, y
    if y is None:
        sparse = "sparse" in str(getattr(loss, "name", None) or loss)
        y = keras.tree.map_structure(
            lambda t: keras.KerasTensor(t.shape[:-1], "int32") if sparse else t, y_pred
        )
        y_spec = keras.tree.map_structure(lambda t: tf.TensorSpec((None, *t.shape[1:]), t.dtype), y)
        spec = spec[0], y_spec, None
    compile_loss = CompileLoss(loss, output_names=getattr(model, "output_names", None))
    compute_output_spec(compile_loss, y, y_pred)
    return compile_loss, spec, y_pred, y


def _symbolic(spec):
    if spec is None:
        return None
    return keras.KerasTensor((PROBE_BATCH, *spec.shape[1:]), dtype=spec.dtype.name)


def _failure(model, error, x):
    line = next((li.strip() for li in str(error).splitlines() if li.strip()), "")
    return Problem(
        f"The model {model.name!r}",
        f"cannot be traced or run in training mode: {type(error).__name__}: {line}",
        "Pass x and y." if x is None else "Make model and loss run on data of the form of x and y.",
        "warning" if x is None else "error",
    )
