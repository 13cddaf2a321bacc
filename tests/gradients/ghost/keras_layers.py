"""Every layer class of Keras, in one or more ways to make it, with inputs of every rank."""

import inspect

import keras
import numpy as np
import tensorflow as tf

L = keras.layers
B, D = 5, 4

# Classes that are not tried, and why.
UNTRIED = {
    "Layer": "base class",
    "Wrapper": "base class",
    "Lambda": "is what its function is",
    "InputLayer": "is not called",
    "InputSpec": "is no layer",
    "Pipeline": "a container of other layers",
    "FlaxLayer": "needs JAX",
    "JaxLayer": "needs JAX",
    "TorchModuleWrapper": "needs PyTorch",
    "TFSMLayer": "needs a SavedModel",
    "MaxNumBoundingBoxes": "takes boxes, no tensors",
}
WAYS = {  # where a class cannot be made without arguments, or has more than one way to work
    "Activation": [lambda a=a: L.Activation(a) for a in ("softmax", "log_softmax", "glu", "relu")],
    "Attention": [L.Attention, lambda: L.Attention(score_mode="concat")],
    "BatchNormalization": [L.BatchNormalization, lambda: L.BatchNormalization(trainable=False)],
    "Bidirectional": [lambda: L.Bidirectional(L.GRU(2))],
    "CategoryEncoding": [
        lambda: L.CategoryEncoding(50, "multi_hot"),
        lambda: L.CategoryEncoding(50, "one_hot"),
        lambda: L.CategoryEncoding(50, "count"),
    ],
    "CenterCrop": [lambda: L.CenterCrop(2, 2), lambda: L.CenterCrop(6, 6)],
    "Concatenate": [L.Concatenate, lambda: L.Concatenate(axis=1)],
    "ConvLSTM1D": [lambda: L.ConvLSTM1D(2, 2)],
    "ConvLSTM2D": [lambda: L.ConvLSTM2D(2, 2)],
    "ConvLSTM3D": [lambda: L.ConvLSTM3D(2, 2)],
    "Conv1D": [lambda: L.Conv1D(2, 2), lambda: L.Conv1D(2, 2, dilation_rate=2)],
    "Conv2D": [lambda: L.Conv2D(2, 2), lambda: L.Conv2D(2, 2, groups=2)],
    "Conv3D": [lambda: L.Conv3D(2, 2), lambda: L.Conv3D(2, 2, groups=2)],
    "Dense": [lambda: L.Dense(2), lambda: L.Dense(2, activation="softmax")],
    "DepthwiseConv1D": [lambda: L.DepthwiseConv1D(2)],
    "DepthwiseConv2D": [
        lambda: L.DepthwiseConv2D(2),
        lambda: L.DepthwiseConv2D(2, dilation_rate=2),
    ],
    "Discretization": [
        lambda: L.Discretization([-1.0, 0.0, 1.0]),
        lambda: L.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot"),
    ],
    "Dot": [lambda: L.Dot(1), lambda: L.Dot(-1), lambda: L.Dot(1, normalize=True)],
    "Dropout": [lambda: L.Dropout(0.5), lambda: L.Dropout(0.5, noise_shape=(1, 1, D))],
    "EinsumDense": [
        lambda: L.EinsumDense("ab,bc->ac", 3),
        lambda: L.EinsumDense("...b,bc->...c", 3),
        lambda: L.EinsumDense("...b,bc->...c", 3, activation=tf.nn.softmax),
    ],
    "Embedding": [lambda: L.Embedding(50, 2), lambda: L.Embedding(50, 2, mask_zero=True)],
    "GRUCell": [lambda: L.GRUCell(2)],
    "GroupNormalization": [lambda: L.GroupNormalization(1), lambda: L.GroupNormalization(-1)],
    "GroupedQueryAttention": [lambda: L.GroupQueryAttention(2, 2, 1)],
    "HashedCrossing": [lambda: L.HashedCrossing(7)],
    "Hashing": [lambda: L.Hashing(7)],
    "IntegerLookup": [lambda: L.IntegerLookup(vocabulary=list(range(1, 9)))],
    "LSTMCell": [lambda: L.LSTMCell(2)],
    "LayerNormalization": [L.LayerNormalization, lambda: L.LayerNormalization(axis=1)],
    "MelSpectrogram": [lambda: L.MelSpectrogram(fft_length=2, sequence_stride=1, num_mel_bins=2)],
    "MultiHeadAttention": [
        lambda: L.MultiHeadAttention(1, 2),
        lambda: L.MultiHeadAttention(1, 2, attention_axes=(1,)),
        lambda: L.MultiHeadAttention(1, 2, dropout=0.5),
    ],
    "Normalization": [lambda: L.Normalization(mean=[0.1] * D, variance=[2.0] * D)],
    "Permute": [lambda: L.Permute((2, 1)), lambda: L.Permute((1,))],
    "RMSNormalization": [lambda: L.RMSNormalization(), lambda: L.RMSNormalization(axis=1)],
    "RNN": [lambda: L.RNN(L.GRUCell(2))],
    "RandomCrop": [lambda: L.RandomCrop(2, 2)],
    "RandomTranslation": [lambda: L.RandomTranslation(0.2, 0.2)],
    "RandomColorJitter": [lambda: L.RandomColorJitter((0, 1), 0.2, 0.2, 0.2, 0.2)],
    "RandomPosterization": [lambda: L.RandomPosterization(4)],
    "RepeatVector": [lambda: L.RepeatVector(3)],
    "Rescaling": [
        lambda: L.Rescaling(2.0),
        lambda: L.Rescaling(np.ones((1, 1, D))),
        lambda: L.Rescaling(1.0, offset=np.arange(2.0 * D).reshape(2, 1, 1, D)),
        lambda: L.Rescaling(np.arange(1.0 * B * D).reshape(B, D)),
    ],
    "Reshape": [lambda: L.Reshape((-1,)), lambda: L.Reshape((1, -1)), lambda: L.Reshape(())],
    "Resizing": [
        lambda: L.Resizing(3, 3),
        lambda: L.Resizing(3, 3, "nearest"),
        lambda: L.Resizing(3, 5, crop_to_aspect_ratio=True),
        lambda: L.Resizing(3, 5, pad_to_aspect_ratio=True),
    ],
    "ReversibleEmbedding": [
        lambda: L.ReversibleEmbedding(50, 2),
    ],
    "STFTSpectrogram": [lambda: L.STFTSpectrogram(frame_length=2, frame_step=1, fft_length=2)],
    "SimpleRNNCell": [lambda: L.SimpleRNNCell(2)],
    "Softmax": [L.Softmax, lambda: L.Softmax(1)],
    "SpectralNormalization": [
        lambda: L.SpectralNormalization(L.Dense(2)),
        lambda: L.SpectralNormalization(L.Dense(2), trainable=False),
    ],
    "StackedRNNCells": [lambda: L.StackedRNNCells([L.GRUCell(2), L.GRUCell(2)])],
    "StringLookup": [lambda: L.StringLookup(vocabulary=["1", "2", "3"])],
    "TextVectorization": [
        lambda: L.TextVectorization(output_sequence_length=3, vocabulary=["1", "2", "3"]),
        lambda: L.TextVectorization(output_mode="multi_hot", vocabulary=["1", "2", "3"]),
    ],
    "TimeDistributed": [
        lambda: L.TimeDistributed(L.Dense(2)),
        lambda: L.TimeDistributed(L.Softmax()),
        lambda: L.TimeDistributed(L.UnitNormalization()),
    ],
    "UnitNormalization": [L.UnitNormalization, lambda: L.UnitNormalization(axis=1)],
}
_SAME_ARGUMENTS = {
    (2,): (
        "GRU", "LSTM", "SimpleRNN", "AveragePooling1D", "AveragePooling2D", "AveragePooling3D",
        "MaxPooling1D", "MaxPooling2D", "MaxPooling3D", "AdaptiveAveragePooling1D",
        "AdaptiveAveragePooling2D", "AdaptiveAveragePooling3D", "AdaptiveMaxPooling1D",
        "AdaptiveMaxPooling2D", "AdaptiveMaxPooling3D",
    ),
    (2, 2): (
        "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose", "SeparableConv1D",
        "SeparableConv2D",
    ),
    (0.5,): (
        "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout",
        "GaussianDropout", "GaussianNoise", "RandomBrightness", "RandomColorDegeneration",
        "RandomContrast", "RandomHue", "RandomSaturation",
        "RandomSharpness", "RandomShear",
    ),
    (0.2,): ("RandomRotation", "RandomZoom"),
}  # fmt: skip
for _arguments, _names in _SAME_ARGUMENTS.items():
    WAYS |= {n: [lambda n=n, a=_arguments: getattr(L, n)(*a)] for n in _names}

