"""Copies a model without the layers that private training refuses (`make_compatible`)."""

import keras

from tf_adadp.persistence.saved_model import SavedWithLedger
from tf_adadp.persistence.weights_ledger import copy_history
from tf_adadp.sampling.preprocessing import preprocesses
from tf_adadp.utils.attached import CHANGES, attach, attached
from tf_adadp.utils.checks import check_choice, check_instance
from tf_adadp.utils.problems import Problem
from tf_adadp.validation.copying import Copies, is_graph
from tf_adadp.validation.layers import generator_problems, layer_problems, override_problems
from tf_adadp.validation.replacements import group_normalization, is_refused
from tf_adadp.validation.report import Report

_L = keras.layers


def make_compatible(model: keras.Model, batch_normalization: str = "group") -> keras.Model:
    """Copies a model, with other layers in place of some that private training refuses.

        model = dp.DPModel(dp.make_compatible(keras.applications.ResNet50V2(weights=None)))

    The copy has variables of its own, the names, `trainable` flags and weights of the given model,
    and is not compiled. The given model is not changed. It contains no class of this package, so
    plain Keras saves and loads it. Replaced are:

    - BatchNormalization that is not frozen. "group" puts `GroupNormalization` in its place, with
      the same name, axis, epsilon, initializers, regularizers, constraints, gamma and beta. gamma
      and beta mean the same in both, scale and offset of a normalised channel; the statistics do
      not: GroupNormalization takes mean and variance over the positions and channels of a group
      of ONE example. The outputs of a pre-trained model change, and it needs training. The number
      of groups is the largest divisor of the channels that is at most 32, the default of Wu & He
      (2018), arXiv:1803.08494, and leaves at least 4 channels in a group; 1 where there is none.
      "freeze" keeps the layer, with trainable=False: it uses its moving statistics in training
      too, and the outputs in inference mode are exactly those of the given model. The moving
      statistics have to be public: they are in the copy, and no ε covers them.
    - `SpectralNormalization`, by the layer that it wraps, with the kernel that was normalised last.
      Outputs in inference mode are unchanged; training does not normalise the kernel any more.
    - Recurrent layers with stateful=True, by the same layers with stateful=False.

    Nested models, shared layers and layers inside of wrappers (TimeDistributed, Bidirectional) are
    treated alike. Other parts that a `DPModel` refuses stay unchanged: `compatibility_changes`
    lists them beside the changes.

    Guarantee: none is added or lost. Copied weights cost as much as in the given model, so a
    `DPModel` of the copy starts with a copy of the ledger that the given model's weights have in
    this process; see `DPModel(ledger=...)` for histories that cannot be found.

    Args:
        model: a Sequential or functional `keras.Model`, which may hold other models and layers.
        batch_normalization: "group" or "freeze".

    Returns:
        A new `keras.Model`: functional or Sequential, as the given one.

    Raises:
        TypeError: model is no `keras.Model`, or a `DPModel`.
        ValueError: where the model has a preprocessor, as tasks of keras_hub do; where a model or
            layer makes a BatchNormalization in code of its own, which no copy can replace; and
            where "group" would replace a BatchNormalization that is not built, or that normalises
            single numbers.

    Example:
        >>> layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        >>> model = dp.make_compatible(keras.Sequential(layers))
        >>> [type(layer).__name__ for layer in model.layers]
        ['GroupNormalization', 'Dense']
    """
    check_instance("model", model, keras.Model, "a keras.Model")
    if isinstance(model, SavedWithLedger):
        raise TypeError(
            "model is a DPModel: give its plain model, make_compatible(model.model), and wrap the "
            "result."
        )
    check_choice("batch_normalization", batch_normalization, ("group", "freeze"))
    if preprocesses(model):
        raise ValueError(
            f"model is a {type(model).__name__} with a preprocessor, which no copy of its layers "
            "has: preprocess the records beforehand, x = model.preprocessor(x), and set "
            "`model.preprocessor = None` before make_compatible(model)."
        )
    if not is_graph(model):
        raise ValueError(_by_hand(model))
    copies = Copies(group=batch_normalization == "group")
    made = copies.of_model(model)
    pairs = list(copies.pairs())
    copies.keep_trainable(pairs)
    copies.keep_weights(pairs)
    if batch_normalization == "freeze":
        for _, new in pairs:
            if isinstance(new, _L.BatchNormalization):
                new.trainable = False
    changes = [change for old, new in pairs for change in _changes(old, new)]
    copy_history(model, made)
    remaining = (*layer_problems(made), *override_problems(made), *generator_problems(made))
    attach(made, CHANGES, Report([*changes, *remaining]))
    return made


