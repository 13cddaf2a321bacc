"""Attacks by swapped, shared, nested or disguised parts: refused before anything is trained."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, crossentropy, data, plain_model, private_model
from tf_adadp.accounting import FixedSizeSampling, PoissonSampling

DELTA = 1e-3
L = keras.layers


def fit(private, **kwargs):
    x, y = data()
    return private.fit(**{"x": x, "y": y, "batch_size": 30, "verbose": 0, **kwargs})


def unmoved(private, act, match, error=ValueError):
    """`act` raises; no weight moved and nothing was charged or released."""
    before, steps = private.get_weights(), private.ledger.steps
    iterations = private.optimizer.iterations.numpy()
    with pytest.raises(error, match=match):
        act()
    for a, b in zip(before, private.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert private.ledger.steps == steps
    assert private.optimizer.iterations.numpy() == iterations


# The optimizer.


# All that were made read-only by name once, and stay so.
READ_ONLY = {
    "noise_multiplier", "l2_norm_clip", "_l2_norm_clip", "automatic_clipping", "microbatch_size",
    "augmentation_multiplicity", "seed", "allow_no_noise", "secure_noise", "clipping", "prior",
    "warmup_steps", "local_clip_factor", "prior_decay", "prior_exponent", "local_clip_threshold",
    "scale_step", "scale", "center_decay", "variance_decay", "min_variance", "max_variance",
    "directions", "direction_noise_multiplier", "direction_decay", "pruning", "variant",
    "energy_noise_multiplier", "energy_clip", "initial_temperature", "rejection_threshold",
    "energy_batch_size", "total_epsilon", "total_delta", "splits", "loss_clip", "num_candidates",
    "budget_growth", "max_step_size", "step_size_growth",
}  # fmt: skip
MAKERS = {
    dp.DPSGD: {},
    dp.DPAdam: {},
    dp.DPRMSprop: {},
    dp.ADADP: {},
    dp.ADAN: {},
    dp.AdaCliP: {},
    dp.DPOPT: {},
    dp.SADPSGD: {"energy_data": data()},
    dp.AutoSGD: {},
    dp.make_private(keras.optimizers.Nadam): {},
    dp.AGD: {"total_epsilon": 1.0, "total_delta": 1e-5},
}


def with_noise(make):
    """A rate is given: Keras lets no one set one over a schedule."""
    if make is dp.AGD:
        return make(**MAKERS[make])
    return make(learning_rate=0.1, noise_multiplier=1.0, **MAKERS[make])


@pytest.mark.parametrize("name", sorted(READ_ONLY))
def test_what_sets_the_privacy_is_read_only(name):
    """A traced graph would go on releasing with the old value, charged by the new one."""
    optimizers = [with_noise(make) for make in MAKERS]
    having = [optimizer for optimizer in optimizers if hasattr(optimizer, name)]
    assert having
    for optimizer in having:
        value = getattr(optimizer, name)
        kind = type(optimizer).__name__
        message = f"{name} of a {kind} is read-only.*Make a new optimizer"
        with pytest.raises(AttributeError, match=message):
            setattr(optimizer, name, 1000.0)
        with pytest.raises(AttributeError, match=message):
            delattr(optimizer, name)
        assert getattr(optimizer, name) == value


# AGD takes none of Keras's arguments.
@pytest.mark.parametrize("make", [make for make in MAKERS if make is not dp.AGD])
def test_every_argument_of_our_own_is_read_only(make):
    """Those of Keras's optimizer (learning_rate, ...) act on released vectors and stay free."""
    optimizer = with_noise(make)
    keras_class = next(c for c in make.__mro__ if c.__module__.startswith("keras"))
    ours = optimizer.get_config().keys() - keras_class().get_config().keys()
    for name in ours:
        with pytest.raises(AttributeError, match=f"{name} of a {make.__name__} is read-only"):
            setattr(optimizer, name, 1000.0)
    assert not make._read_only & keras_class().get_config().keys()
    optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25
    for name in ("momentum", "ema_momentum", "rho", "beta_1", "epsilon"):
        if hasattr(optimizer, name):
            setattr(optimizer, name, 0.5)
            assert getattr(optimizer, name) == 0.5


