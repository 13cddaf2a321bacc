"""The private training of one DPModel: prepares it, charges its steps and runs them."""

import contextlib
import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

from tf_adadp import validation
from tf_adadp.accounting import PrivacyLedger, PrivacyWarning
from tf_adadp.distribution import replicas, workers
from tf_adadp.metrics import RawMetricsWarning
from tf_adadp.persistence import private_state
from tf_adadp.persistence.model_ledger import ModelLedger
from tf_adadp.persistence.private_state import LotsInUse
from tf_adadp.sampling import Lots, make_lot
from tf_adadp.sampling.lot_sizes import ContradictedLaw
from tf_adadp.training.arguments import FitData, check_workers
from tf_adadp.training.batch import Batch
from tf_adadp.training.budget import BudgetedRun
from tf_adadp.training.compiled import Compiled
from tf_adadp.training.preparation import (
    Prepared,
    check_strategy,
    physical_batch_size,
    plan_from_inputs,
    prepare,
)
from tf_adadp.training.run import Run
from tf_adadp.training.step import LotStep
from tf_adadp.utils.keras_compat import compile_loss_of, set_first_epoch

_RAW_METRICS = (
    "Training loss and metrics in the logs come from raw records, and no ε covers them. "
    "compile(released_metrics=tf_adadp.ReleasedMetrics(...)) releases them with noise, "
    "log_raw_metrics=False leaves them out, log_raw_metrics=True says that you know."
)
_MOST_FORMS = 16  # of batches, besides the last, whose graphs are kept
_NO_LOGS = "no logs"  # the result of Keras's train function may not be empty
_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