def compatibility_changes(model: keras.Model) -> Report:
    """Returns the report of the changes by `make_compatible` in the model that it returned.

        fixed = dp.make_compatible(model)
        print(dp.compatibility_changes(fixed))      # severity, where, what, fix

    Args:
        model: as `make_compatible` returned it.

    Returns:
        A `Report` with a `Problem` of severity "change" for each changed layer, and one of another
        severity for each part that private training still refuses, or runs otherwise. No model is
        traced for it; `validate` also follows the model's operations.

    Raises:
        ValueError: model is not a result of `make_compatible` in this process.

    Example:
        >>> layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        >>> len(dp.compatibility_changes(dp.make_compatible(keras.Sequential(layers))))
        1
    """
    check_instance("model", model, keras.Model, "a keras.Model")
    report = attached(model, CHANGES)
    if report is None:
        raise ValueError(
            f"model {model.name!r} is not a result of make_compatible in this process. Give the "
            "model that make_compatible returned; files and copies of it hold no report."
        )
    return report


def _by_hand(model):
    """Returns the error for a model whose own code, not a graph, calls its layers."""
    refused = [problem.where for problem in layer_problems(model)]
    named = f"; in its code, change {', '.join(refused)}" if refused else ""
    return (
        f"The model {model.name!r} is a {type(model).__name__}, whose layers are called by code of "
        f"its own, so that no copy can have other layers{named}. Write GroupNormalization where "
        "it makes a BatchNormalization, or set `trainable = False` of that layer; "
        "tf_adadp.validate lists all."
    )


def _changes(old, new):
    """Yields the changes of a copied layer; refuses one that was not replaced but must be."""
    where = f"Layer {new.name!r}"
    if isinstance(old, _L.BatchNormalization) and is_refused(old):
        if isinstance(new, _L.GroupNormalization):
            yield Problem(
                where,
                f"was a BatchNormalization and is a GroupNormalization(groups={new.groups}), with "
                "its gamma and beta",
                "Train the model: its outputs differ, since the statistics are those of one "
                "example.",
                "change",
            )
        elif new.trainable:
            raise ValueError(
                f"{where} is a {type(old).__name__} that the code of another layer makes, or a "
                "class of your own, so that no copy can have another layer there. Write "
                f"{group_normalization(old)} in its place, or call make_compatible(model, "
                'batch_normalization="freeze").'
            )
        else:
            yield Problem(
                where,
                "is a frozen BatchNormalization (trainable=False): it uses its moving statistics "
                "in training too",
                "Change nothing if these statistics are public: outputs in inference mode are "
                "the same.",
                "change",
            )
    elif isinstance(old, _L.SpectralNormalization) and not isinstance(new, type(old)):
        yield Problem(
            where,
            f"was a SpectralNormalization and is the {type(new).__name__} that it wrapped",
            "Give the layer a kernel_constraint if its kernel has to stay small.",
            "change",
        )
    elif isinstance(old, _L.RNN) and old.stateful and not new.stateful:
        yield Problem(
            where,
            "was stateful and has stateful=False",
            "Give whole sequences: each one starts with an empty state.",
            "change",
        )
    elif isinstance(old, keras.Model) and type(new) is not type(old):
        yield Problem(
            f"The model {new.name!r}",
            f"was a {type(old).__name__} and is a plain {type(new).__name__} of the same layers",
            "Call the methods of its class on the given model.",
            "change",
        )
