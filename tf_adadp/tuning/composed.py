"""Makes KerasTuner tuners charge all of their trials."""

import os
from typing import Any

import keras

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.model import DPModel
from tf_adadp.utils.checks import check_instance

_EARLIER = (
    "the KerasTuner project has trials of a search that kept no ledger, so what they cost is "
    "unknown. Give the tuner overwrite=True or another project_name"
)
_ONE_BUDGET = (
    "target_epsilon={} in a model of a ComposedTuner: all trials have one ledger, so the first one "
    "would spend it. Compile without it, with the noise_multiplier that is enough for the steps of "
    "all trials, ledger.calibrate_noise_multiplier(target_epsilon, delta, law, steps); "
    "PrivacyCallback(delta, max_epsilon=...) among the callbacks of `search` holds them to it"
)


class ComposedTuner:
    """Makes a KerasTuner tuner charge all trials to the ledger of every model that it returns.

        class Tuner(dp.tuning.ComposedTuner, keras_tuner.BayesianOptimization):
            pass

        tuner = Tuner(build, objective="val_accuracy", max_trials=10, directory="runs")
        tuner.search(x, y, batch_size=128, epochs=5, validation_data=(x_val, y_val))
        model = tuner.get_best_models()[0]
        model.epsilon(1e-5)                    # of all ten trials

    `build` is `HyperParameters` ↦ a compiled `DPModel`. Derive from this class first. Any tuner
    will do: RandomSearch, BayesianOptimization, GridSearch, Hyperband, which trains some models
    further, and subclasses; several executions per trial, too. `PrivacyCallback(delta,
    max_epsilon=…)` among the callbacks of `tuner.search` holds all trials together to a budget.

    Guarantee: all models of the search share one ledger, `tuner.ledger`, which every trial charges
    before it releases, failed ones too. Its ε is that of the sequential composition of all
    trials, for the neighbouring relation of their lots: so the tuner may adapt, and all models,
    scores and hyper-parameters of the search may be looked at. Ten equal trials cost ten times the
    releases. Searching by `tuning.search` costs less for many trials, and shows only one.

    NOT covered: validation records, by which trials are compared; and raw training metrics, which
    `fit` refuses as objective.

    The ledger is saved in the tuner's project before every checkpoint, and a tuner that goes on
    with the project goes on with it. A process that is killed loses the charges of the epoch
    that was running, or of the trial where the hypermodel has a `fit` that passes no callbacks on;
    nothing else of them remains. Models that you build by yourself from `get_best_hyperparameters`
    were chosen by the search, too: build them by `tuner.hypermodel.build`, or give them the ledger,
    `DPModel(model, ledger=tuner.ledger)`.

    Attributes:
        ledger: the `PrivacyLedger` of the search.
        charges_every_trial: tells `DPModel.fit` that ε is that of all trials.

    Raises:
        TypeError: the hypermodel builds something else than a DPModel.
        ValueError: there is no hypermodel; it compiles its models with a budget, which is for one
            training; or the search is a parallel one, in several processes.

    Example:
        >>> import keras_tuner
        >>> class Tuner(dp.tuning.ComposedTuner, keras_tuner.RandomSearch):
        ...     "Charges all trials of a random search."
        ...
        >>> Tuner.charges_every_trial
        True
    """

    charges_every_trial = True
    ledger: PrivacyLedger

    def __init__(self, *args: Any, **kwargs: Any):
        if "KERASTUNER_ORACLE_IP" in os.environ:
            raise ValueError(
                "ComposedTuner with KERASTUNER_ORACLE_IP: each of several processes would charge "
                "its own trials only. Search in one process."
            )
        self.ledger = PrivacyLedger()
        super().__init__(*args, **kwargs)
        if self.hypermodel is None:
            raise ValueError(
                "hypermodel=None: ComposedTuner charges the models that hypermodel.build returns. "
                "Give a function or a HyperModel that builds a DPModel."
            )

    @property
    def hypermodel(self) -> Any:
        """Returns the hypermodel; the models that it builds have the ledger of the search."""
        return self._joining

    @hypermodel.setter
    def hypermodel(self, hypermodel: Any) -> None:
        self._joining = None if hypermodel is None else _Joining(hypermodel, self.ledger)

    def get_state(self) -> dict[str, Any]:
        """Returns the tuner's state for its project, with the ledger."""
        return {**super().get_state(), "privacy_ledger": self.ledger.to_json()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on with a project; one without a ledger fails closed."""
        super().set_state(state)
        if "privacy_ledger" in state:
            stored = PrivacyLedger.from_json(state["privacy_ledger"])
            self.ledger.merge(stored, same_data=True)
        else:
            self.ledger.mark_unknown(_EARLIER)

    def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a trial, and saves the ledger also where a `fit` of the hypermodel's own fails."""
        try:
            return super().run_trial(trial, *args, **kwargs)
        finally:
            self.save()

    def on_epoch_end(
        self, trial: Any, model: keras.Model, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Saves the ledger; KerasTuner writes its checkpoint of the epoch afterwards."""
        super().on_epoch_end(trial, model, epoch, logs=logs)
        self.save()


class _Joining:
    """A hypermodel whose models all have one ledger."""

    def __init__(self, hypermodel: Any, ledger: PrivacyLedger):
        self._hypermodel, self._ledger = hypermodel, ledger

    def build(self, *args: Any, **kwargs: Any) -> DPModel:
        """Builds a model and unites its ledger with that of the search."""
        model = self._hypermodel.build(*args, **kwargs)
        check_instance("what the hypermodel built", model, DPModel, "a compiled DPModel")
        if model.compiled and model.session.compiled.budget is not None:
            raise ValueError(_ONE_BUDGET.format(model.session.compiled.budget.target_epsilon))
        self._ledger.unite(model.ledger)
        return model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hypermodel, name)
