"""Makes grouped convolutions of volumes run on a CPU.

TensorFlow has no CPU kernel for them. Keras compiles the operation with XLA instead, which fails
inside a map over examples and hides the operation from the ghost engine.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tf_adadp.gradients.patching import PATCHING, replaced
from tf_adadp.utils.keras_compat import gen_nn_ops

_raw_conv3d = gen_nn_ops.conv3d


@contextlib.contextmanager
def split_groups() -> Iterator[None]:
    """Makes a grouped `Conv3D` one operation per group in all that is traced in this context."""
    with PATCHING, replaced(gen_nn_ops, conv3d=_conv3d):
        yield


def _conv3d(
    input,
    filter,
    strides,
    padding,
    data_format="NDHWC",
    dilations=None,
    name=None,
):
    """Replaces the operation; the arguments are its own."""
    images, filters = tf.convert_to_tensor(input), tf.convert_to_tensor(filter)
    options = {"data_format": data_format, "dilations": dilations}
    channels = 1 if data_format == "NCDHW" else 4
    groups = (images.shape[channels] or 0) // filters.shape[3]
    if groups <= 1:
        return _raw_conv3d(images, filters, strides, padding, **options, name=name)
    parts = zip(tf.split(images, groups, channels), tf.split(filters, groups, 4), strict=True)
    return tf.concat([_raw_conv3d(x, w, strides, padding, **options) for x, w in parts], channels)
