"""Takes one private step of a custom training loop."""

from typing import Any

import keras
import tensorflow as tf

from tf_adadp import validation
from tf_adadp.accounting import PrivacyLedger
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.charging.lot_releases import when_run
from tf_adadp.distribution import replicas
from tf_adadp.gradients.lot_sums import engine_for_lot
from tf_adadp.optimizers import DPOptimizer
from tf_adadp.persistence.saved_model import SavedWithLedger
from tf_adadp.persistence.weights_ledger import keep_in_copies
from tf_adadp.sampling.preprocessing import refuse_raw
from tf_adadp.training.step import regularization_of
from tf_adadp.utils.attached import STEPS, attached_dict
from tf_adadp.utils.checks import check_instance


@tf.autograph.experimental.do_not_convert
def private_step(
    model: keras.Model,
    loss: Any,
    lot: tuple,
    optimizer: DPOptimizer,
    *,
    ledger: PrivacyLedger,
    law: SamplingLaw,
    jit_compile: bool | str = "auto",
    gradient_engine: str = "auto",
) -> None:
    """Takes one private training step on one lot: charges, clips, releases and updates.

        ledger ← ledger + optimizer.event(law)                       before anything else
        g̃ = (Σ_x clip_K(∇ℓ(θ, x)) + N(0, diag(s²))) / L,   L = law.expected_lot_size
        θ, optimizer state ← Keras's update rule(g̃ + gradient of the weight regularisers)

        lots = dp.PoissonLots(x, y, expected_size=600)
        optimizer, ledger = dp.ADADP(noise_multiplier=4.0), dp.PrivacyLedger()
        for lot in lots.take(1000, physical_batch_size=64):
            dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)
        print(ledger.epsilon(1e-5))

    Guarantee: that of one step of `DPModel.fit`, for the unit and the neighbouring relation of the
    law, if the lot was drawn by it. A lot serves one step: a second step on the same weights, or
    charged to the same ledger, is refused, except under a law whose lots hold every record. A lot
    is identified by its mask, so each needs its own mask. Under `ShuffledLots`, charged by the
    pass, every step is charged for a whole pass: train with `DPModel.fit`, which charges each pass
    once.

    In eager code the step is compiled once per model, loss, optimizer and form of the lots. Inside
    of a `tf.function` it becomes a part of that graph. There an operation calls Python to charge
    the ledger, and nothing is computed from the lot before the call has returned. So every run of
    the graph charges, in loops too. The call needs the process that made the graph: it works
    neither under `jit_compile=True` of the outer function nor in a SavedModel. A lot that served a
    step is then refused by a `tf.errors.InvalidArgumentError`.

    The ledger is charged before the noise is drawn, in memory. A crash in between leaves a charge
    without a release, which overstates ε. A crash also loses unsaved state: save the ledger
    before the weights, by `ledger.save(path)`, so that the file never understates the cost of the
    weights. (`DPModel(model, ledger=ledger).save(path)` keeps both in one file.)

    Args:
        model: a built `keras.Model`, the plain one.
        loss: a Keras loss (object, name or function), or None for the losses that layers add.
        lot: `((x, y, sample_weight), mask)` with leaves `[P, B, ...]`, as `take` and `as_dataset`
            of lots yield them.
        optimizer: a private optimizer; built here if it is not.
        ledger: the `PrivacyLedger` of these weights and data.
        law: the law that the lot was drawn by, `lots.law`.
        jit_compile: as in `DPModel.compile`.
        gradient_engine: as in `DPModel`.

    Raises:
        TypeError, ValueError: an argument is of another kind; the model or loss cannot be trained
            privately; the lot holds raw records, and the model is a task that preprocesses them;
            the lot served a step before; AGD's budget is spent, or AGD is used inside of a
            `tf.function`. Nothing is charged or changed then.
        RuntimeError: under a `tf.distribute` strategy, whose steps `DPModel.fit` takes.

    Warns:
        UserWarning: the loss depends on no output of a layer that has weights, so noise alone
            would train them.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> optimizer, ledger = dp.DPSGD(0.1, noise_multiplier=4.0), dp.PrivacyLedger()
        >>> lots = dp.PoissonLots(np.ones((100, 2)), np.ones((100, 1)), expected_size=10)
        >>> loss = keras.losses.MeanSquaredError()
        >>> for lot in lots.as_dataset(10, num_lots=3):
        ...     _ = dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)
        ...
        >>> ledger.steps
        3
    """
    _check(model, optimizer, ledger, law)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    step = _step(model, loss, lot, optimizer, jit_compile, gradient_engine)
    step.begin(law)

    def charge(lot):
        optimizer.charges.charge_lot(ledger, law, lot, model.trainable_variables)

    if not tf.executing_eagerly():
        if optimizer.event_varies:
            raise ValueError(
                f"optimizer={type(optimizer).__name__} inside of a tf.function: its next event "
                "depends on its releases. Call private_step from Python, which compiles it "
                "by itself."
            )
        with tf.control_dependencies(when_run(charge, lot)):
            step.take(lot, law.expected_lot_size)
        return
    charge(lot)
    with optimizer.charges.expiring(1):
        step.compiled(lot, law.expected_lot_size)


