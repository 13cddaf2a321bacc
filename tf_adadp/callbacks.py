"""Reports ε in every log, writes a ledger file ahead, and stops before the budget is exceeded."""

import io
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.accounting.curve import metrics_over_epsilon, privacy_curve
from tf_adadp.accounting.files.ledger_file import LedgerFile
from tf_adadp.distribution.workers import worker_number
from tf_adadp.utils.checks import check_bool, check_integer
from tf_adadp.utils.keras_compat import print_msg

_SECONDS_BETWEEN_IMAGES = 10.0  # drawing takes about 0.2 s


@keras.saving.register_keras_serializable(package="tf_adadp")
class PrivacyCallback(keras.callbacks.Callback):
    """Reports a `DPModel`'s cumulative ε while it trains, and keeps its ledger in a file.

    Puts `epsilon` into the logs of every epoch and of every step, before any other callback reads
    them (`DPModel.fit` moves this one to the front), so that History, the progress bar, CSVLogger
    and TensorBoard show it. With the "pld" accountant, whose ε takes a fraction of a second, only
    epochs have it.

    **TensorBoard.** `keras.callbacks.TensorBoard(folder, update_freq="batch")`, or a whole number,
    writes `batch_epsilon` at every execution of `steps_per_execution` steps, or every so many; by
    default it writes epochs alone. Beside it this callback draws two images, in a run named
    "privacy": the curve δ(ε) at the end, and, also while training goes on, validation metrics and
    metrics released with noise over ε. They are images for two reasons. TensorBoard smooths scalars
    by averaging each with earlier ones, which shows an ε below the one spent, and accuracies at an
    ε at which they were not measured. Its charts also have steps or time on the x axis, not ε. Raw
    training metrics are never in the images; TensorBoard's own scalars have them unless `compile`
    got log_raw_metrics=False.

    This callback only reports. The train function charges the ledger, `steps_per_execution` steps
    before they run.

    **Budget.** With `max_epsilon` training stops before the execution that would exceed the budget,
    also in the middle of an epoch; it decides one execution ahead. With the "rdp" accountant a
    `RenyiFilter` decides, whose order is fixed before the first release and kept in the ledger. So
    (max_epsilon, target_delta) also holds where a later `fit` chooses noise or lot size by results
    of earlier ones. With other accountants it holds for noise and lots that were fixed beforehand.

    **File.** With `ledger_path` the file on disk always covers all releases. It is written, and
    synced, ahead of every `ledger_interval` steps. So after a crash at any moment it records all
    releases and at most max(ledger_interval, steps_per_execution) steps more, fewer where training
    would end or the budget would stop it. A run on the same file counts the steps that it records.
    At the end, and after an exception, the file is exact. For optimizers whose next event depends
    on the last outcome (AGD) every step is written separately. Charges by other callbacks are in
    the file from the next step on.

    Args:
        target_delta: δ in (0, 1); below 1/N for a meaningful guarantee (a warning says so if not).
        max_epsilon: the budget; None for no stop.
        accountant: "rdp", "pld" or "theorem1"; see `tf_adadp.accounting`.
        ledger_path: a JSON file for the ledger; an existing one is continued. Only one run at a
            time may have it open.
        ledger_interval: how many steps are written ahead at a time, ≥ 1. A synced write takes 4
            to 20 ms on a plain disk: some 0.1 ms a step for the default of 100.
        dataset: a public name for the data set, for ledger and statement. Not a hash of records.
        same_data: True to continue a ledger with another name or number of records, for a part of
            the same records or a table that grew.
        extra_deltas: further δ for which epoch logs have ε, as `epsilon_at_<δ>`.
        log_dir: a folder for the images alone; by default "privacy" in the folder of a
            `TensorBoard` callback in the same `fit`, and none without one. Needs matplotlib.

    Raises:
        ValueError: at construction on arguments out of range; when training begins, on a budget
            that is already spent, an ε that the ledger refuses to report, a ledger file that is
            damaged, of a newer version or about other data. Nothing is trained or overwritten.
        BlockingIOError: when training begins, where another run has the ledger file open.

    Example:
        >>> callback = dp.PrivacyCallback(target_delta=1e-5, max_epsilon=2.0)
        >>> callback.target_delta
        1e-05
    """

    reports_privacy = True

    def __init__(
        self,
        target_delta: float,
        max_epsilon: float | None = None,
        accountant: str = "rdp",
        ledger_path: str | os.PathLike | None = None,
        ledger_interval: int = 100,
        dataset: str | None = None,
        same_data: bool = False,
        extra_deltas: Sequence[float] = (),
        log_dir: str | os.PathLike | None = None,
    ):
        super().__init__()
        extra_deltas = tuple(extra_deltas)
        for delta in (target_delta, *extra_deltas):
            PrivacyLedger(dataset).epsilon(delta, accountant)  # checks all three
        if max_epsilon is not None and not max_epsilon > 0:
            raise ValueError(f"max_epsilon={max_epsilon!r}: give a number above 0, or None.")
        wanted = "a whole number of steps, at least 1"
        check_integer("ledger_interval", ledger_interval, wanted, at_least=1)
        check_bool("same_data", same_data)
        self.target_delta = target_delta
        self.max_epsilon = max_epsilon
        self.accountant = accountant
        self.ledger_path = ledger_path
        self.ledger_interval = int(ledger_interval)
        self.dataset = dataset
        self.same_data = same_data
        self.extra_deltas = extra_deltas
        self.log_dir = log_dir
        self._file = None
        self._running = False
        self._budget = None
        self._remaining = None
        self._seen_steps = 0  # of the ledger, when the budget was counted
        self._written_steps = 0  # of the ledger, up to which the file is written
        self._writes = False  # whether this run began to write the file
        self._images = None
        self.stopped_by_budget = False

    def epsilon(self) -> float:
        """Returns the model's ε so far."""
        return self.model.epsilon(self.target_delta, self.accountant)

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Checks that ε can be reported and that the budget has room for one execution."""
        if not hasattr(self.model, "ledger"):
            raise ValueError(
                "PrivacyCallback needs a DPModel: wrap the model, `tf_adadp.DPModel(model)`."
            )
        if self.max_epsilon is not None and self.model.optimizer.event_varies:
            raise ValueError(
                f"max_epsilon={self.max_epsilon} with {type(self.model.optimizer).__name__}, whose "
                "earlier steps decide the cost of later ones, so their number cannot be planned. "
                "Give the budget to the optimizer, as total_epsilon, and leave max_epsilon out."
            )
        self._budget = None
        self.stopped_by_budget = False
        self._running, self._writes = True, False
        log_dir = self.log_dir
        for callback in self.model.session.callbacks:
            if log_dir is None and isinstance(callback, keras.callbacks.TensorBoard):
                log_dir = pathlib.Path(callback.log_dir) / "privacy"
        self._images = log_dir and _Images(log_dir, self.target_delta, self.accountant)
        # Only the first of several hosts has the file, and all other restored state.
        if self.ledger_path is not None and worker_number(self.model.distribute_strategy) == 0:
            self._file = LedgerFile(self.ledger_path)
            self._written_steps = 0
        self._check_data()
        if self._file is not None:
            self.model.ledger.merge(self._file.stored, same_data=True)
        if self.dataset is not None:
            self.model.ledger.dataset = self.dataset
        self._check_budget()
        if self.max_epsilon is None:  # raises, before training, if ε cannot be reported
            self.model.ledger.preview(
                self.model.session.step_event,
                1,
                self.target_delta,
                self.accountant,
                law=self.model.session.run.law,
            )

    def _check_data(self):
        """Refuses ledgers, in the file or in the model, about other data than this run's."""
        if self.same_data:
            return
        names = [] if self.dataset is None else [self.dataset]
        law = self.model.session.run.law
        sizes = [] if law.num_units is None else [(law.unit, law.num_units)]
        self.model.ledger.check_data(names, sizes)
        if self._file is None:
            return
        try:
            self._file.stored.check_data(names, sizes)
        except ValueError as error:
            raise ValueError(f"{self.ledger_path}: {error}") from error

    def _check_budget(self):
        """Counts how many steps still fit; raises where ε is refused or no execution fits."""
        spent = self.epsilon()
        ledger = self.model.ledger
        self._seen_steps = ledger.steps
        if self.max_epsilon is None:
            return
        event, law = self.model.session.step_event, self.model.session.run.law
        if self.accountant == "rdp":
            if self._budget is None:
                self._budget = self._begin_budget(event, law)
            self._remaining = ledger.remaining_under(self._budget, event) if self._budget else 0
        else:
            self._remaining = ledger.remaining(
                event, self.max_epsilon, self.target_delta, self.accountant, law=law
            )
        self._remaining = self.model.session.affordable_steps(self._remaining)
        if self._remaining < self.model.steps_per_execution:
            after = ledger.preview(event, 1, self.target_delta, self.accountant, law=law)
            raise ValueError(
                f"max_epsilon={self.max_epsilon} leaves no room for "
                f"{self.model.steps_per_execution} more step(s): ε = {spent:.6g} is spent at "
                f"δ = {self.target_delta:g}, and one more release makes it {after:.6g}. Raise "
                "max_epsilon, stop here, or release less at a time: a larger noise_multiplier "
                "(accounting.calibrate_noise_multiplier finds one), or smaller lots."
            )

    def share_budget(self, from_chief: Callable[[np.ndarray], np.ndarray]) -> None:
        """Takes over, on several hosts, how many steps still fit by the first one's count.

        Called after the callbacks that restore, on hosts whose ledgers are alike since.

        Args:
            from_chief: gives all hosts the first one's array.

        Raises:
            ValueError: on all hosts, where no execution fits.
        """
        self._seen_steps = self.model.ledger.steps
        if self.max_epsilon is None:
            return
        found, error = -1, None
        if worker_number(self.model.distribute_strategy) == 0:
            try:
                self._check_data()
                self._check_budget()  # the earlier count does not include a restored ledger
                found = self._remaining
            except ValueError as refusal:  # raised after the other hosts received it
                error = refusal
        self._remaining = int(from_chief(np.array(found, np.int64)))
        if error is not None:
            raise error
        if self._remaining < 0:
            raise ValueError(
                f"max_epsilon={self.max_epsilon}: the chief refused to train; see its message."
            )

    def _begin_budget(self, event, law):
        """Returns the filter of this run, recorded once a step fits; None where none does."""
        ledger = self.model.ledger
        if not ledger.remaining(event, self.max_epsilon, self.target_delta, law=law):
            return None
        budget = ledger.budget_for(event, self.max_epsilon, self.target_delta, law=law)
        ledger.begin_budget(budget)
        return budget

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Writes the next steps to the file ahead, unless it has them.

        Counts the budget again if another callback restored or charged a ledger.

        Raises:
            ValueError: the budget is spent, and another callback set `stop_training` back.
        """
        if self.model.ledger.steps != self._seen_steps:
            self._check_data()
            self._check_budget()
            self._written_steps = 0  # the steps written ahead are other releases
        elif self._remaining is not None and self._remaining < self.model.steps_per_execution:
            self._check_budget()  # raises
        self._write_ahead()

    def _write_ahead(self):
        coming = self.model.steps_per_execution
        steps = self.model.ledger.steps
        if self._file is None or steps + coming <= self._written_steps:
            return
        ahead = self.ledger_interval
        if self.model.optimizer.event_varies:
            ahead = coming
        if self._remaining is not None:
            ahead = min(ahead, self._remaining)
        ahead = max(min(ahead, self.model.session.run.steps_left(self.model)), coming)
        self._writes = True
        self._file.write(self.model.session.announced_ledger(ahead))
        self._written_steps = steps + ahead

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Puts ε into the logs; stops if the next execution would exceed the budget."""
        if logs is not None and self.accountant != "pld":
            logs["epsilon"] = self.epsilon()
        steps = self.model.steps_per_execution
        self._seen_steps += steps
        if self._remaining is not None:
            self._remaining -= steps
            if self._remaining < steps:
                self.stopped_by_budget = self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Puts ε at every δ into the logs, and adds these to the image of metrics over ε."""
        if logs is not None:
            logs["epsilon"] = self.epsilon()
            for delta in self.extra_deltas:
                logs[f"epsilon_at_{delta:g}"] = self.model.epsilon(delta, self.accountant)
            if self._images:
                self._images.add(logs, self.model.ledger.steps)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Prints a message if a budget ended training, and writes TensorBoard's last images."""
        if self.stopped_by_budget and self.params.get("verbose"):
            taken = self.model.session.run.taken
            print_msg(
                f"PrivacyCallback: training ended after {taken} steps at ε = "
                f"{self.epsilon():.6g}; more would exceed max_epsilon={self.max_epsilon}."
            )
        if self not in self.model.session.callbacks:  # else `fit` does, after the other callbacks
            self.finish()
        if self._images:
            self._images.close(self.model.ledger)
            self._images = None

    def finish(self) -> None:
        """Writes the exact ledger into its file; once per run.

        `DPModel.fit` calls it also where an exception ends the training.
        """
        if not self._running:
            return
        self._running = False
        file, self._file = self._file, None
        try:
            if file is not None and self._writes:
                file.write(self.model.ledger)
        finally:
            if file is not None:
                file.close()

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            "target_delta": self.target_delta,
            "max_epsilon": self.max_epsilon,
            "accountant": self.accountant,
            "ledger_path": self.ledger_path,
            "ledger_interval": self.ledger_interval,
            "dataset": self.dataset,
            "same_data": self.same_data,
            "extra_deltas": list(self.extra_deltas),
            "log_dir": self.log_dir,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PrivacyCallback":
        """Makes a callback from its `get_config`."""
        return cls(**config)


