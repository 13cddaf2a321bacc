"""Releases loss and metrics of a lot: per-example values, clipped and summed, with noise."""

import math
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_adadp import noise
from tf_adadp.distribution import replicas
from tf_adadp.gradients.example_graph import refuse_state, shaped_by_values
from tf_adadp.gradients.indices import no_index_stops
from tf_adadp.gradients.mapping import map_examples
from tf_adadp.metrics.example_metrics import ExampleMetrics
from tf_adadp.metrics.settings import PREFIX, ReleasedMetrics
from tf_adadp.utils.keras_compat import CompileMetrics


class LotMetrics:
    """Releases the loss and metrics of a lot with its gradient; see `ReleasedMetrics`.

    Per lot: `begin`, `add` for every physical batch (as the engines' `on_batch`), `release`. It
    holds the sums of one lot and a secret key, so nothing that saves may see it.

    Args:
        settings: a `ReleasedMetrics`.
        compiled: a built Keras `CompileMetrics`, or None.
        element_spec: `(y, y_pred, sample_weight)` of TensorSpecs of a batch.
        seed: None, or an int for reproducible noise; for tests.
        secure_noise: see `DPOptimizer`.

    Attributes:
        noise_multiplier: σ_m of a release.
        names: the names in the logs.

    Raises:
        ValueError: see `ReleasedMetrics`.
    """

    def __init__(
        self,
        settings: ReleasedMetrics,
        compiled: CompileMetrics | None,
        element_spec: Any,
        seed: int | None = None,
        secure_noise: bool = False,
    ):
        self.noise_multiplier = settings.noise_multiplier
        self._secure = secure_noise
        self._metrics = ExampleMetrics(compiled, settings.metrics)
        self._with_loss = settings.loss_bound is not None
        unknown = set(settings.metric_bounds) - set(self._metrics.names)
        if unknown:
            raise ValueError(
                f"metric_bounds has {sorted(unknown)}, which are not released; released are "
                f"{list(self._metrics.names)}."
            )
        bounds = [settings.metric_bounds.get(name, 1.0) for name in self._metrics.names]
        names, modes = list(self._metrics.names), list(self._metrics.modes)
        if self._with_loss:
            bounds, names, modes = [settings.loss_bound, *bounds], ["loss", *names], ["min", *modes]
        if not names:
            raise ValueError(
                "released_metrics with loss_bound=None, and no metrics are compiled: nothing to "
                "release. Give a loss_bound or compile with metrics."
            )
        self.names = tuple(PREFIX + name for name in names)
        self._modes = dict(zip(self.names, modes, strict=True))
        self._bounds = np.asarray(bounds)
        self._key = noise.SecretKey(seed, "metrics")
        self._sequential = False
        self._rows = tf.function(self._clipped_rows, autograph=False)
        self._check_keeps_no_state(element_spec)
        with tf.init_scope():
            # In float64, so that the rounding of sums is far below the sensitivity.
            # Each replica has its own.
            self._sums = tf.Variable(
                tf.zeros([len(names)], tf.float64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            self._means = [keras.metrics.Mean(name=name) for name in self.names]

    def _check_keeps_no_state(self, element_spec):
        y, y_pred, sample_weight = element_spec
        row = tf.TensorSpec([None], tf.float32)
        traced = self._rows.get_concrete_function(y, y_pred, sample_weight, row, row)
        refuse_state(traced.graph, "a released metric")
        if shaped_by_values(traced.graph) is not None:  # vectorised, it would stop some lots
            self._sequential = True
            self._rows = tf.function(self._clipped_rows, autograph=False)

    def _clipped_rows(self, y, y_pred, sample_weight, mask, losses):
        """Returns values over their bounds, in [0, 1], float32 [B, d]; 0 for padding."""
        bounds = tf.constant(self._bounds, tf.float32)

        def one_example(y, y_pred, sample_weight, ahead, loss, mask):
            example = tf.nest.map_structure(
                lambda t: None if t is None else tf.expand_dims(t, 0),
                (y, y_pred, sample_weight, ahead),
            )
            values = [loss] if self._with_loss else []
            values = tf.stack([*values, *self._metrics(*example)])
            inside = tf.clip_by_value(values / bounds, 0.0, 1.0)
            inside = tf.where(tf.math.is_finite(values), inside, 1.0)
            return tf.where(mask > 0, inside, 0.0)

        # Mapped, so that no function of a batch can mix its examples. Traced before a step is.
        with no_index_stops():
            structure = (y, y_pred, sample_weight, self._metrics.ahead(y, y_pred), losses)
            return map_examples(one_example, structure, mask, sequential=self._sequential)

    def set_modes(self, callbacks: Iterable[Any]) -> None:
        """Sets the mode of callbacks that monitor a release in mode "auto".

        Keras would look for a compiled metric of that name, and stop after an epoch was trained.

        Raises:
            ValueError: whether more or less is better is not known.
        """
        for callback in callbacks:
            name = getattr(callback, "monitor", None)
            if name not in self._modes or getattr(callback, "mode", None) != "auto":
                continue
            if self._modes[name] is None:
                raise ValueError(
                    f"{type(callback).__name__}(monitor={name!r}, mode='auto'): nothing says "
                    "whether more or less of it is better. Give mode='min' or mode='max'."
                )
            callback.mode = self._modes[name]

    def begin(self) -> None:
        """Starts a lot."""
        self._sums.assign(tf.zeros_like(self._sums))

    def add(
        self, y: Any, y_pred: Any, sample_weight: Any, mask: tf.Tensor, losses: tf.Tensor
    ) -> None:
        """Adds a physical batch; `losses` and `y_pred` are those of each example alone."""
        rows = self._rows(y, y_pred, sample_weight, mask, losses)
        self._sums.assign_add(tf.reduce_sum(tf.cast(rows, tf.float64), axis=0))

    def release(
        self, expected_lot_size: float | tf.Tensor, step: tf.Tensor | None = None
    ) -> dict[str, tf.Tensor]:
        """Adds the noise, and updates the means of the epoch with the release.

        Args:
            expected_lot_size: L, a public constant.
            step: the number of the release, where noise is reproducible: never twice.

        Returns:
            {name: mean of the releases since `reset`}, a released quantity.
        """
        number = self._key.next_step()
        if self._key.reproducible:
            number = tf.cast(step, tf.int64)
        # ‖u‖₂ ≤ √d for sums over their bounds, see `ReleasedMetrics`.
        stddev = self.noise_multiplier * math.sqrt(len(self.names))
        sums = replicas.all_reduced(tf.convert_to_tensor(self._sums))
        (noisy,), _ = noise.add_gaussian(
            [sums],
            [stddev],
            self._key.key,
            number,
            noise_multiplier=self.noise_multiplier,
            secure=self._secure,
        )
        noisy *= self._bounds
        released = tf.cast(noisy / tf.cast(expected_lot_size, tf.float64), tf.float32)
        self.begin()  # the raw sums are not kept
        for mean, value in zip(self._means, tf.unstack(released), strict=True):
            mean.update_state(value)
        return {mean.name: mean.result() for mean in self._means}

    def reset(self) -> None:
        """Starts an epoch."""
        for mean in self._means:
            mean.reset_state()
