"""What a training run keeps besides the model's state."""

import contextlib
import gc
import warnings
import weakref

import numpy as np
import tensorflow as tf

from tf_adadp.accounting import PrivacyWarning
from tf_adadp.persistence.weights_ledger import corner


class Run:
    """What a training run needs besides the model's state: never saved, never tracked by Keras."""

    def __init__(self):
        self.engine = None
        self.layer_settings = None  # the layers, as the engine knows them
        self.plan = None
        self.y_pred = None
        self.optimizer = None
        self.trainable_state = {}
        self.steps_per_execution = None
        self.metrics_noise_multiplier = None
        self.released = None  # a LotMetrics
        self.expected_size = None
        self.law = None
        self.iterator = None
        self.share = None  # makes a lot of what a replica is given
        self.position = 0  # how many lots of the iterator were charged
        self.lots = None  # a `private_state.LotsInUse`, of the last fit
        self.supply = _endless  # raises where lots cannot be drawn, see `Lots.supply`
        self.resumed_lots = None  # what `load_private_state` brought for the next fit
        self.reproducible_sampling = False
        self.active = False
        self.callbacks = ()
        self.ledger_loaded = False
        self.met = None
        self._warned = False

    @property
    def released_names(self):
        """The names of released metrics in the logs."""
        return () if self.released is None else self.released.names

    def reset(self, optimizer, trainable_state, steps_per_execution, metrics_noise_multiplier):
        """After compile: another optimizer, another loss."""
        self.engine = None
        self.released = None
        self.metrics_noise_multiplier = metrics_noise_multiplier
        self.met = None
        self.optimizer = optimizer
        self.trainable_state = trainable_state
        self.steps_per_execution = steps_per_execution
        self._warned = False

    def meet(self, optimizer):
        """Remembers where the optimizer stands, to see state that is put in from outside."""
        if optimizer is not None:
            self.met = optimizer._noise_key.releases, optimizer.steps_taken

    def start(self, law, expected_size, reproducible_sampling):
        """Lots of this law come next."""
        self.law = law
        self.iterator, self.position = None, 0
        self.lots, self.resumed_lots, self.supply = None, None, _endless
        self.reproducible_sampling = reproducible_sampling
        if self.expected_size is None:
            self.expected_size = tf.Variable(0.0, trainable=False, dtype=tf.float32)
        self.expected_size.assign(expected_size)
        self._warned = False

    def position_of(self, iterator):
        """How many lots of this iterator were charged.

        Every iterator over lots begins a new pass, so a new one is charged from its start.
        """
        if iterator is not self.iterator:
            if self.iterator is not None:
                self.lots = None  # the second pass began where only the lots know
            self.iterator, self.position = iterator, 0
        return self.position

    @contextlib.contextmanager
    def fitting(self, callbacks):
        """`fit` runs. Callbacks that hold a ledger file finish, however it ends."""
        self.active, self.callbacks = True, tuple(callbacks)
        error = None
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
                        stack.callback(callback.finish, error)

    def _end(self):
        self.active, self.callbacks = False, ()
        iterator = None if self.iterator is None else weakref.ref(self.iterator)
        self.iterator = None
        # Where training ended inside of an epoch, a cycle of Keras's holds it, with data, and a
        # thread that draws lots.
        if iterator is not None and iterator() is not None:
            gc.collect()

    def snapshot(self, model):
        """A few entries of every trainable weight, at the first execution of a run."""
        return None if self._warned else [corner(v) for v in model.trainable_variables]

    def warn_if_unmoved(self, model, before):
        """Warns where the first step left every weight as it was in `before`, its snapshot."""
        if before is None:
            return
        self._warned = True
        after = [corner(v) for v in model.trainable_variables]
        if all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)):
            warnings.warn(
                "The first step moved no trainable weight, and cost privacy all the same: look at "
                "the learning rate and at which layers are trainable.",
                PrivacyWarning,
                stacklevel=2,
            )


def _endless(count):
    """Lots that never end."""
