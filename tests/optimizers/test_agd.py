"""AGD against a slow state machine in NumPy, exact probabilities, and its own budget."""

import functools
import math

import dp_accounting
import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, crossentropy, data, plain_model
from tf_adadp import gradients, noise
from tf_adadp.accounting import (
    FixedSizeSampling,
    PoissonSampling,
    PrivacyLedger,
    UnknownSampling,
)
from tf_adadp.gradients.lot_losses import clipped_loss_sum
from tf_adadp.optimizers import agd
from tf_adadp.optimizers.agd import AGD, GRADIENT, REMEASURE, SELECT
from tf_adadp.sampling import make_lot

DELTA = 1e-3
SEED = 1
LAW = PoissonSampling(ROWS, 60)


def make(total_epsilon=3.0, **arguments):
    return AGD(**{"total_epsilon": total_epsilon, "total_delta": DELTA, **arguments})


def linear_model(features=6, **arguments):
    return keras.Sequential([keras.Input((features,)), keras.layers.Dense(3, **arguments)])


def wrapped(optimizer, model=None, engine="auto", **compile_arguments):
    private = dp.DPModel(model or linear_model(), gradient_engine=engine)
    arguments = {"loss": crossentropy(), "jit_compile": False, **compile_arguments}
    private.compile(optimizer=optimizer, **arguments)
    return private


def built(**arguments):
    optimizer = make(**arguments)
    optimizer.build(linear_model().trainable_variables)
    return optimizer


def number(variable):
    return keras.ops.convert_to_numpy(variable).item()


def state(optimizer):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in optimizer.variables]


# The whole state machine, once more, in float64 and with the noise that was drawn.


class Reference:
    """The class docstring of AGD for softmax regression, one example at a time."""

    def __init__(self, optimizer, weights, decay, lot_size):
        self.o, self.decay, self.lot_size = optimizer, decay, lot_size
        self.w = [v.astype(np.float64) for v in weights]
        self.phase, self.max_step, self.moves, self.window = (
            "gradient",
            optimizer.max_step_size,
            0,
            [],
        )
        self.rho = self.old_rho = None
        self.s, self.step_size = None, 0.0

    def losses(self, w, x, y):
        logits = x @ w[0] + w[1]
        logits = logits - logits.max(1, keepdims=True)
        return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]

    def released(self, x, y, rho, draws):
        sums = [np.zeros_like(v) for v in self.w]
        for row, label in zip(x, y, strict=True):
            logits = row @ self.w[0] + self.w[1]
            p = np.exp(logits - logits.max())
            p /= p.sum()
            p[label] -= 1
            g = [np.outer(row, p), p]
            norm = math.sqrt(sum((v**2).sum() for v in g))
            for total, v in zip(sums, g, strict=True):
                total += v * min(1, self.o.l2_norm_clip / norm)
        sigma = 1 / math.sqrt(2 * rho)
        noises = [sigma * self.o.l2_norm_clip * z for z in draws]
        return [(a + b) / self.lot_size for a, b in zip(sums, noises, strict=True)]

    def step(self, x, y, draws, epsilon):
        if self.phase == "gradient":
            self.s = self.released(x, y, self.rho, draws)
            self.phase = "select"
        elif self.phase == "remeasure":
            new = self.released(x, y, self.rho - self.old_rho, draws)
            self.s = [
                (self.old_rho * a + (self.rho - self.old_rho) * b) / self.rho
                for a, b in zip(self.s, new, strict=True)
            ]
            self.phase = "select"
        else:
            d = [self.s[0] + 2 * self.decay * self.w[0], self.s[1]]
            norm = math.sqrt(sum((v**2).sum() for v in d))
            lengths = np.linspace(0, self.max_step, self.o.num_candidates)
            at = [[w - a * v / norm for w, v in zip(self.w, d, strict=True)] for a in lengths]
            scores = [np.clip(self.losses(w, x, y), 0, self.o.loss_clip).sum() for w in at]
            gumbel = -np.log(draws)
            k = np.argmax(-epsilon * np.array(scores) / self.o.loss_clip + gumbel)
            self.w = at[k]
            self.step_size = lengths[k]
            if k == 0:
                self.old_rho, self.rho = self.rho, (1 + self.o.budget_growth) * self.rho
                self.phase = "remeasure"
            else:
                self.phase = "gradient"
                self.moves += 1
                self.window.append(lengths[k])
                if len(self.window) == agd._MOVES_PER_WINDOW:
                    self.max_step = (1 + self.o.step_size_growth) * max(self.window)
                    self.window = []


