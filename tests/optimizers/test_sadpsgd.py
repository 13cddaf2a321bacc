"""SADPSGD against a slow version of its algorithm, and what its acceptance may see and cost."""

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tf_adadp as dp
from tests.helpers import ROWS, crossentropy, data, plain_model, private_model
from tf_adadp.accounting import FixedSizeSampling, PoissonSampling, UnknownSampling
from tf_adadp.optimizers.sadpsgd import SADPSGD

ENERGY = data(40, seed=5)
POISSON = PoissonSampling(num_examples=ROWS, expected_size=30)
FIXED = FixedSizeSampling(num_examples=ROWS, size=30)
PRIVATE = {"energy_noise_multiplier": 3.0, "energy_clip": 0.25}


def make(energy_data=ENERGY, **arguments):
    return SADPSGD(**{"noise_multiplier": 1.0, "energy_data": energy_data, **arguments})


def regression(rows=25, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    return x, (x @ [[1.0], [-2.0], [0.5]]).astype(np.float32)


def linear(layer=None, **arguments):
    """A linear model and an optimizer that is bound to it."""
    layers = [keras.Input((3,)), *([layer] if layer else []), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = make(**{"energy_data": regression(), **arguments})
    optimizer.build(model.trainable_variables)
    optimizer.bind(model, "mse")
    return model, optimizer


def step(optimizer, release=None):
    """One step, on a release that is given or of a lot without records."""
    if release is not None:
        optimizer._release = lambda sums, expected_lot_size: [
            tf.cast(g, tf.float32) for g in release
        ]
    optimizer.apply_private([tf.zeros(v.shape) for v in optimizer._trainable_variables], 10.0)


def state(*owners):
    return [np.array(v.numpy()) for owner in owners for v in owner.variables]


def same_bits(a, b):
    return all(v.tobytes() == w.tobytes() for v, w in zip(a, b, strict=True))


def constant(optimizer, value):
    return [np.full(v.shape, value) for v in optimizer._trainable_variables]


def counters(optimizer):
    return int(optimizer.accepted), int(optimizer.rejections)


# The algorithm.


def test_a_slow_version_of_algorithm_2():
    rng = np.random.default_rng(1)
    mu_0, q_0, eta = 4, 30.0, 0.4
    x, y = regression()
    model, optimizer = linear(
        learning_rate=eta,
        initial_temperature=q_0,
        rejection_threshold=mu_0,
        seed=7,
        energy_batch_size=4,  # does not divide 25: the padding must not count
    )
    w, b = (v.astype(np.float64) for v in model.get_weights())

    def energy(w, b):
        return np.mean((x @ w + b - y) ** 2)

    key = optimizer._annealing_key.key
    tau = mu = forced = undone = 0
    q = q_0
    for t in range(60):
        release = [rng.normal(size=v.shape) * 0.7 for v in (w, b)]
        release[0] += 2 * x.T @ (x @ w + b - y) / len(x)
        new = w - eta * release[0], b - eta * release[1]
        uniform = tf.random.stateless_uniform([], key + [2**32, t], dtype=tf.float64, alg="philox")
        change = energy(*new) - energy(w, b)
        likely = float(uniform) <= np.exp(min(0.0, -change * q))
        if likely or mu >= mu_0:
            forced += not likely
            (w, b), tau, mu = new, tau + 1, 0
        else:
            undone, mu = undone + 1, mu + 1
        q = q_0 * tau

        step(optimizer, release)
        assert counters(optimizer) == (tau, mu)
        for ours, theirs in zip(model.get_weights(), (w, b), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert min(tau, undone, forced) > 0  # every branch was taken
    assert int(optimizer.iterations) == 60


def test_acceptance_has_the_probability_it_claims():
    """2000 draws, 4.5 standard deviations: false alarms are below 1e-5 for each of the cases."""
    _, optimizer = linear(initial_temperature=10.0)

    @tf.function(autograph=False)
    def rate(change, first):
        kept = tf.map_fn(
            lambda draw: optimizer._accepts(change, first, draw),
            tf.range(2000, dtype=tf.int64),
            fn_output_signature=tf.bool,
        )
        return tf.reduce_mean(tf.cast(kept, tf.float64))

    def measured(tau, change, first=False):
        optimizer.accepted.assign(tau)
        return float(rate(tf.constant(change, tf.float64), tf.constant(first)))

    for tau, change in ((1, 0.05), (3, 0.05), (3, 0.01)):
        p = np.exp(-change * 10.0 * tau)
        tolerance = 4.5 * np.sqrt(p * (1 - p) / 2000)
        assert measured(tau, change) == pytest.approx(p, abs=tolerance)
        assert measured(tau, change * 1.6) != pytest.approx(p, abs=tolerance)
    assert measured(3, 0.0) == measured(3, -1.0) == 1.0
    assert measured(3, 50.0) == 0.0
    # Q = Q0·τ is 0 until a candidate was kept, but Q0 at the very first.
    assert measured(0, 0.05) == 1.0
    assert measured(0, 0.05, first=True) == pytest.approx(np.exp(-0.5), abs=0.05)


@pytest.mark.parametrize("private", [{}, PRIVATE], ids=["public", "private"])
def test_a_rejection_leaves_everything_but_counters_as_it_was(private):
    model, optimizer = linear(
        learning_rate=0.01,
        momentum=0.9,
        nesterov=True,
        use_ema=True,
        weight_decay=0.1,
        rejection_threshold=3,
        initial_temperature=1e6,
        **(private and {**private, "energy_noise_multiplier": 1e-6}),  # it may not decide here
    )
    # A first candidate that is undone: the average of the weights begins at the weights.
    step(optimizer, constant(optimizer, 1e5))
    assert counters(optimizer) == (0, 1)
    for average, w in zip(
        optimizer._model_variables_moving_average, model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(average.numpy(), w)
    x, y = regression()
    for _ in range(3):
        w, b = model.get_weights()
        error = x @ w + b - y
        step(optimizer, [x.T @ error / len(x), error.mean(0)])
    assert counters(optimizer) == (3, 0)
    slots = [v for v in optimizer.variables if "momentum" in v.path or "average" in v.path]
    assert len(slots) == 4

    def kept():
        return state(model) + [np.array(v.numpy()) for v in slots]

    before = kept()
    assert all(np.any(v != 0) for v in before)
    for rejections in (1, 2, 3):
        step(optimizer, constant(optimizer, 1e5))
        assert counters(optimizer) == (3, rejections)
        assert same_bits(before, kept())
    assert int(optimizer.iterations) == 7
    step(optimizer, constant(optimizer, 1e5))  # μ ≥ μ0
    assert counters(optimizer) == (4, 0)
    assert not any(np.array_equal(v, w) for v, w in zip(before, kept(), strict=True))


@pytest.mark.parametrize("private", [{}, PRIVATE], ids=["public", "private"])
def test_candidates_that_are_not_finite_are_never_kept(private):
    model, optimizer = linear(rejection_threshold=1, **private)
    before = model.get_weights()
    for rejections, value in enumerate((np.nan, np.inf, np.nan), 1):
        step(optimizer, constant(optimizer, value))
        assert counters(optimizer) == (0, rejections)
        assert same_bits(before, model.get_weights())
    if not private:
        step(optimizer, constant(optimizer, 1e30))  # finite weights, infinite energy
        assert counters(optimizer) == (0, 4)
    step(optimizer, constant(optimizer, 1e-3))
    assert counters(optimizer) == (1, 0)


def test_the_remembered_energy_is_of_the_weights_in_force():
    """Weights that somebody else changed between steps have an energy of their own."""
    model, optimizer = linear(initial_temperature=1e6, rejection_threshold=99)
    x, y = regression()
    exact = [np.array([[1.0], [-2.0], [0.5]]), np.zeros(1)]
    step(optimizer, constant(optimizer, 1e-9))
    model.set_weights(exact)
    accepted = int(optimizer.accepted)
    step(optimizer, constant(optimizer, 1e-2))  # worse than exact, better than before
    assert counters(optimizer) == (accepted, 1)
    assert float(optimizer._energy()._value) == pytest.approx(0.0, abs=1e-9)


def test_at_temperature_factor_zero_it_is_dp_sgd():
    shared = {"learning_rate": 0.3, "momentum": 0.5, "use_ema": True, "seed": 1}
    model, optimizer = linear(initial_temperature=0, **shared)
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    plain = dp.DPSGD(noise_multiplier=1.0, **shared)
    plain.build(other.trainable_variables)
    for _ in range(5):
        step(optimizer)
        step(plain)
    assert counters(optimizer) == (5, 0)
    assert same_bits(state(model), state(other))
    assert same_bits(state(plain), [np.array(v.numpy()) for v in optimizer.variables][:-2])


def test_sample_weights_count_and_an_empty_lot_is_a_lot():
    x, y = regression()
    weights = np.linspace(0, 2, len(x)).astype(np.float32)
    model, optimizer = linear(energy_data=(x, y, weights))
    w, b = model.get_weights()
    step(optimizer)
    expected = np.mean(weights * ((x @ w + b - y) ** 2)[:, 0])
    assert float(optimizer._energy().mean([w, b])) == pytest.approx(expected, rel=1e-5)
    assert int(optimizer.iterations) == 1
    assert sum(counters(optimizer)) == 1


# Training, both engines, and what it is charged.

RUNS = {
    "ghost": ("ghost", {}, {}),
    "vectorized": ("vectorized", {"steps_per_execution": 2}, {"microbatch_size": 2, **PRIVATE}),
}


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", RUNS)
def test_every_candidate_is_charged(name):
    engine, how, arguments = RUNS[name]
    x, y = data()
    optimizer = make(learning_rate=5.0, initial_temperature=300.0, seed=1, **arguments)
    model = plain_model(keras.layers.Dense(3))
    private = private_model(optimizer, model, {"gradient_engine": engine}, metrics=None, **how)
    callback = dp.PrivacyCallback(1e-3)
    history = private.fit(x, y, batch_size=30, epochs=3, verbose=0, callbacks=[callback]).history
    accepted = int(optimizer.accepted)
    assert private.ledger.steps == int(optimizer.iterations) == 12
    assert 0 < accepted < 12  # so that the next lines compare different things
    assert history["accepted"][-1] == accepted
    assert history["accepted"] == sorted(history["accepted"])
    assert history["epsilon"][-1] == private.epsilon(1e-3)
    assert [e.event for e in private.ledger.entries] == [optimizer.event(POISSON)]
    assert private.epsilon(1e-3, "pld") < private.epsilon(1e-3) < np.inf
    if name == "ghost":
        assert private.epsilon(1e-3) == pytest.approx(dp.accounting.epsilon(1, 0.25, 12, 1e-3))
        # The published figure has the looser conversion but fewer steps.
        alone = dp_accounting.rdp.RdpAccountant(list(range(2, 65)))
        alone.compose(POISSON.event(1.0), accepted)
        classical = min(alone._rdp - np.log(1e-3) / (np.arange(2, 65) - 1))
        assert optimizer.epsilon_as_published(POISSON, 1e-3) == pytest.approx(classical)
        assert optimizer.epsilon_as_published(FIXED, 1e-3) == pytest.approx(classical)
        optimizer.accepted.assign(0)
        assert optimizer.epsilon_as_published(POISSON, 1e-3) == 0.0


@pytest.mark.parametrize(
    ("candidates", "epsilon"), [(1.0, 2.58), (1.5, 3.21), (2.0, 3.76), (3.0, 4.71)]
)
def test_what_rejections_cost_in_the_papers_setting(candidates, epsilon):
    """MNIST of Table 2: 40 epochs of accepted steps, times the candidates for each of them."""
    steps = round(candidates * 40 * 60000 / 512)
    law = PoissonSampling(num_examples=60000, expected_size=512)
    optimizer = make(noise_multiplier=1.23)
    ledger = dp.accounting.PrivacyLedger()
    optimizer.charge(ledger, law, steps)
    assert ledger.epsilon(1e-5) == pytest.approx(epsilon, abs=0.006)


def test_accepted_steps_alone_are_no_bound():
    """One dimension, q = 1, one accepted step: candidates above `least` are kept, or the 11th."""
    z, width = np.linspace(-15, 20, 100_001, retstep=True)
    sigma, threshold = 1.23, 10

    def density(mean, least):
        rejected = stats.norm.cdf(least, mean, sigma)
        kept = (z > least) * (1 - rejected**threshold) / (1 - rejected)
        return stats.norm.pdf(z, mean, sigma) * (kept + rejected**threshold)

    def delta(least):
        pair = density(1.0, least), density(0.0, least)
        return max(np.sum(np.maximum(a - np.e * b, 0)) * width for a, b in (pair, pair[::-1]))

    claimed = delta(-15.0)  # nothing is rejected
    assert claimed == pytest.approx(0.067, abs=1e-3)
    assert delta(2.0) > 5 * claimed
    assert dp.accounting.delta(sigma, 1.0, threshold + 1, 1.0) > delta(2.0)  # every candidate


def test_events():
    gaussian, composed = dp_accounting.GaussianDpEvent, dp_accounting.ComposedDpEvent
    assert make().event(POISSON) == POISSON.event(1.0)
    for law, multiplier in ((POISSON, 3.0), (FIXED, 1.5)):
        optimizer = make(**PRIVATE)
        assert optimizer.event(law) == composed([law.event(1.0), gaussian(multiplier)])
        ledger = dp.accounting.PrivacyLedger()
        optimizer.charge(ledger, law, 5)
        alone = dp.accounting.PrivacyLedger()
        alone.add(law.event(1.0), 5, law=law)
        alone.add(gaussian(multiplier), 5, neighboring_relation=law.neighboring_relation)
        assert ledger.epsilon(1e-3) == pytest.approx(alone.epsilon(1e-3))
        assert ledger.steps == 5
    ledger = dp.accounting.PrivacyLedger()
    make(variant="printed").charge(ledger, POISSON)
    assert ledger.epsilon(1e-3) == np.inf
    ledger = dp.accounting.PrivacyLedger()
    make(**PRIVATE).charge(ledger, UnknownSampling("nobody looked"))
    with pytest.raises(ValueError, match="nobody"):
        ledger.epsilon(1e-3)


# Private energy_data.


class MeanOfBatch(keras.layers.Layer):
    """Mixes examples."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


@pytest.mark.representative(1)
@pytest.mark.parametrize("mixing", [True, False])
def test_the_sensitivity_of_the_sum_of_changes(mixing):
    x, y = regression(9)
    clip = PRIVATE["energy_clip"]
    layer = MeanOfBatch if mixing else (lambda: None)
    rng = np.random.default_rng(0)
    old = [rng.normal(size=s).astype(np.float32) for s in ((3, 1), (1,))]
    new = [w + np.float32(0.01) for w in old]
    shared = {"energy_batch_size": 16 if mixing else 4, **PRIVATE}

    def sums(energy_data, batched=False):
        _, optimizer = linear(layer(), energy_data=energy_data, **shared)
        energy = optimizer._energy()
        change = energy.clipped_change
        if batched:
            energy._one_by_one, energy._trace = False, None
            change = energy._clipped_change
        return [float(change(old, new, tf.constant(c))) for c in (clip, 1e30)]

    base, unclipped = sums((x, y))
    moved = []
    for value in (30.0,) if mixing else (30.0, -0.1, np.nan, 1e25):
        record = np.full((1, 3), value, np.float32), np.array([[-value]], np.float32)
        longer = [np.concatenate([a, r]) for a, r in zip((x, y), record, strict=True)]
        other, other_unclipped = sums(longer)
        moved.append(abs(other - base))
        replaced = [np.concatenate([r, a[1:]]) for a, r in zip((x, y), record, strict=True)]
        assert abs(sums(replaced)[0] - base) <= 2 * clip * (1 + 1e-5)
        if not np.isfinite(value) or value > 1e20:
            assert moved[-1] == pytest.approx(0.0, abs=1e-6)
        elif not mixing and value == 30.0:
            assert abs(other_unclipped - unclipped) > 10 * clip
    assert max(moved) <= clip * (1 + 1e-5)
    if mixing:  # evaluated as one batch, one record would move the others
        far = [np.concatenate([a, np.full((1, a.shape[1]), 1e3, np.float32)]) for a in (x, y)]
        assert abs(sums(far, batched=True)[0] - sums((x, y), batched=True)[0]) > 2 * clip
    else:
        assert max(moved) == pytest.approx(clip, rel=1e-5)


def test_private_energy_has_the_noise_it_is_charged_for():
    """χ² of 200 draws at 1e-4; 0.67 and 1.5 times the noise are turned away. KS for the law."""
    x, y = regression()
    changes = []
    _, optimizer = linear(learning_rate=1e-30, seed=5, **PRIVATE)
    accepts = optimizer._accepts

    def see(change, first, draw):
        changes.append(float(change))
        return accepts(change, first, draw)

    optimizer._accepts = see
    step(optimizer, constant(optimizer, 0.0))
    for _ in range(199):
        optimizer.apply_private(
            [tf.zeros(v.shape) for v in optimizer._trainable_variables], 1.0
        )  # the weights do not move: noise alone
    noise = np.array(changes) * len(x) / (3.0 * 0.25)

    def fits(scale):
        tail = stats.chi2(200).cdf(np.sum((scale * noise) ** 2))
        return 5e-5 < tail < 1 - 5e-5

    assert fits(1.0)
    assert not fits(0.67)
    assert not fits(1.5)
    assert stats.kstest(noise, "norm").pvalue > 1e-4
    assert len(set(changes)) == 200
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.32  # 4.5 standard deviations


def test_no_energy_of_private_records_is_kept():
    model, optimizer = linear(**PRIVATE)
    energy = optimizer._energy()
    optimizer.begin(POISSON, None, 1)
    for _ in range(3):
        step(optimizer)
    assert not bool(energy._known)
    assert float(energy._value) == 0.0
    assert not any(np.any(v.numpy()) for v in energy._weights)


def test_private_records_raise_nothing_by_their_values():
    x, y = regression()
    x[3], y[4] = np.nan, np.inf
    _, optimizer = linear(energy_data=(x, y), **PRIVATE)
    optimizer.begin(POISSON, None, 1)
    step(optimizer, constant(optimizer, 1e-3))
    assert sum(counters(optimizer)) == 1


# The state is a function of releases, public records and keys.


def recorded(optimizer, x, y):
    """A run of a DPModel, its start, its releases and its last state."""
    releases = []
    keras.utils.set_random_seed(2)
    private = private_model(
        optimizer, model=plain_model(keras.layers.Dense(3)), metrics=None, run_eagerly=True
    )
    start = private.model.get_weights()
    release = optimizer._release

    def record(sums, expected_lot_size):
        releases.append([g.numpy() for g in release(sums, expected_lot_size)])
        return [tf.constant(g) for g in releases[-1]]

    optimizer._release = record
    private.fit(x, y, batch_size=30, epochs=2, verbose=0)
    return start, releases, state(private.model, optimizer)


def test_training_is_a_function_of_its_releases():
    arguments = {"learning_rate": 4.0, "initial_temperature": 300.0, "momentum": 0.5, "seed": 4}
    start, releases, trained = recorded(make(**arguments), *data())
    ends = {}
    for name, energy_data in (("same", ENERGY), ("again", ENERGY), ("other", data(40, seed=6))):
        model = plain_model(keras.layers.Dense(3))
        model.set_weights(start)
        optimizer = make(energy_data, **arguments)
        optimizer.build(model.trainable_variables)
        optimizer.bind(model, crossentropy())
        replay = step if name == "same" else tf.function(step, autograph=False)
        for release in releases:
            replay(optimizer, release)
        ends[name] = state(model, optimizer)
    accepted, rejections = counters(optimizer)
    assert 0 < accepted < len(releases)
    assert same_bits(trained, ends["same"])
    assert same_bits(trained, ends["again"])
    assert not same_bits(trained, ends["other"])


# Saving, loading, and refusals.


@pytest.mark.extended
def test_a_saved_run_goes_on(tmp_path):
    x, y = data()
    optimizer = make(learning_rate=5.0, initial_temperature=300.0, momentum=0.5)
    private = private_model(optimizer, model=plain_model(keras.layers.Dense(3)), metrics=None)
    private.fit(x, y, batch_size=30, epochs=2, verbose=0)
    optimizer.rejections.assign(3)
    private.save(tmp_path / "m.keras")
    key = optimizer._annealing_key.key.numpy()
    written = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert key.tobytes() not in written
    assert ENERGY[0].tobytes()[:64] not in written
    restored = dp.load_model(tmp_path / "m.keras")
    again = restored.optimizer
    assert counters(again) == counters(optimizer)
    assert int(again.accepted) > 0
    assert again.get_config() == optimizer.get_config()
    assert not np.array_equal(again._annealing_key.key, key)
    before = state(restored, again)
    with pytest.raises(ValueError, match="set_energy_data"):
        restored.fit(x, y, batch_size=30, verbose=0)
    assert same_bits(before, state(restored, again))
    assert restored.ledger.steps == 8
    assert again.uncharged_releases == 0
    again.set_energy_data(*ENERGY)
    restored.fit(x, y, batch_size=30, verbose=0)
    assert restored.ledger.steps == int(again.iterations) == 12
    assert restored.epsilon(1e-3) == pytest.approx(dp.accounting.epsilon(1, 0.25, 12, 1e-3))
    with pytest.raises(ValueError, match="are set"):
        again.set_energy_data(*ENERGY)
    renewed = again._annealing_key.key.numpy()
    again.load_own_variables({str(i): v.numpy() for i, v in enumerate(again.variables)})
    assert not np.array_equal(again._annealing_key.key, renewed)


@pytest.mark.parametrize("arguments", [{}, PRIVATE, {"variant": "printed", "seed": 3}], ids=str)
def test_the_config_round_trips_without_records(arguments):
    optimizer = make(
        learning_rate=keras.optimizers.schedules.CosineDecay(0.1, 10),
        rejection_threshold=5,
        energy_batch_size=7,
        **arguments,
    )
    config = keras.optimizers.serialize(optimizer)
    assert "energy_data" not in config["config"]
    restored = keras.optimizers.deserialize(config)
    assert type(restored) is SADPSGD
    assert keras.optimizers.serialize(restored) == config


def test_custom_loops_are_told_what_is_missing():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = make(regression())
    optimizer.build(model.trainable_variables)
    before = state(model, optimizer)
    with pytest.raises(RuntimeError, match="bind"):
        step(optimizer)
    optimizer.bind(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), "mse")
    with pytest.raises(ValueError, match="other trainable variables"):
        step(optimizer)
    with pytest.raises(ValueError, match="loss=None"):
        optimizer.bind(model, None)
    loaded = SADPSGD.from_config(optimizer.get_config())
    loaded.build(model.trainable_variables)
    loaded.bind(model, "mse")
    with pytest.raises(ValueError, match="set_energy_data"):
        step(loaded)
    assert optimizer.uncharged_releases == loaded.uncharged_releases == 0
    assert same_bits(before, state(model, optimizer))


NOT_FINITE = regression()[0] * [1.0, np.nan, 1.0], regression()[1]
BAD = {
    "missing": ({"energy_data": None}, "energy_data=None"),
    "no pair": ({"energy_data": ENERGY[0]}, "energy_data=ndarray"),
    "lengths": ({"energy_data": (ENERGY[0], ENERGY[1][:-1])}, "energy_data: y has 39 rows"),
    "empty": ({"energy_data": (ENERGY[0][:0], ENERGY[1][:0])}, "energy_data: x has no rows"),
    "no array": ({"energy_data": (iter([1]), ENERGY[1])}, "energy_data: x"),
    "nan": ({"energy_data": NOT_FINITE}, "energy_data hold values that are not finite"),
    "temperature": ({"initial_temperature": -1}, "initial_temperature"),
    "threshold": ({"rejection_threshold": 2.5}, "rejection_threshold"),
    "batch": ({"energy_batch_size": 0}, "energy_batch_size"),
    "variant": ({"variant": "fast"}, "variant"),
    "noise": ({"energy_noise_multiplier": 0, "energy_clip": 1.0}, "energy_noise_multiplier=0"),
    "no clip": ({"energy_noise_multiplier": 1.0}, "energy_clip=None"),
    "clip": ({"energy_clip": 1.0}, "without energy_noise_multiplier"),
    "printed": ({"variant": "printed", **PRIVATE}, "variant='printed'"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_are_refused(name):
    arguments, match = BAD[name]
    with pytest.raises(ValueError, match=match):
        make(**arguments)


def test_energy_data_that_are_refused_when_training_begins():
    x, y = data()
    model = plain_model(keras.layers.Dense(3))
    optimizer = None

    def begin(energy_data, lots=None, **arguments):
        nonlocal optimizer
        optimizer = make(energy_data, **arguments)
        optimizer.build(model.trainable_variables)
        optimizer.bind(model, crossentropy())
        lots = lots or dp.PoissonLots(x, y, expected_size=30)
        optimizer.begin(lots.law, lots, 1)

    for energy_data in (
        (x, y),
        (x[:50], y[:50]),
        (x[::-1], y),
        (x.copy(), y[:50].repeat(3)[:ROWS]),
        (ENERGY[0], y[:40]),
    ):
        with pytest.raises(ValueError, match="energy_data .* the training data"):
            begin(energy_data)
    begin((x, y), **PRIVATE)  # charged for
    begin(ENERGY)
    begin((x[:50].copy(), y[:50].copy()))  # not seen, as documented
    whole = np.concatenate([x, ENERGY[0]]), np.concatenate([y, ENERGY[1]])
    begin([a[ROWS:] for a in whole], dp.PoissonLots(whole[0][:ROWS], whole[1][:ROWS], 30))
    begin([a[1::2] for a in whole], dp.PoissonLots(whole[0][::2], whole[1][::2], 30))
    for energy_data, match in (
        ((ENERGY[0][:, :5], ENERGY[1]), "energy_data"),
        (({"a": ENERGY[0]}, ENERGY[1]), "energy_data"),
        ((ENERGY[0], np.eye(3, dtype=np.float32)[ENERGY[1]]), "energy_data"),
    ):
        with pytest.raises(ValueError, match=match):
            begin(energy_data)
    with pytest.raises(ValueError, match="on energy_data is nan.* Look for labels"):
        begin((ENERGY[0], ENERGY[1] + 5))
    begin((ENERGY[0], ENERGY[1] + 5), **PRIVATE)  # such records count as the bound
    model.layers[-1].kernel.assign(np.full((3, 3), np.nan))
    with pytest.raises(ValueError, match="The loss on energy_data is nan"):
        begin(ENERGY)
    assert optimizer.uncharged_releases == 0


def test_fit_refuses_before_anything_is_trained():
    x, y = data()
    private = private_model(make((x, y)), model=plain_model(keras.layers.Dense(3)), metrics=None)
    before = private.model.get_weights()
    with pytest.raises(ValueError, match="energy_data"):
        private.fit(x, y, batch_size=30, verbose=0)
    assert same_bits(before, private.model.get_weights())
    assert private.ledger.steps == 0
