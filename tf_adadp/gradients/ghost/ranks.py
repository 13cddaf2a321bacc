"""On tensors of which rank a layer that is known keeps the examples of a batch apart.

A layer that works along the last axis, or the last two, works across the batch where a tensor has
no others; and where tensors, masks or constants of a layer are of other ranks than each other,
broadcasting can move one of their axes onto the batch. Keras refuses some of that and carries out
the rest. What a class is (see `independence`) does not tell, so every call in a batched pass is
looked at, while it is traced.
"""

import contextlib
import inspect

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.gradients.ghost.independence import (
    ATTENTION,
    CannotFollow,
    is_container,
    known_class,
    mixing_reason,
)
from tf_adadp.gradients.patching import PATCHING, replaced
from tf_adadp.utils.keras_compat import layers_of


def _classes(*names):
    return {getattr(keras.layers, name) for name in names if hasattr(keras.layers, name)}


# What they do to an example does not depend on how many axes it has.
_ANY_RANK = _classes("Embedding", "Flatten", "Identity", "InputLayer", "Reshape")
_MERGING = _classes(
    "Add", "Average", "Concatenate", "Dot", "Maximum", "Minimum", "Multiply", "Subtract"
)
# Their outputs are of the form of their inputs, unless a constant of theirs has more axes.
_SAME_RANK = _MERGING - _classes("Dot") | _classes(
    "Activation", "ActivityRegularization", "AlphaDropout", "BatchNormalization", "Dropout", "ELU",
    "GaussianDropout", "GaussianNoise", "GroupNormalization", "LayerNormalization", "LeakyReLU",
    "Masking", "Normalization", "PReLU", "RMSNormalization", "ReLU", "Rescaling", "Softmax",
    "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "UnitNormalization",
)  # fmt: skip


@contextlib.contextmanager
def on_known_ranks(layers):
    """While it lasts, calls of these layers raise `CannotFollow` where their ranks may mix.

    Args:
        layers: `checked_layers` of a model.
    """
    with PATCHING, contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, call=_checked(layer)))
        yield


def checked_layers(model, has_rule=lambda layer: False):
    """The layers of a model that run on batches, containers apart: their parts are looked at.

    Args:
        has_rule: whether a rule runs a layer, which sees to its activation.
    """
    return [
        layer
        for layer in layers_of(model)
        if mixing_reason(layer, has_rule(layer)) is None and not is_container(layer)
    ]


def _checked(layer):
    call = layer.call
    base = known_class(layer)
    signature = inspect.signature(base.call)

    def checked(*args, **kwargs):
        ranks, masks = _ranks(signature.bind(layer, *args, **kwargs).arguments)
        outputs = call(*args, **kwargs)
        made = [t.shape.rank for t in tf.nest.flatten(outputs) if tf.is_tensor(t)]
        if not _are_known(layer, base, ranks, masks, made):
            raise CannotFollow(
                f"the layer {layer.name!r} ({type(layer).__name__}) gets tensors of rank "
                f"{_listed(ranks)}"
                + (f", masks of rank {_listed(masks.values())}" if masks else "")
                + f" and makes rank {_listed(made)}, on which it may work across the examples of "
                "a batch"
            )
        return outputs

    return checked


def _ranks(arguments):
    """The ranks of the tensors in a call's arguments; and, by name, of the masks."""
    ranks, masks = [], {}
    for name, value in arguments.items():
        for i, tensor in enumerate(t for t in tf.nest.flatten(value) if tf.is_tensor(t)):
            if "mask" in name:
                masks[name, i] = tensor.shape.rank
            else:
                ranks.append(tensor.shape.rank)
    return ranks, masks


def _are_known(layer, base, ranks, masks, made):
    if None in ranks or None in masks.values() or None in made:
        return False
    attention = base in ATTENTION
    if min(ranks, default=3) < (3 if attention else 1 if base in _ANY_RANK else 2):
        return False
    if (attention or base in _MERGING) and len(set(ranks)) > 1:
        return False
    if base in _SAME_RANK and set(made) != set(ranks):
        return False
    for name in ("scale", "offset") if base is keras.layers.Rescaling else ():
        # As many rows as the batch: what an example meets would depend on its place in it.
        shape = np.shape(getattr(layer, name))
        if len(shape) == ranks[0] and shape[0] != 1:
            return False
    if attention and masks and ranks[0] != 3:
        return False
    return all(rank == _rank_of_mask(base, name, ranks) for (name, _), rank in masks.items())


def _rank_of_mask(base, name, ranks):
    """[batch, time], except: one entry for each of a Softmax's inputs, or for query and value."""
    if base is keras.layers.Softmax:
        return ranks[0]
    return 3 if name == "attention_mask" else 2


def _listed(ranks):
    return " and ".join(map(str, dict.fromkeys(ranks)))
