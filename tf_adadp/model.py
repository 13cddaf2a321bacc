"""Wraps any Keras model for training with differential privacy: `DPModel`."""

from typing import Any

import dp_accounting
import keras

from tf_adadp import validation
from tf_adadp.accounting import PrivacyLedger
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.distribution import workers
from tf_adadp.metrics import ReleasedMetrics
from tf_adadp.optimizers import DPOptimizer
from tf_adadp.persistence import files, trained_parts
from tf_adadp.persistence.saved_model import SavedWithLedger
from tf_adadp.persistence.weights_ledger import keep_in_copies
from tf_adadp.sampling.preprocessing import preprocessed
from tf_adadp.training import arguments
from tf_adadp.training.batch import batch_of
from tf_adadp.training.budget import Budget
from tf_adadp.training.chief import ShareChiefsState
from tf_adadp.training.compiled import Compiled
from tf_adadp.training.raw_records import TakesRawRecords
from tf_adadp.training.session import Session


@keras.saving.register_keras_serializable(package="tf_adadp")
class DPModel(SavedWithLedger, TakesRawRecords, keras.Model):
    """Wraps a Keras model so that `fit` trains it with differential privacy.

    One Keras "batch" is one lot: Poisson-sampled with the EXPECTED size `batch_size`, its gradients
    clipped example by example and summed, noised once, and charged to `ledger` before it runs.

    Guarantee: the weights, the optimizer's state and everything computed from them satisfy the
    (ε, δ) that `epsilon(delta)` reports, for the unit and the neighbouring relation of the lots
    (add or remove one record for Poisson lots, one user for `UserLots`). Not covered: training
    loss and metrics but those of `released_metrics`, validation data, the choice of
    hyper-parameters, the number and timing of lots.

    Args:
        model: a `keras.Model`: Sequential, functional or subclassed, built or not.
        physical_batch_size: the number of examples processed at once; sets memory, not privacy. By
            default the largest within a memory bound, see `gradient_plan`.
        gradient_engine: "ghost": norms and clipped sums without per-example gradients, at nearly
            the cost of ordinary training; "vectorized": per-example gradients by
            `tf.vectorized_map`; "auto": "ghost" wherever it can follow the model. Both give the
            same sums, up to rounding.
        ledger: a `PrivacyLedger` of the earlier releases about the weights, for histories that
            cannot be found: weights copied by `clone_model` and `set_weights`, read from a file of
            a plain model, or trained in another process. This model continues that ledger. None
            where the weights are new or public, and where they were trained by a DPModel, or by a
            custom loop that charged a ledger, in this process: that history is found.

    Raises:
        TypeError: model is not a plain `keras.Model`, or ledger not a `PrivacyLedger`.
        ValueError: where a layer mixes examples or keeps statistics of raw data.

    Example:
        >>> layers = [keras.Input((4,)), keras.layers.Dense(1)]
        >>> x, y = np.ones((100, 4)), np.ones((100, 1))
        >>> model = dp.DPModel(keras.Sequential(layers))
        >>> budget = {"target_epsilon": 2.0, "target_delta": 1e-3}
        >>> model.compile(dp.DPSGD(), "mse", log_raw_metrics=False, **budget)
        >>> history = model.fit(x, y, batch_size=20, epochs=3, verbose=0)  # lots of 20 on average
        noise_multiplier=1.6252 for 15 steps (Poisson sampling: each of 100 records enters a lot
        independently with probability 0.2 (expected lot size 20); these numbers are public):
        epsilon <= 2.0 at delta=0.001 (rdp).
        >>> print(f"{model.epsilon(delta=1e-3):.2f}")
        2.00
        >>> model.model.save("model.keras")  # the plain model, free of tf_adadp
    """

    def __init__(
        self,
        model: keras.Model,
        physical_batch_size: int | None = None,
        gradient_engine: str = "auto",
        ledger: PrivacyLedger | None = None,
        **kwargs: Any,
    ):
        arguments.check_model(model, physical_batch_size, gradient_engine)
        validation.check_layers(model)
        validation.check_overrides(model)
        super().__init__(**kwargs)
        self.model = model
        self.physical_batch_size = physical_batch_size
        self.gradient_engine = gradient_engine
        self._keep_ledger(ledger)
        self.session = Session(self, self._history)
        keep_in_copies(model)
        if model.built:
            self.built = True

    @property
    def output_names(self) -> list[str]:
        """Returns the inner model's output names: losses and metrics may be given per output."""
        names = getattr(self.model, "output_names", None)
        if names is None:
            raise AttributeError("output_names")
        return names

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Runs the inner model's forward pass."""
        return self.model(inputs, training=training)

    def build(self, input_shape: Any) -> None:
        """Marks the wrapper as built: it has no weights, and the inner model builds itself."""
        self.built = True

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints the inner model's summary."""
        return self.model.summary(*args, **kwargs)

    def compile(
        self,
        optimizer: DPOptimizer,
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str | None = "auto",
        auto_scale_loss: bool = True,
        released_metrics: ReleasedMetrics | None = None,
        log_raw_metrics: bool | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        accountant: str = "rdp",
    ) -> None:
        """Configures training. Arguments as in `keras.Model.compile`, with these differences.

        Args:
            optimizer: a private optimizer (an instance of `DPOptimizer`); no other is accepted.
            jit_compile: whether XLA compiles the work on one physical batch. "auto" chooses by the
                kinds of layers. The loop over physical batches is never compiled by XLA, since
                their number differs from lot to lot.
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
        compiled = Compiled.checked(
            optimizer=optimizer,
            released_metrics=released_metrics,
            log_raw_metrics=log_raw_metrics,
            jit_compile=jit_compile,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            layers=self._flatten_layers(),
            budget=Budget.checked(target_epsilon, target_delta, accountant),
        )
        validation.check_layers(self.model)
        self._history.close_uncharged()
        optimizer.charges.cover_metrics(compiled.metrics_noise_multiplier)
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
        self.session.compiled_with(compiled)

    def get_compile_config(self) -> dict[str, Any]:
        """Returns Keras's compile configuration, with the arguments that differ as given."""
        config = super().get_compile_config()
        return {**config, **self.session.compiled.config()} if config else config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles from a configuration of `get_compile_config`."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: float | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | list[int] = 1,
    ) -> keras.callbacks.History:
        """Trains with differential privacy. Arguments as in `keras.Model.fit`, with differences.

        Args:
            x: arrays (or a dict or list of them) with `y` and `batch_size`; a finite
                `tf.data.Dataset` with `batch_size`, which is read once into memory; or lots that
                carry their sampling law, any of `tf_adadp.sampling`. Raw records of a keras_hub
                task are preprocessed once, each independently; lots hold preprocessed records.
            batch_size: L, the expected lot size; required without lots, 1 ≤ L ≤ N. Every step draws
                each record with probability L/N. The batches of a dataset do not matter.
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
        self.session.refuse_nested("fit")
        arguments.check_fit(
            epochs=epochs,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            validation_data=validation_data,
            validation_batch_size=validation_batch_size,
            validation_steps=validation_steps,
            validation_freq=validation_freq,
        )
        callbacks = arguments.private_callbacks_first(callbacks)
        data = arguments.fit_data(
            x,
            y,
            model=self.model,
            batch_size=batch_size,
            sample_weight=sample_weight,
            class_weight=class_weight,
            validation_split=validation_split,
            validation_data=validation_data,
            optimizer=self.optimizer,
            strategy=self.distribute_strategy,
            verbose=bool(verbose),
        )
        lots = data.lots
        self.session.prepare(lots.element_spec)
        self.session.check_fit(data, callbacks)
        if steps_per_epoch is None:
            steps_per_epoch = lots.steps_per_epoch
        dataset, budgeted = self.session.start(lots, epochs, initial_epoch, steps_per_epoch)
        # Comes after the callbacks that restore state.
        if workers.num_workers(self.distribute_strategy) > 1:
            callbacks = [*callbacks, ShareChiefsState()]
        callbacks = [*callbacks, *budgeted]
        self.session.warn_of_raw_metrics()
        with self.session.running(callbacks):
            return super().fit(
                x=dataset,
                shuffle=False,
                epochs=epochs,
                verbose=verbose,
                callbacks=callbacks,
                validation_data=data.validation_data,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_batch_size=arguments.evaluation_batch_size(
                    validation_batch_size, validation_steps, batch_size, lots.num_examples
                ),
                validation_freq=validation_freq,
            )

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
        *,
        law: SamplingLaw | None = None,
    ) -> Any:
        """Takes one private step on a batch that the caller sampled.

        One call is one release, charged as if its batch was sampled for it. Two calls with the same
        batch cost more than they are charged for: sample a new batch for every call.

        Args:
            law: how the batch was sampled, e.g. `accounting.PoissonSampling(N, L)`; it is recorded
                as declared by you. Without it the step is charged as of unknown sampling, and
                `epsilon` refuses to report from then on.

        Other arguments and the result are those of `keras.Model.train_on_batch`.
        """
        self._assert_compile_called("train_on_batch")
        self.session.refuse_nested("train_on_batch")
        if self.distribute_strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"train_on_batch under {type(self.distribute_strategy).__name__}: give `fit` lots, "
                "which it splits over the replicas."
            )
        batch = batch_of(*preprocessed(self.model, x, y, sample_weight), class_weight, law)
        self.session.prepare(batch.element_spec)
        lot = self.session.start_batch(batch)
        self.make_train_function()
        self.reset_metrics()
        with self.session.running():
            logs = self.train_function(iter([lot]))
        logs = {name: float(value) for name, value in logs.items()}
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    def make_train_function(self, force: bool = False) -> None:
        """Makes Keras's train function, which charges the ledger before it runs."""
        if self.train_function is not None and not force:
            return
        super().make_train_function(force=True)
        self.train_function = self.session.charging(self.train_function)

    def train_step(self, lot: Any) -> dict[str, Any]:
        """Takes one step on one lot, or on a replica's share of one."""
        return workers.stacked(self.distribute_strategy, self.session.train_step(lot))

    def test_step(self, data: Any) -> dict[str, Any]:
        """Takes Keras's step of evaluation."""
        return workers.stacked(self.distribute_strategy, super().test_step(data))

    def reset_metrics(self) -> None:
        """Starts the means of an epoch anew."""
        super().reset_metrics()
        self.session.reset_metrics()

    def gradient_plan(self) -> Any:
        """Returns the `GradientPlan`, which tells how each weight's gradients are clipped.

        For each weight it holds the operation that combines it with the examples, the form of its
        norms, and the multiplications and floats per example. It also holds the chosen engine and
        the reason. It prints as a table. It is known after `fit` or `train_on_batch` began or, for
        models with known inputs, after `compile`.

        Raises:
            ValueError: where the model is not compiled, or the shapes of its inputs are not known.
        """
        self._assert_compile_called("gradient_plan")
        return self.session.gradient_plan()

    @property
    def step_law(self) -> SamplingLaw | None:
        """Returns the sampling law of the running or last training."""
        return None if self.session.run is None else self.session.run.law

    @property
    def step_event(self) -> dp_accounting.DpEvent:
        """Returns the privacy event of one of its steps, or passes; see `SamplingLaw.event`."""
        return self.session.step_event

    def save_private_state(self, path: Any) -> None:
        """Moves the noise and lot keys of this run into a file, for one continuation of it.

        Save weights, optimizer state and ledger at the same time. A run that loads all of them, and
        calls `fit` with the `initial_epoch` at which it is, continues exactly as this one would
        have, on the same machine and libraries. Without the keys, a resumed run draws new noise and
        new lots, which costs nothing and is safer: use the file to reproduce a run, not to survive
        crashes.

        The file is as secret as the data: its reader can subtract the noise of past releases, and
        reconstruct their lots. It is made with mode 0600. This model continues with NEW keys, so
        that no noise is drawn twice; see `load_private_state`.

        Args:
            path: a file that does not exist. Save the weights apart from it, in the same state.

        Raises:
            FileExistsError: path exists; links are not followed. No key was changed.
            RuntimeError: while `fit` runs, whose lots are drawn ahead.
            ValueError: the model is not compiled or trained; it is seeded, which needs no such
                file; or a release was not charged.
            OSError: the file cannot be written, or this system has no file modes (Windows).
        """
        self.session.refuse_nested("save_private_state")
        self._assert_compile_called("save_private_state")
        self.session.save_private_state(path)

    def load_private_state(self, path: Any) -> None:
        """Takes up the keys that `save_private_state` wrote, and deletes the file.

        Load the weights first. The next `fit` continues the lots: give it the data, and sampling
        arguments, of the run that was saved, and its epoch as `initial_epoch`. The file can be
        loaded ONCE: it is deleted, durably, before any key is used. Two runs with the same keys
        would draw the same noise, and their releases together would cancel the noise. A COPY of the
        file (a backup, a snapshot of the disk or the machine, `cp`) could still be loaded. Make no
        copy, and exclude the file from backups.

        Raises:
            FileNotFoundError: there is no such file; it may have been loaded before.
            RuntimeError: while `fit` runs.
            ValueError: the file was altered, can be read by others, is a link, or is about another
                optimizer, number of steps or ledger than this model has. It is left as it was.
        """
        self.session.refuse_nested("load_private_state")
        self._assert_compile_called("load_private_state")
        self.session.load_private_state(path)

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Exports the inner model for serving, as Keras does: it needs no tf_adadp."""
        return self.model.export(filepath, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        files.refuse_legacy_format()
        return {
            "name": self.name,
            **trained_parts.model_config(self.model),
            "physical_batch_size": self.physical_batch_size,
            "gradient_engine": self.gradient_engine,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "DPModel":
        """Makes a model from its `get_config`."""
        files.refuse_legacy_format()
        return cls(**trained_parts.with_model(config, custom_objects))

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        # Under a strategy Keras builds from the first batch and drops it, which would drop a lot.
        if self.session.prepared is None:
            super()._maybe_symbolic_build(iterator, data_batch)

    def _get_metrics_result_or_logs(self, logs):
        # Keras averages over all replicas only where a step logs metrics alone.
        metrics = self.get_metrics_result()
        return {name: metrics.get(name, value) for name, value in logs.items()}
