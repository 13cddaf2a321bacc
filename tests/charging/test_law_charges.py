"""Compares the charges of `fit` with the lots drawn, for every law."""

import math

import dp_accounting
import keras
import numpy as np
import pytest

import tf_adadp as dp
from tests.helpers import ROWS, data, private_model
from tf_adadp.accounting import PoissonSampling, PrivacyLedger

DELTA = 1e-3
SIZE, PER_PASS = 30, 4  # 120 records
SHUFFLED_PASS = dp_accounting.GaussianDpEvent(0.5)  # σ* = 1 under replace-one


class WatchedLots(dp.ShuffledLots):
    """Remembers which lots were drawn."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drawn = []

    def _indices(self, step):
        self.drawn.append(step)
        return super()._indices(step)


def shuffled(kind=dp.ShuffledLots, size=SIZE):
    return kind(*data(), size=size)


def passes_charged(ledger):
    return sum(e.count for e in ledger.entries if e.event == SHUFFLED_PASS)


def after(passes):
    """ε of so many passes, from the closed form of the Rényi divergence of Gaussians."""
    ledger = PrivacyLedger()
    ledger.add(
        SHUFFLED_PASS, passes, neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    return ledger.epsilon(DELTA)


@pytest.fixture(scope="module", params=[1, 3])
def model(request):
    return private_model(steps_per_execution=request.param)


def test_every_pass_is_charged_before_a_lot_of_it_is_used(model):
    """Epochs of 5 lots over passes of 4, with validation between; lots that were used are the
    first of those drawn."""
    x, y = data()
    lots = shuffled(WatchedLots)
    ledger, start, seen = model.ledger, model.ledger.steps, []
    started = passes_charged(ledger)

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((ledger.steps - start, passes_charged(ledger) - started))

    model.fit(
        lots, epochs=3, steps_per_epoch=5, validation_data=(x, y), verbose=0, callbacks=[Watch()]
    )
    used = ledger.steps - start
    assert used == 3 * math.ceil(5 / model.steps_per_execution) * model.steps_per_execution
    assert lots.drawn[:used] == list(range(used)), "one iterator, no lot skipped"
    assert seen[-1][0] == used
    for steps, passes in seen:
        assert passes == len({step // PER_PASS for step in lots.drawn[:steps]})


def test_a_second_fit_pays_for_a_pass_of_its_own(model):
    lots = shuffled(WatchedLots)
    before = passes_charged(model.ledger)
    execution = model.steps_per_execution
    for _ in range(2):
        model.fit(lots, steps_per_epoch=execution, verbose=0)  # a part of a pass each
    assert passes_charged(model.ledger) == before + 2
    assert {step // PER_PASS for step in lots.drawn} == {0, 1}


def test_epsilon_is_that_of_the_passes():
    model = private_model()
    history = model.fit(
        shuffled(), epochs=3, verbose=0, callbacks=[dp.PrivacyCallback(DELTA)]
    ).history
    assert history["epsilon"] == pytest.approx([after(1), after(2), after(3)])
    assert model.ledger.steps == int(model.optimizer.iterations) == 12
    assert "without amplification" in " ".join(model.ledger.statement(DELTA).split())
    assert not model.step_law.declared


def test_a_budget_of_passes_is_used_to_their_last_lot_and_the_file_is_ahead(tmp_path):
    path = tmp_path / "ledger.json"
    budget = (after(2) + after(3)) / 2
    ahead = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            ahead.append(passes_charged(PrivacyLedger.load(path)))
            assert ahead[-1] >= passes_charged(self.model.ledger)

    model = private_model()
    callback = dp.PrivacyCallback(DELTA, max_epsilon=budget, ledger_path=path)
    model.fit(shuffled(), epochs=9, verbose=0, callbacks=[callback, Reads()])
    assert model.ledger.steps == 2 * PER_PASS
    assert model.epsilon(DELTA) == pytest.approx(after(2))
    assert ahead[0] >= 1
    assert ahead[-1] >= 2
    with pytest.raises(ValueError, match="leaves no room"):
        model.fit(shuffled(), verbose=0, callbacks=[callback])


def test_a_custom_loop_says_where_it_is_or_pays_for_a_pass_each_time():
    optimizer, law = dp.DPSGD(0.1, noise_multiplier=1.0), shuffled().law
    ledger = PrivacyLedger()
    for position in range(9):
        optimizer.charge(ledger, law, position=position)
    assert (passes_charged(ledger), ledger.steps) == (3, 9)
    ledger = PrivacyLedger()
    for _ in range(9):
        optimizer.charge(ledger, law)
    assert passes_charged(ledger) == 9


def test_optimizers_whose_step_is_more_than_one_sum_refuse_passes():
    x, y = data()
    agd = private_model(dp.AGD(total_epsilon=4.0, total_delta=1e-5, splits=5))
    private_energy = dp.SADPSGD(
        0.1,
        noise_multiplier=1.0,
        energy_data=(x, y),
        energy_noise_multiplier=5.0,
        energy_clip=1.0,
    )
    for model in (agd, private_model(private_energy)):
        before = model.get_weights()
        with pytest.raises(ValueError, match="charged once for a pass|cost of a selection"):
            model.fit(shuffled(), verbose=0)
        for a, b in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert not model.ledger.entries


def user_lots():
    return dp.UserLots(
        *data(),
        user_ids=np.arange(ROWS) % 40,
        expected_users=10,
        max_records_per_user=2,
        expected_size=20,
    )


def test_fit_on_users_is_charged_by_user_and_divides_by_the_public_size():
    model = private_model()
    lots = user_lots()
    model.fit(lots, verbose=0, callbacks=[dp.PrivacyCallback(DELTA)])
    poisson = dp.accounting.epsilon(0.5, 10 / 40, lots.steps_per_epoch, DELTA)
    assert model.epsilon(DELTA) == pytest.approx(poisson)
    assert model.session.run.expected_size == 20
    with pytest.raises(ValueError, match="one record and others one user"):
        model.fit(
            dp.PoissonLots(*data(), expected_size=30),
            verbose=0,
            callbacks=[dp.PrivacyCallback(DELTA)],
        )


def test_energies_of_single_records_do_not_protect_users():
    x, y = data()
    arguments = {"energy_data": (x, y), "energy_noise_multiplier": 5.0, "energy_clip": 1.0}
    optimizer = dp.SADPSGD(0.1, noise_multiplier=1.0, **arguments)
    with pytest.raises(ValueError, match="protects one record .* protect one user"):
        optimizer.charge(PrivacyLedger(), user_lots().law)


def test_truncated_lots_need_pld_and_say_so_before_training():
    model = private_model()
    lots = dp.TruncatedPoissonLots(*data(), expected_size=30, max_size=48)
    with pytest.raises(ValueError, match='Use accountant="pld"'):
        model.fit(lots, verbose=0, callbacks=[dp.PrivacyCallback(DELTA)])
    assert model.ledger.steps == 0
    model.fit(lots, steps_per_epoch=2, verbose=0)
    assert [(e.event, e.count) for e in model.ledger.entries] == [(lots.law.event(1.0), 2)]


def test_full_batches_are_poisson_lots_of_all_records():
    model = private_model()
    lots = dp.PoissonLots(*data(), expected_size=ROWS)
    model.fit(lots, epochs=2, verbose=0)
    assert [(e.event, e.count) for e in model.ledger.entries] == [
        (dp_accounting.GaussianDpEvent(1.0), 2)
    ]
    assert "full batches: every lot holds all 120 records" in model.ledger.statement(DELTA)
    assert PoissonSampling(ROWS, ROWS).event(1.0) == dp_accounting.GaussianDpEvent(1.0)


LAWS = {
    "poisson": PoissonSampling(ROWS, SIZE),
    "full batches": PoissonSampling(ROWS, ROWS),
    "fixed size": dp.accounting.FixedSizeSampling(ROWS, SIZE),
    "shuffled": dp.accounting.ShuffledSampling(ROWS, SIZE),
    "users": dp.accounting.UserSampling(40, 10, 2, 20),
}


@pytest.mark.parametrize("name", LAWS)
def test_what_an_optimizer_charges_can_be_stated_and_is_no_odometer_reading(name):
    """Events of several parts, and lots that their pass has paid for, among them."""
    law = LAWS[name]
    optimizers = [
        dp.DPSGD(noise_multiplier=1.0),
        dp.ADADP(noise_multiplier=1.0, microbatch_size=2),
        dp.DPOPT(directions="budgeted", direction_noise_multiplier=3.0, noise_multiplier=4.0),
    ]
    if name not in ("shuffled", "users"):  # which it refuses
        arguments = {"energy_noise_multiplier": 5.0, "energy_clip": 1.0, "energy_data": data()}
        optimizers.append(dp.SADPSGD(0.1, noise_multiplier=1.0, **arguments))
    for optimizer in optimizers:
        ledger = PrivacyLedger()
        for position in range(6):
            optimizer.charge(ledger, law, position=position)
        assert ledger.odometer_reasons == ()
        assert repr(ledger).startswith("<PrivacyLedger: 6 releases")
        statement = " ".join(ledger.statement(DELTA).split())
        assert f"{ledger.epsilon(DELTA):.6g}" in statement
        assert f"the number of {'users' if name == 'users' else 'records'} is public" in statement
        other = type(optimizer).from_config({**optimizer.get_config(), "noise_multiplier": 4.5})
        if isinstance(optimizer, dp.SADPSGD):
            continue  # its energies stay with it
        other.charge(ledger, law)
        assert "(2 settings)" in ledger.odometer_reasons[0]


@pytest.mark.parametrize("largest", [1, 3])
def test_one_user_moves_a_sum_by_at_most_k(largest):
    """Sums of vectors of norm C over the lots of one key, with and without a user's records."""
    ids = np.arange(ROWS) % 40
    sums = []
    for keep in (np.ones(ROWS, bool), ids != 39):  # the last user: the others keep their numbers
        made = dp.UserLots(
            np.where(ids == 39, 1.0, 0.0)[keep],
            user_ids=ids[keep],
            expected_users=int(keep.sum() / 3),  # q = 1
            max_records_per_user=largest,
            expected_size=10,
        )
        sums.append([float(np.sum(x)) for (x, _, _), _ in made.take(5, 16)])
    assert np.abs(np.subtract(*sums)).max() == largest


def test_a_charge_that_failed_pays_for_no_lot_of_its_pass():
    model = private_model()
    lots = shuffled()
    model.fit(lots, steps_per_epoch=1, verbose=0)
    before = passes_charged(model.ledger)
    model.session._begin(lots.law, lots, lots.expected_size)
    stream = iter(lots.as_dataset(8, PER_PASS))
    charge, model.optimizer.charge = model.optimizer.charge, None
    with pytest.raises(TypeError):
        model.train_function(stream)
    model.optimizer.charge = charge
    model.train_function(stream)
    assert passes_charged(model.ledger) == before + 1
