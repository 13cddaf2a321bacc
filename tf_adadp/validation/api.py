"""Reports everything that private training would refuse or change in a model, at once."""

import keras
import tensorflow as tf

from tf_adadp.gradients import ghost
from tf_adadp.gradients.compiled_losses import batch_reductions, loss_obstacles, probe
from tf_adadp.gradients.example_graph import ExampleGraph
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.gradients.proof.obstacles import first_line
from tf_adadp.sampling.base import Lots
from tf_adadp.sampling.datasets import record_spec
from tf_adadp.sampling.preprocessing import preprocessed_spec, preprocesses, raw_source
from tf_adadp.sampling.sources import as_source
from tf_adadp.utils.keras_compat import (
    CompileLoss,
    compile_loss_of,
    compute_output_spec,
    functional_inputs,
    renew_constants,
    user_loss,
)
from tf_adadp.utils.problems import Problem
from tf_adadp.validation.arguments import label_problems
from tf_adadp.validation.layers import (
    adapter_problems,
    generator_problems,
    layer_problems,
    override_problems,
    weight_problems,
)
from tf_adadp.validation.mixing import (
    at_one_length,
    batch_size_problems,
    dropped_problems,
    loss_problems,
    mixing_problems,
    unreached_problems,
)
from tf_adadp.validation.report import Report


def validate(model: keras.Model, loss: object = None, x: object = None, y: object = None) -> Report:
    """Lists everything in a model that private training refuses or changes, each with a fix.

        report = validate(model, "sparse_categorical_crossentropy", x, y)
        print(report)                      # severity, where, what, fix
        report.raise_if_any()

    Errors are problems that `DPModel` refuses, found by the same rules. Warnings are problems that
    it accepts, though it may train differently than without privacy: layers or losses that are not
    proven to keep examples apart, variables that a layer writes, random numbers from outside of the
    model's seed generators, LoRA adapters that are frozen.

    Nothing is run. The model is traced in training mode, for one example and for a batch of any
    size, and the graph of the batch is followed operation by operation, forwards and through its
    gradients, as the gradient engine does. Every layer that cannot be followed is named, with the
    operation and the line of code; where the model's own code cannot be followed, the analysis
    stops at that place. The values of x and y are never read, so the report depends on no data, and
    no weight or state of the model is changed. A model that is not built yet is built.

    A report without problems is a proof about the traced graph: in training, the output of an
    example, its gradient and its loss are functions of that example, the weights and random numbers
    of its own, for every value and every number of other examples. The proof holds

    - for constants that the model holds (`gradient_plan().captured`) if they are public: a table of
      the training data is a constant too;
    - for axes of unknown size at one length, and for Python code as it ran when it was traced;
    - for values of losses. Gradients of losses are always taken example by example, so mixing in a
      custom gradient of a loss is not reported;
    - where no operation keeps state. A model with such an error is not followed further.

    A warning does not prove that examples are mixed: an operation without a rule may be harmless.
    It is then mapped over the examples, which is slower and gives the same result. `gradient_plan`
    reports parts that only make training slower.

    Args:
        model: a `keras.Model`, or a `DPModel`, whose compiled loss is then the default.
        loss: as for `compile`; None to leave losses out.
        x, y: arrays, a `tf.data.Dataset` or lots, as for `fit`; only their shapes and types are
            used. Without x the model's own inputs give the shapes, where they are known. Without y
            the labels are assumed to be classes for sparse losses, and otherwise to be shaped as
            the outputs.

    Returns:
        A `Report`, a list of `Problem(where, what, fix, severity)`; `report.ok` where no severity
        is "error".

    Raises:
        TypeError: if model is no `keras.Model`.

    Example:
        >>> layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        >>> report = dp.validate(keras.Sequential(layers))
        >>> print(len(report), report[0].severity)
        1 error
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"model={model!r}: give a keras.Model.")
    inner = getattr(model, "model", None)
    if isinstance(inner, keras.Model) and hasattr(model, "ledger"):  # a DPModel
        if loss is None and compile_loss_of(model) is not None:
            loss = user_loss(compile_loss_of(model))
        model = inner
    return Report(_problems(model, loss, x, y))


def _problems(model, loss, x, y):
    of_layers = list(layer_problems(model))
    yield from of_layers
    yield from override_problems(model)
    yield from generator_problems(model)
    seen = {problem.where for problem in of_layers}
    spec = _element_spec(model, x, y)
    if spec is None:
        yield Problem(
            f"The model {model.name!r}",
            "was not followed, since the form of its inputs is not known",
            "Pass x, and y where there are labels.",
            "warning",
        )
        return
    try:
        compile_loss, spec, y_pred, probed_y = _built(model, loss, spec)
    except Exception as error:  # the user's layers may raise anything
        yield from list(batch_size_problems(model, spec[0])) or [_failure(model, error, x)]
        return
    yield from weight_problems(model)
    yield from adapter_problems(model)
    yield from label_problems(probed_y)
    if compile_loss is not None:
        reductions = batch_reductions(compile_loss, probed_y, y_pred)
        yield from reductions
        if reductions:
            compile_loss = None
    example = tf.nest.map_structure(
        lambda s: None if s is None else tf.TensorSpec(s.shape[1:], s.dtype), spec
    )
    example_loss = ExampleLoss(model, compile_loss)
    try:
        graph = ExampleGraph(example_loss, example)
        effects = list(graph.problems())
        yield from effects
        if effects:
            return
        spec, y_pred = at_one_length(model, spec, y_pred)
        obstacles = ghost.obstacles_of(example_loss, spec)
        for problem in (
            *mixing_problems(model, obstacles),
            *dropped_problems(model, example_loss.written),
        ):
            # A layer that is refused for its type is not listed again for its operations.
            if problem.where not in seen:
                yield problem
        if compile_loss is not None:
            yield from unreached_problems(model, graph.unreached)
            yield from loss_problems(loss_obstacles(compile_loss, spec[1], y_pred))
    except Exception as error:
        yield _failure(model, error, x)


def _element_spec(model, x, y):
    """Returns `(x, y, sample_weight)` of TensorSpecs [None, ...], as `fit` does, or None."""
    if isinstance(x, Lots):
        return x.element_spec
    if isinstance(x, tf.data.Dataset):
        return preprocessed_spec(model, record_spec(x))
    if x is not None:
        source = raw_source(x, y) if preprocesses(model) else as_source(x, y)
        return preprocessed_spec(model, source.spec)
    inputs = functional_inputs(model)
    if inputs is None:
        return None
    x_spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), inputs)
    y_spec = None if y is None else as_source(y).spec[0]
    return x_spec, y_spec, None


def _built(model, loss, spec):
    """Builds model and loss; returns `(CompileLoss or None, spec with labels, y_pred, y)`."""
    x, y, _ = probe(spec)
    y_pred = compute_output_spec(model, x)
    renew_constants(model)
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


def _failure(model, error, x):
    return Problem(
        f"The model {model.name!r}",
        f"cannot be traced in training mode: {type(error).__name__}: {first_line(error)}",
        "Pass x and y." if x is None else "Make model and loss run on data of the form of x and y.",
        "warning" if x is None else "error",
    )
