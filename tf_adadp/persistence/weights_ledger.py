"""Finds the one ledger of a set of weights, whichever models and loops train them."""

import copy
from collections.abc import Sequence
from typing import Any

import keras

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.persistence.changed_weights import forget_left, note_changes
from tf_adadp.utils.attached import (
    CHARGED_LEDGERS,
    COPY,
    LEDGER,
    OPTIMIZERS,
    attach,
    attached,
    detach,
)
from tf_adadp.utils.checks import check_instance

UNCHARGED = "{} releases of the optimizer were not charged"


class WeightsLedger:
    """The ledger of everything that was released about the weights of a model.

    It is attached to every variable that was trained privately, and to every one that was loaded
    with a history. So all models that have one of them in common, frozen or not, report what all of
    them released. It is attached to the model as well, whose weights may be made only after a
    ledger was restored for them.

    Args:
        model: the plain `keras.Model`.
        ledger: the earlier cost of its weights, as the user gives it; None for a new ledger.

    Attributes:
        last: the ledger as it was found last; enough while nothing else trains.
    """

    last: PrivacyLedger

    def __init__(self, model: keras.Model, ledger: PrivacyLedger | None = None):
        wanted = "a tf_adadp.PrivacyLedger, or None"
        check_instance("ledger", ledger, PrivacyLedger | None, wanted)
        self._model = model
        self.last = PrivacyLedger() if ledger is None else ledger
        if ledger is not None:
            self.keep()

    def current(self) -> PrivacyLedger:
        """Returns the ledger of all these weights: those that were apart until now become one."""
        holders = self._holders()
        tagged = [holder for holder in holders if attached(holder, LEDGER) is not None]
        for holder in tagged:
            found = attached(holder, LEDGER)
            found.unite(self.last)  # about the same weights
            self.last = found
        if attached(self._model, LEDGER) is not None:
            tagged = holders  # some weights may be made since a ledger was restored for them
        for holder in tagged:
            attach(holder, LEDGER, self.last)
        for holder in holders:
            for charged in attached(holder, CHARGED_LEDGERS, ()):
                if not self.last.covers(charged):
                    self.last.merge(charged, same_data=True)
        return self.last

    def share(self, variables: Sequence[keras.Variable]) -> None:
        """Attaches the ledger to variables that are about to be trained."""
        ledger = self.current()
        for variable in variables:
            attach(variable, LEDGER, ledger)

    def keep(self) -> None:
        """Attaches the ledger to all weights where they have a history.

        Which of the weights a history is about is not known.
        """
        ledger = self.current()
        if ledger.entries or ledger.unknown_reasons:
            self.share(self._holders())

    def replace(self, ledger: PrivacyLedger) -> None:
        """Attaches another ledger in place of this one: that of the chief, of several hosts."""
        self.last = ledger
        for holder in self._holders():
            if attached(holder, LEDGER) is not None:
                attach(holder, LEDGER, ledger)

    def paid_by(self, ledger: PrivacyLedger) -> None:
        """Attaches a ledger that covers all releases about these weights, and replaces others."""
        for holder in self._holders():
            detach(holder, CHARGED_LEDGERS)
        self.replace(ledger)
        self.keep()

    def close_uncharged(self) -> None:
        """Records releases that were not charged, where they would be forgotten."""
        uncharged = uncharged_releases(self._model.weights)
        if uncharged:
            self.current().mark_unknown(UNCHARGED.format(uncharged))

    def _holders(self) -> list[Any]:
        return [self._model, *self._model.weights]


def copy_history(model: keras.Model, made: keras.Model) -> None:
    """Gives a plain model with copied weights the history of the model that they are from.

    The history is that of the weights at the time; what is released about either model later is
    its own.
    """
    history = WeightsLedger(model).current()
    note_changes(model.weights, history)
    history = copy.deepcopy(history)
    uncharged = uncharged_releases(model.weights)
    if uncharged:
        history.mark_unknown(UNCHARGED.format(uncharged))
    WeightsLedger(made, history)
    keep_in_copies(made)


def keep_in_copies(model: keras.Model) -> None:
    """Makes `copy.deepcopy` of a plain model bring the history of its weights along.

    Keras copies a model by saving and loading it, without its ledger. The copy's history is
    that of the model at the time; what is released about either later is its own.
    """

    def deepcopy(memo):
        rebuild, arguments = type(model).__reduce__(model)[:2]
        made = memo[id(model)] = rebuild(*arguments)
        copy_history(model, made)
        return made

    attach(model, COPY, deepcopy)


def note_optimizer(variables: Sequence[keras.Variable], optimizer: Any) -> None:
    """Attaches to variables a private optimizer that was built for them."""
    for variable in variables:
        attach(variable, OPTIMIZERS, (*attached(variable, OPTIMIZERS, ()), optimizer))


def note_charged(variables: Sequence[keras.Variable], ledger: PrivacyLedger) -> None:
    """Attaches to variables a ledger that was charged for them, where it is not their own."""
    note_changes(variables, ledger)
    forget_left(variables)
    for variable in variables:
        charged = attached(variable, CHARGED_LEDGERS, ())
        own = attached(variable, LEDGER)
        if own is not ledger and not any(ledger is other for other in charged):
            attach(variable, CHARGED_LEDGERS, (*charged, ledger))


def uncharged_releases(variables: Sequence[keras.Variable]) -> int:
    """Counts the uncharged releases about these variables."""
    optimizers = {id(o): o for v in variables for o in attached(v, OPTIMIZERS, ())}
    return sum(o.uncharged_releases for o in optimizers.values())
