"""Attacks with a lot, or its sums, that are used more often than they were charged for."""

import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import ROWS, crossentropy, data, plain_model

import tf_adadp as dp
from tf_adadp.accounting import FixedSizeSampling, PoissonSampling, PrivacyLedger

DELTA = 1e-4
LAW = PoissonSampling(ROWS, 30)


def lots_of(expected_size=30):
    x, y = data()
    return dp.PoissonLots(x, y, expected_size=expected_size)


def built(optimizer=None, model=None):
    model = model or plain_model()
    optimizer = optimizer or dp.DPSGD(0.1, noise_multiplier=1.0)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def release(model, optimizer, lot, loss, times=1):
    for _ in range(times):
        optimizer.apply_private(dp.clipped_sum(model, loss, lot, optimizer), 30.0)


def test_four_releases_from_each_lot_are_refused_and_what_they_would_have_hidden():
    """Charged as four lots 250 times over, ε read 1.76; the worst case is 8.19."""
    model, optimizer = built()
    law, loss, ledger = PoissonSampling(6000, 60), crossentropy(), PrivacyLedger()
    optimizer.charge(ledger, law, 4 * 250)
    assert ledger.epsilon(DELTA) == pytest.approx(1.755, abs=1e-3)
    (lot,) = lots_of().take(1, 16)
    release(model, optimizer, lot, loss)
    weights = model.get_weights()
    with pytest.raises(ValueError, match="had a release already.*releases_per_lot=K"):
        release(model, optimizer, lot, loss)
    assert optimizer.releases == 1
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)

    honest = PrivacyLedger()
    optimizer.charge(honest, law, 250, releases_per_lot=4)
    assert honest.epsilon(DELTA) == pytest.approx(8.194, abs=1e-3)
    assert honest.epsilon(DELTA) == dp.accounting.epsilon(0.5, 0.01, 250, DELTA)


def test_releases_per_lot_allows_exactly_so_many_from_one_lot():
    model, optimizer = built(dp.ADADP(noise_multiplier=1.0))
    loss, ledger = crossentropy(), PrivacyLedger()
    first, second, third = lots_of().take(3, 16)
    optimizer.charge(ledger, LAW, 2, releases_per_lot=3)
    release(model, optimizer, first, loss, 2)
    release(model, optimizer, second, loss, 3)
    release(model, optimizer, first, loss)
    assert optimizer.uncharged_releases == 0
    for lot in (first, second):
        with pytest.raises(ValueError, match="had a release already"):
            release(model, optimizer, lot, loss)
    # Nothing paid for a third lot, whatever was left of the first two.
    release(model, optimizer, third, loss)
    assert optimizer.uncharged_releases == 1


def test_a_joint_charge_pays_for_releases_from_its_own_lot_alone():
    """Four releases from four lots can cost more than four from one."""
    model, optimizer = built()
    loss, ledger = crossentropy(), PrivacyLedger()
    optimizer.charge(ledger, LAW, releases_per_lot=4)
    for lot in lots_of().take(4, 16):
        release(model, optimizer, lot, loss)
    assert optimizer.uncharged_releases == 3


def test_two_optimizers_with_one_ledger_share_the_lots():
    x, y = data()
    (lot,) = lots_of().take(1, 16)
    ledger, loss = PrivacyLedger(), crossentropy()
    for i, (model, optimizer) in enumerate((built(), built())):
        optimizer.charge(ledger, LAW)
        if i == 1:
            with pytest.raises(ValueError, match="had a release already"):
                release(model, optimizer, lot, loss)
        else:
            release(model, optimizer, lot, loss)
    # Another ledger is another account, of another model.
    model, optimizer = built()
    optimizer.charge(PrivacyLedger(), LAW)
    release(model, optimizer, lot, loss)


@pytest.mark.parametrize("law", [PoissonSampling(ROWS, ROWS), FixedSizeSampling(ROWS, ROWS)])
def test_full_batches_may_be_used_again(law):
    """Nothing is amplified, so releases from one lot cost what releases from several lots cost."""
    model, optimizer = built()
    loss, ledger = crossentropy(), PrivacyLedger()
    lot = dp.make_lot(*data(), physical_batch_size=64)
    for _ in range(4):
        optimizer.charge(ledger, law)
        release(model, optimizer, lot, loss)
    joint = PrivacyLedger()
    built()[1].charge(joint, law, releases_per_lot=4)
    assert ledger.epsilon(DELTA) == pytest.approx(joint.epsilon(DELTA), rel=1e-9)
    for _ in range(3):
        dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=law)
    assert ledger.steps == 7
    assert optimizer.uncharged_releases == 0


@pytest.mark.parametrize(
    "optimizer",
    [
        dp.AGD(total_epsilon=3.0, total_delta=1e-4),
        dp.SADPSGD(noise_multiplier=1.0, energy_data=data()),
        dp.SADPSGD(
            noise_multiplier=1.0,
            energy_data=data(),
            energy_noise_multiplier=9.0,
            energy_clip=1.0,
        ),
        dp.DPOPT(noise_multiplier=1.0, directions="budgeted", direction_noise_multiplier=2.0),
    ],
)
def test_methods_that_release_more_than_a_sum_have_no_joint_price(optimizer):
    optimizer.build(plain_model().trainable_variables)
    ledger = PrivacyLedger()
    with pytest.raises(ValueError, match=rf"releases_per_lot=4 with {type(optimizer).__name__}"):
        optimizer.charge(ledger, LAW, releases_per_lot=4)
    assert ledger.steps == 0
    assert not ledger.budgets


