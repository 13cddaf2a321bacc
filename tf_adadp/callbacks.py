"""PrivacyCallback: ε in every log, and a stop before the budget is exceeded."""

import keras

from tf_adadp.accounting import PrivacyLedger


@keras.saving.register_keras_serializable(package="tf_adadp")
class PrivacyCallback(keras.callbacks.Callback):
    """Reports a `DPModel`'s cumulative ε while it trains.

    Puts `epsilon` into the logs of every epoch and of every step, before any other callback reads
    them (`DPModel.fit` moves this one to the front), so that History, the progress bar, CSVLogger
    and TensorBoard show it. With the "pld" accountant, whose ε takes a fraction of a second, only
    epochs have it.

    It reports; the ledger is charged by the train function, `steps_per_execution` steps before they
    run. With `max_epsilon` it stops training before the execution that would exceed the budget,
    deciding one execution ahead, also in the middle of an epoch.

    Args:
        target_delta: δ in (0, 1); below 1/N for a meaningful guarantee (a warning says so if not).
        max_epsilon: the budget, None for no stop.
        accountant: "rdp", "pld" or "theorem1"; see `tf_adadp.accounting`.
        ledger_path: a JSON file for the ledger. Each epoch is written ahead, so that a crash cannot
            lower ε; a file that is there when training begins is merged in.

    Raises:
        ValueError: at construction on arguments out of range; when training begins, on a budget
            that is already spent or an ε that the ledger refuses to report. Nothing is trained.
    """

    reports_privacy = True

    def __init__(self, target_delta, max_epsilon=None, accountant="rdp", ledger_path=None):
        super().__init__()
        PrivacyLedger().epsilon(target_delta, accountant)  # checks both
        if max_epsilon is not None and not max_epsilon > 0:
            raise ValueError(f"max_epsilon={max_epsilon!r}: give a number above 0, or None.")
        self.target_delta = target_delta
        self.max_epsilon = max_epsilon
        self.accountant = accountant
        self.ledger_path = ledger_path
        self._remaining = None
        self._seen_steps = 0

    def epsilon(self):
        """The model's ε so far."""
        return self.model.epsilon(self.target_delta, self.accountant)

    def on_train_begin(self, logs=None):
        """Checks that ε can be reported and that the budget has room for one execution."""
        if not hasattr(self.model, "ledger"):
            raise ValueError(
                "PrivacyCallback needs a DPModel: wrap the model, `tf_adadp.DPModel(model)`."
            )
        if self.max_epsilon is not None and self.model.optimizer.event_varies:
            raise ValueError(
                f"max_epsilon={self.max_epsilon} with {type(self.model.optimizer).__name__}, whose "
                "later steps cost what earlier ones decide: how many fit cannot be told ahead. "
                "Give the budget to the optimizer, total_epsilon, and leave max_epsilon out."
            )
        if self.ledger_path is not None:
            self._merge_file()
        self._check_budget()
        if self.max_epsilon is None:  # refuses, before it is trained, what could not be reported
            self.model.ledger.preview(
                self.model.step_event,
                1,
                self.target_delta,
                self.accountant,
                law=self.model.step_law,
            )

    def _check_budget(self):
        """Counts how many steps still fit; raises where ε is refused or no execution fits."""
        spent = self.epsilon()
        ledger = self.model.ledger
        self._seen_steps = ledger.steps
        if self.max_epsilon is None:
            return
        self._remaining = self.model.affordable_steps(
            ledger.remaining(
                self.model.step_event,
                self.max_epsilon,
                self.target_delta,
                self.accountant,
                law=self.model.step_law,
            )
        )
        if self._remaining < self.model.steps_per_execution:
            raise ValueError(
                f"max_epsilon={self.max_epsilon} leaves no room for "
                f"{self.model.steps_per_execution} more step(s): ε = {spent:.6g} is spent at "
                f"δ = {self.target_delta:g}. Raise max_epsilon or stop here."
            )

    def on_epoch_begin(self, epoch, logs=None):
        """Writes the epoch's steps ahead to the ledger file."""
        if not self.model.optimizer.event_varies:
            self._write_ahead(self.params["steps"] + self.model.steps_per_execution)

    def _write_ahead(self, steps):
        if self.ledger_path is not None:
            ahead = PrivacyLedger.from_json(self.model.ledger.to_json())
            # Under the optimizer's name: after a crash its own budget counts these steps, too.
            origin = f"{self.model.optimizer.ledger_origin}, write-ahead"
            for event, count in self.model.step_charges(steps):
                ahead.add(event, count, law=self.model.step_law, origin=origin)
            ahead.save(self.ledger_path)

    def on_train_batch_begin(self, batch, logs=None):
        """Counts the budget anew where another callback restored a ledger or charged it.

        Where the coming step's event depends on the last step, writes that one ahead.
        """
        if self.model.optimizer.event_varies:
            self._write_ahead(1)
        if self.model.ledger.steps != self._seen_steps:
            self._check_budget()

    def on_train_batch_end(self, batch, logs=None):
        """ε into the logs; stops if the next execution would exceed the budget."""
        if logs is not None and self.accountant != "pld":
            logs["epsilon"] = self.epsilon()
        self._seen_steps += self.model.steps_per_execution
        if self._remaining is not None:
            self._remaining -= self.model.steps_per_execution
            if self._remaining < self.model.steps_per_execution:
                self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        """ε into the logs, the ledger into its file."""
        if logs is not None:
            logs["epsilon"] = self.epsilon()
        if self.ledger_path is not None:
            self.model.ledger.save(self.ledger_path)

    def get_config(self):
        """The arguments of the constructor."""
        return {
            "target_delta": self.target_delta,
            "max_epsilon": self.max_epsilon,
            "accountant": self.accountant,
            "ledger_path": self.ledger_path,
        }

    @classmethod
    def from_config(cls, config):
        """The callback that `get_config` described."""
        return cls(**config)

    def _merge_file(self):
        try:
            stored = PrivacyLedger.load(self.ledger_path)
        except FileNotFoundError:
            return
        self.model.ledger.merge(stored)
