"""Finds the noise multiplier for a budget (ε, δ): `compile(target_epsilon=…)`."""

import dataclasses
import warnings

import keras

from tf_adadp.accounting import PrivacyLedger, PrivacyWarning
from tf_adadp.accounting.accountants import check_accountant
from tf_adadp.accounting.events import is_non_private
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.optimizers import DPOptimizer
from tf_adadp.utils.checks import check_delta, check_target_epsilon
from tf_adadp.utils.keras_compat import first_epoch, print_msg


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bounds the cost of everything released about a model; the optimizer has no noise_multiplier.

    The first `fit` finds the least σ* for which

        ε(what the model's ledger holds + the steps that this fit plans) ≤ target_epsilon at δ

    to 1e-3 of it. The ledger holds earlier charges: DPPCA, earlier training. A step is the
    optimizer's `event`: its lots' law, microbatches, released metrics and every other noise
    multiplier that was given are in it. σ* is printed, fixed from then on, and saved with the
    optimizer's state; a run that is restored keeps the saved one.

    Guarantee: no step is taken that would bring ε of the ledger above target_epsilon. σ* follows
    from the number of records (or users), L and the number of steps, so all three are public here.
    Under add-or-remove-one the number of records often counts as public; where it does not, give a
    public bound as the lots' `num_examples`.

    Attributes:
        target_epsilon: ε > 0.
        target_delta: δ in (0, 1), below one over the number of records.
        accountant: one of `accounting.ACCOUNTANTS`.
    """

    target_epsilon: float
    target_delta: float
    accountant: str = "rdp"

    @classmethod
    def checked(
        cls, target_epsilon: float | None, target_delta: float | None, accountant: str
    ) -> "Budget | None":
        """Validates the arguments of `compile`; None where no budget is given.

        Raises:
            ValueError: one of the two is missing, or out of range.
        """
        check_accountant(accountant)
        if target_epsilon is None and target_delta is None:
            return None
        if target_epsilon is None or target_delta is None:
            raise ValueError(
                f"target_epsilon={target_epsilon} with target_delta={target_delta}: a budget is "
                "both, e.g. target_epsilon=2.0, target_delta=1e-5."
            )
        return cls(check_target_epsilon(target_epsilon), check_delta(target_delta), accountant)

    def check_optimizer(self, optimizer: DPOptimizer) -> None:
        """Refuses an optimizer whose noise the budget could not set.

        Raises:
            ValueError: it has a noise_multiplier, or a budget, of its own.
        """
        name = type(optimizer).__name__
        if optimizer.event_varies:
            raise ValueError(
                f"target_epsilon={self.target_epsilon} with {name}, whose earlier steps decide the "
                "cost of later ones. It has its own budget: give it total_epsilon and "
                "total_delta, and leave target_epsilon out."
            )
        if not optimizer.waits_for_budget:
            raise ValueError(
                f"target_epsilon={self.target_epsilon} beside noise_multiplier="
                f"{optimizer.noise_multiplier}: one follows from the other. Make the optimizer "
                f"without noise_multiplier, {name}(), or leave target_epsilon out."
            )

    def noise_multiplier(
        self, ledger: PrivacyLedger, optimizer: DPOptimizer, law: SamplingLaw, steps: int
    ) -> float:
        """Returns the least σ* for which `steps` steps on top of the ledger are within the budget.

        Raises:
            ValueError: the budget is spent, or no noise is enough.
        """
        event = optimizer.event_at(1.0, law)
        name = type(optimizer).__name__
        if is_non_private(event):
            raise ValueError(
                f"target_epsilon={self.target_epsilon} with this {name}, whose steps are charged "
                "ε = ∞ whatever its noise. Give noise_multiplier, or take its private form."
            )
        # A pass of shuffled lots is one event.
        (_, count), *_ = law.charges(event, steps)
        try:
            return ledger.calibrate_noise_multiplier(
                self.target_epsilon,
                self.target_delta,
                law,
                count,
                self.accountant,
                step=lambda sigma: optimizer.event_at(sigma, law),
            )
        except ValueError as error:
            others = "".join(f" or {name}" for name in other_noise(optimizer))
            raise ValueError(
                f"{error} {steps:,} steps are planned ({law.describe()}). Lower epochs or "
                f"batch_size, or raise target_epsilon{others}."
            ) from error

    def room(self, model: keras.Model) -> int:
        """Returns how many further steps of the running law the budget has room for.

        "rdp" holds releases to a `RenyiFilter` that the ledger keeps, so the budget is a guarantee
        also where results end the training early.
        """
        optimizer, law, ledger = model.optimizer, model.step_law, model.ledger
        event = optimizer.event(law)
        bound = self.target_epsilon, self.target_delta
        if self.accountant == "rdp":
            filter = ledger.budget_for(event, *bound, law=law)
            ledger.begin_budget(filter)
            events = ledger.remaining_under(filter, event)
        else:
            events = ledger.remaining(event, *bound, self.accountant, law=law)
        return model.session.affordable_steps(events)

    def check_batch(self, model: keras.Model) -> None:
        """Refuses `train_on_batch` before σ* is known, or where the budget has no room for it."""
        model.optimizer.take_saved_noise()
        if model.optimizer.noise_multiplier is None:
            raise ValueError(
                f"target_epsilon={self.target_epsilon} with train_on_batch, whose number of steps "
                "is not known: call fit first, or make the optimizer with a "
                "noise_multiplier and compile without target_epsilon."
            )
        if self.room(model) < 1:
            raise ValueError(self.refusal(model, 1, 0))

    def refusal(self, model: keras.Model, planned: int, left: int, per_epoch: int = 1) -> str:
        """Returns the message for more steps than there is room for."""
        spent = model.ledger.epsilon(self.target_delta, self.accountant)
        whole = left - left % model.steps_per_execution
        rest = f"epochs=1, steps_per_epoch={whole} trains what is left. Or compile"
        fewer = rest if whole else "Compile"
        return (
            f"{planned:,} steps are planned ({model.step_law.describe()}), and target_epsilon="
            f"{self.target_epsilon} at target_delta={self.target_delta:g} has room for {left:,} "
            f"({left // per_epoch:,} epochs) at noise_multiplier="
            f"{model.optimizer.noise_multiplier:.5g}: epsilon={spent:.5g} is spent. {fewer} "
            "with a new optimizer and a larger target_epsilon, whose first fit counts what is "
            "spent."
        )


class BudgetedRun(keras.callbacks.Callback):
    """Settles σ* when a `fit` begins, and ends the training before the budget is exceeded.

    It is the last callback: earlier ones may restore weights with their σ*, or a ledger.

    Args:
        budget: the `Budget`.
    """

    def __init__(self, budget: Budget):
        super().__init__()
        self._budget = budget
        self._steps_before: int | None = None  # of the ledger, before anything was restored
        self._seen_steps = self._left = 0
        self.stopped_by_budget = False
        self._found: tuple[tuple, float] | None = None  # (ledger, law and steps), σ*

    def settle(self, model: keras.Model) -> None:
        """Takes the saved σ*, or finds it for the present ledger; before the first step."""
        optimizer, ledger = model.optimizer, model.ledger
        if self._steps_before is None:
            self._steps_before = ledger.steps
        if not optimizer.take_saved_noise():
            # A fit settles twice, as callbacks may restore weights in between. With "pld" a search
            # can take a minute.
            for_what = ledger.entries, model.step_law, model.session.run.planned_steps(model)
            if self._found is None or self._found[0] != for_what:
                self._found = (
                    for_what,
                    self._budget.noise_multiplier(ledger, optimizer, *for_what[1:]),
                )
            optimizer.plan_noise(self._found[1])

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Settles σ*, and prints it where it is new.

        Raises:
            ValueError: more steps are planned than the budget has room for.
        """
        model, optimizer = self.model, self.model.optimizer
        before = optimizer.noise_multiplier
        self.settle(model)
        if optimizer.save_noise():
            print_msg(self._announcement())
        if optimizer.noise_multiplier != before:  # restored, after another one was traced
            model.make_train_function(force=True)
        self._count()
        resumed = first_epoch(model) > 0 or model.ledger.steps != self._steps_before
        # A run resumed after a crash repeats steps, and ends at the budget.
        run = model.session.run
        planned = run.planned_steps(model)
        least = model.steps_per_execution if resumed else planned
        if self._left < least:
            raise ValueError(self._budget.refusal(model, planned, self._left, run.steps_per_epoch))

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Counts the remaining steps again if another callback charged the ledger.

        Raises:
            ValueError: none is left, and another callback set `stop_training` back.
        """
        if self.model.ledger.steps != self._seen_steps:
            self._count()
        run, steps = self.model.session.run, self.model.steps_per_execution
        if self._left < steps:
            planned = run.steps_left(self.model)
            raise ValueError(self._budget.refusal(self.model, planned, self._left))
        run.affordable = self._left - self._left % steps

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Stops training if the budget has no room for the next execution."""
        steps = self.model.steps_per_execution
        self._seen_steps += steps
        self._left -= steps
        to_come = self.model.session.run.steps_left(self.model)
        if self._left < steps <= to_come and not self.model.stop_training:
            self.stopped_by_budget = self.model.stop_training = True
            warnings.warn(
                f"target_epsilon={self._budget.target_epsilon} is reached, and training stopped "
                f"{to_come:,} steps before its end: what was restored, or charged since, "
                "took their place.",
                PrivacyWarning,
                stacklevel=2,
            )

    def _count(self):
        self._left = self._budget.room(self.model)
        self._seen_steps = self.model.ledger.steps

    def _announcement(self):
        budget, optimizer, ledger = self._budget, self.model.optimizer, self.model.ledger
        planned = self.model.session.run.planned_steps(self.model)
        others = [f"{name}={value:.5g}" for name, value in other_noise(optimizer).items()]
        spent = ledger.epsilon(budget.target_delta, budget.accountant)
        on_top = f", on top of epsilon={spent:.5g}" if spent else ""
        beside = f", beside the given {', '.join(others)}" if others else ""
        return (
            f"noise_multiplier={optimizer.noise_multiplier:.5g} for {planned:,} steps "
            f"({self.model.step_law.describe()}; these numbers are public){on_top}{beside}: "
            f"epsilon <= {budget.target_epsilon} at delta={budget.target_delta:g} "
            f"({budget.accountant})."
        )


def other_noise(optimizer: DPOptimizer) -> dict[str, float]:
    """Returns {name: σ} of the further releases of a step, as the user gave it."""
    names = [n for n in dir(optimizer) if n.endswith("_noise_multiplier") and n[0] != "_"]
    found = {name: getattr(optimizer, name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, float)}