class Bounded(dp.DPOptimizer, keras.optimizers.SGD):
    """An optimizer of a user's own, which says nothing of read-only attributes."""

    def __init__(self, learning_rate=0.1, *, bound, _scale=1.0, momentum=0.0, **kwargs):
        super().__init__(learning_rate, momentum=momentum, **kwargs)
        self.bound, self._scale = bound, _scale


class HalfBounded(Bounded):
    def __init__(self, *args, share=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self._share = share


class WithLimit:
    """A mixin that knows nothing of optimizers."""

    def __init__(self, *args, limit=3.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.limit = limit


class Limited(WithLimit, HalfBounded):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class LimitedNadam(dp.DPOptimizer, WithLimit, keras.optimizers.Nadam):
    pass


@pytest.mark.parametrize(
    ("make", "arguments", "names"),
    [
        (Bounded, {"bound": 2.0}, ["bound", "_scale", "noise_multiplier"]),
        (HalfBounded, {"bound": 2.0}, ["bound", "_scale", "_share"]),
        (Limited, {"bound": 2.0}, ["bound", "_scale", "_share", "limit"]),
        (LimitedNadam, {}, ["limit", "secure_noise"]),
    ],
)
def test_arguments_of_an_optimizer_of_ones_own_are_read_only(make, arguments, names):
    optimizer = make(learning_rate=0.1, noise_multiplier=1.0, **arguments)
    for name in names:
        value = getattr(optimizer, name)
        message = f"{name} of a {make.__name__} is read-only.*Make a new optimizer.*compile again"
        with pytest.raises(AttributeError, match=message):
            setattr(optimizer, name, 1000.0)
        with pytest.raises(AttributeError, match=message):
            delattr(optimizer, name)
        assert getattr(optimizer, name) == value
    optimizer.learning_rate = 0.25
    optimizer.note = "not an argument"
    if hasattr(optimizer, "momentum"):
        optimizer.momentum = 0.5


def test_bounds_cannot_be_changed_in_place():
    optimizer = dp.DPSGD(noise_multiplier=1.0, l2_norm_clip={"": 2.0})
    optimizer.l2_norm_clip[""] = 1e-3
    assert optimizer.l2_norm_clip == {"": 2.0}


def test_a_rule_of_keras_that_comes_first():
    with pytest.raises(TypeError, match="SGD comes before DPOptimizer"):

        class Wrong(keras.optimizers.SGD, dp.DPOptimizer):
            pass


@pytest.mark.parametrize("name", ["record", "expiring", "cover_metrics"])
@pytest.mark.parametrize("inherited", [False, True])
def test_a_charge_that_nothing_would_call(name, inherited):
    body = {name: lambda self, *args, **kwargs: None}
    bases, own = ((type("More", (), body),), {}) if inherited else ((), body)
    with pytest.raises(TypeError, match=f"defines {name}, which nothing calls"):
        type("Mine", (*bases, dp.DPSGD), own)


def test_a_replaced_optimizer():
    private = private_model()
    fit(private)
    private.optimizer = dp.DPSGD(1.0, noise_multiplier=1000.0)
    x, y = data()
    law = PoissonSampling(ROWS, 30)
    unmoved(private, lambda: fit(private), "optimizer was replaced")
    unmoved(private, lambda: private.train_on_batch(x, y, law=law), "optimizer was replaced")


def test_an_optimizer_replaced_while_training():
    class Swaps(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.optimizer = dp.DPSGD(0.1, noise_multiplier=1000.0)

    private = private_model()
    with pytest.raises(ValueError, match="optimizer was replaced"):
        fit(private, epochs=3, callbacks=[Swaps()])
    assert private.ledger.steps == 4


def test_one_optimizer_in_two_models():
    optimizer = dp.DPSGD(0.1, noise_multiplier=1.0)
    first, second = private_model(optimizer), private_model(optimizer)
    fit(first)
    weights = first.get_weights()
    unmoved(second, lambda: fit(second), "built for other variables")
    for a, b in zip(weights, first.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_optimizer_after_moving_trainable_to_another_layer():
    """Has variables of equal shape, so that only identity distinguishes them."""
    first, second = L.Dense(6), L.Dense(6)
    second.trainable = False
    optimizer = dp.DPSGD(0.5, noise_multiplier=1.0)
    model = keras.Sequential([keras.Input((6,)), first, second])
    private = private_model(optimizer, model, loss="mse", metrics=[])
    x, _ = data()
    fit(private, y=x)
    first.trainable, second.trainable = False, True
    private.compile(optimizer, "mse", jit_compile=False)
    unmoved(private, lambda: fit(private, y=x), "built for other variables")


def test_the_update_rule_takes_no_raw_gradients():
    private = private_model()
    variable = private.trainable_variables[0]
    private.optimizer.build(private.trainable_variables)
    step = private.optimizer.update_step
    unmoved(
        private, lambda: step(tf.ones(variable.shape), variable, 0.1),
        "no raw gradients", RuntimeError,
    )  # fmt: skip


# The model.


@pytest.mark.representative(1)
@pytest.mark.parametrize("kind", [tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy])
def test_strategies(kind):
    """Under one of them Keras iterates in a way that charged one step of four."""
    x, y = data()
    strategy = kind(["cpu:0"]) if kind is tf.distribute.MirroredStrategy else kind("cpu:0")
    with strategy.scope():
        several = private_model(steps_per_execution=4)
        private = private_model()
    unmoved(several, lambda: fit(several), "Compile with 1")
    fit(private, steps_per_epoch=3)
    assert private.ledger.steps == private.optimizer.steps_taken == 3
    private.train_on_batch(x, y, law=PoissonSampling(ROWS, ROWS))
    assert private.ledger.steps == private.optimizer.steps_taken == 4
    assert private.optimizer.uncharged_releases == 0


@pytest.mark.parametrize("name", ["train_step", "compute_loss"])
def test_models_with_a_training_step_of_their_own(name):
    def never(self, *args, **kwargs):
        raise AssertionError

    model_class = type("Own", (keras.Model,), {name: never, "call": lambda self, x: x})
    with pytest.raises(ValueError, match=f"Own overrides {name}"):
        dp.DPModel(model_class())


def test_a_model_whose_call_knows_no_training_argument_trains():
    class Plain(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(3)

        def call(self, x):
            return self.dense(x)

    x, y = data()
    private = private_model(model=Plain())
    fit(private, validation_data=(x, y))
    before = private.get_weights()
    fit(private)
    assert any((a != b).any() for a, b in zip(before, private.get_weights(), strict=True))
    assert private.predict(x, verbose=0).shape == (ROWS, 3)


# The run.


@pytest.mark.representative(1)
@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_training_from_a_callback(method):
    """It would set the law that the rest of the running fit is charged by."""
    x, y = data()

    class Nests(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if method == "fit":
                self.model.fit(x, y, batch_size=3, verbose=0)
            else:
                self.model.train_on_batch(x[:3], y[:3], law=PoissonSampling(10**6, 3))

    private = private_model()
    unmoved(
        private, lambda: fit(private, callbacks=[Nests()]),
        f"{method} was called while fit runs", RuntimeError,
    )  # fmt: skip
    fit(private)  # the refusal does not stick
    assert private.ledger.steps == 4


@pytest.mark.parametrize("name", ["val_acc", "epsilon"])
def test_training_metrics_under_a_name_that_callbacks_may_monitor(name):
    for kind in ("metrics", "weighted_metrics"):
        metric = keras.metrics.SparseCategoricalAccuracy(name=name)
        private = private_model(**{"metrics": [], kind: [metric]})
        stopping = keras.callbacks.EarlyStopping(monitor=name, mode="max", patience=0)
        unmoved(private, lambda m=private, c=stopping: fit(m, callbacks=[c]), f"name {name!r}")


def test_an_output_named_like_a_validation_metric():
    inputs = keras.Input((6,))
    outputs = {name: L.Dense(3, name=name)(inputs) for name in ("val", "other")}
    loss = {name: crossentropy() for name in outputs}
    private = private_model(model=keras.Model(inputs, outputs), loss=loss, metrics=None)
    _, y = data()
    unmoved(private, lambda: fit(private, y={"val": y, "other": y}), "name 'val_loss'")


def test_callbacks_within_lists():
    """Keras accepts a CallbackList in the list of callbacks, without looking into it."""
    stopping = keras.callbacks.EarlyStopping(monitor="loss", patience=0)
    for hidden in (
        keras.callbacks.CallbackList([stopping]),
        [keras.callbacks.CallbackList([[stopping]])],
    ):
        private = private_model()
        unmoved(private, lambda m=private, c=hidden: fit(m, callbacks=c), "EarlyStopping")
        unmoved(private, lambda m=private, c=hidden: fit(m, callbacks=[c]), "EarlyStopping")
    nested = keras.callbacks.CallbackList([dp.PrivacyCallback(DELTA)])
    assert "epsilon" in fit(private_model(), callbacks=nested).history


# The law.


def test_a_law_given_to_train_on_batch_is_reported_as_declared():
    x, y = data()
    private = private_model()
    private.train_on_batch(x[:30], y[:30], law=PoissonSampling(ROWS, 30))
    with pytest.warns(dp.PrivacyWarning, match="declared by the user"):
        private.epsilon(DELTA)
    (entry,) = private.ledger.entries
    assert entry.law == PoissonSampling(ROWS, 30, declared=True)


@pytest.mark.parametrize(
    ("law", "error", "match"),
    [
        (FixedSizeSampling(10**6, 10), ValueError, "10 records, and this batch has 30"),
        (PoissonSampling(29, 10), ValueError, "29 records, and this batch alone has 30"),
        (dp.accounting.UnknownSampling("none"), TypeError, "give a PoissonSampling"),
        (0.25, TypeError, "give a PoissonSampling"),
    ],
)
def test_laws_that_the_batch_contradicts(law, error, match):
    x, y = data()
    private = private_model()
    unmoved(private, lambda: private.train_on_batch(x[:30], y[:30], law=law), match, error)


def test_lots_that_draw_by_another_law_than_their_parent():
    class Everything(dp.PoissonLots):
        def _indices(self, step):
            return np.arange(self.num_examples)

    x, y = data()
    for lots, declared in itertools.product([dp.PoissonLots, Everything], [False, True]):
        if declared is (lots is Everything):
            private = private_model()
            private.fit(lots(x, y, expected_size=30), steps_per_epoch=1, verbose=0)
            assert private.step_law.declared is declared
            assert [entry.law.declared for entry in private.ledger.entries] == [declared]


def test_lots_that_set_another_law_after_they_were_made():
    class Sets(dp.PoissonLots):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._law = PoissonSampling(ROWS, 1)

    x, y = data()
    private = private_model()
    private.fit(Sets(x, y, expected_size=30), steps_per_epoch=1, verbose=0)
    assert private.step_law.declared
    assert [entry.law.declared for entry in private.ledger.entries] == [True]


def test_plain_models_stay_free():
    """The refusals are of DPModels: the plain model may be trained on public data."""
    x, y = data()
    private = private_model()
    private.model.compile("sgd", crossentropy())
    private.model.fit(x, y, verbose=0)
    assert private.epsilon(DELTA) == 0.0
    assert plain_model().count_params() == private.model.count_params()


def test_arguments_cannot_be_deleted_and_laws_not_replaced():
    optimizer = dp.DPSGD(noise_multiplier=1.0)
    with pytest.raises(AttributeError, match="read-only"):
        del optimizer.noise_multiplier
    x, y = data()
    lots = dp.PoissonLots(x, y, expected_size=30)
    with pytest.raises(AttributeError):
        lots.law = dp.accounting.PoissonSampling(10**6, 60)


def test_subclasses_of_adapted_layers_are_refused():
    class Mine(keras.layers.Normalization):
        pass

    with pytest.raises(ValueError, match="mean and variance"):
        dp.DPModel(keras.Sequential([Mine()]))