class _Images:
    """Writes the images of one run for TensorBoard.

    They go into a separate folder: TensorBoard reads only the newest file of a folder, and would
    stop reading the one that Keras writes.
    """

    def __init__(self, log_dir, delta, accountant):
        self._folder, self._priced_by = str(log_dir), (delta, accountant)
        self._points = []
        self._drawn_at = time.monotonic()
        self._writer = None
        self._can_draw = True

    def add(self, logs, step):
        """Adds the logs of an epoch, and draws metrics over ε if a drawing is due."""
        self._points.append((logs["epsilon"], dict(logs)))
        if time.monotonic() - self._drawn_at > _SECONDS_BETWEEN_IMAGES:
            self._draw_metrics(step)
            self._drawn_at = time.monotonic()

    def close(self, ledger):
        """Draws metrics over ε, and δ(ε), for the last time."""
        self._draw_metrics(ledger.steps)
        self._write("privacy", ledger.steps, lambda: privacy_curve(ledger, *self._priced_by))
        if self._writer is not None:
            self._writer.close()

    def _draw_metrics(self, step):
        draw = lambda: metrics_over_epsilon(self._points, *self._priced_by)  # noqa: E731
        self._write("metrics_over_epsilon", step, draw)

    def _write(self, name, step, draw):
        if not self._can_draw:
            return
        try:
            figure = draw()
        except ImportError as error:
            self._can_draw = False
            print_msg(f"No images for TensorBoard: {error}. pip install matplotlib")
            return
        if figure is None:
            return
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._folder)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=100)
        with self._writer.as_default():
            image = tf.io.decode_png(png.getvalue(), channels=4)
            tf.summary.image(name, image[tf.newaxis], step=step)
        self._writer.flush()
