"""Attacks with a lot, or its sums, that are used more often than they were charged for."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, crossentropy, data, plain_model
from tf_adadp.accounting import FixedSizeSampling, PoissonSampling, PrivacyLedger
from tf_adadp.charging import lot_releases

DELTA = 1e-4
LAW = PoissonSampling(ROWS, 30)


def lots_of(expected_size=30, seed=None):
    x, y = data()
    return dp.PoissonLots(x, y, expected_size=expected_size, seed=seed)


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


@pytest.mark.parametrize("shared", ["ledger", "united ledgers", "weights"])
def test_a_lot_serves_one_release_for_one_account(shared):
    """Two optimizers of one ledger; and one set of weights with a new ledger for every epoch."""
    (lot,) = lots_of().take(1, 16)
    loss = crossentropy()
    model, optimizer = built()
    ledger, second = PrivacyLedger(), PrivacyLedger()
    optimizer.charge(ledger, LAW)
    release(model, optimizer, lot, loss)
    if shared == "weights":
        other = built(model=model)
    else:
        other = built()
        if shared == "ledger":
            second = ledger
        else:
            second.unite(ledger)
    other[1].charge(second, LAW)
    with pytest.raises(ValueError, match="had a release already"):
        release(*other, lot, loss)
    # Another model with a ledger of its own is another account.
    model, optimizer = built()
    optimizer.charge(PrivacyLedger(), LAW)
    release(model, optimizer, lot, loss)


def test_a_joint_charge_is_for_the_optimizer_that_paid():
    """If a charge of σ = 10 covered two releases, the other optimizer's σ = 1 would cost 0.70."""
    (lot,) = lots_of().take(1, 16)
    ledger, loss = PrivacyLedger(), crossentropy()
    cheap = built(dp.DPSGD(0.1, noise_multiplier=10.0))
    dear = built(dp.DPSGD(0.1, noise_multiplier=1.0))
    cheap[1].charge(ledger, LAW, releases_per_lot=2)
    dear[1].charge(ledger, LAW)
    release(*cheap, lot, loss)
    with pytest.raises(ValueError, match="had a release already"):
        release(*dear, lot, loss)
    release(*cheap, lot, loss)


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


def test_other_records_under_the_mask_of_a_lot_are_that_lot():
    """Augmented or normalised, cast or relabelled: what was drawn is known by its mask."""
    model, optimizer = built()
    ledger, loss, lots = PrivacyLedger(), crossentropy(), lots_of()
    for (x, y, weight), mask in lots.take(3, 16):
        lot = (x, y, weight), mask
        dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)
        noisy = (x + tf.random.normal(tf.shape(x)), y, weight), mask
        with pytest.raises(ValueError, match="with a mask of its own"):
            dp.private_step(model, loss, noisy, optimizer, ledger=ledger, law=lots.law)
    assert ledger.steps == 3


def test_one_table_for_many_masks_is_legal():
    """Keeps all records in memory; every lot selects some by its own mask."""
    model, optimizer = built()
    ledger, loss = PrivacyLedger(), crossentropy()
    x, y = data()
    rng = np.random.default_rng(0)
    table = tf.constant(x[None]), tf.constant(y[None]), None
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


@pytest.mark.parametrize("in_graph", [True, False])
def test_several_releases_from_lots_that_may_be_empty(in_graph):
    """An empty lot is refused, and charged, as a lot with rows is."""
    model, optimizer = built()
    ledger, loss, lots = PrivacyLedger(), crossentropy(), lots_of(0.5, seed=4)

    def step(lot):
        optimizer.apply_private(dp.clipped_sum(model, loss, lot, optimizer), 0.5)

    stream = lots.as_dataset(16, num_lots=12)
    if in_graph:
        step = tf.function(step, input_signature=[stream.element_spec], autograph=False)
    empty = 0
    for lot in stream:
        empty += 0 in lot[1].shape
        optimizer.charge(ledger, lots.law, releases_per_lot=3)
        for _ in range(3):
            step(lot)
    assert 0 < empty < 12
    assert optimizer.releases == 36
    assert optimizer.uncharged_releases == 0


def test_memory_of_lots_is_bounded(monkeypatch):
    """Masks that somebody else keeps are known all the same: a list of lots of any length."""
    monkeypatch.setattr(lot_releases, "_REMEMBERED_BYTES", 0)
    releases, variable = lot_releases.LotReleases(), keras.Variable(0.0)
    before = len(lot_releases._lots)

    def claim(mask):
        return releases.claim(((tf.zeros([1, 50, 2]), None, None), mask), [variable])

    for _ in range(50):
        claim(tf.ones([1, 50]))
    assert len(lot_releases._kept) == 1
    assert len(lot_releases._lots) <= before + 2
    kept = [tf.ones([1, 50]) for _ in range(50)]
    for mask in kept:
        claim(mask)
    for mask in kept:
        with pytest.raises(ValueError, match="had a release already"):
            claim(mask)


