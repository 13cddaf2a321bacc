"""Defines priors: public guesses, from past releases, of how large each coordinate is."""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp.utils.checks import check_number
from tf_adadp.utils.flat_groups import FlatGroups

FLOOR = 0.4  # no coordinate's scale falls below this fraction of the root mean square scale


class Prior(abc.ABC):
    """The SHAPE r of a clipping set and its noise, with mean(r²) = 1; never the total scale.

    With scale and feedback together, a prior that sees its own noise diverges: the noise it asked
    for raises it. r ≡ 1 is DP-SGD's noise.

    Guarantee: a prior is fed with released vectors and public facts only, so its shape is
    post-processing and costs no privacy. r is at most √m for m trainable scalars, for any releases.

    A new prior is one subclass: `update` receives releases, `moments` returns the estimate;
    state is made in `_build` with `add_variable`. The shape is worked out once after every release
    and kept by the optimizer, so that clipping and noise cannot differ in it. Arguments go through
    `get_config`, with `@keras.saving.register_keras_serializable()` on the class, and a model that
    is trained with it can be saved. An instance serves one optimizer.

    Args:
        exponent: p > 0, r ∝ (second moment)^p. 1/2 makes the scale proportional to the root mean
            square gradient, 1/4 is the scale that adds the least noise to a plain gradient step.
        floor: f in [0, 1), r² ← f² + (1 − f²)·r².

    Example:
        >>> class LastRelease(dp.priors.Prior):
        ...     "Shapes the noise by the last release alone."
        ...
        ...     def _build(self, add_variable, variables):
        ...         self._last = [add_variable(v.shape, v.name) for v in variables]
        ...
        ...     def update(self, released, stddevs):
        ...         for last, g in zip(self._last, released):
        ...             last.assign(tf.square(g))
        ...
        ...     def moments(self):
        ...         return [last.value for last in self._last]
        ...
        >>> dp.ADADP(prior=LastRelease(), noise_multiplier=1.0).prior.floor
        0.4
    """

    distributable = True  # False where `update` has branches: several replicas cannot take them

    def __init__(self, *, exponent: float = 0.25, floor: float = FLOOR):
        self.exponent = check_number("exponent", exponent, above=0)
        self.floor = check_number("floor", floor, at_least=0, below=1)
        self._shapes = None

    def build(self, add_variable: Callable, variables: Sequence[keras.Variable]) -> None:
        """Creates the state.

        Args:
            add_variable: function `(shape, name)` that makes a float32 variable of zeros.
            variables: the optimizer's trainable variables.

        Raises:
            ValueError: the prior was built already, for another optimizer.
        """
        if self._shapes is not None:
            raise ValueError(
                f"This {type(self).__name__} serves an optimizer already, and would mix the "
                "gradients of two. Make a new one."
            )
        self._shapes = [tuple(v.shape) for v in variables]
        self._build(add_variable, variables)

    @abc.abstractmethod
    def _build(self, add_variable, variables):
        """Creates the state of a subclass. A hook of `build`."""

    @abc.abstractmethod
    def update(self, released: Sequence[tf.Tensor], stddevs: Sequence[tf.Tensor]) -> None:
        """Takes in one released vector and the std of its noise, lists over the variables.

        Both are divided by the expected lot size; a std broadcasts to its variable.
        """

    @abc.abstractmethod
    def moments(self) -> list[tf.Tensor]:
        """Estimates of each coordinate's second moment, up to one common factor.

        Returns:
            List of float32 tensors of the variables' rank that broadcast to them; they may be
            negative, as unbiased estimates are.
        """

    def shape(self) -> list[tf.Tensor]:
        """Returns r, a list of float32 tensors that broadcast to the variables, mean(r²) = 1."""
        return normalized(self.moments(), self._shapes, self.exponent, self.floor)

    def factors(self) -> list[tuple[tf.Tensor, ...]]:
        """Returns r as products, per variable a tuple of tensors that broadcast to it.

        One factor per axis of a matrix keeps the norms of its gradients fast (see `AxisScales`);
        here there is one factor, r itself.
        """
        return [(r,) for r in self.shape()]

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {"exponent": self.exponent, "floor": self.floor}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Prior":
        """Returns a prior of these arguments, without state."""
        return cls(**config)


def floored(squares: tf.Tensor, low: float) -> tf.Tensor:
    """Returns squares of mean 1 raised to at least `low`, their mean kept."""
    return low + (1.0 - low) * squares


def normalized(
    moments: Sequence[tf.Tensor],
    shapes: Sequence[tuple[int, ...]],
    exponent: float,
    floor: float = FLOOR,
) -> list[tf.Tensor]:
    """Returns the shape r ∝ moment^exponent, mean(r²) = 1, floored; 1 where all moments are ≤ 0.

    Args:
        moments: list of float32 tensors that broadcast to the variables.
        shapes: those of the variables.
        exponent, floor: see `Prior`.
    """
    moments = [tf.convert_to_tensor(m, tf.float32) for m in moments]
    sizes = [math.prod(shape) for shape in shapes]
    groups = FlatGroups([m.shape for m in moments])
    # Of all coordinates, the share that one entry of a moment stands for.
    shares = groups.spread(
        [size / sum(sizes) / max(n, 1) for size, n in zip(sizes, groups.sizes, strict=True)]
    )
    flat = groups.pack(moments)

    def mean(vectors):
        return tf.add_n([tf.reduce_sum(s * v) for s, v in zip(shares, vectors, strict=True)])

    overall = mean(flat)
    # Over the largest, so that no power overflows.
    scale = tf.maximum(tf.reduce_max(tf.stack([tf.reduce_max(v) for v in flat])), 1e-30)
    powers = [tf.maximum(v / scale, 0.0) ** exponent for v in flat]
    mean_square = mean([tf.square(p) for p in powers])
    known = tf.logical_and(overall > 0.0, mean_square > 0.0)
    normal = tf.math.rsqrt(tf.where(known, mean_square, 1.0))
    return groups.unpack(
        [tf.where(known, tf.sqrt(floored(tf.square(p * normal), floor**2)), 1.0) for p in powers]
    )
