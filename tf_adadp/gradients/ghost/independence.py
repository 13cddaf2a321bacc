"""Which layers treat every example of a batch by itself, by what they are.

The guarantee rests on it: where one example changes another's gradient, clipping each by itself
bounds nothing. Trying a layer on random data cannot show it, since a layer may mix only loud
inputs, or large batches. So only what is known runs on batches; everything else (a layer with a
`call` of its own, a `Lambda`, an activation function of the user's) runs in a map over examples,
which cannot mix them, whatever it does. Known is a class on tensors of known ranks: see `ranks`.
"""

import inspect

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.gradients.mapping import map_rows
from tf_adadp.utils.keras_compat import (
    Functional,
    inbound_nodes,
    is_kerass_own,
    layers_of,
    operations,
)

# MelSpectrogram, MixUp and CutMix are not there: they mix.
_NAMES = [
    "Activation", "ActivityRegularization", "AdaptiveAveragePooling1D",
    "AdaptiveAveragePooling2D", "AdaptiveAveragePooling3D", "AdaptiveMaxPooling1D",
    "AdaptiveMaxPooling2D", "AdaptiveMaxPooling3D", "Add", "AdditiveAttention", "AlphaDropout",
    "Attention", "Average", "AveragePooling1D", "AveragePooling2D", "AveragePooling3D",
    "BatchNormalization", "Bidirectional", "Concatenate", "Conv1D", "Conv1DTranspose", "Conv2D",
    "Conv2DTranspose", "Conv3D", "Conv3DTranspose", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D",
    "Cropping1D", "Cropping2D", "Cropping3D", "Dense", "DepthwiseConv1D", "DepthwiseConv2D",
    "Dot", "Dropout", "ELU", "EinsumDense", "Embedding", "Flatten", "GRU", "GRUCell",
    "GaussianDropout", "GaussianNoise", "GlobalAveragePooling1D", "GlobalAveragePooling2D",
    "GlobalAveragePooling3D", "GlobalMaxPooling1D", "GlobalMaxPooling2D", "GlobalMaxPooling3D",
    "GroupNormalization", "GroupQueryAttention", "Identity", "InputLayer", "LSTM", "LSTMCell",
    "LayerNormalization", "LeakyReLU", "Masking", "MaxPooling1D", "MaxPooling2D", "MaxPooling3D",
    "Maximum", "Minimum", "MultiHeadAttention", "Multiply", "Normalization", "PReLU", "Permute",
    "RMSNormalization", "RNN", "ReLU", "RepeatVector", "Rescaling", "Reshape", "SeparableConv1D",
    "SeparableConv2D", "SimpleRNN", "SimpleRNNCell", "Softmax", "SpatialDropout1D",
    "SpatialDropout2D", "SpatialDropout3D", "StackedRNNCells", "Subtract", "TimeDistributed",
    "UnitNormalization", "UpSampling1D", "UpSampling2D", "UpSampling3D", "ZeroPadding1D",
    "ZeroPadding2D", "ZeroPadding3D",
]  # fmt: skip
_KNOWN = {getattr(keras.layers, n) for n in _NAMES if hasattr(keras.layers, n)}
# On batches of images alone: a tensor of rank 3 they take for ONE image, and move its rows about.
IMAGE_AUGMENTATION = tuple(
    getattr(keras.layers, n)
    for n in ("RandomFlip", "RandomRotation", "RandomTranslation", "RandomZoom")
)
_CONTAINERS = {keras.Sequential, Functional}
_KNOWN |= _CONTAINERS | set(IMAGE_AUGMENTATION)
ATTENTION = (
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
)
_ELEMENTWISE = {
    "Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Maximum", "Minimum", "Equal",
    "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr",
}  # fmt: skip
_HARMLESS = {
    "__init__", "get_config", "from_config", "__doc__", "__module__", "__dict__", "__weakref__",
    "__annotations__", "__abstractmethods__", "_abc_impl", "__firstlineno__",
    "__static_attributes__",
}  # fmt: skip
SET_BY_KERAS = {"build", "quantize", "loss"}  # on instances


class CannotFollow(BaseException):
    """The ghost pass cannot follow a model; the message says where and why.

    Never leaves this package. No `Exception`, since Keras would rewrite the message of one that is
    raised while a layer is called.
    """


def declare_independent(*layer_classes):
    """Declares that layers of these very classes treat every example of a batch by itself.

    Then the ghost engine runs them on batches, where it would otherwise map them over examples (a
    layer) or leave the model to the plain engine (a subclassed `keras.Model`). The guarantee then
    rests on your word: for no inputs, whatever their size, number or values, may row x of an output
    or its gradient depend on another row of the inputs or on their number, not even through a
    maximum, a sort, a condition or a mask. Layers inside of a model are still looked at one by one.

    Can be used as a decorator of one class.
    """
    _KNOWN.update(layer_classes)
    _CONTAINERS.update(c for c in layer_classes if issubclass(c, keras.Model))
    return layer_classes[0] if len(layer_classes) == 1 else None