@pytest.mark.extended
def test_against_the_reference(monkeypatch):
    monkeypatch.setattr(agd, "_MOVES_PER_WINDOW", 2)
    x, y = data(features=4)
    lot_size, decay, steps = 60, 0.01, []
    model = linear_model(4, kernel_regularizer=keras.regularizers.L2(decay))
    optimizer = make(
        4.0,
        splits=16,
        seed=3,
        loss_clip=1.2,
        l2_norm_clip=0.8,
        num_candidates=4,
        max_step_size=4.0,
    )
    private = wrapped(optimizer, model)
    start = model.get_weights()

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            values = [optimizer._phase, optimizer._gradient_budget, optimizer._max_step,
                      optimizer._step_size, optimizer._moves]  # fmt: skip
            steps.append((model.get_weights(), [number(v) for v in values], logs))

    private.fit(x, y, batch_size=lot_size, epochs=30, verbose=0, callbacks=[Watch()])
    reference = Reference(optimizer, start, decay, lot_size)
    epsilon = number(optimizer._selection_epsilon)
    reference.rho = epsilon**2 / 8
    lots = dp.PoissonLots(x, y, expected_size=lot_size, seed=3).take(len(steps), 1)
    phases = {"gradient": GRADIENT, "select": SELECT, "remeasure": REMEASURE}
    seen = []
    for t, ((weights, found, logs), lot) in enumerate(zip(steps, lots, strict=True)):
        (lot_x, lot_y, _), _ = lot
        seen.append(reference.phase)
        if reference.phase == "select":
            draws = agd.exponential(optimizer._selection_key.key, t, 4).numpy()
        else:
            key = optimizer._noise_key.key
            draws = noise.gaussians(key, t, [v.shape for v in start], [1.0] * len(start))
            draws = [draw.numpy().astype(np.float64) for draw in draws]
        reference.step(lot_x.numpy()[:, 0], lot_y.numpy()[:, 0], draws, epsilon)
        for a, b in zip(weights, reference.w, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-5)
        length = reference.step_size
        expected = [
            phases[reference.phase], reference.rho, reference.max_step, length, reference.moves
        ]  # fmt: skip
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        logged = [logs["step_size"], logs["gradient_budget"]]
        np.testing.assert_allclose(logged, [length, reference.rho], rtol=1e-5)
    # Everything happened: averaging twice in a row, moves, another largest step.
    assert "remeasure select remeasure" in " ".join(seen)
    assert reference.moves >= 4
    assert reference.max_step != 4.0


# Choosing.


def choices(optimizer, scores, draws):
    steps = tf.range(1, draws + 1, dtype=tf.int64)

    @tf.function
    def run():
        return tf.map_fn(lambda step: optimizer._choose(scores, step), steps)

    return np.bincount(run().numpy(), minlength=len(scores))


def sound_probabilities(scores, scale):
    weights = np.exp(-(scores - scores.min()) / scale)
    return weights / weights.sum()


def printed_probabilities(scores, scale, points=100_001):
    """P(k = argmin of scores + exponential noise), by numerical integration."""
    grid = np.linspace(scores.min(), scores.max() + 40 * scale, points)
    above = np.clip(grid[:, None] - scores, 0, None) / scale
    density = np.where(grid[:, None] >= scores, np.exp(-above) / scale, 0)
    others = np.exp(-above.sum(1, keepdims=True) + above)
    return np.trapezoid(density * others, grid, axis=0)


