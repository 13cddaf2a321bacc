"""The one ledger of a set of weights, whichever models and loops train them."""

import copy
import math
import weakref

import numpy as np
import tensorflow as tf

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.utils.checks import check_instance

# Attributes of variables: the private optimizers built for them, the ledger of what was released
# about them, and the ledgers of others that custom loops charged for them.
OPTIMIZERS_TAG = "_tf_adadp_optimizers"
LEDGER_TAG = "_tf_adadp_ledger"
CHARGED_TAG = "_tf_adadp_charged_ledgers"
# A few entries of a variable, as the last private training left it.
LEFT_TAG = "_tf_adadp_left"
CHANGED = (
    "the weights are not those that the last private step left: the plain model was trained, "
    "loaded or set by other means since, and what that used of the records is not in epsilon"
)
UNCHARGED = "{} releases of the optimizer were not charged"


class WeightsLedger:
    """Finds the ledger of everything that was released about some weights.

    Every privately trained variable is tagged with its ledger, and every one that was loaded with a
    history, so that all models that have one of them in common, frozen or not, report what all of
    them released.
    """

    def __init__(self):
        self.last = PrivacyLedger()  # as it was found last; enough while nothing else trains

    def start_from(self, ledger, model):
        """Takes up the ledger of what the weights of a model cost before, as the user gives it."""
        check_instance("ledger", ledger, PrivacyLedger, "a tf_adadp.PrivacyLedger, or None")
        self.last = ledger
        self.keep([model, *model.weights])

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


def remember_left(variables):
    """Remembers what private training left, to see changes by others."""
    for variable in variables:
        setattr(variable, LEFT_TAG, corner(variable))


def forget_left(variables):
    """Forgets it, where a private step, or weights with their ledger, come next."""
    for variable in variables:
        if hasattr(variable, LEFT_TAG):
            delattr(variable, LEFT_TAG)


def changed_since(variables):
    """Whether one of the variables is not what private training left."""
    return any(
        not np.array_equal(corner(v), getattr(v, LEFT_TAG), equal_nan=True)
        for v in variables
        if hasattr(v, LEFT_TAG)
    )


def note_changes(variables, ledger):
    """Records in a ledger that variables are not what private training left, where it is so."""
    if changed_since(variables):
        ledger.mark_not_covered(CHANGED)


def corner(variable):
    """A few entries of a variable, from all over it, as a NumPy array."""
    value = tf.convert_to_tensor(variable.value)
    return tf.reshape(value, [-1])[:: 1 + math.prod(value.shape) // 256].numpy()


def keep_in_copies(model):
    """Makes `copy.deepcopy` of a plain model bring the history of its weights along.

    Keras copies a model by saving and loading it, which knows of no ledger. The copy's history is
    that of the model at the time; what is released about either later is its own.
    """

    def deepcopy(memo):
        history = WeightsLedger().of([model, *model.weights])
        note_changes(model.weights, history)
        rebuild, arguments = type(model).__reduce__(model)[:2]
        made = memo[id(model)] = rebuild(*arguments)
        ledger = WeightsLedger()
        ledger.last = copy.deepcopy(history)
        ledger.keep([made, *made.weights])
        keep_in_copies(made)
        return made

    model.__dict__["__deepcopy__"] = deepcopy  # past Keras's tracking


def note_charged(weights, ledger):
    """Tags weights with a ledger that was charged for them, where it is not their own."""
    note_changes(weights, ledger)
    forget_left(weights)
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
