"""The noise multiplier of an optimizer that was made without one, for a budget."""

from typing import Any

import dp_accounting
import keras

from tf_adadp.accounting.laws import SamplingLaw


class PlannedNoise:
    """Mixin of `DPOptimizer`: σ* that `DPModel.fit` finds for the budget of `compile`.

    It is planned until the first step is about to be taken, and fixed from then on: kept as a
    variable, so that it is saved and restored with the optimizer's state, and 0 before.
    """

    noise_multiplier: float | None
    _saved_noise: keras.Variable | None = None
    waits_for_budget = False  # whether it was made without noise_multiplier

    def event(self, law: SamplingLaw) -> dp_accounting.DpEvent:
        """Returns the privacy event of one step; see `DPOptimizer.event`."""
        raise NotImplementedError

    def event_at(self, noise_multiplier: float, law: SamplingLaw) -> dp_accounting.DpEvent:
        """Returns the `event` that it would have at this σ*."""
        before = self.noise_multiplier
        self._put_noise(noise_multiplier)
        try:
            return self.event(law)
        finally:
            self._put_noise(before)

    def plan_noise(self, noise_multiplier: float) -> None:
        """Sets σ* of the steps that are planned. Nothing may have been released.

        Raises:
            ValueError: σ* was given, or is fixed.
        """
        if not self.waits_for_budget or self.take_saved_noise():
            raise ValueError(f"noise_multiplier={self.noise_multiplier} is fixed.")
        self._put_noise(noise_multiplier)

    def save_noise(self) -> bool:
        """Fixes the planned σ*; tells whether it was not fixed before."""
        if self.take_saved_noise():
            return False
        self._saved_noise.assign(self.noise_multiplier)
        return True

    def take_saved_noise(self) -> bool:
        """Takes σ* that is fixed, as it was saved or restored; tells whether there is one."""
        saved = 0.0 if self._saved_noise is None else float(self._saved_noise.numpy())
        if saved > 0:
            self._put_noise(saved)
        return saved > 0

    def _build_saved_noise(self):
        if self.waits_for_budget:
            self._saved_noise = self._add_state((), "noise_multiplier", dtype="float64")

    def _add_state(self, shape, name, dtype="float32", initializer="zeros") -> Any:
        raise NotImplementedError

    def _put_noise(self, noise_multiplier):
        object.__setattr__(self, "noise_multiplier", noise_multiplier)  # which is read-only