@pytest.mark.representative(1)
@pytest.mark.parametrize("variant", ["sound", "printed"])
@pytest.mark.parametrize("law", [LAW, FixedSizeSampling(ROWS, 60)], ids=["poisson", "fixed"])
def test_choices_follow_the_exact_probabilities(law, variant):
    optimizer = built(variant=variant, num_candidates=7, seed=1, loss_clip=2.0)
    optimizer.begin(law, None, 1)
    sensitivity = 2.0 if law is LAW else 4.0
    scale = sensitivity / number(optimizer._selection_epsilon)
    scores = scale * np.array([0.0, 0.3, 1.0, 1.1, 2.0, 3.0, 0.3])
    counts = choices(optimizer, tf.constant(scores, tf.float64), 20_000)
    laws = {"sound": sound_probabilities, "printed": printed_probabilities}
    for name, probabilities in laws.items():
        expected = probabilities(scores, scale)
        assert expected.sum() == pytest.approx(1, abs=1e-3)
        p_value = scipy.stats.chisquare(counts, 20_000 * expected / expected.sum()).pvalue
        if name == variant:
            assert p_value > 1e-6  # the rate of false alarms, were the seed not fixed
        else:
            assert p_value < 1e-12
    # Twice the scale, or half of it, is noticed too.
    for factor in (0.5, 2.0):
        wrong = laws[variant](scores, factor * scale)
        assert scipy.stats.chisquare(counts, 20_000 * wrong / wrong.sum()).pvalue < 1e-12


def worst_log_ratio(probabilities, epsilon, rng):
    worst = 0.0
    for _ in range(6):
        scores = np.round(10 * rng.random(21))
        for pattern in (np.eye(21)[scores.argmin()], rng.integers(0, 2, 21), np.eye(21)[0]):
            p, q = (probabilities(s, 1 / epsilon) for s in (scores, scores + pattern))
            worst = max(worst, np.abs(np.log(p / q)).max())
    # The case of the published code: one good candidate among twenty-one.
    scores = np.where(np.arange(21) == 0, 0.0, 20.0 / epsilon)
    p, q = (probabilities(s, 1 / epsilon) for s in (scores, scores + np.eye(21)[0]))
    return max(worst, np.abs(np.log(p / q)).max())


def test_neighbouring_scores():
    epsilon = 0.3
    assert worst_log_ratio(sound_probabilities, epsilon, np.random.default_rng(0)) <= epsilon
    coarse = functools.partial(printed_probabilities, points=8_001)
    printed = worst_log_ratio(coarse, epsilon, np.random.default_rng(0))
    assert printed > 5.5  # twenty times what it claims


def test_noise_is_fresh_and_its_streams_are_apart():
    optimizer = built(seed=3)
    assert not np.array_equal(optimizer._selection_key.key, optimizer._noise_key.key)
    a, b = agd.exponential(np.int64([1, 2]), 1, 9), agd.exponential(np.int64([1, 2]), 2, 9)
    assert not np.intersect1d(a, b).size
    many = agd.exponential(np.int64([1, 2]), 5, 20_000).numpy()
    assert scipy.stats.kstest(many, "expon").pvalue > 1e-6
    assert scipy.stats.kstest(1.1 * many, "expon").pvalue < 1e-12
    key = optimizer._selection_key
    assert not any(np.array_equal(key.key, v) for v in optimizer.variables)
    unseeded = built()
    before = unseeded._selection_key.key.numpy()
    unseeded.load_own_variables({str(i): v for i, v in enumerate(state(unseeded))})
    assert not np.array_equal(before, unseeded._selection_key.key.numpy())


# Scores.


def scoring(model, engine, x, y, weights=None, jit_compile=False):
    """`lot ↦ Σ clipped losses`, from an engine for data like these."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = keras.src.trainers.compile_utils.CompileLoss(loss)
    compiled.build(y[:2], model(x[:2]))
    specs = tf.nest.map_structure(
        lambda a: None if a is None else tf.TensorSpec((None, *a.shape[1:]), a.dtype),
        (x, y, weights),
    )
    made, _ = gradients.make_engine(
        model, compiled, gradient_engine=engine, element_spec=specs, jit_compile=jit_compile
    )

    @tf.function(autograph=False)
    def score(lot, trainable, seed):
        return clipped_loss_sum(made, lot, trainable, seed, 2.5)[0]

    def total(x, y, weights=None, batch=3, trainable=None, seed=(3, 4)):
        if trainable is None:
            trainable = made.example_loss.trainable_values()
        lot = make_lot(x, y, weights, physical_batch_size=batch)
        return score(lot, trainable, tf.constant(seed, tf.int64)).numpy()

    return total, made


class Centring(keras.layers.Layer):
    """Mixes examples, wherever it is given several."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


