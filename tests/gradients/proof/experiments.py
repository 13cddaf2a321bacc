"""Traces a function of a batch, asks the Follower about it, and asks the function itself."""

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tf_adadp.gradients.proof import Follower, Rows, inputs_of_rows, public

KEY = np.array([7, 11], np.int32)


@dataclasses.dataclass
class Followed:
    """A traced function, with what the Follower says of its outputs.

    Attributes:
        run: the function, of arrays.
        values: a `Value` per output.
        follower: the Follower.
        outputs: the tensors.
    """

    run: Callable
    values: list
    follower: Follower
    outputs: list


def follow(function: Callable, *specs: tf.TensorSpec) -> Followed:
    """Traces `function(key, *batches)` and follows it: the key is secret, the batches are rows."""

    def flat(key, *batches):
        return [t for t in tf.nest.flatten(function(key, *batches)) if t is not None]

    traced = tf.function(flat, autograph=False).get_concrete_function(
        tf.TensorSpec([2], tf.int32), *specs
    )
    key, *batches = traced.graph.inputs[: 1 + len(specs)]
    follower = Follower()
    follower.set(key, public(key, secret=True))
    for tensor in batches:
        follower.set(tensor, inputs_of_rows(tensor))
    follower.advance(traced.graph.get_operations())
    outputs = traced.graph.outputs

    def run(*arrays):
        return [t.numpy() for t in traced(tf.constant(KEY), *map(tf.constant, arrays))]

    return Followed(run, [follower.of(t) for t in outputs], follower, outputs)


def block(array: np.ndarray, value: Rows, row: int) -> np.ndarray:
    """Returns what belongs to one example."""
    places = range(row * value.stride, (row + 1) * value.stride)
    return np.take(array, places, axis=value.axis)


def influence(
    followed: Followed, sample: Callable, seed: int = 0, moves: bool = True
) -> str | None:
    """Looks for another row's influence on a row, in the outputs that are `Rows`.

    Args:
        followed: of `follow`.
        sample: `sample(generator, B, loud)` returns the arrays of a batch.
        seed: of the generator.
        moves: whether to compare batches of other sizes and rows at other places too. Random
            numbers differ by place.

    Returns:
        What was found, or None.
    """
    generator = np.random.default_rng(seed)
    mine = sample(generator, 1, False)
    wanted = None
    for count, place in ((1, 0), (2, 0), (2, 1), (3, 1), (5, 4)):
        if not moves:
            wanted = None
        for other in ("usual", "loud", "equal", "zero"):
            batch = sample(generator, count, other == "loud")
            for array, own in zip(batch, mine, strict=True):
                if other == "equal":
                    array[:] = own
                if other == "zero":
                    array[:] = 0
                array[place] = own[0]
            found = []
            for array, value in zip(followed.run(*batch), followed.values, strict=True):
                if not isinstance(value, Rows):
                    continue
                if array.shape[value.axis] != count * value.stride:
                    return f"{array.shape} for {count} examples, {value}"
                found.append(block(array, value, place))
            wanted = found if wanted is None else wanted
            for first, second in zip(wanted, found, strict=True):
                if not same(first, second):
                    return f"{other} rows, {count} of them, change {first} into {second}"
    return None


def same(first: np.ndarray, second: np.ndarray) -> bool:
    """Tells whether two blocks are equal, but for rounding."""
    if first.shape != second.shape:
        return False
    if first.dtype.kind not in "fc":
        return bool((first == second).all())
    finite = np.abs(first[np.isfinite(first)])
    # What cancels is as large as the rounding of numbers around 1.
    scale = max(0.1, finite.max() if finite.size else 0.0)
    # The order of a sum is that of the whole batch's shape.
    rounding = 2e-2 if first.dtype.itemsize == 2 else 1e-5
    return np.allclose(first, second, rtol=rounding, atol=rounding * scale, equal_nan=True)


def usual(*shapes, dtypes=None, low=None, high=None) -> Callable:
    """Makes a `sample` of arrays [B, *shape]: normal, or integers from `low` to `high`."""
    dtypes = dtypes or [tf.float32] * len(shapes)

    def sample(generator, count, loud):
        arrays = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            size = (count, *shape)
            if dtype == tf.bool:
                array = generator.random(size) < 0.5
            elif dtype.is_integer:
                array = generator.integers(0 if low is None else low, high or 3, size)
            else:
                array = generator.normal(size=size)
                if dtype.is_complex:
                    array = array + 1j * generator.normal(size=size)
                if low is not None:
                    array = low + (high - low) * (0.5 + 0.5 * np.tanh(np.real(array)))
                elif loud:
                    array = 40 * array
            arrays.append(np.asarray(array).astype(dtype.as_numpy_dtype))
        return arrays

    return sample


def specs(*shapes, dtypes=None) -> list[tf.TensorSpec]:
    """Describes batches [None, *shape]."""
    dtypes = dtypes or [tf.float32] * len(shapes)
    return [tf.TensorSpec([None, *s], d) for s, d in zip(shapes, dtypes, strict=True)]


def with_gradient(function: Callable) -> Callable:
    """Adds the gradients of Σ f(output) to a function's outputs, f' being tanh."""

    def applied(key, *batches):
        outputs = [t for t in tf.nest.flatten(function(key, *batches)) if t is not None]
        ys = [t for t in outputs if t.dtype.is_floating or t.dtype.is_complex]
        xs = [t for t in batches if t.dtype.is_floating or t.dtype.is_complex]
        if not ys or not xs:
            return outputs
        back = tf.gradients(ys, xs, [tf.tanh(y) for y in ys])
        return [*outputs, *(tf.convert_to_tensor(g) for g in back if g is not None)]

    return applied