def test_permits_of_full_batches_are_for_full_batches():
    model, optimizer = built()
    ledger, loss = PrivacyLedger(), crossentropy()
    law = PoissonSampling(ROWS, ROWS)
    full = dp.make_lot(*data(), physical_batch_size=64)
    for _ in range(3):
        dp.private_step(model, loss, full, optimizer, ledger=ledger, law=law)
    (lot,) = lots_of().take(1, 16)
    optimizer.charge(ledger, LAW, 2)
    release(model, optimizer, lot, loss)
    with pytest.raises(ValueError, match="had a release already"):
        release(model, optimizer, lot, loss)


@pytest.mark.parametrize("make", [dp.DPSGD, dp.ADADP])
def test_sums_that_were_changed_are_refused(make):
    """Sums of four lots in the place of one's, for the price of one."""
    model, optimizer = built(make(noise_multiplier=1.0))
    loss = crossentropy()
    first, second = lots_of().take(2, 16)
    sums = dp.clipped_sum(model, loss, first, optimizer)
    for i, more in enumerate(dp.clipped_sum(model, loss, second, optimizer)):
        sums[i] += more
    with pytest.raises(ValueError, match="sums were changed since they were clipped"):
        optimizer.apply_private(sums, 60.0)
    assert optimizer.releases == 0


def test_refused_arguments_use_up_no_lot():
    model, optimizer = built(dp.ADADP(noise_multiplier=1.0))
    loss = crossentropy()
    (lot,) = lots_of().take(1, 16)
    sums = dp.clipped_sum(model, loss, lot, optimizer)
    with pytest.raises(ValueError, match="expected_lot_size=0"):
        optimizer.apply_private(sums, 0)
    with pytest.raises(ValueError, match="regularization_gradients has 1 entries for 4"):
        optimizer.apply_private(sums, 30.0, [None])
    assert optimizer.releases == 0
    optimizer.apply_private(sums, 30.0)


def test_charges_that_were_paid_ahead_are_not_lost():
    model, optimizer = built()
    ledger, loss, lots = PrivacyLedger(), crossentropy(), lots_of()
    optimizer.charge(ledger, lots.law, 3)
    first, *others = lots.take(4, 16)
    dp.private_step(model, loss, first, optimizer, ledger=ledger, law=lots.law)
    for lot in others:
        release(model, optimizer, lot, loss)
    assert ledger.steps == optimizer.releases == 4
    assert optimizer.uncharged_releases == 0


# Lots that are paid for by the pass.


SHUFFLED = dp.accounting.ShuffledSampling(ROWS, 30)  # passes of four lots


def cost(*charges):
    """The ε of charges (optimizer, arguments, …) on one ledger."""
    ledger = PrivacyLedger()
    for optimizer, arguments in charges:
        optimizer.charge(ledger, SHUFFLED, **arguments)
    return ledger.epsilon(DELTA)


def passes(count, sigma=1.0):
    return dp.accounting.epsilon(sigma / 2, 1.0, count, DELTA)


def test_positions_within_a_pass_that_nobody_paid_for_pay_for_it():
    """Counted from 1, a pass was free: ε read 0.0 for 9.65."""
    _, optimizer = built()
    assert cost(*((optimizer, {"position": i}) for i in (1, 2, 3))) == pytest.approx(passes(1))
    _, optimizer = built()
    assert cost(*((optimizer, {"position": i}) for i in range(8))) == pytest.approx(passes(2))


def test_a_pass_is_paid_for_by_every_optimizer_and_price():
    """A pass that σ = 10 paid for served σ = 1, and one release a lot served four."""
    cheap, dear = (built(dp.DPSGD(0.1, noise_multiplier=s))[1] for s in (10.0, 1.0))
    assert cost((cheap, {"position": 0}), *((dear, {"position": i}) for i in (1, 2, 3))) >= passes(
        1
    )
    _, optimizer = built()
    both = cost((optimizer, {"position": 0}), (optimizer, {"position": 1, "releases_per_lot": 4}))
    assert both >= passes(1, 0.5)


def test_a_new_ledger_within_a_pass_pays_for_it():
    _, optimizer = built()
    cost((optimizer, {"position": 0}))
    assert cost((optimizer, {"position": 1})) == pytest.approx(passes(1))


# Inside of tf.function.


def test_a_charge_in_a_graph_is_refused():
    """It charged when the graph was traced, once for any number of runs."""
    model, optimizer = built()
    loss, ledger, lots = crossentropy(), PrivacyLedger(), lots_of()

    @tf.function(autograph=False)
    def step(lot):
        optimizer.charge(ledger, lots.law)
        release(model, optimizer, lot, loss)

    (lot,) = lots.take(1, 16)
    with pytest.raises(RuntimeError, match="charge inside of a tf.function.*private_step"):
        step(lot)
    assert ledger.steps == optimizer.releases == 0


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
