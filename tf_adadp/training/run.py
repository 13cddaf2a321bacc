"""Describes the lots of one run: their law, and the numbers charged and left."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tf_adadp.accounting import PrivacyWarning
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.persistence.changed_weights import corner
from tf_adadp.persistence.private_state import LotsInUse
from tf_adadp.utils.keras_compat import first_epoch


class Run:
    """Holds the law and the position of one `fit` or one `train_on_batch`.

    Args:
        law: the sampling law of the lots.
        expected_size: L, the divisor of sums over a lot.
        reproducible: whether the lots are seeded.

    Attributes:
        law, expected_size, reproducible: see Args.
        position: the number of lots of the running iteration that were charged.
        taken: the number of lots of the run that were charged.
        epochs, initial_epoch: as `fit` has them.
        steps_per_epoch: in whole executions; 0 outside of `fit`.
        affordable: the further lots that a budget of `compile` has room for; None without one.
        take: a function of a number of lots; raises if so many cannot be drawn, see `Lots.supply`.
        lots: the lots, for `save_private_state`; None where they cannot be continued.
    """

    def __init__(
        self,
        law: SamplingLaw,
        expected_size: float,
        reproducible: bool = False,
    ):
        self.law, self.expected_size = law, expected_size
        self.reproducible = reproducible
        self.position = self.taken = 0
        self.epochs = self.initial_epoch = self.steps_per_epoch = 0
        self.affordable: int | None = None
        self.lots: LotsInUse | None = None
        self.take: Callable[[int], None] = lambda count: None
        self._iterator: Any = None
        self._moved = False  # whether the first step was checked

    def planned_steps(self, model: keras.Model) -> int:
        """Returns the steps of the `fit`, from the epoch that restoring callbacks left."""
        first = first_epoch(model) or self.initial_epoch
        return max(1, self.epochs - first) * self.steps_per_epoch

    def plan(self, model: keras.Model) -> None:
        """Tells the optimizer how many steps a `fit` is still to take, and of how many.

        It is told before every execution: a callback may have restored the optimizer's variables.
        """
        left = max(0, self.steps_left(model))
        if self.affordable is not None:
            left = min(left, self.affordable)
        model.optimizer.plan_steps(left, self.epochs * self.steps_per_epoch)

    def steps_left(self, model: keras.Model) -> int:
        """Returns the planned steps that were not charged yet."""
        return self.planned_steps(model) - self.taken

    def record_end(
        self, model: keras.Model, callbacks: Sequence[Any], error: BaseException | None
    ) -> None:
        """Records, in the model's ledger, that something else than plan or budget ended a `fit`.

        Its ε is an odometer reading then: results may have decided the number of steps.
        """
        planned = self.planned_steps(model)
        if not 0 < self.taken < planned:
            return
        by_budget = any(getattr(c, "stopped_by_budget", False) for c in callbacks)
        if error is not None:
            who = type(error).__name__
        elif by_budget or not model.optimizer.can_continue(self.law):
            return
        else:
            stoppers = [c for c in callbacks if getattr(c, "stopped_epoch", 0)]
            names = [
                type(c).__name__ + (f"(monitor={c.monitor!r})" if hasattr(c, "monitor") else "")
                for c in stoppers
            ]
            who = " and ".join(names) or "a callback"
        model.ledger.mark_odometer(
            f"{who} ended training after {self.taken} of {planned} planned steps"
        )

    def begin_iteration(self, iterator: Any) -> None:
        """Sets the position to 0 where this is a new iterator.

        Every iterator over lots begins a new pass, so a new one is charged from its start.
        """
        if iterator is not self._iterator:
            if self._iterator is not None:
                self.lots = None  # the start of the second pass is not known here
            self._iterator, self.position = iterator, 0

    def end(self) -> Any:
        """Drops the iterator, and returns it."""
        iterator, self._iterator = self._iterator, None
        return iterator

    def before_step(self, variables: Sequence[keras.Variable]) -> list[np.ndarray] | None:
        """Returns a few entries of every trainable weight, before the first step of the run."""
        return None if self._moved else [corner(v) for v in variables]

    def warn_if_unmoved(
        self, variables: Sequence[keras.Variable], before: list[np.ndarray] | None
    ) -> None:
        """Warns where the first step left every weight as it was `before`."""
        if before is None:
            return
        self._moved = True
        after = [corner(v) for v in variables]
        if all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)):
            warnings.warn(
                "The first step moved no trainable weight, and still spent privacy budget: check "
                "the learning rate, and which layers are trainable.",
                PrivacyWarning,
                stacklevel=2,
            )
