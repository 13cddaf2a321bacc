"""Keeps the rows of an example together in dilated convolutions and poolings.

On a CPU TensorFlow cuts every image of a dilated convolution into m images, one for each offset of
the dilation (`SpaceToBatchND`), convolves these, and joins the results (`BatchToSpaceND`). In its
order the images of one example lie B rows apart. Here they are consecutive rows [B·m]. Both
operations become a reshape, a transpose, and a padding or a slice. The proof has rules for all of
these.

Only `tf.nn.with_space_to_batch`, the base of TensorFlow's dilated operations, is changed. The
operation that it applies between the two treats each image independently, in any order.
"""

import contextlib
import types
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tf_adadp.gradients.patching import PATCHING, replaced
from tf_adadp.utils.keras_compat import array_ops, nn_ops


@contextlib.contextmanager
def rows_together() -> Iterator[None]:
    """Makes dilated convolutions keep the rows of an example together, in all that is traced."""
    # `tf.space_to_batch` is not changed, since its callers see the order of the rows.
    seen = types.ModuleType(array_ops.__name__)
    vars(seen).update(vars(array_ops))
    seen.space_to_batch_nd, seen.batch_to_space_nd = space_to_batch, batch_to_space
    with PATCHING, replaced(nn_ops, array_ops=seen):
        yield


def space_to_batch(
    input: tf.Tensor, block_shape: Sequence, paddings: Sequence, name: str | None = None
) -> tf.Tensor:
    """Cuts images [B, *space, ...] into images [B·m, *(space / block), ...].

    Args:
        input, block_shape, paddings, name: of `tf.space_to_batch_nd`. Where one is not static, that
            operation runs, and its rows are reordered.
    """
    x = tf.convert_to_tensor(input)
    block, space, widths = _known(x, block_shape, paddings)
    if block is None or any(
        (size + sum(pair)) % n for size, pair, n in zip(space, widths, block, strict=True)
    ):
        cut = array_ops.space_to_batch_nd(x, block_shape, paddings, name=name)
        return _exchanged(cut, tf.reduce_prod(block_shape))
    count, rest = len(block), x.shape[1 + len(block) :].as_list()
    if any(map(any, widths)):
        x = tf.pad(x, [[0, 0], *widths, *[[0, 0]] * len(rest)])
    space = [size // n for size, n in zip(x.shape[1 : 1 + count], block, strict=True)]
    x = tf.reshape(x, [-1, *_alternating(space, block), *rest])
    places = range(1, 1 + 2 * count)
    x = tf.transpose(x, [0, *places[1::2], *places[::2], *range(1 + 2 * count, x.shape.rank)])
    return tf.reshape(x, [-1, *space, *rest])


def batch_to_space(
    input: tf.Tensor, block_shape: Sequence, crops: Sequence, name: str | None = None
) -> tf.Tensor:
    """Joins images [B·m, *space, ...] to images [B, *(space · block), ...].

    Args:
        input, block_shape, crops, name: of `tf.raw_ops.BatchToSpaceND`. Where one is not static,
            that operation runs, on rows in the order it expects.
    """
    x = tf.convert_to_tensor(input)
    block, space, widths = _known(x, block_shape, crops)
    if block is None or any(
        sum(pair) > size * n for size, pair, n in zip(space, widths, block, strict=True)
    ):
        x = _exchanged(x, tf.shape(x)[0] // tf.reduce_prod(block_shape))
        return array_ops.batch_to_space_nd(x, block_shape, crops, name=name)
    count, rest = len(block), x.shape[1 + len(block) :].as_list()
    x = tf.reshape(x, [-1, *block, *space, *rest])
    places = _alternating(range(1 + count, 1 + 2 * count), range(1, 1 + count))
    x = tf.transpose(x, [0, *places, *range(1 + 2 * count, x.shape.rank)])
    space = [size * n for size, n in zip(space, block, strict=True)]
    x = tf.reshape(x, [-1, *space, *rest])
    if not any(map(any, widths)):
        return x
    kept = [slice(pair[0], size - pair[1]) for size, pair in zip(space, widths, strict=True)]
    return x[(slice(None), *kept)]


def _exchanged(x, count):
    """Puts rows [count · n, ...] in the order [n · count, ...]."""
    split = tf.reshape(x, tf.concat([[count, -1], tf.shape(x)[1:]], 0))
    moved = tf.transpose(split, [1, 0, *range(2, split.shape.rank)])
    return tf.ensure_shape(tf.reshape(moved, tf.shape(x)), x.shape)


def _known(x, block, widths):
    """Returns the block, the axes of space and the widths as lists; Nones where not static."""
    block, widths = (tf.get_static_value(tf.convert_to_tensor(v)) for v in (block, widths))
    if block is None or widths is None or x.shape.rank is None or None in x.shape.as_list()[1:]:
        return None, None, None
    return block.tolist(), x.shape.as_list()[1 : 1 + len(block)], widths.tolist()


def _alternating(first, second):
    return [n for pair in zip(first, second, strict=True) for n in pair]
