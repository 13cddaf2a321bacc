"""Layer, group and RMS normalisation: an elementwise scale and shift of normalised inputs."""

import keras
import tensorflow as tf

from tf_adadp.clipping.row_gradients import Rows
from tf_adadp.gradients.ghost.registry import register
from tf_adadp.gradients.patching import replaced


@register(keras.layers.LayerNormalization)
def layer_normalization(layer, call, tap, inputs, **kwargs):
    """z = γ·x̂ + β along `axis`."""
    if getattr(layer, "rms_scaling", False):
        return NotImplemented
    with replaced(layer, scale=False, center=False, gamma=None, beta=None):
        normalized = call(inputs, **kwargs)
    return _scale_and_shift(layer, tap, normalized, layer.gamma, layer.beta, layer.axis)


@register(keras.layers.GroupNormalization)
def group_normalization(layer, call, tap, inputs, **kwargs):
    """z = γ·x̂ + β, x̂ normalised over groups of channels."""
    gamma = layer.gamma if layer.scale else None
    beta = layer.beta if layer.center else None
    with replaced(layer, scale=False, center=False):
        normalized = call(inputs, **kwargs)
    return _scale_and_shift(layer, tap, normalized, gamma, beta, layer.axis)


if hasattr(keras.layers, "RMSNormalization"):

    @register(keras.layers.RMSNormalization)
    def rms_normalization(layer, call, tap, inputs, **kwargs):
        """z = γ·x/rms(x)."""
        with replaced(layer, scale=None):
            normalized = call(inputs, **kwargs)
        return _scale_and_shift(layer, tap, normalized, layer.scale, None, layer.axis)


def _scale_and_shift(layer, tap, normalized, gamma, beta, axis):
    """γ·x̂ + β with dγ = Σ x̂·dz and dβ = Σ dz, sums over all but the normalised axes."""
    rank = normalized.shape.rank
    axes = sorted(a % rank for a in ([axis] if isinstance(axis, int) else axis))
    shape = [normalized.shape[a] if a in axes else 1 for a in range(rank)]
    summed = [a for a in range(1, rank) if a not in axes]

    def row_sums(values, variable):
        return Rows(tf.reshape(tf.reduce_sum(values, summed), [-1, *variable.shape]))

    def gradients(outputs):
        if gamma is not None:
            yield gamma, row_sums(outputs * tf.cast(normalized, tf.float32), gamma)
        if beta is not None:
            yield beta, row_sums(outputs, beta)

    z = normalized
    if gamma is not None:
        z *= tf.reshape(tf.cast(gamma, z.dtype), shape)
    if beta is not None:
        z += tf.reshape(tf.cast(beta, z.dtype), shape)
    return tap(z, gradients)
