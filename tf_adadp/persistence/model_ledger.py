"""The ledger of a DPModel: saved and restored with its weights, and checked against them."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.persistence.changed_weights import (
    forget_left,
    note_changes,
    remember_left,
    remember_loaded,
)
from tf_adadp.persistence.weights_ledger import UNCHARGED, WeightsLedger, uncharged_releases

_RESTORED = (
    "the optimizer's state was restored without the ledger, it says {} steps after {}. Restore by "
    "`load_weights`, `load_model` or tf.train.Checkpoint(model=<the DPModel>), which keep them "
    "together"
)
_NO_LEDGER = (
    "the weights were loaded from a file without a ledger, so what they cost is unknown. Load "
    "public weights into the plain model, `model.model.load_weights`"
)
_CHOSEN = (
    "the file was saved inside of a fit whose ModelCheckpoint keeps the best one: if later steps "
    "decided that it stayed, they belong to its cost, which is epsilon of the whole training"
)


class ModelLedger:
    """Holds the ledger of one `DPModel`'s weights, and the last state of weights and optimizer.

    Weights, optimizer state and ledger belong together. Where one of them comes without the
    others, the ledger says that its history is unknown, and `epsilon` refuses to report.

    Args:
        model: the `DPModel`.
        ledger: the earlier cost of its weights, as the user gives it; None for a new ledger.
    """

    def __init__(self, model: keras.Model, ledger: PrivacyLedger | None = None):
        self._model = model
        self._of_weights = WeightsLedger(model.model, ledger)
        self._training = False
        self._saved_with: str | None = None  # a reason for files that are saved while fit runs
        self._loaded = False  # whether the file that is being loaded had a ledger
        self._optimizer: Any = None
        self._budget: Any = None  # of `compile`
        self._met: tuple[int, int] | None = None  # releases and steps of the optimizer

    @property
    def last(self) -> PrivacyLedger:
        """Returns the ledger as it was found last; enough while nothing else trains."""
        return self._of_weights.last

    def current(self) -> PrivacyLedger:
        """Returns the ledger, with a note where something else changed the weights."""
        ledger = self._of_weights.current()
        if not self._training:
            note_changes(self._model.weights, ledger)
        return ledger

    def share(self) -> None:
        """Attaches the ledger to the weights that are about to be trained."""
        self._of_weights.share(self._model.trainable_variables)

    def close_uncharged(self) -> None:
        """Records releases that were not charged, where they would be forgotten."""
        self._of_weights.close_uncharged()

    @contextlib.contextmanager
    def training(self, callbacks: Iterable[keras.callbacks.Callback] = ()) -> Iterator[None]:
        """Lets private training run in the `with` block; its changes of the weights are known.

        Args:
            callbacks: those of the `fit`; one of them may choose which file stays.
        """
        self.current()
        self._training = True
        chosen = any(getattr(callback, "save_best_only", False) for callback in callbacks)
        self._saved_with = _CHOSEN if chosen else None
        try:
            yield
        finally:
            self._training, self._saved_with = False, None
            remember_left(self._model.trainable_variables)

    def note_replaced(self, reason: str) -> None:
        """Records that weights without a history are put in, unless a callback of `fit` does it."""
        if not self._training:
            self.current().mark_unknown(reason)
            self._of_weights.keep()

    def replace(self, ledger: PrivacyLedger) -> None:
        """Attaches another ledger in place of this one: that of the chief, of several hosts."""
        self._of_weights.replace(ledger)

    def paid_by(self, ledger: PrivacyLedger) -> None:
        """Attaches a ledger that covers all releases about these weights, and replaces others."""
        self._of_weights.paid_by(ledger)

    def follow(self, optimizer: Any, budget: Any) -> None:
        """Follows the steps of a compiled optimizer; its budget gives `epsilon` its defaults."""
        self._optimizer, self._budget, self._met = optimizer, budget, None

    def meet(self) -> None:
        """Remembers the optimizer's steps, to see state that is put in from outside."""
        if self._optimizer is not None:
            self._met = self._optimizer.releases, self._optimizer.steps_taken

    def check_restored(self) -> None:
        """Marks the history unknown where steps changed, and none was made or loaded."""
        if self._met is None or self._met[0] != self._optimizer.releases:
            return
        if self._met[1] != self._optimizer.steps_taken:
            reason = _RESTORED.format(self._optimizer.steps_taken, self._met[1])
            self.current().mark_unknown(reason)
            self.meet()

    def epsilon(self, delta: float | None, accountant: str | None) -> float:
        """Returns ε of everything released so far; see `DPModel.epsilon`."""
        default = "rdp"
        if delta is None:
            if self._budget is None:
                raise ValueError(
                    "delta is missing, and compile got no target_delta: give one below 1/N for N "
                    "records, e.g. epsilon(1e-5)."
                )
            delta, default = self._budget.target_delta, self._budget.accountant
        return self.checked().epsilon(delta, default if accountant is None else accountant)

    def checked(self) -> PrivacyLedger:
        """Returns the ledger, once every release about the weights is known to be in it.

        Raises:
            ValueError: a release or a step was not charged.
        """
        ledger = self.current()
        self.check_restored()
        if not ledger.unknown_reasons:
            self._check_charged(ledger)
        return ledger

    def _check_charged(self, ledger):
        """Refuses releases and steps that are not in the ledger."""
        uncharged = uncharged_releases(self._model.weights)
        if uncharged:
            raise ValueError(
                UNCHARGED.format(uncharged)
                + ": call `model.optimizer.charge(model.ledger, law)` before every "
                "`apply_private`, with the law that the lots were drawn by."
            )
        # Steps are charged with the law of their lots; other releases, as DPPCA's, have none.
        charged = sum(entry.steps for entry in ledger.entries if entry.law is not None)
        steps = self._model.optimizer.steps_taken if self._model.compiled else 0
        if steps > charged:
            raise ValueError(
                f"The optimizer took {steps} steps, and the ledger has {charged}: the optimizer's "
                "state was restored without the ledger. Restore with `load_weights` or "
                "`load_model`, which keep them together."
            )

    def to_json(self) -> str:
        """Returns the ledger as JSON, as it is saved with weights."""
        self.close_uncharged()
        ledger = self.current()
        if self._saved_with is not None:
            ledger = copy.deepcopy(ledger)
            ledger.mark_odometer(self._saved_with)
        return ledger.to_json()

    def save_to(self, store: MutableMapping[str, Any]) -> None:
        """Writes the ledger into the part of a Keras file that belongs to the model."""
        store["ledger"] = np.frombuffer(self.to_json().encode(), np.uint8)

    def load_from(self, store: MutableMapping[str, Any]) -> None:
        """Merges the stored ledger into this one; weights without a ledger fail closed."""
        try:
            text = np.asarray(store["ledger"]).tobytes().decode()
        except KeyError:
            self._forget()
            self.current().mark_unknown(_NO_LEDGER)
            self._of_weights.keep()
        else:
            self.take_over(text)
        self._loaded = True

    def take_over(self, text: str) -> None:
        """Merges the ledger of weights that are being loaded; a damaged one fails closed.

        Raises:
            ValueError: the ledger is damaged.
        """
        self._forget()
        try:
            self.current().merge(PrivacyLedger.from_json(text), same_data=True)
        except ValueError as error:
            self._loaded = True
            self.current().mark_unknown(f"the ledger of the loaded weights is damaged: {error}")
            raise
        finally:
            self._of_weights.keep()

    @contextlib.contextmanager
    def loading(self, path: Any) -> Iterator[None]:
        """Lets Keras load a file in the `with` block; one without a ledger fails closed."""
        self._loaded = False
        try:
            yield
        except ValueError as error:
            if _NO_LEDGER not in self.current().unknown_reasons:
                raise
            raise ValueError(
                f"{path} does not fit this DPModel. If it has the weights of a plain model, "
                "public ones, load them into the plain model, `model.model.load_weights`."
            ) from error
        else:
            remember_loaded(self._model)
        finally:
            if not self._loaded:
                self.current().mark_unknown(_NO_LEDGER)
            self._of_weights.keep()
            self.meet()

    def _forget(self):
        """Forgets weights and steps that were seen: others are being loaded."""
        self._met = None
        forget_left(self._model.weights)


class LedgerState(tf.train.experimental.PythonState):
    """The ledger of a DPModel as part of a `tf.train.Checkpoint` that holds the model."""

    def __init__(self, ledger: ModelLedger):
        self._ledger = ledger

    def serialize(self) -> bytes:
        """Returns the ledger as bytes."""
        return self._ledger.to_json().encode()

    def deserialize(self, string_value: bytes) -> None:
        """Merges the ledger of a restored file into the model's."""
        self._ledger.take_over(string_value.decode())
