"""The one ledger of a set of weights, whichever models and loops train them."""

import weakref

import tensorflow as tf

from tf_adadp.accounting import PrivacyLedger

# Attributes of variables: the private optimizers built for them, the ledger of what was released
# about them, and the ledgers of others that custom loops charged for them.
OPTIMIZERS_TAG = "_tf_adadp_optimizers"
LEDGER_TAG = "_tf_adadp_ledger"
CHARGED_TAG = "_tf_adadp_charged_ledgers"
UNCHARGED = "{} releases of the optimizer were not charged"


class WeightsLedger:
    """Finds the ledger of everything that was released about some weights.

    Every privately trained variable is tagged with its ledger, and every one that was loaded with a
    history, so that all models that have one of them in common, frozen or not, report what all of
    them released.
    """

    def __init__(self):
        self.last = PrivacyLedger()  # as it was found last; enough while nothing else trains

    def of(self, weights):
        """The ledger of all of `weights`: those that were apart until now become one."""
        tagged = [carrier for carrier in weights if hasattr(carrier, LEDGER_TAG)]
        for carrier in tagged:
            found = getattr(carrier, LEDGER_TAG)
            found.unite(self.last)  # about the same weights
            self.last = found
        for carrier in tagged:
            setattr(carrier, LEDGER_TAG, self.last)
        for carrier in weights:
            for charged in getattr(carrier, CHARGED_TAG, ()):
                if not self.last.covers(charged):
                    self.last.merge(charged, same_data=True)
        return self.last

    def share(self, weights, trainable):
        """Tags what is about to be trained."""
        ledger = self.of(weights)
        for variable in trainable:
            setattr(variable, LEDGER_TAG, ledger)

    def keep(self, weights):
        """Tags all weights where they have a history: which of them it is about is not known."""
        ledger = self.of(weights)
        if ledger.entries or ledger.unknown_reasons:
            self.share(weights, weights)

    def replace(self, weights, ledger):
        """Another ledger for all tagged weights: that of the chief, of several hosts."""
        self.last = ledger
        for carrier in weights:
            if hasattr(carrier, LEDGER_TAG):
                setattr(carrier, LEDGER_TAG, ledger)

    def close_uncharged(self, weights):
        """Puts releases that were not charged on record, where they would be forgotten."""
        uncharged = uncharged_releases(weights)
        if uncharged:
            self.of(weights).mark_unknown(UNCHARGED.format(uncharged))


def note_charged(weights, ledger):
    """Tags weights with a ledger that was charged for them, where it is not their own."""
    for variable in weights:
        own = getattr(variable, LEDGER_TAG, None)
        charged = getattr(variable, CHARGED_TAG, ())
        if own is not ledger and not any(ledger is other for other in charged):
            setattr(variable, CHARGED_TAG, (*charged, ledger))


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