@pytest.mark.representative(1)
@pytest.mark.parametrize("engine", ["ghost", "vectorized"])
def test_scores_are_sums_over_examples(engine):
    layers = (
        keras.layers.Dense(8, "tanh", activity_regularizer=keras.regularizers.L2(0.1)),
        Centring(),
    )
    model = plain_model(*layers)
    x, y = data(23)
    x *= 3
    weights = np.linspace(0, 5, 23).astype(np.float32)
    total, made = scoring(model, engine, x, y, weights)
    other = [v + 0.3 for v in made.example_loss.trainable_values()]
    for trainable in (None, other):
        single = [
            total(x[i : i + 1], y[i : i + 1], weights[i : i + 1], trainable=trainable)
            for i in range(23)
        ]
        assert 0 < min(single) < max(single) == 2.5
        for batch in (1, 4, 23, 40):  # with and without padding
            found = total(x, y, weights, batch, trainable)
            np.testing.assert_allclose(found, sum(single), rtol=1e-6)
    now = total(x, y, weights)
    assert total(x, y, weights, trainable=other) != pytest.approx(now, rel=1e-4)


@pytest.mark.parametrize(
    ("engine", "jit_compile"),
    [("ghost", False), ("ghost", True), ("vectorized", False), ("vectorized", True)],
)
def test_one_example_moves_the_scores_by_at_most_the_clip(engine, jit_compile):
    x, y = data(9)
    weights = np.ones(9, np.float32)
    total, _ = scoring(plain_model(), engine, x, y, weights, jit_compile)
    for worst, weight, expected in [
        (1e6, 1.0, None), (np.nan, 1.0, 2.5), (np.inf, 1.0, 2.5), (1.0, 1e9, 2.5), (1.0, -1e9, 0.0),
    ]:  # fmt: skip
        x[-1], weights[-1] = worst, weight
        moved = total(x, y, weights) - total(x[:-1], y[:-1], weights[:-1])
        assert -1e-5 <= moved <= 2.5 + 1e-5  # what float32 leaves open in the other losses
        if expected is not None:
            assert moved == pytest.approx(expected, abs=1e-5)
    assert total(x[:0], y[:0], weights[:0]) == 0.0


def test_dropout_draws_alike_for_all_candidates():
    x, y = data(9)
    model = plain_model(keras.layers.Dense(8), keras.layers.Dropout(0.5))
    for engine in ("ghost", "vectorized"):
        total, _ = scoring(model, engine, x, y)
        assert total(x, y) == total(x, y)
        assert total(x, y) != total(x, y, seed=(3, 5))


# The budget.


def events(private):
    return [(entry.event, entry.count) for entry in private.ledger.entries]


def rounds_of(private):
    """The kinds of charges, in order."""
    return ["s" if isinstance(e, dp_accounting.ZCDpEvent) else "m" for e, _ in events(private)]


