"""The settings of released training metrics: which ones, and with how much noise."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tf_adadp.utils.checks import check_number

PREFIX = "released_"  # of names in the logs; no raw metric may have it


class RawMetricsWarning(UserWarning):
    """Warns that training loss and metrics in the logs come from raw records: no ε covers them.

    `fit` gives it once per `DPModel` whose `compile` got neither `released_metrics` nor
    `log_raw_metrics`.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", dp.RawMetricsWarning)  # an error from here on
        ...
    """


@keras.saving.register_keras_serializable(package="tf_adadp")
@dataclasses.dataclass(frozen=True)
class ReleasedMetrics:
    """Releases training loss and metrics with noise: `DPModel.compile(released_metrics=…)`.

    For every lot, together with the gradient and charged with it in one event, it releases

        r_i = (Σ_x min(max(v_i(x), 0), b_i) + b_i·N(0, σ_m²·d)) / L,   i = 1..d

    v_1 the loss of one example (times its weight, with what layers add to it, without weight
    regularisers), v_2..v_d its compiled metrics (its accuracy is 1 or 0), L the EXPECTED lot size.
    A value that is not finite counts as b_i. The logs have the means of r_i over the steps of an
    epoch so far, as `released_loss`, `released_accuracy`, …, which callbacks may monitor. Since
    lots vary in size and every r_i has noise, they may lie outside of [0, b_i].

    Guarantee: neighbouring lots, one record more, fewer or another, move (Σ_x v_i/b_i)_i by a
    vector with entries in [−1, 1], so by at most √d: with noise σ_m√d in each coordinate a Gaussian
    mechanism of multiplier σ_m (k records of a user: σ_m/k). Gradient and metrics come from one
    lot, at the weights before the step: one mechanism under the lot's sampling, of the multiplier
    that `SamplingLaw.event_with_metrics` states. Means, and all uses of them by callbacks, are
    post-processing. The metrics are those of each example alone: functions of a batch are mapped
    over its rows.

    Args:
        noise_multiplier: σ_m > 0. Beside σ* of the gradient it costs as if that were
            (σ*⁻² + σ_m⁻²)^(−1/2), see `accounting.joint_noise_multiplier`: five times σ* costs as
            much as 2 % less noise. (On fixed-size and shuffled lots, and with microbatches, a
            quarter of that.)
        loss_bound: b_1 in [1e-10, 1e10], in units of the loss; losses above count as b_1, so choose
            it above a typical loss, from public knowledge (log of the number of classes is what
            guessing gives). None to leave the loss out.
        metrics: names of the compiled metrics to release, None for all. Each has to be a mean over
            examples (`keras.metrics.MeanMetricWrapper`: accuracies, errors, functions); AUC and the
            like are no sum over examples, and are for validation data.
        metric_bounds: {name: b_i in [1e-10, 1e10]} for metrics whose values are not in [0, 1].
            `weighted_metrics` are multiplied by the example's weight before.

    Raises:
        ValueError: on an argument that is out of range; when training begins, on a name that is not
            compiled, on a metric that is no mean over examples or keeps state, on an optimizer
            whose steps cannot cover metrics (AGD).

    Example:
        >>> metrics = dp.ReleasedMetrics(20.0, loss_bound=4.0, metrics=["accuracy"])
        >>> metrics.loss_bound
        4.0
    """

    noise_multiplier: float
    _: dataclasses.KW_ONLY
    loss_bound: float | None
    metrics: Sequence[str] | None = None
    metric_bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        sigma = check_number(
            "noise_multiplier",
            self.noise_multiplier,
            "a finite number above 0; log_raw_metrics=True logs metrics without noise",
            above=0,
        )
        bound, metrics = self.loss_bound, self.metrics
        if bound is not None:
            bound = _check_bound("loss_bound", bound)
        if metrics is not None:
            if isinstance(metrics, str) or not all(isinstance(name, str) for name in metrics):
                raise ValueError(f"metrics={metrics!r}: give a list of names, or None for all.")
            metrics = tuple(dict.fromkeys(metrics))
            if not metrics and bound is None:
                raise ValueError(
                    f"metrics={self.metrics!r} with loss_bound=None: nothing to release. Leave "
                    "released_metrics out; log_raw_metrics=False keeps raw ones out of the logs."
                )
        if not isinstance(self.metric_bounds, Mapping):
            raise ValueError(f"metric_bounds={self.metric_bounds!r}: give a dict {{name: bound}}.")
        bounds = {
            str(name): _check_bound(f"metric_bounds[{name!r}]", value)
            for name, value in self.metric_bounds.items()
        }
        for name, value in (
            ("noise_multiplier", sigma),
            ("loss_bound", bound),
            ("metrics", metrics),
            ("metric_bounds", bounds),
        ):
            object.__setattr__(self, name, value)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        metrics = None if self.metrics is None else list(self.metrics)
        return {**dataclasses.asdict(self), "metrics": metrics}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ReleasedMetrics":
        """Makes the settings that `get_config` described."""
        return cls(**config)


def _check_bound(name, value):
    return check_number(name, value, "a number in [1e-10, 1e10]", at_least=1e-10, at_most=1e10)
