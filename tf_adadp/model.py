"""DPModel: any Keras model, trained with differential privacy."""

import contextlib
import math
import warnings

import keras
import numpy as np
import tensorflow as tf

from tf_adadp import gradients, validation
from tf_adadp.accounting import PrivacyLedger, UnknownSampling
from tf_adadp.distribution import replicas, workers
from tf_adadp.gradients.indices import no_index_stops
from tf_adadp.metrics import LotMetrics, RawMetricsWarning, ReleasedMetrics
from tf_adadp.persistence import files as saving
from tf_adadp.persistence import private_state
from tf_adadp.persistence.weights_ledger import (
    CHANGED,
    UNCHARGED,
    LedgerState,
    WeightsLedger,
    changed_since,
    forget_left,
    keep_in_copies,
    remember_left,
    uncharged_releases,
)
from tf_adadp.sampling import Lots, make_lot
from tf_adadp.sampling.lot_sizes import ContradictedLaw
from tf_adadp.training import arguments as fit_arguments
from tf_adadp.training.session import Run
from tf_adadp.utils.checks import check_choice, check_instance, check_integer
from tf_adadp.utils.keras_compat import compute_output_spec, functional_inputs

_PER_EXAMPLE_BYTES = 100 * 2**20  # what the gradients of a physical batch may take by default
_MAX_PHYSICAL_BATCH = 64
_PADDING = 16  # at most: lots are padded to a multiple of it where physical batches are joined
_RESTORED = (
    "the optimizer's state was restored without the ledger, it says {} steps after {}. Restore by "
    "`load_weights`, `load_model` or tf.train.Checkpoint(model=<the DPModel>), which keep them "
    "together"
)
_NO_LOGS = "no logs"  # what Keras's train function returns may not be empty
_RAW_METRICS = (
    "Training loss and metrics in the logs come from raw records, and no ε covers them. "
    "compile(released_metrics=tf_adadp.ReleasedMetrics(...)) releases them with noise, "
    "log_raw_metrics=False leaves them out, log_raw_metrics=True says that you know."
)
_NO_LEDGER = (
    "the weights were loaded from a file without a ledger, so what they cost is unknown. Load "
    "public weights into the plain model, `model.model.load_weights`"
)


