"""Releases statistics with a step's gradient, and computes the clip norm from one of them."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adadp import clipping
from tf_adadp.optimizers import guards


class Statistics:
    """Mixin of `DPOptimizer`: releases statistics of the examples as coordinates of the sum.

    They are part of the one release of a step, see `clipping.RowsBeside`, so the step costs what
    it costs without them. Which ones there are is public:

        "count"  where `l2_norm_clip` is a `QuantileClip`; it moves C
        "loss"   where `loss_share` is above 0, for classes that adapt by it
    """

    _l2_norm_clip: Any
    _adapted_norm: keras.Variable | None = None
    _add_state: Callable[..., keras.Variable]

    @property
    def l2_norm_clip(self) -> float | dict[str, float] | clipping.QuantileClip:
        """Returns C, the `QuantileClip` that adapts it, or a copy of the dict of bounds."""
        clip = self._l2_norm_clip
        return dict(clip) if isinstance(clip, tuple) else clip

    @property
    def adapts_clip_norm(self) -> bool:
        """Tells whether C follows a quantile, so that a count follows every sum."""
        return isinstance(self._l2_norm_clip, clipping.QuantileClip)

    def current_clip_norm(self) -> float | tf.Tensor:
        """Returns C of the next step: a constant, or a scalar tensor that follows from releases."""
        if not self.adapts_clip_norm:
            return self.l2_norm_clip
        if self._adapted_norm is None:  # not built
            return self.l2_norm_clip.initial_norm
        return tf.convert_to_tensor(self._adapted_norm.value)

    @property
    def loss_share(self) -> float:
        """Returns the share of a step's budget for the loss; 0 where it is not released."""
        return 0.0

    @property
    def statistics(self) -> dict[str, float]:
        """Returns the statistics of a step, with each one's share of the step's budget."""
        count = {"count": self.l2_norm_clip.budget_share} if self.adapts_clip_norm else {}
        return {**count, "loss": self.loss_share} if self.loss_share else count

    def with_statistics(self, clipping_set: clipping.ClippingSet) -> clipping.ClippingSet:
        """Makes a ball or ellipsoid of norm `current_clip_norm()` release `statistics` too.

        For `clipping_set` methods; where there are none, the set is returned as it is.
        """
        if not self.statistics:
            return clipping_set
        return clipping.RowsBeside(clipping_set, self.statistics, self.current_clip_norm())

    def _build_statistics(self):
        if self.adapts_clip_norm:
            norm = keras.initializers.Constant(self.l2_norm_clip.initial_norm)
            self._adapted_norm = self._add_state((), "clip_norm", initializer=norm)

    def _check_statistics(self, sums):
        """Refuses sums of a set without the statistics, or of other shapes than the variables."""
        wanted = tuple(self.statistics)
        known = getattr(sums, "clipping_set", None)
        given = getattr(known, "statistics", ())
        if known is not None and given != wanted:
            raise ValueError(
                f"sums were clipped to a set that releases the statistics {list(given)} beside "
                f"them, and {type(self).__name__} adapts by {list(wanted)} (l2_norm_clip="
                f"{self.l2_norm_clip!r}; the loss where it was made without learning_rate). Give "
                "sums that were clipped to its own clipping_set. In a clipping_set of yours, "
                "return self.with_statistics(a set of norm self.current_clip_norm()), or make the "
                "optimizer with numbers for both."
            )
        guards.check_shapes(sums, self._trainable_variables, beside=wanted)

    def _apart(
        self, released: Sequence[tf.Tensor], stddevs: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], dict[str, tuple[tf.Tensor, tf.Tensor]]]:
        """Returns the gradient of a release, its noise's std, and {statistic: (value, std)}.

        Args:
            released, stddevs: over L, of the variables and then of the statistics.
        """
        many = len(self._trainable_variables)
        beside = zip(released[many:], stddevs[many:], strict=True)
        statistics = dict(zip(self.statistics, beside, strict=True))
        return list(released[:many]), list(stddevs[:many]), statistics

    def _adapt_clip_norm(self, count: tf.Tensor) -> None:
        """Moves C, by a released count over L."""
        norm = self.l2_norm_clip.next_norm(self.current_clip_norm(), count)
        self._adapted_norm.assign(norm)