@pytest.mark.parametrize("k", [0, -1, 1.5, True, None])
def test_bad_releases_per_lot(k):
    with pytest.raises(ValueError, match="releases_per_lot"):
        built()[1].charge(PrivacyLedger(), LAW, releases_per_lot=k)


def test_noiseless_releases_stay_infinite():
    ledger = PrivacyLedger()
    _, optimizer = built(dp.DPSGD(0.1, noise_multiplier=0, allow_no_noise=True))
    optimizer.charge(ledger, LAW, releases_per_lot=4)
    assert ledger.epsilon(DELTA) == math.inf


def test_shuffled_lots_and_microbatches_have_their_joint_price():
    _, optimizer = built(dp.DPSGD(0.1, noise_multiplier=2.0, microbatch_size=2))
    for law in (LAW, dp.accounting.ShuffledSampling(ROWS, 30), FixedSizeSampling(ROWS, 30)):
        ledger = PrivacyLedger()
        optimizer.charge(ledger, law, 4, releases_per_lot=4)
        assert ledger.entries[0].event == law.event(1.0, microbatched=True)


# Replays of lots that are all still there, and disguises.


def test_a_list_of_lots_is_no_supply():
    """20 lots kept in a list and used in every epoch: as declared data that is replayed."""
    model, optimizer = built()
    ledger, loss, lots = PrivacyLedger(), crossentropy(), lots_of()
    kept = list(lots.take(20, 16))
    for lot in kept:
        dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)
    for lot in kept:
        with pytest.raises(ValueError, match="had a release already"):
            dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)
    assert ledger.steps == optimizer.releases == 20


def test_a_cached_dataset_of_lots_is_no_supply():
    model, optimizer = built()
    ledger, loss, lots = PrivacyLedger(), crossentropy(), lots_of()
    cached = lots.as_dataset(16, num_lots=3).cache()

    def epoch():
        for lot in cached:
            dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)

    epoch()
    with pytest.raises(ValueError, match="had a release already"):
        epoch()
    assert ledger.steps == 3


def test_a_lot_in_another_wrapping_is_the_same_lot():
    model, optimizer = built()
    ledger, loss = PrivacyLedger(), crossentropy()
    (lot,) = lots_of().take(1, 16)
    dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=LAW)
    (x, y, weight), mask = lot
    for other in (((x, y, weight), mask), ((tf.identity(x), y, weight), tf.identity(mask))):
        with pytest.raises(ValueError, match="had a release already"):
            dp.private_step(model, loss, other, optimizer, ledger=ledger, law=LAW)


def test_one_mask_for_many_lots_and_one_table_for_many_masks_are_legal():
    """Rows with a mask of ones; and all records, of which a drawn mask takes some."""
    model, optimizer = built()
    ledger, loss = PrivacyLedger(), crossentropy()
    x, y = data()
    ones = tf.ones([1, 30])
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows = rng.choice(ROWS, 30, replace=False)
        lot = (tf.constant(x[None, rows]), tf.constant(y[None, rows]), None), ones
        law = FixedSizeSampling(ROWS, 30)
        dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=law)
    table = tf.constant(x[None]), tf.constant(y[None]), None
    ledger = PrivacyLedger()
    for _ in range(40):
        mask = tf.constant((rng.random((1, ROWS)) < 0.25).astype(np.float32))
        dp.private_step(model, loss, (table, mask), optimizer, ledger=ledger, law=LAW)
    assert ledger.steps == 40


def test_empty_lots_are_lots():
    model, optimizer = built()
    ledger, loss, lots = PrivacyLedger(), crossentropy(), lots_of(0.001)
    for lot in lots.take(4, 16):
        dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)
    assert ledger.steps == optimizer.releases == 4


def test_memory_of_lots_is_bounded(monkeypatch):
    from tf_adadp import lot_releases

    monkeypatch.setattr(lot_releases, "_REMEMBERED_BYTES", 1000)
    releases = lot_releases.LotReleases()
    for _ in range(50):
        mask = tf.ones([1, 50])
        releases.claim(((tf.zeros([1, 50, 2]), None, None), mask))
    assert len(releases._lots) == 5
    assert releases._bytes == 1000


# Inside of tf.function.


def test_a_graph_that_runs_twice_on_a_lot_is_stopped_before_the_second_release():
    model, optimizer = built()
    loss, ledger, lots = crossentropy(), PrivacyLedger(), lots_of()
    stream = lots.as_dataset(16, num_lots=3)

    @tf.function(input_signature=[stream.element_spec], autograph=False)
    def step(lot):
        optimizer.apply_private(dp.clipped_sum(model, loss, lot, optimizer), 30.0)

    for lot in stream:
        optimizer.charge(ledger, lots.law, 4)
        step(lot)
        for _ in range(3):
            with pytest.raises(tf.errors.InvalidArgumentError, match="had a release already"):
                step(lot)
    assert optimizer.releases == 3


def test_a_graph_with_two_releases_from_its_lot_makes_one():
    model, optimizer = built()
    loss, ledger, lots = crossentropy(), PrivacyLedger(), lots_of()
    stream = lots.as_dataset(16, num_lots=1)

    @tf.function(input_signature=[stream.element_spec], autograph=False)
    def step(lot):
        for _ in range(2):
            optimizer.apply_private(dp.clipped_sum(model, loss, lot, optimizer), 30.0)

    optimizer.charge(ledger, lots.law, 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="had a release already"):
        step(next(iter(stream)))
    assert optimizer.releases <= 1
    optimizer.charge(ledger, lots.law, 1, releases_per_lot=2)
    step(next(iter(stream)))