@pytest.mark.representative(1)
@pytest.mark.parametrize("lots", ["poisson", "fixed"])
def test_every_step_is_charged_what_it_is_and_training_stops(lots):
    x, y = data()
    make_lots = {
        "poisson": lambda: dp.PoissonLots(x, y, expected_size=60),
        "fixed": lambda: dp.FixedSizeLots(x, y, 60),
    }[lots]()
    optimizer = make(1.0, splits=5, max_step_size=4.0)
    private = wrapped(optimizer)
    budgets = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            budgets.append(number(optimizer._measurement_budget))

    private.fit(make_lots, epochs=100, verbose=0, callbacks=[Watch()])
    assert int(optimizer.iterations) == len(budgets) == private.ledger.steps
    assert [count for _, count in events(private)] == [1] * len(budgets)
    assert rounds_of(private) == ["m", "s"] * (len(budgets) // 2)
    for (event, _), rho in zip(events(private), budgets, strict=True):
        if not isinstance(event, dp_accounting.ZCDpEvent):
            assert event == make_lots.law.event((2 * rho) ** -0.5)
    assert private.epsilon(DELTA) <= 1.0
    guard = optimizer.budget_filter
    recorded = math.fsum(guard.cost(event) for event, _ in events(private))
    assert number(optimizer._spent) == pytest.approx(recorded, rel=1e-12)
    assert recorded <= guard.budget
    # The budget was used: no other round fits.
    assert not optimizer.can_continue(make_lots.law)
    with pytest.raises(ValueError, match="cannot fit one step"):
        private.fit(make_lots, verbose=0)
    assert int(optimizer.iterations) == len(budgets)
    with pytest.raises(ValueError, match="accountant"):
        private.epsilon(DELTA, "pld")


def pay(optimizer, ledger, law):
    """Charges one release, which is not made: outcomes here are the test's."""
    with optimizer.charged(ledger, law, 1):
        pass


def test_no_sequence_of_outcomes_exceeds_the_budget():
    """Outcomes by an adversary: the worst that selections can say."""
    rng = np.random.default_rng(5)
    for law in (LAW, PoissonSampling(ROWS, ROWS), FixedSizeSampling(ROWS, 30)):
        for chance in (0.0, 0.6):
            optimizer, ledger = (
                built(total_epsilon=2.0, splits=6, budget_growth=0.7),
                PrivacyLedger(),
            )
            optimizer.begin(law, None, 1)
            while optimizer.can_continue(law):
                pay(optimizer, ledger, law)
                if number(optimizer._phase) == SELECT:
                    optimizer._advance(tf.constant(float(rng.random() > chance)))
                else:
                    optimizer._phase.assign(SELECT)
            assert ledger.epsilon(DELTA) <= 2.0
            assert ledger.steps >= 2
            optimizer._phase.assign(GRADIENT)
            optimizer._measurement_budget.assign(1e3)
            with pytest.raises(ValueError, match="is spent"):
                optimizer.charge(ledger, law)
            assert ledger.epsilon(DELTA) <= 2.0


def test_what_the_ledger_knows_is_spent():
    """A new optimizer on the same weights, or one that was set back, has no second budget."""
    optimizer, ledger = built(splits=3), PrivacyLedger()
    steps = 0
    while optimizer.event(LAW) and optimizer.budget_filter.has_room(
        number(optimizer._spent), [optimizer.event(LAW)]
    ):
        pay(optimizer, ledger, LAW)
        steps += 1
    spent = number(optimizer._spent)
    again, larger = built(splits=3), built(splits=3, total_epsilon=6.0)
    with pytest.raises(ValueError, match="is spent"):
        again.charge(ledger, LAW)
    assert ledger.steps == steps >= 3
    larger.charge(ledger, LAW)
    assert ledger.steps == steps + 1
    guard = larger.budget_filter
    assert number(larger._spent) == pytest.approx(
        steps * guard.cost(ledger.entries[0].event) + guard.cost(ledger.entries[1].event)
    )
    early = state(optimizer)
    optimizer._spent.assign(1.01 * spent)
    optimizer.load_own_variables({str(i): v for i, v in enumerate(early)})
    assert number(optimizer._spent) == 1.01 * spent


def test_a_state_of_another_budget_leaves_nothing():
    optimizer, other = built(splits=3), built(splits=3, total_epsilon=0.1)
    optimizer.charge(PrivacyLedger(), LAW)
    other.charge(PrivacyLedger(), LAW)
    assert number(optimizer._filter_order) != number(other._filter_order)
    optimizer.load_own_variables({str(i): v for i, v in enumerate(state(other))})
    assert not optimizer.can_continue(LAW)


def test_refusals_before_anything_is_trained():
    x, y = data()
    private = wrapped(make(), loss=None)
    with pytest.raises(ValueError, match="without per-example values"):
        private.fit(x, y, batch_size=60, verbose=0)
    private = wrapped(make(), steps_per_execution=2)
    with pytest.raises(ValueError, match="steps_per_execution=2"):
        private.fit(x, y, batch_size=60, verbose=0)
    optimizer = built()
    with pytest.raises(ValueError, match="known sampling"):
        optimizer.begin(UnknownSampling("nobody said"), None, 1)
    optimizer.begin(LAW, None, 1)
    with pytest.raises(ValueError, match="another neighbouring relation"):
        optimizer.begin(FixedSizeSampling(ROWS, 60), None, 1)
    with pytest.raises(ValueError, match="one by one"):
        optimizer.charge(PrivacyLedger(), LAW, 2)
    with pytest.raises(RuntimeError, match="takes a lot"):
        optimizer.apply_private([], 60.0)
    with pytest.raises(RuntimeError, match="no raw gradients"):
        optimizer.apply([tf.zeros((6, 3)), tf.zeros(3)])
    optimizer._spent.assign(0.9999 * optimizer.budget_filter.budget)
    with pytest.raises(ValueError, match="cannot fit one step"):
        optimizer.begin(LAW, None, 1)
    assert int(optimizer.iterations) == int(private.optimizer.iterations) == 0


def test_arguments():
    for arguments, name in [
        ({"total_epsilon": 0}, "total_epsilon"), ({"total_epsilon": math.nan}, "total_epsilon"),
        ({"total_epsilon": math.inf}, "allow_no_noise"), ({"total_delta": 1.0}, "total_delta"),
        ({"splits": 0}, "splits"), ({"loss_clip": 0}, "loss_clip"),
        ({"loss_clip": math.inf}, "loss_clip"), ({"num_candidates": 1}, "num_candidates"),
        ({"budget_growth": 0}, "budget_growth"), ({"max_step_size": -1}, "max_step_size"),
        ({"step_size_growth": -0.1}, "step_size_growth"), ({"variant": "raw"}, "variant"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=name):
            make(**arguments)
    for foreign in ("momentum", "learning_rate", "noise_multiplier", "weight_decay"):
        with pytest.raises(TypeError, match=foreign):
            make(**{foreign: 0.5})
    optimizer = make(2.0, splits=7, l2_norm_clip={"": 2.0}, loss_clip=1.5, microbatch_size=2)
    config = keras.saving.serialize_keras_object(optimizer)
    assert keras.saving.deserialize_keras_object(config).get_config() == optimizer.get_config()
    assert optimizer.get_config()["splits"] == 7
    for name in ("total_epsilon", "loss_clip", "splits", "variant"):
        with pytest.raises(AttributeError, match="read-only"):
            setattr(optimizer, name, 9)


# Without privacy.


def test_the_printed_choice_is_charged_as_no_privacy():
    x, y = data()
    optimizer = make(2.0, splits=4, variant="printed")
    private = wrapped(optimizer)
    private.fit(x, y, batch_size=60, epochs=20, verbose=0)
    kinds = [type(e) for e, _ in events(private)]
    assert kinds[1::2] == [dp_accounting.NonPrivateDpEvent] * (len(kinds) // 2)
    assert 2 <= len(kinds) <= 8  # the budget counts what it claims
    assert private.epsilon(DELTA) == math.inf


@pytest.mark.extended
def test_without_noise_it_descends():
    x, y = data()
    optimizer = make(math.inf, allow_no_noise=True, max_step_size=1.0)
    private = wrapped(optimizer)
    before = private.evaluate(x, y, verbose=0)
    private.fit(x, y, batch_size=ROWS, epochs=20, verbose=0)
    assert private.evaluate(x, y, verbose=0) < 0.7 * before
    assert private.epsilon(DELTA) == math.inf


# Saving.


@pytest.mark.extended
def test_saved_in_the_middle_of_a_round(tmp_path):
    x, y = data()

    part = wrapped(make(4.0, splits=6, seed=9, max_step_size=3.0))
    fit = {"batch_size": 60, "verbose": 0, "epochs": 1}
    part.fit(x, y, steps_per_epoch=3, **fit)
    assert number(part.optimizer._phase) == SELECT
    part.save(tmp_path / "model.keras")
    loaded = dp.load_model(tmp_path / "model.keras")
    for a, b in zip(state(part.optimizer), state(loaded.optimizer), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    for one in (part, loaded):
        one.fit(x, y, steps_per_epoch=5, **fit)
    assert part.ledger.steps == 8
    assert events(loaded) == events(part)
    for a, b in zip(
        [*state(part.optimizer), *part.model.get_weights()],
        [*state(loaded.optimizer), *loaded.model.get_weights()],
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# Awkward lots.


def test_bad_records_and_empty_lots():
    x, y = data()
    x[:5] = np.nan
    x[5:8] = np.inf
    private = wrapped(make(5.0, splits=6), metrics=["accuracy"])
    for batch_size in (60, 1):  # one record in expectation: a third of those lots are empty
        private.fit(x, y, batch_size=batch_size, epochs=1, steps_per_epoch=6, verbose=0)
        assert all(np.isfinite(w).all() for w in private.model.get_weights())
        assert all(np.isfinite(v).all() for v in state(private.optimizer))
    assert private.ledger.steps == 12
    assert {e.law.expected_size for e in private.ledger.entries} == {60, 1}


@pytest.mark.extended
def test_compiled_by_xla():
    x, y = data()
    private = wrapped(make(5.0, splits=3), engine="vectorized", jit_compile=True)
    private.fit(x, y, batch_size=60, epochs=1, steps_per_epoch=4, verbose=0)
    assert private.ledger.steps == 4
    assert all(np.isfinite(v).all() for v in state(private.optimizer))


def test_microbatches_are_charged_as_such():
    x, y = data()
    private = wrapped(make(5.0, splits=3, microbatch_size=2))
    private.fit(x, y, batch_size=60, epochs=1, steps_per_epoch=3, verbose=0)
    rho = number(private.optimizer._selection_epsilon) ** 2 / 8
    assert events(private)[0][0] == LAW.event((2 * rho) ** -0.5, microbatched=True)
    assert private.epsilon(DELTA) <= 5.0


@pytest.mark.extended
def test_a_small_problem_is_learnt():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    private = wrapped(make(3.0, total_delta=1e-4, seed=0, splits=30), model, metrics=["accuracy"])
    private.fit(x[:1500], y[:1500], batch_size=300, epochs=100, verbose=0)
    assert private.epsilon(1e-4) <= 3.0
    assert private.evaluate(x[1500:], y[1500:], verbose=0)[1] > 0.85


@pytest.mark.extended
def test_under_a_privacy_callback(tmp_path):
    """ε in the logs, every release on disk before it is made, and no second budget."""
    x, y = data()
    path = tmp_path / "ledger.json"
    on_disk = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            on_disk.append(dp.PrivacyLedger.load(path).steps - self.model.ledger.steps)

    private = wrapped(make(splits=4))
    report = dp.PrivacyCallback(DELTA, ledger_path=path)
    history = private.fit(x, y, batch_size=60, epochs=2, verbose=0, callbacks=[report, Watch()])
    assert len(on_disk) >= 4
    assert set(on_disk) == {1}
    assert dp.PrivacyLedger.load(path).steps == private.ledger.steps
    assert history.history["epsilon"][-1] == private.epsilon(DELTA)
    with pytest.raises(ValueError, match="max_epsilon=1"):
        wrapped(make()).fit(
            x, y, batch_size=60, verbose=0, callbacks=[dp.PrivacyCallback(DELTA, max_epsilon=1)]
        )


def test_a_charge_waits_for_its_release():
    """Charges made ahead in a cheap phase would pay for dear ones."""
    optimizer = built()
    ledger = dp.PrivacyLedger()
    optimizer.charge(ledger, LAW)
    with pytest.raises(ValueError, match="waits for its release"):
        optimizer.charge(ledger, LAW)
    assert ledger.steps == 1


@pytest.mark.extended
def test_a_crash_is_no_free_release(tmp_path):
    """Charges written before a crash count in the budget of the following run."""
    x, y = data()
    path = tmp_path / "ledger.json"

    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    spent = []
    for _ in range(3):
        private = wrapped(make(splits=4))
        callbacks = [dp.PrivacyCallback(DELTA, ledger_path=path), Crash()]
        with pytest.raises(KeyboardInterrupt):
            private.fit(x, y, batch_size=60, verbose=0, callbacks=callbacks)
        spent.append(number(private.optimizer._spent))
    assert spent[1] == pytest.approx(2 * spent[0])
    assert spent[2] == pytest.approx(3 * spent[0])


def test_a_subclass_gets_no_second_budget():
    class Mine(AGD):
        pass

    first, second = built(), Mine(total_epsilon=3.0, total_delta=DELTA)
    second.build(first._trainable_variables)
    ledger = dp.PrivacyLedger()
    with first.charged(ledger, LAW, 1):
        pass
    second.charge(ledger, LAW)
    assert number(second._spent) == pytest.approx(2 * number(first._spent))
    for name in ("total_epsilon", "loss_clip"):
        with pytest.raises(AttributeError, match="read-only"):
            delattr(first, name)