class Session:
    """Holds the training state of a `DPModel` between two `compile`s: never saved, never tracked.

        compile            → `compiled_with`
        fit, train_on_batch → `prepare`, then `start` or `start_batch`, then `running`
        every execution    → `charging`: the ledger is charged, then Keras's train function runs
        every step in it   → `train_step`

    Args:
        model: the `DPModel`.
        history: its ledger.

    Attributes:
        compiled: the arguments of `compile`; None before.
        prepared: the settings for tracing its graphs; None until `prepare`.
        run: the running or last training; None before the first one.
        callbacks: those of the running `fit`; none outside of it.
    """

    compiled: Compiled | None
    prepared: Prepared | None
    run: Run | None
    callbacks: tuple[keras.callbacks.Callback, ...]

    def __init__(self, model: keras.Model, history: ModelLedger):
        self.compiled = self.prepared = self.run = None
        self.callbacks = ()
        # The form of batches that `prepared` is for; Prepared and train function by other forms.
        self._form, self._of_other_forms = "", {}
        self._model, self._history = model, history
        self._step: LotStep | None = None
        self._divisor: tf.Variable | None = None  # L of the run, which graphs read
        self._share: Callable[[Any], tuple] = _itself  # makes a lot from the input of a replica
        self._resumed: dict | None = None  # from `load_private_state`, for the next fit
        self._active = False
        self._warned_of_raw_metrics = False

    def compiled_with(self, compiled: Compiled) -> None:
        """Takes up another optimizer and another loss."""
        self.compiled, self.prepared, self._step = compiled, None, None
        self._form, self._of_other_forms = "", {}
        self._history.follow(compiled.optimizer, compiled.budget)

    def refuse_nested(self, method: str) -> None:
        """Raises a RuntimeError where `fit` runs."""
        if self._active:
            raise RuntimeError(
                f"{method} was called while fit runs (from a callback?): it would change the "
                "sampling law that the running fit is charged by."
            )

    def prepare(self, element_spec: tuple) -> None:
        """Builds and checks model, loss, metrics, optimizer and engine, before anything is trained.

        Args:
            element_spec: TensorSpecs of an ordinary batch, `(x, y, sample_weight)`.
        """
        model = self._model
        check_strategy(model, self.compiled)
        with model.distribute_strategy.scope():
            validation.check_layers(model.model)
            self.compiled.check_unchanged(model)
            self._take_up(element_spec)
            self.prepared.layers.check_unchanged()
            self._history.share()

    def check_fit(self, data: FitData, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Refuses callbacks, labels and validation data that would fail after steps are charged.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        model, prepared = self._model, self.prepared
        loss, y_pred = compile_loss_of(model), prepared.y_pred
        validation.check_callbacks(callbacks, prepared.released_names, self.compiled.optimizer)
        self._warn_without_budget(callbacks)
        validation.check_tuner(callbacks, model.get_metrics_result(), self._history.current())
        if prepared.released is not None:
            prepared.released.set_modes(callbacks)
        validation.check_class_labels(loss, data.y, y_pred)
        if data.x is not None:
            validation.check_tokens(model.model, data.x)
        if data.class_weight:
            classes = np.array(list(data.class_weight))
            validation.check_class_labels(loss, classes, y_pred, "class_weight")
        spec = data.lots.element_spec
        validation.check_validation_data(model, data.validation_data, spec, y_pred)

    def start(
        self, lots: Lots, epochs: int, initial_epoch: int, steps_per_epoch: int
    ) -> tuple[Any, list[keras.callbacks.Callback]]:
        """Starts a run on lots.

        Returns:
            The dataset of them that Keras iterates over, and the callback that holds the run to
            the budget of `compile`, if there is one.
        """
        strategy, at_once = self._model.distribute_strategy, self.compiled.steps_per_execution
        if self._resumed is not None:
            private_state.resume_lots(lots, self._resumed)
            self._resumed = None
        run = self._begin(lots.law, lots, lots.expected_size)
        if workers.num_workers(strategy) > 1:
            check_workers(strategy, lots, epochs, steps_per_epoch)
        # Executions are whole, so the last one of an epoch may take lots beyond steps_per_epoch.
        of_epoch = math.ceil(steps_per_epoch / at_once) * at_once
        run.epochs, run.initial_epoch, run.steps_per_epoch = epochs, initial_epoch, of_epoch
        set_first_epoch(self._model, 0)  # that of an earlier fit, which a callback restored
        budgeted = []
        if self.compiled.budget is not None:
            budgeted = [BudgetedRun(self.compiled.budget)]
            budgeted[0].settle(self._model)
        self._check_adds_up()
        num_lots = max(1, epochs - initial_epoch) * of_epoch
        run.lots, run.take = LotsInUse.of(lots, num_lots), lots.supply()
        dataset = lots.as_dataset(self._physical_batch_size(), num_lots)
        dataset, self._share = replicas.distribute(dataset, strategy)
        return dataset, budgeted

    def start_batch(self, batch: Batch) -> tuple:
        """Starts a run on one batch, and returns the batch as a lot."""
        self._begin(batch.law, None, batch.expected_size)
        if self.compiled.budget is not None:
            self.compiled.budget.check_batch(self._model)
        self._check_adds_up()
        self._share = _itself
        return make_lot(*batch.arrays, physical_batch_size=self._physical_batch_size())

    def warn_of_raw_metrics(self) -> None:
        """Warns once per model, where raw metrics are logged without log_raw_metrics=True."""
        compiled = self.compiled
        if compiled.log_raw_metrics is None and compiled.logs_raw_metrics:
            if not self._warned_of_raw_metrics:
                warnings.warn(_RAW_METRICS, RawMetricsWarning, stacklevel=3)
            self._warned_of_raw_metrics = True

    @contextlib.contextmanager
    def running(self, callbacks: Sequence[keras.callbacks.Callback] = ()) -> Iterator[None]:
        """Lets the run train in the `with` block. Callbacks that hold a ledger file finish."""
        error = None
        with self._history.training(callbacks):
            self._active, self.callbacks = True, tuple(callbacks)
            try:
                yield
            except BaseException as raised:
                error = raised
                raise
            finally:
                with contextlib.ExitStack() as stack:
                    stack.callback(self._end)
                    for callback in callbacks:
                        if getattr(callback, "reports_privacy", False):
                            stack.callback(callback.finish)
                    # Comes first, as ledger files have it.
                    stack.callback(self.run.record_end, self._model, callbacks, error)

    def charging(self, train: Callable[[Any], dict]) -> Callable[[Any], dict]:
        """Returns Keras's train function, made to charge the ledger before it runs."""

        def charge_and_train(iterator):
            model, run, optimizer = self._model, self.run, self.compiled.optimizer
            of_fit = isinstance(iterator, _ITERATORS)
            steps = self.compiled.steps_per_execution if of_fit else 1
            self.compiled.check_unchanged(model)
            self._history.check_restored()
            run.begin_iteration(iterator)
            self._check_supply(steps)
            if of_fit:
                run.plan(model)
            variables, before = model.trainable_variables, None
            if optimizer.moves_every_step:
                before = run.before_step(variables)
            with self._charged(steps):
                logs = train(iterator)
            logs.pop(_NO_LOGS, None)
            self._history.meet()
            run.warn_if_unmoved(variables, before)
            if not optimizer.can_continue(run.law):
                model.stop_training = True
            return logs

        return charge_and_train

    def train_step(self, share: Any) -> dict[str, Any]:
        """Takes one step, as it is traced, on a lot or a replica's share of one."""
        if self._step is None:
            self._step = LotStep(self._model, self.compiled, self.prepared, self._divisor)
        return self._step(self._share(share)) or {_NO_LOGS: tf.zeros([])}

    def reset_metrics(self) -> None:
        """Starts the means of released metrics anew."""
        if self.prepared is not None and self.prepared.released is not None:
            self.prepared.released.reset()

    def gradient_plan(self) -> Any:
        """Returns the `GradientPlan` of the model; see `DPModel.gradient_plan`."""
        if self.prepared is not None:
            return self.prepared.plan
        return plan_from_inputs(self._model, self.compiled)

    @property
    def step_event(self) -> dp_accounting.DpEvent:
        """Returns the privacy event of one step of the run, or pass; see `SamplingLaw.event`."""
        return self.compiled.optimizer.event(self.run.law)

    def affordable_steps(self, events: int) -> int:
        """Returns for how many further steps of the run `events` times `step_event` are enough."""
        return self.run.law.affordable_steps(events, self.run.position)

    def announced_ledger(self, steps: int) -> PrivacyLedger:
        """Returns the ledger as it will be `steps` steps of the run from now."""
        ledger, run = self._history.current().announced(), self.run
        # In the portions in which they will be charged, so that entries begin at the same steps.
        one_by_one = run.law.lots_per_pass > 1
        portion = self.compiled.steps_per_execution if one_by_one else steps
        for taken in range(0, steps, portion):
            self.compiled.optimizer.charges.announce(
                ledger,
                run.law,
                min(portion, steps - taken),
                position=run.position + taken,
                reproducible_sampling=run.reproducible,
            )
        return ledger

    def take_chiefs_ledger(self) -> None:
        """Takes, on several hosts, the chief's ledger in place of this one, with its weights."""
        strategy = self._model.distribute_strategy
        text = workers.bytes_from_chief(strategy, self._history.current().to_json().encode())
        if workers.worker_number(strategy) > 0:
            self._history.replace(PrivacyLedger.from_json(text.decode()))
        self._history.meet()

    def save_private_state(self, path: Any) -> None:
        """Moves keys into a file; see `DPModel.save_private_state`."""
        if workers.num_workers(self._model.distribute_strategy) > 1:
            raise ValueError(
                "save_private_state on several hosts: every `fit` gives them new keys, and their "
                "lots have keys of their own. Resume from the weights and the ledger."
            )
        run = self.run
        lots, position = (None, 0) if run is None else (run.lots, run.position)
        optimizer = self.compiled.optimizer
        private_state.save(path, optimizer, self._history.current(), lots, position)

    def load_private_state(self, path: Any) -> None:
        """Takes keys out of a file; see `DPModel.load_private_state`."""
        optimizer = self.compiled.optimizer
        self._resumed = private_state.load(path, optimizer, self._history.current())
        if self.run is not None:
            self.run.lots = None
        self._history.meet()

    def _take_up(self, element_spec):
        """Takes up what serves batches of a form: shapes, dtypes, and what there is.

        A train function that met two forms would be traced for sizes that are not known, around an
        engine that is for one of them.
        """
        model = self._model
        form = repr(tf.nest.map_structure(lambda s: s and (s.shape[1:], s.dtype), element_spec))
        if form == self._form:
            return
        found = self._of_other_forms.pop(form, None)
        if found is None:
            found = prepare(model, self.compiled, element_spec), None
        if self.prepared is not None:
            self._of_other_forms[self._form] = self.prepared, model.train_function
        if len(self._of_other_forms) > _MOST_FORMS:
            del self._of_other_forms[next(iter(self._of_other_forms))]
        self._form, self._step = form, None
        self.prepared, model.train_function = found

    def _begin(self, law, lots, expected_size):
        """Lets the optimizer check the law, and makes it that of a new run."""
        seeded = lots is not None and lots.seed is not None
        at_once = 1 if lots is None else self.compiled.steps_per_execution
        self.compiled.optimizer.begin(law, lots, at_once)
        self.run, self._resumed = Run(law, expected_size, seeded), None
        if self._divisor is None:
            self._divisor = tf.Variable(0.0, trainable=False, dtype=tf.float32)
        self._divisor.assign(expected_size)
        return self.run

    def _warn_without_budget(self, callbacks):
        """Warns where an earlier budget would not hold this run."""
        budgets = self._history.last.budgets
        held = self.compiled.budget is not None or self.compiled.optimizer.event_varies
        if budgets and not held and not any(getattr(c, "max_epsilon", None) for c in callbacks):
            epsilon, delta = budgets[-1].filter.epsilon, budgets[-1].filter.delta
            warnings.warn(
                f"Earlier training was held to epsilon={epsilon:.6g} at delta={delta:g}, and "
                f"nothing holds this fit to it. Give PrivacyCallback({delta:g}, "
                f"max_epsilon={epsilon:.6g}) to every fit.",
                PrivacyWarning,
                stacklevel=4,
            )

    def _check_adds_up(self):
        self._history.current().check_adds_up(self.step_event, self.run.law)

    def _physical_batch_size(self):
        return physical_batch_size(self._model, self.prepared.engine, self.run.expected_size)

    def _check_supply(self, steps):
        """Raises a ValueError where so many more lots of the run cannot be drawn."""
        try:
            self.run.take(steps)
        except ContradictedLaw as error:
            self._history.current().mark_unknown(
                f"the declared sampling law does not hold: {error}"
            )
            raise

    @contextlib.contextmanager
    def _charged(self, steps):
        """Charges so many steps, which are to be taken in the `with` block."""
        run, optimizer = self.run, self.compiled.optimizer
        uncharged = optimizer.uncharged_releases
        with optimizer.charged(
            self._history.last,
            run.law,
            steps,
            position=run.position,
            reproducible_sampling=run.reproducible,
        ):
            run.position += steps  # they stay charged, even if they fail
            run.taken += steps
            yield
        if optimizer.uncharged_releases > uncharged:
            self._history.close_uncharged()

    def _end(self):
        self._active, self.callbacks = False, ()
        if 0 < self.run.taken < self.run.planned_steps(self._model):
            self.compiled.optimizer.plan_steps(0)  # a loop may follow the `fit` that was cut short
        iterator = self.run.end()
        # Where training ended inside of an epoch, a cycle of Keras's holds it, with data, and a
        # thread that draws lots.
        held = weakref.ref(iterator) if isinstance(iterator, _ITERATORS) else _nothing
        del iterator
        if held() is not None:
            gc.collect()


def _itself(lot):
    return lot


def _nothing():
    return None
