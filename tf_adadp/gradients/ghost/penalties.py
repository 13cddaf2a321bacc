"""The part of each example in a loss that a layer adds for a whole batch (`add_loss`).

Such a loss is a number: a sum or a mean over the batch, and functions of it. Its value for one
example is that of a batch of one, so the sum or mean over the examples is left out.
"""

import tensorflow as tf

from tf_adadp.gradients.ghost.weights import batch_first
from tf_adadp.gradients.proof import sizes
from tf_adadp.gradients.proof.follow import Follower
from tf_adadp.gradients.proof.rules.registry import constants
from tf_adadp.gradients.proof.values import Mixes, Public, Rows

_SAME = ("Identity", "Cast", "Squeeze", "EnsureShape")


def per_example(loss: tf.Tensor, ones: tf.Tensor, follower: Follower) -> tf.Tensor:
    """Returns the loss of each example, float32 [B].

    Args:
        loss: a tensor that a layer added, of one entry or one per example.
        ones: [B].
        follower: has seen all operations so far.

    Raises:
        Mixes: the examples meet otherwise than in a last sum or mean.
    """
    value = follower.of(loss)
    if isinstance(value, Public) and not value.sized:
        return tf.reduce_sum(tf.cast(loss, tf.float32)) * ones
    if isinstance(value, Rows):  # Keras adds its entries up
        rows = tf.cast(batch_first(loss, value), tf.float32)
        return tf.reduce_sum(rows, list(range(1, rows.shape.rank)))
    op = loss.op
    if op.type in ("Sum", "Mean"):
        return _reduced(op, follower)
    if op.type == "Cast" and not (loss.dtype.is_floating and op.inputs[0].dtype.is_floating):
        raise Mixes("a layer adds a loss (`add_loss`) of the batch that is no float")
    if op.type in _SAME:
        return per_example(op.inputs[0], ones, follower)
    if op.type == "StopGradient":
        return tf.stop_gradient(per_example(op.inputs[0], ones, follower))
    if op.type == "Neg":
        return -per_example(op.inputs[0], ones, follower)
    if op.type in ("AddV2", "Add", "AddN"):
        return tf.add_n([per_example(t, ones, follower) for t in op.inputs])
    if op.type == "Sub":
        first, second = (per_example(t, ones, follower) for t in op.inputs)
        return first - second
    if op.type == "Mul":
        factor, other = sorted(op.inputs, key=lambda t: not isinstance(follower.of(t), Public))
        return _factor(factor, follower) * per_example(other, ones, follower)
    if op.type in ("RealDiv", "DivNoNan"):
        divide = tf.divide if op.type == "RealDiv" else tf.math.divide_no_nan
        return divide(per_example(op.inputs[0], ones, follower), _factor(op.inputs[1], follower))
    raise Mixes(f"a layer adds a loss (`add_loss`) of the batch that ends in {op.type}")


def _reduced(op, follower):
    value = follower.of(op.inputs[0])
    if not isinstance(value, Rows):
        raise Mixes("a layer adds a loss (`add_loss`) in which the examples of a batch have met")
    axes = {a % value.rank for a in constants(follower.of(op.inputs[1]), "axes")}
    if axes != set(range(value.rank)):
        raise Mixes("a layer adds a loss (`add_loss`) that is no number")
    rows = tf.cast(batch_first(op.inputs[0], value), tf.float32)
    reduce = tf.reduce_sum if op.type == "Sum" else tf.reduce_mean
    return reduce(rows, list(range(1, rows.shape.rank)))


def _factor(tensor, follower):
    """Returns a public number, for a batch of one."""
    value = follower.of(tensor)
    if not isinstance(value, Public) or value.rank != 0 or value.secret:
        raise Mixes("a layer adds a loss (`add_loss`) that is a product of sums over the batch")
    if value.value is not None:
        number = value.value.item()
        return float(number.factor if isinstance(number, sizes.Size) else number)
    if value.sized:
        raise Mixes("a layer adds a loss (`add_loss`) that depends on the size of the batch")
    return tf.cast(tensor, tf.float32)