@keras.saving.register_keras_serializable(package="tf_adadp")
class DPModel(keras.Model):
    """Wraps a Keras model so that `fit` trains it with differential privacy.

        model = DPModel(keras.Sequential([...]))
        model.compile(optimizer=ADADP(noise_multiplier=4.0), loss=..., metrics=[...])
        model.fit(x, y, batch_size=600, epochs=10, callbacks=[PrivacyCallback(1e-5)])
        model.model.save("model.keras")            # the plain model, free of tf_adadp

    One Keras "batch" is one lot: Poisson-sampled with the EXPECTED size `batch_size`, its gradients
    clipped example by example and summed, noised once, and charged to `ledger` before it runs.

    Guarantee: the weights, the optimizer's state and everything computed from them satisfy the
    (ε, δ) that `epsilon(delta)` reports, for the unit and the neighbouring relation of the lots
    (add or remove one record for Poisson lots, one user for `UserLots`). Not covered: training
    loss and metrics but those of `released_metrics`, validation data, the choice of
    hyper-parameters, the number and timing of lots.

    Args:
        model: a `keras.Model`: Sequential, functional or subclassed, built or not.
        physical_batch_size: how many examples are worked on at once; sets memory, not privacy. By
            default as many as a memory bound allows, see `gradient_plan`.
        gradient_engine: "ghost": norms and clipped sums without per-example gradients, at nearly
            the cost of ordinary training; "vectorized": per-example gradients by
            `tf.vectorized_map`; "auto": "ghost" wherever it can follow the model. Both give the
            same sums, up to rounding.
        ledger: a `PrivacyLedger` of what the weights cost before, for histories that cannot be
            seen: weights copied by `clone_model` and `set_weights`, read from a file of a plain
            model, or trained in another process. This model goes on in that ledger. None where
            the weights are new or public, and where they were trained by a DPModel, or by a
            custom loop that charged a ledger, in this process: that history is found.

    Raises:
        TypeError: model is no plain `keras.Model`, or ledger no `PrivacyLedger`.
        ValueError: where a layer mixes examples or keeps statistics of raw data.
    """

    def __init__(
        self, model, physical_batch_size=None, gradient_engine="auto", ledger=None, **kwargs
    ):
        check_instance("model", model, keras.Model, "a keras.Model")
        if isinstance(model, DPModel):
            raise TypeError("model is a DPModel already: wrap the plain one, `model.model`.")
        if physical_batch_size is not None:
            wanted = "an integer of at least 1, or None to have it chosen"
            check_integer("physical_batch_size", physical_batch_size, wanted, at_least=1)
        check_choice("gradient_engine", gradient_engine, ("auto", "ghost", "vectorized"))
        validation.check_layers(model)
        validation.check_overrides(model)
        super().__init__(**kwargs)
        self.model = model
        self.physical_batch_size = physical_batch_size
        self.gradient_engine = gradient_engine
        self._weights_ledger = WeightsLedger()
        if ledger is not None:
            self._weights_ledger.start_from(ledger, model)
        keep_in_copies(model)
        self._ledger_state = LedgerState(self)
        self._run = Run()
        self._warned_of_raw_metrics = False
        if model.built:
            self.built = True

    @property
    def output_names(self):
        """The inner model's output names: losses and metrics may be given per output."""
        names = getattr(self.model, "output_names", None)
        if names is None:
            raise AttributeError("output_names")
        return names

    def call(self, inputs, training=None):
        """The inner model's forward pass."""
        return self.model(inputs, training=training)

    def build(self, input_shape):
        """Nothing to make: the wrapper has no weights, and the inner model builds itself."""
        self.built = True

    def summary(self, *args, **kwargs):
        """Prints the inner model's summary."""
        return self.model.summary(*args, **kwargs)

    def compile(
        self,
        optimizer,
        loss=None,
        loss_weights=None,
        metrics=None,
        weighted_metrics=None,
        run_eagerly=False,
        steps_per_execution=1,
        jit_compile="auto",
        auto_scale_loss=True,
        released_metrics=None,
        log_raw_metrics=None,
    ):
        """Configures training. Arguments as in `keras.Model.compile`, with these differences.

        Args:
            optimizer: a private optimizer (an instance of `DPOptimizer`); no other is accepted.
            jit_compile: whether XLA compiles the work on one physical batch. "auto" chooses by the
                kinds of layers. The loop over physical batches is never compiled by XLA, since
                every lot has another number of them.
            auto_scale_loss: has no effect. Keras's dynamic loss scale is a raw statistic; under
                mixed_float16 one fixed scale is used and undone before clipping.
            released_metrics: a `ReleasedMetrics`: training loss and metrics get noise, are charged
                with every step and may be monitored by callbacks. None: none are released.
            log_raw_metrics: whether the logs of training have loss and metrics of the raw records,
                which no ε covers. None: only where none are released, and `fit` warns once.

        Raises:
            ValueError: if the optimizer is not private, has no noise_multiplier, or cannot cover
                released metrics.
        """
        fit_arguments.check_optimizer(optimizer)
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
        validation.check_layers(self.model)
        self._weights_ledger.close_uncharged(self._ledger_carriers)
        sigma = None if released_metrics is None else released_metrics.noise_multiplier
        optimizer.charges.cover_metrics(sigma)
        super().compile(
            optimizer=optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=False,
            auto_scale_loss=False,
        )
        self._body_jit_compile = "auto" if jit_compile is None else jit_compile
        self._released_metrics = released_metrics
        self._log_raw_metrics = log_raw_metrics
        self._run.reset(
            optimizer,
            {layer: layer.trainable for layer in self._flatten_layers()},
            steps_per_execution,
            sigma,
        )

    def get_compile_config(self):
        """Keras's compile configuration, with the arguments that differ as they were given."""
        config = super().get_compile_config()
        if config:  # compiled
            released = self._released_metrics
            config["jit_compile"] = self._body_jit_compile
            config["released_metrics"] = keras.saving.serialize_keras_object(released)
            config["log_raw_metrics"] = self._log_raw_metrics
        return config

    def compile_from_config(self, config):
        """Compiles with what `get_compile_config` described."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        epochs=1,
        verbose="auto",
        callbacks=None,
        validation_split=0.0,
        validation_data=None,
        shuffle=True,
        class_weight=None,
        sample_weight=None,
        initial_epoch=0,
        steps_per_epoch=None,
        validation_steps=None,
        validation_batch_size=None,
        validation_freq=1,
    ):
        """Trains with differential privacy. Arguments as in `keras.Model.fit`, with differences.

        Args:
            x: arrays (or a dict or list of them) with `y` and `batch_size`; or lots that carry
                their sampling law, any of `tf_adadp.sampling`: `PoissonLots`, `ShuffledLots`, …
            batch_size: L, the expected lot size; required with arrays, 1 ≤ L ≤ N. Every step draws
                each record with probability L/N.
            shuffle: must stay True, lots are drawn at random.
            class_weight, sample_weight: multiply an example's loss before clipping.
            steps_per_epoch: lots per epoch; ceil(N/L) by default.
            validation_split: a last part of the arrays that is set aside before L/N is computed.
            validation_batch_size: by default at most 256, or where `validation_steps` is given, as
                in Keras: `batch_size`, and all records in those steps where that is None too.

        Returns:
            A Keras `History`.

        Raises:
            TypeError, ValueError: before anything is trained, on data whose sampling law is
                unknown, on arguments out of range, on callbacks that steer by a training metric, on
                validation data that cannot be evaluated.
        """
        self._assert_compile_called("fit")
        self._refuse_nested("fit")
        fit_arguments.check_epochs(epochs, initial_epoch, steps_per_epoch)
        fit_arguments.check_evaluations(
            validation_data, validation_batch_size, validation_steps, validation_freq
        )
        if not shuffle:
            raise ValueError(
                "shuffle=False: lots are drawn at random, the guarantee rests on it. Leave it out."
            )
        callbacks = fit_arguments.private_callbacks_first(callbacks)
        if isinstance(x, Lots):
            fit_arguments.refuse_with_lots(
                y=y, batch_size=batch_size, sample_weight=sample_weight, class_weight=class_weight
            )
            if validation_split:
                raise ValueError(
                    f"validation_split={validation_split} with lots: set validation records aside "
                    "before making the lots, and give validation_data."
                )
            lots = x
        else:
            if validation_split and validation_data is None:
                (x, y, sample_weight), validation_data = fit_arguments.split(
                    (x, y, sample_weight), validation_split
                )
            if class_weight is not None:
                sample_weight = fit_arguments.class_weights(y, class_weight, sample_weight)
            lots = fit_arguments.lots_from_arrays(
                x, y, sample_weight, batch_size, self.optimizer, self.distribute_strategy
            )
        self._prepare(lots.element_spec)
        validation.check_callbacks(callbacks, self._run.released_names, self.optimizer)
        if self._run.released is not None:
            self._run.released.set_modes(callbacks)
        validation.check_class_labels(self._compile_loss, y, self._run.y_pred)
        if lots is not x:
            validation.check_tokens(self.model, x)
        if class_weight:
            validation.check_class_labels(
                self._compile_loss, np.array(list(class_weight)), self._run.y_pred, "class_weight"
            )
        validation.check_validation_data(self, validation_data, lots.element_spec, self._run.y_pred)
        law = lots.law
        if self._run.resumed_lots is not None:
            private_state.resume_lots(lots, self._run.resumed_lots)
            self._run.resumed_lots = None
        self.optimizer.begin(law, lots, self.steps_per_execution)
        self._run.start(law, lots.expected_size, lots.seed is not None)
        if steps_per_epoch is None:
            steps_per_epoch = lots.steps_per_epoch
        if workers.num_workers(self.distribute_strategy) > 1:
            fit_arguments.check_workers(self.distribute_strategy, lots, epochs, steps_per_epoch)
            callbacks = [*callbacks, workers.ShareChiefsState()]  # after those that restore
        self.ledger.check_adds_up(self.step_event, law)
        # Executions are whole, so the last one of an epoch may take lots beyond steps_per_epoch.
        executions = math.ceil(steps_per_epoch / self.steps_per_execution)
        num_lots = max(1, epochs - initial_epoch) * executions * self.steps_per_execution
        self._run.lots = private_state.LotsInUse.of(lots, num_lots)
        self._run.supply = lots.supply()
        dataset = lots.as_dataset(self._physical_batch_size(lots.expected_size), num_lots)
        dataset, self._run.share = replicas.distribute(dataset, self.distribute_strategy)
        self._warn_of_raw_metrics()
        if not validation_batch_size:
            if validation_steps is None:
                validation_batch_size = min(256, lots.num_examples or 256)
            elif batch_size is not None:  # the steps are to cover the records that Keras's do
                validation_batch_size = math.ceil(batch_size)
        with self._leaving_weights(), self._run.fitting(callbacks):
            return super().fit(
                x=dataset,
                shuffle=False,
                epochs=epochs,
                verbose=verbose,
                callbacks=callbacks,
                validation_data=validation_data,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size,
                validation_freq=validation_freq,
            )

    def train_on_batch(
        self,
        x,
        y=None,
        sample_weight=None,
        class_weight=None,
        return_dict=False,
        *,
        law=None,
    ):
        """One private step on a batch that the caller sampled.

        One call is one release, charged as one from a batch of its own. Two calls with the same
        batch are two releases from one batch, which cost more than is charged for them: sample a
        batch for every call.

        Args:
            law: how the batch was sampled, e.g. `accounting.PoissonSampling(N, L)`; it is recorded
                as declared by you. Without it the step is taken and charged as of unknown
                sampling: from then on `epsilon` refuses to report.

        Other arguments and the result are those of `keras.Model.train_on_batch`.
        """
        self._assert_compile_called("train_on_batch")
        self._refuse_nested("train_on_batch")
        if self.distribute_strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"train_on_batch under {type(self.distribute_strategy).__name__}: give `fit` lots, "
                "which it splits over the replicas."
            )
        if class_weight is not None:
            sample_weight = fit_arguments.class_weights(y, class_weight, sample_weight)
        batch = tf.nest.map_structure(
            lambda a: None if a is None else np.asarray(a), (x, y, sample_weight)
        )
        size = len(tf.nest.flatten(x)[0])
        if law is None:
            law = UnknownSampling(
                "train_on_batch was called without `law`: pass how the batches were sampled, e.g. "
                "law=PoissonSampling(num_examples=N, expected_size=L)"
            )
        else:
            law = validation.declared_law(law, size)
        expected_size = law.expected_lot_size or size
        spec = tf.nest.map_structure(
            lambda a: None if a is None else tf.TensorSpec((None, *a.shape[1:]), a.dtype), batch
        )
        self._prepare(spec)
        self.optimizer.begin(law, None, 1)
        self._run.start(law, expected_size, False)
        self.ledger.check_adds_up(self.step_event, law)
        self._run.share = lambda lot: lot
        lot = make_lot(*batch, physical_batch_size=self._physical_batch_size(expected_size))
        self.make_train_function()
        self.reset_metrics()
        with self._leaving_weights():
            logs = self.train_function(iter([lot]))
        logs = {name: float(value) for name, value in logs.items()}
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    def make_train_function(self, force=False):
        """Keras's train function, which charges the ledger before it runs."""
        if self.train_function is not None and not force:
            return
        super().make_train_function(force=True)
        run = self.train_function

        def charge_and_run(iterator):
            of_fit = isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator))
            steps = self.steps_per_execution if of_fit else 1
            self._check_unchanged()
            self._check_iterations()
            law, sampling = self._run.law, self._run.reproducible_sampling
            position = self._run.position_of(iterator)
            self._check_supply(steps)
            before = self._run.snapshot(self) if self.optimizer.moves_every_step else None
            uncharged = self.optimizer.uncharged_releases
            with self.optimizer.charged(
                self._weights_ledger.last,
                law,
                steps,
                position=position,
                reproducible_sampling=sampling,
            ):
                self._run.position += steps  # they are charged, whatever becomes of them
                logs = run(iterator)
            if self.optimizer.uncharged_releases > uncharged:
                self._weights_ledger.close_uncharged(self._ledger_carriers)
            logs.pop(_NO_LOGS, None)
            self._run.meet(self.optimizer)
            self._run.warn_if_unmoved(self, before)
            if not self.optimizer.can_continue(law):
                self.stop_training = True
            return logs

        self.train_function = charge_and_run

    @contextlib.contextmanager
    def _leaving_weights(self):
        """Private training runs; what it leaves is remembered, to see changes by others."""
        self._look_for_changes()
        try:
            yield
        finally:
            remember_left(self.trainable_variables)

    def _look_for_changes(self):
        if not self._run.active and changed_since(self.weights):
            self._weights_ledger.of(self._ledger_carriers).mark_not_covered(CHANGED)
            forget_left(self.weights)

    def _check_supply(self, steps):
        """Raises a ValueError where so many more lots of the running `fit` cannot be drawn."""
        try:
            self._run.supply(steps)
        except ContradictedLaw as error:
            self.ledger.mark_unknown(f"the declared sampling law does not hold: {error}")
            raise

    def train_step(self, lot):
        """One lot, or a replica's share of one: clip and sum its gradients, release, update."""
        optimizer, run = self.optimizer, self._run
        lot = run.share(lot)
        # This runs whenever a graph is traced: what the engine knows of the layers must hold.
        validation.check_layers(self.model)
        run.layer_settings.check_unchanged()
        if run.released is not None:
            run.released.begin()
        with tf.GradientTape() as tape:
            regularization = gradients.weight_regularization(self.model)
        regularization_gradients = None
        if regularization is not None:
            regularization_gradients = tape.gradient(
                regularization, [v.value for v in self.trainable_variables]
            )
        loss = optimizer.step_on_lot(
            run.engine,
            lot,
            run.expected_size.value(),
            on_batch=self._on_batch,
            regularization_gradients=regularization_gradients,
        )
        logs = {}
        if self._logs_raw_metrics:
            count = replicas.all_reduced(tf.reduce_sum(lot[1]))
            mean_loss = tf.math.divide_no_nan(loss, count)
            if regularization is not None:
                mean_loss += regularization
            self._loss_tracker.update_state(mean_loss, sample_weight=count)
            logs.update(self.get_metrics_result())
        if run.released is not None:
            step = optimizer.iterations.value
            logs.update(run.released.release(run.expected_size.value(), step))
        logs.update(optimizer.step_logs())
        return self._for_workers(logs or {_NO_LOGS: tf.zeros([])})

    def test_step(self, data):
        """Keras's."""
        return self._for_workers(super().test_step(data))

    def _for_workers(self, logs):
        """Logs as Keras reduces them: on several hosts it takes a mean over a first axis."""
        if workers.num_workers(self.distribute_strategy) == 1:
            return logs
        return {name: tf.expand_dims(value, 0) for name, value in logs.items()}

    def reset_metrics(self):
        """Starts the means of an epoch anew."""
        super().reset_metrics()
        if self._run.released is not None:
            self._run.released.reset()

    def gradient_plan(self):
        """Prints, and returns as a `GradientPlan`, how each weight's gradients are clipped.

        Per weight: the layer's rule, the form in which norms are found, multiplications and floats
        per example; and which engine was chosen, and why. Known once the model has met data: after
        `fit` or `train_on_batch` began, or, for models with known inputs, after `compile`.

        Raises:
            ValueError: where the model is not compiled, or nothing tells the form of its inputs.
        """
        self._assert_compile_called("gradient_plan")
        if self._run.plan is None:
            inputs = functional_inputs(self.model)
            if inputs is None:
                raise ValueError(
                    "gradient_plan: the form of the inputs of this model is not known yet; call "
                    "it after training has begun."
                )
            spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), inputs)
            # Forms depend on the layers alone; a loss needs labels, whose form is not known yet.
            _, plan = gradients.make_engine(
                self.model,
                None,
                jit_compile=self._engine_jit(),
                gradient_engine=self.gradient_engine,
                element_spec=(spec, None, None),
                microbatch_size=self.optimizer.microbatch_size,
            )
        else:
            plan = self._run.plan
        print(plan)
        return plan

    @property
    def ledger(self):
        """The `PrivacyLedger` of everything that was released about these weights.

        One ledger for all DPModels that have a privately trained variable in common, frozen or not.
        """
        self._look_for_changes()
        return self._weights_ledger.of(self._ledger_carriers)

    @property
    def _ledger_carriers(self):
        """What is tagged with a ledger: the weights; and the inner model, whose weights may be made
        only after a ledger was restored for them."""
        return [self.model, *self.weights]

    def take_chiefs_ledger(self, strategy):
        """On several hosts: the chief's ledger in place of this one, with the chief's weights."""
        text = workers.bytes_from_chief(strategy, self.ledger.to_json().encode())
        if workers.worker_number(strategy) > 0:
            self._weights_ledger.replace(
                self._ledger_carriers, PrivacyLedger.from_json(text.decode())
            )
        self._run.meet(self.optimizer)

    @property
    def step_law(self):
        """The sampling law of the running or last training."""
        return self._run.law

    def announced_ledger(self, steps):
        """The ledger as it will be `steps` steps of the running training from now."""
        ledger, run = self.ledger.announced(), self._run
        # In the portions in which they will be charged, so that entries begin at the same steps.
        portion = steps if run.law.lots_per_pass == 1 else self.steps_per_execution
        for taken in range(0, steps, portion):
            self.optimizer.charges.announce(
                ledger,
                run.law,
                min(portion, steps - taken),
                position=run.position + taken,
                reproducible_sampling=run.reproducible_sampling,
            )
        return ledger

    @property
    def fit_callbacks(self):
        """The callbacks of the running `fit`; none outside of it."""
        return self._run.callbacks

    @property
    def step_event(self):
        """The privacy event of one of its steps, or passes; see `SamplingLaw.event`."""
        return self.optimizer.event(self._run.law)

    def affordable_steps(self, events):
        """For how many further steps of it `events` times `step_event` are enough."""
        return self._run.law.affordable_steps(events, self._run.position)

    def epsilon(self, delta, accountant="rdp"):
        """ε of everything released so far at this δ; see `accounting.PrivacyLedger.epsilon`.

        Raises:
            ValueError: where a release was not charged, or its sampling law or the history of the
                weights is unknown.
        """
        ledger = self.ledger
        self._check_iterations()
        if not ledger.unknown_reasons:
            uncharged = uncharged_releases(self.weights)
            if uncharged:
                raise ValueError(
                    UNCHARGED.format(uncharged)
                    + ": call `model.optimizer.charge(model.ledger, law)` before every "
                    "`apply_private`, with the law that the lots were drawn by."
                )
            # Steps are charged with the law of their lots; other releases, as DPPCA's, have none.
            charged = sum(entry.count for entry in ledger.entries if entry.law is not None)
            if self.compiled and self.optimizer.steps_taken > charged:
                raise ValueError(
                    f"The optimizer took {self.optimizer.steps_taken} steps, and the ledger "
                    f"knows of {charged}: its state was restored without the ledger. "
                    "Restore with `load_weights` or `load_model`, which keep them together."
                )
        return ledger.epsilon(delta, accountant)

    def set_weights(self, weights):
        """Sets the weights; outside of `fit`, their history is unknown from then on.

        Callbacks that go back to earlier weights of the same run are fine. Public weights belong
        into the plain model: `model.model.set_weights(weights)`.
        """
        if not self._run.active:
            self.ledger.mark_unknown(
                "set_weights was called on the DPModel, so what its weights cost is unknown. Put "
                "public weights into the plain model, `model.model.set_weights`"
            )
            self._weights_ledger.keep(self._ledger_carriers)
        super().set_weights(weights)

    def set_state_tree(self, state_tree):
        """Sets all state as Keras does; of the weights the history is unknown from then on."""
        if not self._run.active:
            self.ledger.mark_unknown(
                "set_state_tree was called on the DPModel (Orbax checkpoints do): the tree has no "
                "ledger, so what its weights cost is unknown. Use `save` and `load_model`, or "
                "`save_weights` and `load_weights`"
            )
            self._weights_ledger.keep(self._ledger_carriers)
        super().set_state_tree(state_tree)

    def save(self, filepath, overwrite=True, zipped=None, **kwargs):
        """Saves as Keras does; a local file is replaced whole, see `tf_adadp.persistence.files`.

        Raises:
            ValueError: for Keras's legacy format, a single .h5 file, which cannot hold the ledger.
        """
        saving.refuse_legacy_format(filepath)
        with saving.whole_file(filepath, overwrite, zipped is not False) as path:
            super().save(path, overwrite=overwrite, zipped=zipped, **kwargs)

    def save_weights(self, filepath, overwrite=True, **kwargs):
        """Saves weights, optimizer state and ledger as Keras does; a local file is replaced whole.

        So `ModelCheckpoint` and `BackupAndRestore` leave the last file or the new one, and no half
        one, wherever they are killed.
        """
        single = kwargs.get("max_shard_size") is None  # an argument of newer Keras
        with saving.whole_file(filepath, overwrite, single) as path:
            super().save_weights(path, overwrite=overwrite, **kwargs)

    def load_weights(self, filepath, **kwargs):
        """Loads weights with their ledger; without one, `epsilon` refuses from then on.

        Raises:
            OSError: the file is missing or damaged. Nothing was loaded, or changed, then.
            ValueError: the file is about other weights, or another optimizer, than this model's.
        """
        saving.check_whole(filepath)
        if self.compiled and self.model.built and not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)  # or its state would be passed by
        self._run.ledger_loaded = False
        try:
            super().load_weights(filepath, **kwargs)
        except ValueError as error:
            if _NO_LEDGER not in self.ledger.unknown_reasons:
                raise
            raise ValueError(
                f"{filepath} does not fit this DPModel. If it has the weights of a plain model, "
                "public ones, load them into the plain model, `model.model.load_weights`."
            ) from error
        finally:
            if not self._run.ledger_loaded:
                self.ledger.mark_unknown(_NO_LEDGER)
            self._weights_ledger.keep(self._ledger_carriers)
            self._run.meet(self._run.optimizer)

    def stored_ledger(self):
        """The ledger as JSON, as it is kept beside saved weights."""
        self._weights_ledger.close_uncharged(self._ledger_carriers)
        return self.ledger.to_json()

    def save_own_variables(self, store):
        """Writes the ledger beside the weights."""
        super().save_own_variables(store)
        store["ledger"] = np.frombuffer(self.stored_ledger().encode(), np.uint8)

    def load_own_variables(self, store):
        """Merges the stored ledger into this one; weights of unknown history fail closed."""
        try:
            text = np.asarray(store["ledger"]).tobytes().decode()
        except KeyError:
            self._run.met = None
            forget_left(self.weights)
            self.ledger.mark_unknown(_NO_LEDGER)
            self._weights_ledger.keep(self._ledger_carriers)
        else:
            self.take_over(text)
        self._run.ledger_loaded = True

    def take_over(self, text):
        """Merges the ledger of weights that are being loaded; a damaged one fails closed."""
        self._run.met = None  # the optimizer's state comes with them
        forget_left(self.weights)
        try:
            self.ledger.merge(PrivacyLedger.from_json(text), same_data=True)
        except ValueError as error:
            self._run.ledger_loaded = True
            self.ledger.mark_unknown(f"the ledger of the loaded weights is damaged: {error}")
            raise
        finally:
            self._weights_ledger.keep(self._ledger_carriers)

    def save_private_state(self, path):
        """Moves the noise and lot keys of this run into a file, for one continuation of it.

        With weights, optimizer state and ledger saved at the same time, the run that loads all of
        it goes on bit by bit as this one would have (on the same machine and libraries). Without
        it, a resumed run draws new noise and new lots, which costs nothing and hides more: use it
        where a run must be reproduced, not to survive crashes.

        The file is as secret as the data: who reads it can subtract the noise of past releases, and
        tell their lots. It is made with mode 0600. This model goes on under NEW keys, so that no
        noise is drawn twice; see `load_private_state`.

        Args:
            path: a file that does not exist. Save the weights apart from it, in the same state.

        Raises:
            FileExistsError: path exists; links are not followed. No key was changed.
            RuntimeError: while `fit` runs, whose lots are drawn ahead.
            ValueError: not compiled or trained; seeded, which needs no such file; or a release was
                not charged.
            OSError: the file cannot be written, or this system has no file modes (Windows).
        """
        self._refuse_nested("save_private_state")
        self._assert_compile_called("save_private_state")
        private_state.save(self, self._run.lots, path)

    def load_private_state(self, path):
        """Takes up the keys that `save_private_state` wrote, and deletes the file.

        Load the weights first. The next `fit` continues the lots: give it the data, and sampling
        arguments, of the run that was saved. The file can be loaded ONCE, it is gone, durably,
        before any key is taken up: two runs under one set of keys would draw the same noise, and
        their releases together would show what it hid. Nothing can keep a COPY of the file, of
        whatever kind (a backup, a snapshot of the disk or the machine, `cp`), from being loaded as
        well. Do not make one; keep the file out of what is backed up.

        Raises:
            FileNotFoundError: there is no such file; it may have been loaded before.
            RuntimeError: while `fit` runs.
            ValueError: the file was altered, can be read by others, is a link, or is about another
                optimizer, number of steps or ledger than this model has. It is left as it was.
        """
        self._refuse_nested("load_private_state")
        self._assert_compile_called("load_private_state")
        self._run.resumed_lots = private_state.load(self, path)
        self._run.lots = None
        self._run.meet(self.optimizer)

    def export(self, filepath, *args, **kwargs):
        """Exports the inner model for serving, as Keras does: it needs no tf_adadp."""
        return self.model.export(filepath, *args, **kwargs)

    def get_config(self):
        """The arguments of the constructor."""
        saving.refuse_legacy_format()
        return {
            "name": self.name,
            "model": keras.saving.serialize_keras_object(self.model),
            "physical_batch_size": self.physical_batch_size,
            "gradient_engine": self.gradient_engine,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """The model that `get_config` described."""
        saving.refuse_legacy_format()
        config = dict(config)
        config["model"] = keras.saving.deserialize_keras_object(
            config["model"], custom_objects=custom_objects
        )
        return cls(**config)

    def _prepare(self, element_spec):
        """Builds and checks model, loss, metrics, optimizer and engine, before anything is trained.

        Args:
            element_spec: TensorSpecs of an ordinary batch, `(x, y, sample_weight)`.
        """
        replicas.check_strategy(self.model, self.distribute_strategy)
        kept_alone = self.optimizer.kept_on_one_device
        if self.distribute_strategy.num_replicas_in_sync > 1 and kept_alone:
            raise ValueError(
                f"{kept_alone} trains on one device: its branches cannot wait for other replicas. "
                f"Train it without {type(self.distribute_strategy).__name__}."
            )
        if replicas.is_strategy(self.distribute_strategy) and self.steps_per_execution > 1:
            raise ValueError(
                f"steps_per_execution={self.steps_per_execution} under "
                f"{type(self.distribute_strategy).__name__}: TensorFlow cannot run Keras's loop "
                "over several steps there. Compile with 1."
            )
        replicas.check_microbatches(self.distribute_strategy, self.optimizer.microbatch_size)
        with self.distribute_strategy.scope():
            self._prepare_under(element_spec)

    def _prepare_under(self, element_spec):
        """`_prepare`, under the strategy."""
        validation.check_layers(self.model)
        self._check_unchanged()
        if self._run.engine is not None:
            self._run.layer_settings.check_unchanged()
            self._weights_ledger.share(self._ledger_carriers, self.trainable_variables)
            return
        probe = tf.nest.map_structure(
            lambda s: (
                None
                if s is None
                else keras.KerasTensor((gradients.PROBE_BATCH, *s.shape[1:]), dtype=s.dtype.name)
            ),
            element_spec,
        )
        x, y, sample_weight = probe
        if y is None and self._compile_loss is not None:
            raise ValueError("y=None: the compiled loss needs labels; pass y.")
        validation.check_labels(y)
        self._symbolic_build(data_batch=(x, y, sample_weight))
        y_pred = self._run.y_pred = compute_output_spec(self.model, x)
        if self._compile_loss is not None:
            gradients.check_reduces_no_batch(self._compile_loss, y, y_pred)
        validation.check_weights(self.model)
        validation.check_metric_names(self.get_metrics_result())
        # Also where it was built before: it must have been for these very variables.
        self.optimizer.build(self.trainable_variables)
        self.optimizer.bind(self.model, self._compile_loss)
        engine, self._run.plan = gradients.make_engine(
            self.model,
            self._compile_loss,
            jit_compile=self._engine_jit(),
            gradient_engine=self.gradient_engine,
            element_spec=element_spec,
            microbatch_size=self.optimizer.microbatch_size,
            augmentation_multiplicity=self.optimizer.augmentation_multiplicity,
            max_rows=self.physical_batch_size,
        )
        if self._released_metrics is not None:
            y_spec, y_pred_spec, weight_spec = tf.nest.map_structure(
                lambda t: None if t is None else tf.TensorSpec((None, *t.shape[1:]), t.dtype),
                (y, y_pred, sample_weight),
            )
            self._run.released = LotMetrics(
                self._released_metrics,
                self._compile_metrics,
                (y_spec, y_pred_spec, weight_spec),
                self.optimizer.seed,
                self.optimizer.secure_noise,
            )
        if not replicas.is_strategy(self.distribute_strategy):
            validation.warn_of_mixing(self.model, element_spec, self._compile_loss)
        self._run.engine = engine
        self._run.layer_settings = validation.LayerSettings(self.model)
        self._weights_ledger.share(self._ledger_carriers, self.trainable_variables)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        # Under a strategy Keras builds from the first batch, and drops it: that would be a lot.
        if self._run.engine is None:
            super()._maybe_symbolic_build(iterator, data_batch)

    def _engine_jit(self):
        return False if self.run_eagerly else self._body_jit_compile

    def _physical_batch_size(self, expected_size):
        """B: rows of a lot come in multiples of it.

        For the plain engine: given, or what fits the memory bound, and no larger than a typical
        lot. The ghost engine puts as many together as it works on at once; a small divisor of that
        wastes fewer rows on padding.
        """
        given = self.physical_batch_size
        if self._run.engine.joins_batches:
            return next(d for d in range(_PADDING, 0, -1) if given is None or given % d == 0)
        if given is not None:
            return given
        scalars = sum(math.prod(v.shape) for v in self.trainable_variables)
        fits = max(1, _PER_EXAMPLE_BYTES // (4 * max(1, scalars)))
        return int(min(fits, _MAX_PHYSICAL_BATCH, math.ceil(expected_size)))

    def _check_unchanged(self):
        """Raises where something that the graphs were traced with is not what it was."""
        validation.check_trainable_state(self._run.trainable_state)
        if self.optimizer is not self._run.optimizer:
            raise ValueError(
                "The optimizer was replaced after compile. Call compile with the new one."
            )
        if self.steps_per_execution != self._run.steps_per_execution:
            raise ValueError(
                f"steps_per_execution was changed after compile, from "
                f"{self._run.steps_per_execution} to {self.steps_per_execution}, and the traced "
                "graph takes the old number. Call compile with the new one."
            )
        if self.optimizer.metrics_noise_multiplier != self._run.metrics_noise_multiplier:
            raise ValueError(
                "The optimizer was compiled with other released_metrics since, by another DPModel, "
                "and would charge for those. Call compile again."
            )

    def _check_iterations(self):
        """Fails closed where the optimizer's steps changed and no step was made or loaded."""
        met, optimizer = self._run.met, self._run.optimizer
        if met is None or optimizer is None or met[0] != optimizer._noise_key.releases:
            return
        if met[1] != optimizer.steps_taken:
            self.ledger.mark_unknown(_RESTORED.format(optimizer.steps_taken, met[1]))
            self._run.meet(optimizer)

    def _refuse_nested(self, method):
        if self._run.active:
            raise RuntimeError(
                f"{method} was called while fit runs (from a callback?): it would change the "
                "sampling law that the running fit is charged by."
            )

    @property
    def _logs_raw_metrics(self):
        asked = self._log_raw_metrics
        return self._released_metrics is None if asked is None else asked

    def _warn_of_raw_metrics(self):
        """Once per model, where raw metrics are logged and nobody said so."""
        if self._log_raw_metrics is None and self._logs_raw_metrics:
            if not self._warned_of_raw_metrics:
                warnings.warn(_RAW_METRICS, RawMetricsWarning, stacklevel=3)
            self._warned_of_raw_metrics = True

    def _on_batch(self, *batch):
        """What engines call with every physical batch; see their `clipped_sum`."""
        with no_index_stops():
            if self._logs_raw_metrics:
                self._update_metrics(*batch)
            if self._run.released is not None:
                self._run.released.add(*batch)

    def _update_metrics(self, y, y_pred, sample_weight, mask, losses):
        """Feeds real rows to the metrics: raw statistics, for the logs only, not covered by ε."""
        real = mask > 0
        y, y_pred, sample_weight = tf.nest.map_structure(
            lambda t: None if t is None else tf.boolean_mask(t, real), (y, y_pred, sample_weight)
        )
        if self._compile_loss is not None and self._compile_loss.metrics:
            gradients.without_state(self._compile_loss)(y, y_pred, sample_weight)
        self.compute_metrics(None, y, y_pred, sample_weight)


def load_model(filepath, custom_objects=None, compile=True, safe_mode=True):
    """`keras.saving.load_model` for files that hold a `DPModel`; it draws new noise keys."""
    return keras.saving.load_model(
        filepath, custom_objects=custom_objects, compile=compile, safe_mode=safe_mode
    )