class _Step:
    """Takes the steps of one optimizer on lots of one form.

    Args:
        model, loss, optimizer: see `private_step`.
        engine: the gradient engine for these lots.
    """

    def __init__(self, model, loss, optimizer, engine):
        validation.check_layers(model)
        validation.check_weights(model)
        keep_in_copies(model)
        self.engine = engine
        self._model, self._loss, self._optimizer = model, loss, optimizer
        self._begun = set()
        self._graphs = {}

    def begin(self, law):
        """Lets the optimizer check the law, once, before anything is charged by it."""
        if law not in self._begun:
            with tf.init_scope():
                self._optimizer.begin(law, None, 1)
            self._begun.add(law)

    def take(self, lot, expected_lot_size):
        """Clips, releases and updates, in the graph that is traced."""
        _, gradients = regularization_of(self._model)
        self._optimizer.step_on_lot(
            self.engine, lot, expected_lot_size, regularization_gradients=gradients
        )

    def compiled(self, lot, expected_lot_size):
        """Takes the step in its own graph, which serves all numbers of physical batches."""
        tensors = [t for t in tf.nest.flatten(lot) if t is not None]
        form = tuple((tuple(t.shape[1:]), tf.as_dtype(t.dtype)) for t in tensors)
        if form not in self._graphs:

            def take(expected_lot_size, *values):
                values = iter(values)
                flat = [None if t is None else next(values) for t in tf.nest.flatten(lot_form)]
                self.take(tf.nest.pack_sequence_as(lot_form, flat), expected_lot_size)

            lot_form = tf.nest.map_structure(lambda t: None if t is None else 0, lot)
            signature = [tf.TensorSpec((None, *shape), dtype) for shape, dtype in form]
            self._graphs[form] = tf.function(
                take, input_signature=[tf.TensorSpec([], tf.float32), *signature], autograph=False
            )
        self._graphs[form](tf.constant(expected_lot_size, tf.float32), *tensors)


def _step(model, loss, lot, optimizer, jit_compile, gradient_engine):
    """Returns the `_Step` for these arguments, the same one at every call."""
    engine, plan = engine_for_lot(
        model, loss, lot, optimizer, jit_compile=jit_compile, gradient_engine=gradient_engine
    )
    steps = attached_dict(model, STEPS)
    key = id(optimizer), id(engine)
    if key not in steps:
        (x, y, sample_weight), _ = lot
        spec = tf.nest.map_structure(
            lambda t: None if t is None else tf.TensorSpec([None, *t.shape[2:]], t.dtype),
            keras.tree.lists_to_tuples((x, y, sample_weight)),
        )
        with tf.init_scope():
            refuse_raw(model, spec)
            validation.check_reached(model, plan.unreached, stacklevel=5)
            steps[key] = _Step(model, loss, optimizer, engine)
            optimizer.bind(model, loss)
    return steps[key]


def _check(model, optimizer, ledger, law):
    if isinstance(model, SavedWithLedger) or not isinstance(model, keras.Model):
        raise TypeError(
            f"model={model!r}: give a plain keras.Model; a DPModel's is `model.model`, and it "
            "takes steps of its own by `fit` and `train_on_batch`."
        )
    if not model.built:
        raise ValueError(
            f"model={model.name!r} is not built: give it a keras.Input, or call it on a batch."
        )
    check_instance("optimizer", optimizer, DPOptimizer, "one of tf_adadp's optimizers")
    optimizer._require_noise_multiplier()
    check_instance("ledger", ledger, PrivacyLedger, "a tf_adadp.PrivacyLedger()")
    if not isinstance(law, SamplingLaw) or law.expected_lot_size is None:
        raise TypeError(
            f"law={law!r}: give the law that the lot was drawn by, `lots.law`, or one of "
            "tf_adadp.accounting that has an expected lot size."
        )
    if tf.distribute.in_cross_replica_context() or replicas.num_replicas() > 1:
        raise RuntimeError(
            "private_step under a tf.distribute strategy: every replica would charge. Train with "
            "DPModel.fit, or charge outside of the strategy and use clipped_sum and apply_private."
        )
