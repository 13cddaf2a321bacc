"""Keeps the arguments that a DPModel was compiled with, and refuses later changes."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras

from tf_adadp.metrics import ReleasedMetrics
from tf_adadp.optimizers import DPOptimizer
from tf_adadp.training.budget import Budget
from tf_adadp.utils.checks import check_instance, check_integer
from tf_adadp.validation import check_trainable_state


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """Holds the arguments of `DPModel.compile` that Keras does not keep, and the layers then.

    Attributes:
        optimizer, released_metrics, log_raw_metrics, jit_compile, steps_per_execution: as given.
        trainable: {layer: its `trainable`}.
        budget: the budget that sets the optimizer's noise; None where the noise was given.
    """

    optimizer: DPOptimizer
    released_metrics: ReleasedMetrics | None
    log_raw_metrics: bool | None
    jit_compile: bool | str
    steps_per_execution: int
    trainable: dict[keras.Layer, bool]
    budget: Budget | None

    @classmethod
    def checked(
        cls,
        *,
        optimizer: Any,
        released_metrics: Any,
        log_raw_metrics: Any,
        jit_compile: Any,
        run_eagerly: bool,
        steps_per_execution: Any,
        layers: Iterable[keras.Layer],
        budget: Budget | None,
    ) -> "Compiled":
        """Validates the arguments of `DPModel.compile` that differ from Keras's.

        Raises:
            ValueError: naming the argument.
        """
        _check_optimizer(optimizer, budget)
        check_instance(
            "released_metrics",
            released_metrics,
            ReleasedMetrics | None,
            "a tf_adadp.ReleasedMetrics, or None",
            wrong_type=ValueError,
        )
        if log_raw_metrics not in (True, False, None):
            raise ValueError(f"log_raw_metrics={log_raw_metrics!r}: give True, False or None.")
        if jit_compile not in (True, False, "auto", None):
            raise ValueError(f'jit_compile={jit_compile!r}: give True, False or "auto".')
        check_integer("steps_per_execution", steps_per_execution, at_least=1)
        if jit_compile is True and run_eagerly:
            raise ValueError(
                "jit_compile=True with run_eagerly=True: XLA cannot compile what runs eagerly. "
                "Drop one of them."
            )
        return cls(
            optimizer=optimizer,
            released_metrics=released_metrics,
            log_raw_metrics=log_raw_metrics,
            jit_compile="auto" if jit_compile is None else jit_compile,
            steps_per_execution=steps_per_execution,
            trainable={layer: layer.trainable for layer in layers},
            budget=budget,
        )

    @property
    def metrics_noise_multiplier(self) -> float | None:
        """Returns σ_m of the metrics that every step releases, or None without any."""
        return None if self.released_metrics is None else self.released_metrics.noise_multiplier

    @property
    def logs_raw_metrics(self) -> bool:
        """Tells whether the logs have loss and metrics of the raw records."""
        asked = self.log_raw_metrics
        return self.released_metrics is None if asked is None else asked

    def config(self) -> dict[str, Any]:
        """Returns the arguments that `compile` treats in another way than Keras."""
        return {
            "jit_compile": self.jit_compile,
            "released_metrics": keras.saving.serialize_keras_object(self.released_metrics),
            "log_raw_metrics": self.log_raw_metrics,
            **({} if self.budget is None else dataclasses.asdict(self.budget)),
        }

    def check_unchanged(self, model: keras.Model) -> None:
        """Refuses to train after a change of anything that the graphs were traced with.

        Raises:
            ValueError: names the change.
        """
        check_trainable_state(self.trainable)
        if model.optimizer is not self.optimizer:
            raise ValueError(
                "The optimizer was replaced after compile. Call compile with the new one."
            )
        if model.steps_per_execution != self.steps_per_execution:
            raise ValueError(
                f"steps_per_execution was changed after compile, from {self.steps_per_execution} "
                f"to {model.steps_per_execution}, and the traced graph takes the old number. Call "
                "compile with the new one."
            )
        if self.optimizer.metrics_noise_multiplier != self.metrics_noise_multiplier:
            raise ValueError(
                "The optimizer was compiled with other released_metrics since, by another DPModel, "
                "and would charge for those. Call compile again."
            )


def _check_optimizer(optimizer, budget):
    """Raises ValueError for an optimizer that is not private, or has no noise multiplier."""
    if isinstance(optimizer, type) and issubclass(optimizer, DPOptimizer):
        name = optimizer.__name__
        raise ValueError(f"optimizer={name} is a class: give {name}(noise_multiplier=...).")
    if not isinstance(optimizer, DPOptimizer):
        given = "noise_multiplier=..." if budget is None else ""
        raise ValueError(
            f"optimizer={optimizer!r} is not private. Compile a DPModel with one of tf_adadp's "
            f"optimizers, e.g. tf_adadp.ADADP({given}), or with the private form of one of Keras, "
            f"e.g. tf_adadp.make_private(keras.optimizers.Adam)({given}). For training without "
            "privacy compile the plain model."
        )
    if budget is None:
        optimizer._require_noise_multiplier()
    else:
        budget.check_optimizer(optimizer)