def mixing_reason(layer: keras.Layer, has_rule: bool = False) -> str | None:
    """Why a layer is not known to treat every example by itself, or None where it is.

    Args:
        layer: a Keras layer or model. The layers of a Sequential, functional or declared model are
            not looked at: each is a case of its own.
        has_rule: whether a rule runs it, which sees to its activation.
    """
    base = known_class(layer)
    if base is None:
        return "has a `call` of its own"
    derived = type(layer).__mro__[: type(layer).__mro__.index(base)]
    changed = {n for c in derived for n in vars(c) if hasattr(base, n)} - _HARMLESS
    methods = {n for n, value in vars(layer).items() if callable(value)} - SET_BY_KERAS
    changed |= {n for n in methods if callable(getattr(base, n, None))}
    if changed:
        return f"changes {', '.join(sorted(changed))} of {base.__name__}"
    if base in _CONTAINERS:
        return _mixing_operation(layer)
    if getattr(layer, "stateful", False) or getattr(layer, "quantization_mode", None):
        return "is stateful or quantized"
    if base is keras.layers.BatchNormalization and layer.trainable:
        return "normalises over the batch"
    for name, axes in example_axes(layer):
        if not all(a == -1 or a > 0 for a in axes):
            return f"has {name}={getattr(layer, name)}"
    if base is keras.layers.EinsumDense and not _keeps_batch(layer.equation, layer.bias_axes):
        return f"has equation={layer.equation!r} and bias_axes={layer.bias_axes!r}"
    if has_rule:
        return None
    if not all(_is_known_activation(a) for a in _activations(layer)):
        return "has an activation of the user's"
    cell = getattr(layer, "cell", None)
    if cell is not None and not isinstance(cell, keras.Layer):
        return "has a cell that is no layer"
    # All the way down: parts of a container are no cases of their own here.
    for part in layers_of(layer, include_self=False):
        reason = mixing_reason(part)
        if reason is not None:
            return f"has a part {part.name!r} that {reason}"
    return None


def known_class(layer):
    """The class that a layer is known as, or None."""
    return next((c for c in type(layer).__mro__ if c in _KNOWN), None)


def is_container(layer):
    """Whether a layer is a known model, which does nothing but call its layers."""
    return known_class(layer) in _CONTAINERS


def example_axes(layer):
    """The axes that a layer works along: pairs of the attribute's name and a flat list."""
    for name in ("axis", "axes", "_attention_axes"):
        axes = getattr(layer, name, None)
        if axes is not None:
            yield name, tf.nest.flatten(axes)


def unmappable_reason(layer):
    """Why not even a map of `call` over the examples will do for a layer, or None."""
    if type(layer).__call__ is not keras.Layer.__call__ or "__call__" in vars(layer):
        return "overrides `__call__`"
    owner = next(c for c in type(layer).__mro__ if "compute_mask" in vars(c))
    if not owner.__module__.startswith("keras.") or "compute_mask" in vars(layer):
        return "overrides `compute_mask`"
    parts = layers_of(layer)
    if any(isinstance(part, ATTENTION) for part in parts):
        return "has attention in it, which ends the process inside of a map without XLA"
    if any(part.activity_regularizer is not None for part in parts if part is not layer):
        return "has a part with an activity regulariser"
    return None


def activate(activation, z):
    """activation(z), mapped over examples where it is not one of Keras's functions."""
    if activation is None:
        return z
    if _is_known_activation(activation):
        return activation(z)
    return map_rows(lambda row: activation(row[None])[0], z, sequential=False)


def _activations(layer):
    names = ("activation", "recurrent_activation")
    return [getattr(layer, name) for name in names if getattr(layer, name, None) is not None]


def _is_known_activation(activation):
    if isinstance(activation, keras.Layer):
        return mixing_reason(activation) is None
    return inspect.isfunction(activation) and is_kerass_own(activation, "activations")


def _keeps_batch(equation, bias_axes):
    """Whether the first axis of an EinsumDense's inputs is that of its outputs alone."""
    inputs, outputs = equation.replace(" ", "").split("->")
    inputs, weights = inputs.split(",")
    batch = inputs[0]
    return batch == outputs[0] and batch not in weights and batch not in (bias_axes or "")


def _mixing_operation(model):
    """Why an operation between the layers of a functional model may mix, or None."""
    for operation in operations(model):
        if isinstance(operation, keras.Layer):
            continue
        name = type(operation).__name__
        nodes = [node.arguments.args for node in inbound_nodes(operation)]
        if not is_kerass_own(type(operation), "ops") or not all(
            (name in _ELEMENTWISE and _same_rank(args))
            or (name == "GetItem" and _takes_whole_batch(args[1]))
            for args in nodes
        ):
            return f"has the operation {name} between its layers"
    return None


def _same_rank(args):
    """Whether no argument is broadcast along the batch axis of another.

    Nor has a constant rows of its own: what an example meets would depend on its place.
    """
    ranks = {len(a.shape) for a in args if isinstance(a, keras.KerasTensor)}
    constants = [np.shape(a) for a in args if not isinstance(a, keras.KerasTensor)]
    if len(ranks) != 1:
        return False
    (rank,) = ranks
    return all(len(s) < rank or (len(s) == rank and s[0] == 1) for s in constants)


def _takes_whole_batch(key):
    first = key[0] if isinstance(key, tuple) else key
    return isinstance(first, slice) and first == slice(None)
