"""Rule 1, end to end: weights and optimizer state are functions of the released vectors alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, data, plain_model, private_model

OPTIMIZERS = {
    "dpsgd": lambda **k: dp.DPSGD(0.3, momentum=0.9, nesterov=True, **k),
    "dpadam": lambda **k: dp.DPAdam(0.05, **k),
    "dprmsprop": lambda **k: dp.DPRMSprop(0.05, **k),
    "adadp": lambda **k: dp.ADADP(0.05, warmup_steps=1, **k),
    "adadp_local": lambda **k: dp.ADADP(0.05, clipping="local", warmup_steps=1, **k),
    "adan": lambda **k: dp.ADAN(0.5, warmup_steps=1, **k),
    "autosgd": lambda **k: dp.AutoSGD(0.5, **k),
    "adaclip": lambda **k: dp.AdaCliP(0.5, center_decay=0.5, **k),
    "adaclip_free": lambda **k: dp.AdaCliP(0.5, scale="free", **k),
    "dpopt": lambda **k: dp.DPOPT(0.5, direction_decay=0.5, pruning=0.5, **k),
    "dpopt_local": lambda **k: dp.DPOPT(0.5, clipping="local", **k),
    "dpnadam": lambda **k: dp.make_private(keras.optimizers.Nadam)(learning_rate=0.05, **k),
}
EPOCHS, LOT = 2, 60
STEPS = EPOCHS * ROWS // LOT
SIGMA = 0.5


def state(private):
    """Every number that training leaves behind."""
    variables = [*private.model.variables, *private.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def assert_equal_bits(a, b):
    for v, w in zip(a, b, strict=True):
        assert v.dtype == w.dtype
        assert v.tobytes() == w.tobytes()


# A record that is never drawn, or weighs nothing, leaves no trace.


def run(make, x, y, **kwargs):
    keras.utils.set_random_seed(3)
    private = private_model(make(noise_multiplier=SIGMA, seed=1))
    private.fit(x, y, batch_size=LOT, epochs=EPOCHS, verbose=0, **kwargs)
    assert private.ledger.steps == STEPS
    return state(private)


def drawn_records():
    """Returns the records in the lots of `run`."""
    rows = np.arange(ROWS, dtype=np.float32)
    lots = dp.PoissonLots(rows, expected_size=LOT, seed=1)
    drawn = set()
    for (x, _, _), mask in lots.take(STEPS, 8):
        drawn |= set(x.numpy()[mask.numpy() > 0].astype(int))
    return drawn


def test_a_record_that_is_never_drawn():
    x, y = data()
    drawn = drawn_records()
    absent = [i for i in range(ROWS) if i not in drawn]
    assert absent
    assert drawn
    reference = run(OPTIMIZERS["adadp"], x, y)
    for record, equal in ((absent[0], True), (min(drawn), False)):
        other_x, other_y = x.copy(), y.copy()
        other_x[record], other_y[record] = -100.0, (y[record] + 1) % 3
        other = run(OPTIMIZERS["adadp"], other_x, other_y)
        if equal:
            assert_equal_bits(reference, other)
        else:  # so that the comparison can fail
            assert any((a != b).any() for a, b in zip(reference, other, strict=True))


@pytest.mark.extended
def test_a_record_without_weight():
    x, y = data()
    weights = np.ones(ROWS, np.float32)
    record = min(drawn_records())
    weights[record] = 0.0
    reference = run(OPTIMIZERS["adadp"], x, y, sample_weight=weights)
    for value in (-100.0, np.nan):
        other = x.copy()
        other[record] = value
        assert_equal_bits(reference, run(OPTIMIZERS["adadp"], other, y, sample_weight=weights))


# A run can be replayed from its releases, without data.


def recorded(make):
    """A run, as its released vectors and the state after each step."""
    x, y = data()
    releases, states = [], []
    private = private_model(make(noise_multiplier=SIGMA), run_eagerly=True)
    start = private.model.get_weights()
    release = private.optimizer._noisy_mean

    def record(clipping_set, sums, expected_lot_size):
        released, stddevs = release(clipping_set, sums, expected_lot_size)
        releases.append([tf.identity(g) for g in released])
        return released, stddevs

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            states.append(state(private))

    private.optimizer._noisy_mean = record
    private.fit(x, y, batch_size=LOT, epochs=EPOCHS, verbose=0, callbacks=[Watch()])
    assert len(releases) == len(states) == STEPS
    return start, releases, states


def replay(make, start, releases):
    """The states that the releases lead to from the public start; no data enters."""
    private = private_model(make(noise_multiplier=SIGMA), model=plain_model())
    private.model.set_weights(start)
    optimizer = private.optimizer
    optimizer.build(private.trainable_variables)
    for released in releases:

        def again(clipping_set, sums, expected_lot_size, released=released):
            stddevs = clipping_set.noise_stddev(SIGMA, len(released))
            return released, [s / tf.constant(float(LOT)) for s in stddevs]

        optimizer._noisy_mean = again
        nothing = [tf.zeros([0, *v.shape]) for v in optimizer._trainable_variables]
        sums = optimizer.clipping_set().clipped_sum(nothing, tf.zeros([0]))
        optimizer.apply_private(sums, float(LOT))
        yield state(private)


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_a_function_of_the_released_vectors(name):
    start, releases, states = recorded(OPTIMIZERS[name])
    for expected, replayed in zip(states, replay(OPTIMIZERS[name], start, releases), strict=True):
        assert_equal_bits(expected, replayed)
    assert any((a != b).any() for a, b in zip(states[0], states[-1], strict=True))


@pytest.mark.representative(1)
@pytest.mark.parametrize("clipping", ["ellipsoid", "local"])
def test_the_printed_prior_is_not(clipping):
    """prior="raw" puts raw gradients into its state: the replay misses them, and ε is ∞."""

    def make(**kwargs):
        return dp.ADADP(0.05, prior="raw", clipping=clipping, warmup_steps=1, **kwargs)

    start, releases, states = recorded(make)
    replayed = next(replay(make, start, releases))
    with pytest.raises(AssertionError):
        assert_equal_bits(states[0], replayed)
