"""private_step: charges, clips, releases and updates in one call, eagerly and in graphs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import (
    ROWS,
    Recomputed,
    crossentropy,
    data,
    exact_sgd,
    plain_model,
    private_model,
)
from tf_adadp.accounting import PoissonSampling, PrivacyLedger, UnknownSampling

DELTA = 1e-3
LAW = PoissonSampling(ROWS, 30)
OPTIMIZERS = [
    lambda: dp.DPSGD(0.1, noise_multiplier=1.0),
    lambda: dp.ADADP(noise_multiplier=1.0),
    lambda: dp.AdaCliP(noise_multiplier=1.0),
    lambda: dp.SADPSGD(noise_multiplier=1.0, energy_data=data(seed=1)),
    lambda: dp.DPOPT(noise_multiplier=1.0, directions="budgeted", direction_noise_multiplier=2.0),
]


def lots_of():
    x, y = data()
    return dp.PoissonLots(x, y, expected_size=30)


def train_eagerly(model, loss, optimizer, ledger, lots, steps, **options):
    options |= {"ledger": ledger, "law": lots.law}
    for lot in lots.take(steps, 16):
        assert dp.private_step(model, loss, lot, optimizer, **options) is None


def train_in_a_graph(model, loss, optimizer, ledger, lots, steps, **options):
    options |= {"ledger": ledger, "law": lots.law}
    stream = lots.as_dataset(16, num_lots=steps)

    @tf.function(input_signature=[stream.element_spec], autograph=False)
    def step(lot):
        dp.private_step(model, loss, lot, optimizer, **options)

    assert ledger.steps == 0  # nothing is charged for tracing
    for lot in stream:
        step(lot)
    assert step.experimental_get_tracing_count() <= 2  # TensorFlow's second, where it makes state


def train_in_a_loop_of_a_graph(model, loss, optimizer, ledger, lots, steps):
    stream = lots.as_dataset(16, num_lots=steps)

    @tf.function(autograph=False)
    def train():
        stream.reduce(tf.constant(0), step)

    def step(count, lot):
        dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)
        return count + 1

    train()


WAYS = [train_eagerly, train_in_a_graph, train_in_a_loop_of_a_graph]


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("make", "train"),
    [
        *((make, train) for make in OPTIMIZERS for train in (train_eagerly, train_in_a_graph)),
        (OPTIMIZERS[0], train_in_a_loop_of_a_graph),
    ],
)
def test_every_step_is_charged_and_moves_the_weights(make, train):
    model, optimizer, ledger, lots = plain_model(), make(), PrivacyLedger(), lots_of()
    before = model.get_weights()
    train(model, crossentropy(), optimizer, ledger, lots, 4)
    assert [entry.event for entry in ledger.entries] == [optimizer.event(lots.law)]
    assert ledger.steps == optimizer.steps_taken == optimizer.releases == 4
    assert optimizer.uncharged_releases == 0
    if not isinstance(optimizer, dp.SADPSGD):  # which may undo all
        assert not np.array_equal(before[0], model.get_weights()[0])
    # A model made of these weights later reports what they cost.
    assert dp.DPModel(model).epsilon(DELTA) == ledger.epsilon(DELTA) > 0


@pytest.mark.extended
@pytest.mark.parametrize("train", WAYS)
def test_without_noise_it_is_gradient_descent_with_regularisers(train):
    """A step on full batches without clipping is the step of Keras."""
    regular = keras.regularizers.L2(0.01)
    x, y = data()
    plain = plain_model(keras.layers.Dense(8, activation="tanh", kernel_regularizer=regular))
    mine = keras.models.clone_model(plain)
    mine.set_weights(plain.get_weights())
    plain.compile(keras.optimizers.SGD(0.1), crossentropy())
    plain.fit(x, y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0)
    ledger = PrivacyLedger()
    lots = dp.PoissonLots(x, y, expected_size=ROWS)
    train(mine, crossentropy(), exact_sgd(), ledger, lots, 3)
    for a, b in zip(plain.get_weights(), mine.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert ledger.epsilon(DELTA) == float("inf")


@pytest.mark.extended
def test_agd_spends_its_budget_eagerly_and_is_refused_in_a_graph():
    model, ledger, lots = plain_model(), PrivacyLedger(), lots_of()
    optimizer = dp.AGD(total_epsilon=5.0, total_delta=DELTA, splits=2)
    loss = crossentropy()
    with pytest.raises(ValueError, match="total_epsilon=5.0.*is spent"):
        train_eagerly(model, loss, optimizer, ledger, lots, 100)
    assert 2 <= ledger.steps == optimizer.releases < 100
    assert optimizer.uncharged_releases == 0
    with pytest.raises(ValueError, match="AGD inside of a tf.function"):
        train_in_a_graph(
            model, loss, dp.AGD(total_epsilon=5.0, total_delta=DELTA), PrivacyLedger(), lots, 1
        )


def test_a_step_that_fails_leaves_its_charge(monkeypatch):
    """The charge comes first: a failure overstates ε by one step, which no release can reuse."""
    model, ledger, lots = plain_model(), PrivacyLedger(), lots_of()
    optimizer, loss = dp.DPSGD(0.1, noise_multiplier=1.0), crossentropy()
    with monkeypatch.context() as patched:
        patched.setattr(dp.DPSGD, "step_on_lot", lambda *a, **k: tf.debugging.Assert(False, ["x"]))
        with pytest.raises(tf.errors.InvalidArgumentError):
            train_eagerly(model, loss, optimizer, ledger, lots, 1)
    assert (ledger.steps, optimizer.releases) == (1, 0)
    optimizer.apply_private([tf.zeros(v.shape) for v in model.trainable_variables], 30.0)
    assert optimizer.uncharged_releases == 1


@pytest.mark.representative(1)
@pytest.mark.parametrize("in_graph", [True, False])
def test_nothing_is_released_where_the_charge_fails(monkeypatch, in_graph):
    model, ledger, lots = plain_model(), PrivacyLedger(), lots_of()
    optimizer = dp.ADADP(noise_multiplier=1.0)
    before = model.get_weights()

    def full(*args, **kwargs):
        raise OSError("the disk is full")

    monkeypatch.setattr(ledger, "add", full)
    train = train_in_a_graph if in_graph else train_eagerly
    with pytest.raises((OSError, tf.errors.OpError), match="the disk is full"):
        train(model, crossentropy(), optimizer, ledger, lots, 1)
    assert optimizer.releases == optimizer.steps_taken == 0
    monkeypatch.undo()
    if not in_graph:  # nor was the lot used up
        (lot,) = lots.take(1, 16)
        monkeypatch.setattr(ledger, "add", full)
        with pytest.raises(OSError, match="the disk is full"):
            dp.private_step(model, crossentropy(), lot, optimizer, ledger=ledger, law=lots.law)
        monkeypatch.undo()
        dp.private_step(model, crossentropy(), lot, optimizer, ledger=ledger, law=lots.law)
        return
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_graph_stops_before_it_charges_a_lot_again():
    model, ledger, lots = plain_model(), PrivacyLedger(), lots_of()
    optimizer, loss = dp.DPSGD(0.1, noise_multiplier=1.0), crossentropy()
    stream = lots.as_dataset(16, num_lots=1)

    @tf.function(input_signature=[stream.element_spec], autograph=False)
    def step(lot):
        dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)

    (lot,) = stream
    step(lot)
    with pytest.raises(tf.errors.InvalidArgumentError, match="had a release already"):
        step(lot)
    assert ledger.steps == optimizer.releases == 1


@pytest.mark.extended
def test_one_graph_serves_lots_of_all_sizes(monkeypatch):
    model, ledger = plain_model(), PrivacyLedger()
    optimizer, loss = dp.DPSGD(0.1, noise_multiplier=1.0), crossentropy()
    calls = []
    take = dp.DPSGD.step_on_lot

    def counted(*args, **kwargs):
        calls.append(1)
        return take(*args, **kwargs)

    monkeypatch.setattr(dp.DPSGD, "step_on_lot", counted)
    x, y = data()
    for rows in (0, 1, 16, 33, 120):
        lot = dp.make_lot(x[:rows], y[:rows], physical_batch_size=16)
        dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=LAW)
    assert len(calls) == 1
    assert ledger.steps == 5


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"model": 3}, TypeError, "model=3: give a plain keras.Model"),
        ({"model": private_model}, TypeError, "a DPModel's is `model.model`"),
        ({"model": lambda: keras.Sequential([keras.layers.Dense(3)])}, ValueError, "not built"),
        ({"optimizer": keras.optimizers.SGD()}, TypeError, "one of tf_adadp's optimizers"),
        ({"ledger": None}, TypeError, "ledger=None: give a tf_adadp.PrivacyLedger"),
        ({"law": 0.1}, TypeError, "law=0.1: give the law that the lot was drawn by"),
        ({"law": UnknownSampling("?")}, TypeError, "that has an expected lot size"),
        ({"lot": (1, 2)}, ValueError, "lot must be"),
        ({"loss": None}, ValueError, "no loss that depends on its weights"),
        ({"loss": lambda: lambda y, p: 0.0 * y}, ValueError, "no loss that depends on its weights"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_charged(arguments, error, match):
    (lot,) = lots_of().take(1, 16)
    ledger = PrivacyLedger()
    given = {
        "model": plain_model(),
        "loss": crossentropy(),
        "lot": lot,
        "optimizer": dp.DPSGD(0.1, noise_multiplier=1.0),
        "ledger": ledger,
        "law": LAW,
        **{name: value() if callable(value) else value for name, value in arguments.items()},
    }
    with pytest.raises(error, match=match):
        dp.private_step(**given)
    assert ledger.steps == 0


def test_models_that_mix_examples_are_refused():
    (lot,) = lots_of().take(1, 16)
    ledger = PrivacyLedger()
    model = plain_model(keras.layers.BatchNormalization())
    with pytest.raises(ValueError, match="BatchNormalization"):
        dp.private_step(
            model, crossentropy(), lot, dp.DPSGD(noise_multiplier=1.0), ledger=ledger, law=LAW
        )
    assert ledger.steps == 0


def test_replicas_are_refused():
    (lot,) = lots_of().take(1, 16)
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model, optimizer = plain_model(), dp.DPSGD(noise_multiplier=1.0)
        with pytest.raises(RuntimeError, match="under a tf.distribute strategy"):
            dp.private_step(model, crossentropy(), lot, optimizer, ledger=PrivacyLedger(), law=LAW)


def test_a_batch_of_float64_trains():
    x, y = data()
    private = private_model()
    private.train_on_batch(x.astype(np.float64), y, law=PoissonSampling(10 * ROWS, ROWS))
    assert private.ledger.steps == private.optimizer.steps_taken == 1


STATE = tf.Variable(0.0)


@tf.custom_gradient
def keeping_its_gradient(x):
    def gradient(upstream):
        STATE.assign_add(tf.reduce_sum(tf.abs(upstream)))
        return upstream

    return tf.identity(x), gradient


class Keeping(keras.layers.Layer):
    def call(self, x):
        return keeping_its_gradient(x)


@pytest.mark.representative(2)
@pytest.mark.parametrize("engine", ["auto", "vectorized"])
@pytest.mark.parametrize("train", [train_eagerly, train_in_a_graph])
@pytest.mark.parametrize(
    ("layer", "match"),
    [(Keeping, "keeps state or calls Python"), (Recomputed, "past Keras|captured")],
)
def test_gradients_that_keep_or_lose_something_are_refused_as_in_fit(layer, match, train, engine):
    layers = [keras.Input((6,)), keras.layers.Dense(6), layer(), keras.layers.Dense(3)]
    model, ledger = keras.Sequential(layers), PrivacyLedger()
    optimizer = dp.DPSGD(0.1, noise_multiplier=1.0)

    private = private_model(None, model, {"gradient_engine": engine})
    with pytest.raises(ValueError, match=match):
        private.fit(*data(), batch_size=30, verbose=0)
    with pytest.raises(ValueError, match=match):
        train(model, crossentropy(), optimizer, ledger, lots_of(), 1, gradient_engine=engine)
    assert (ledger.steps, STATE.numpy()) == (0, 0.0)


@pytest.mark.extended
def test_a_layer_that_the_vectorized_map_cannot_convert_is_mapped_row_by_row():
    layers = keras.layers
    network = [keras.Input((5,), dtype="int32"), layers.Embedding(9, 4)]
    network += [layers.LSTM(4, return_sequences=True), layers.Flatten(), layers.Dense(3)]
    model, ledger = keras.Sequential(network), PrivacyLedger()
    words = np.random.default_rng(0).integers(0, 9, (ROWS, 5)).astype(np.int32)
    lots = dp.PoissonLots(words, data()[1], expected_size=30)
    options = {"gradient_engine": "vectorized"}
    before = model.get_weights()
    train_eagerly(model, crossentropy(), dp.DPSGD(noise_multiplier=1.0), ledger, lots, 1, **options)
    assert ledger.steps == 1
    assert all(np.any(a != b) for a, b in zip(before, model.get_weights(), strict=True))