CLASSES = {c.__name__: c for c in vars(L).values() if inspect.isclass(c)}
_PAIRS = ("Add", "AdditiveAttention", "Attention", "Average", "Concatenate", "Dot", "Maximum")
_PAIRS += ("Minimum", "Multiply", "Subtract")


_INTEGERS = ("CategoryEncoding", "Embedding", "HashedCrossing", "Hashing", "IntegerLookup")
_INTEGERS += ("ReversibleEmbedding",)
_STRINGS = ("StringLookup", "TextVectorization")
_COLORS = ("AugMix", "RandAugment", "RandomColorDegeneration", "RandomColorJitter", "RandomHue")
_COLORS += ("RandomGrayscale", "RandomSaturation")


def ways(name):
    """Functions that make a layer of this class, each in another way."""
    return WAYS.get(name, [CLASSES[name]])


def inputs(name, rank):
    """Inputs for a layer of this class: [B, D, ...], numbers or strings."""
    last = {"HashedCrossing": 1}.get(name, 3 if name in _COLORS else D)
    shape = ([B] + [D] * (rank - 2) + [last])[:rank]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    if name in _INTEGERS or name in _STRINGS:
        x = np.abs(10 * x).astype(np.int32)
    return x.astype(str).astype(object) if name in _STRINGS else x


def louder(x):
    """Inputs whose first row alone is the same, some of them loud or no numbers."""
    if x.dtype == object:
        return [np.where(np.arange(B).reshape([B] + [1] * (x.ndim - 1)) > 0, "2", x)]
    found = []
    for change in (lambda x: 50 * x + 3, lambda x: np.nan * x, lambda x: np.inf * x):
        others = x.copy()
        others[1:] = 40 if x.dtype == np.int32 else change(x[1:])
        found.append(others)
    return found[:1] if x.dtype == np.int32 else found


def arguments(name, x):
    """Returns the arguments that a layer of this class is called with."""
    if name == "HashedCrossing":
        return ([x, x],)
    if name in _PAIRS:
        return ([x, 1.5 * x],)
    if name in ("MultiHeadAttention", "GroupedQueryAttention"):
        return x, x
    if name in ("GRUCell", "SimpleRNNCell"):
        return x, x[..., :2]
    if name in ("LSTMCell", "StackedRNNCells"):
        return x, [x[..., :2], x[..., 2:]]
    return (x,)
