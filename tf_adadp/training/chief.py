"""Gives all hosts the chief's state when a `fit` begins on several of them."""

import hashlib
import json

import keras
import numpy as np

from tf_adadp.distribution import workers
from tf_adadp.utils.keras_compat import first_epoch, set_first_epoch


def privacy_arguments(model: keras.Model) -> dict[str, int]:
    """Returns {name: hash} of a running `fit`'s privacy settings, equal for equal settings.

    The hashes have 48 bits, which float64 holds exactly. The learning rate comes from the chief.
    """
    config = model.optimizer.get_config()
    shown = {k: v for k, v in config.items() if k not in ("name", "learning_rate")}
    privacy = [c for c in model.session.callbacks if getattr(c, "reports_privacy", False)]
    budgets = [(str(c.target_delta), str(c.max_epsilon), c.accountant) for c in privacy]
    return {
        "sampling law, hashed": _hashed(model.step_law.to_config()),
        "optimizer's arguments, hashed": _hashed([type(model.optimizer).__name__, shown]),
        "released_metrics, hashed": _hashed(model.session.compiled.released_metrics),
        "budgets of PrivacyCallbacks, hashed": _hashed(budgets),
        "trainable weights, hashed": _hashed([list(v.shape) for v in model.trainable_variables]),
    }


def _hashed(value):
    serialized = keras.saving.serialize_keras_object(value)
    # Values without a JSON form may print differently in each process.
    text = json.dumps(serialized, sort_keys=True, default=lambda v: type(v).__name__)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


class ShareChiefsState(keras.callbacks.Callback):
    """Gives all workers the chief's state when training begins, after callbacks that restore.

    The state is: weights, optimizer state, ledger, new noise keys and the first epoch. All workers
    must clip, add noise and stop alike, since each charges by its own arguments, and all contribute
    to every step.
    """

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Checks that all workers train alike, and shares the state."""
        model, strategy = self.model, self.model.distribute_strategy
        variables = [*model.variables, *model.optimizer.variables]
        variables = list({id(v): v for v in variables}.values())
        workers.check_alike(
            strategy,
            variables=len(variables),
            steps_per_execution=model.steps_per_execution,
            **privacy_arguments(model),
        )
        chief = workers.worker_number(strategy) == 0
        values = workers.from_chief(strategy, [v.numpy() for v in variables])
        if not chief:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        model.session.take_chiefs_ledger()
        workers.check_alike(strategy, releases=model.optimizer.releases)
        model.optimizer.renew_keys(lambda key: workers.from_chief(strategy, [key])[0])
        epoch = workers.from_chief(strategy, [np.array(first_epoch(model), np.int64)])[0]
        set_first_epoch(model, int(epoch))
        for callback in model.session.callbacks:
            if getattr(callback, "reports_privacy", False):
                callback.share_budget(lambda value: workers.from_chief(strategy, [value])[0])
