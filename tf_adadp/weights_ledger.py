"""The one ledger of a set of weights, whichever models train them."""

import weakref

import tensorflow as tf

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.optimizers.base import OPTIMIZERS_TAG

LEDGER_TAG = "_tf_adadp_ledger"  # a trained variable's attribute that holds the ledger
UNCHARGED = "{} releases of the optimizer were not charged"


class WeightsLedger:
    """Finds the ledger of everything that was released about some weights.

    Every privately trained variable is tagged with its ledger, so that all models that have one of
    them in common, frozen or not, report what all of them released.
    """

    def __init__(self):
        self.last = PrivacyLedger()  # as it was found last; enough while nothing else trains

    def of(self, weights):
        """The ledger of all of `weights`: those that were apart until now are merged."""
        tagged = [v for v in weights if hasattr(v, LEDGER_TAG)]
        for variable in tagged:
            other = getattr(variable, LEDGER_TAG)
            if other is not self.last:
                other.merge(self.last, same_data=True)  # about the same weights
                self.last = other
        for variable in tagged:
            setattr(variable, LEDGER_TAG, self.last)
        return self.last

    def share(self, weights, trainable):
        """Tags what is about to be trained."""
        ledger = self.of(weights)
        for variable in trainable:
            setattr(variable, LEDGER_TAG, ledger)

    def replace(self, weights, ledger):
        """Another ledger for all tagged weights: that of the chief, of several hosts."""
        self.last = ledger
        for variable in weights:
            if hasattr(variable, LEDGER_TAG):
                setattr(variable, LEDGER_TAG, ledger)

    def close_uncharged(self, weights):
        """Puts releases that were not charged on record, where they would be forgotten."""
        uncharged = uncharged_releases(weights)
        if uncharged:
            self.of(weights).mark_unknown(UNCHARGED.format(uncharged))


def uncharged_releases(weights):
    """Releases about these weights, by any private optimizer, that nobody charged."""
    optimizers = {id(o): o for v in weights for o in getattr(v, OPTIMIZERS_TAG, ())}
    return sum(o.uncharged_releases for o in optimizers.values())


class LedgerState(tf.train.experimental.PythonState):
    """The ledger of a DPModel as part of a `tf.train.Checkpoint` that holds the model."""

    def __init__(self, model):
        self._model = weakref.ref(model)

    def serialize(self):
        """The ledger as bytes."""
        return self._model().stored_ledger().encode()

    def deserialize(self, string_value):
        """Merges the ledger of what is being restored into the model's."""
        self._model().take_over(string_value.decode())
