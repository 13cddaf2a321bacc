"""A clip norm that follows a quantile: its recursion, its noise, its price, every optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import crossentropy, data, plain_model, private_model
from tests.optimizers.cases import SHAPES, SIGMA, make, make_variables, random_grads, step
from tf_adadp.gradients.microbatch import SlotSums

NO_NOISE = {"noise_multiplier": 0, "allow_no_noise": True}


def rows_of_norms(norms):
    """Gradients of one variable [3] with these norms."""
    rows = np.zeros((len(norms), 3), np.float32)
    rows[np.arange(len(norms)), np.arange(len(norms)) % 3] = norms
    return [tf.constant(rows)]


def one_variable(optimizer):
    optimizer.build([keras.Variable(np.zeros(3, np.float32))])
    return optimizer


def test_without_noise_the_norm_follows_the_formula():
    clip = dp.QuantileClip(0.7, initial_norm=0.2, learning_rate=0.3)
    optimizer = one_variable(dp.DPSGD(0.0, l2_norm_clip=clip, **NO_NOISE))
    rng, norm = np.random.default_rng(0), 0.2
    for _ in range(30):
        norms = rng.lognormal(size=40).astype(np.float32)
        count = np.sum((norms <= norm) - 0.5)
        norm *= np.exp(-0.3 * (count / 50 + 0.5 - 0.7))
        step(optimizer, rows_of_norms(norms), 50)
        np.testing.assert_allclose(optimizer.current_clip_norm(), norm, rtol=1e-5)


def test_the_norm_settles_at_the_quantile_from_far_off():
    """C finds the quantile under seeded noise; [0.55, 0.65] are quantiles 0.57 to 0.63."""
    clip = dp.QuantileClip(0.6, initial_norm=100.0)
    optimizer = one_variable(dp.DPSGD(0.0, l2_norm_clip=clip, noise_multiplier=2.0, seed=1))
    rng = np.random.default_rng(0)
    for _ in range(150):
        step(optimizer, rows_of_norms(rng.uniform(0, 1, 1000).astype(np.float32)), 1000)
    assert 0.55 < float(optimizer.current_clip_norm()) < 0.65


def test_the_clipped_sum_is_that_of_the_norm():
    norms = np.array([0.1, 0.5, 1.0, 3.0], np.float32)
    optimizer = one_variable(dp.DPSGD(1.0, l2_norm_clip=dp.QuantileClip(), **NO_NOISE))
    sums, count = optimizer.clipping_set().clipped_sum(rows_of_norms(norms), tf.ones([4]))
    np.testing.assert_allclose(sums, [0.1 + 1.0, 0.5, 1.0], rtol=1e-5)
    # A norm is bounded from above, so the one that lies on C counts as outside.
    assert float(count) == 0.5 + 0.5 - 0.5 - 0.5


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_sum_and_count_share_one_multiplier(share):
    optimizer = make("dpsgd", l2_norm_clip=dp.QuantileClip(budget_share=share, initial_norm=0.5))
    *of_sum, of_count = optimizer.clipping_set().noise_stddev(SIGMA, len(SHAPES))
    np.testing.assert_allclose(of_sum, SIGMA * 0.5 / np.sqrt(1 - share), rtol=1e-6)
    np.testing.assert_allclose(of_count, SIGMA * 0.5 / np.sqrt(share), rtol=1e-6)
    total = (0.5 / of_sum[0]) ** 2 + (0.5 / of_count) ** 2
    np.testing.assert_allclose(total, SIGMA**-2, rtol=1e-6)


def test_the_noise_is_drawn_with_these_deviations():
    """4,000 draws; a deviation is off by more than 6 % once in 10⁷ times."""
    optimizer = make("dpsgd", l2_norm_clip=dp.QuantileClip(budget_share=0.2), seed=3)
    zeros = [tf.zeros((0, *shape)) for shape in SHAPES.values()]
    draws = []
    for number in range(4000 // 70 + 1):
        k = optimizer.clipping_set()
        sums, stddevs = k.clipped_sum(zeros, tf.zeros([0])), k.noise_stddev(SIGMA, len(SHAPES))
        released, _ = optimizer._with_noise(sums, stddevs, 1.0, tf.constant(number, tf.int64))
        draws.append([(r / s).numpy().ravel() for r, s in zip(released, stddevs, strict=True)])
    flat = np.concatenate([part for draw in draws for part in draw])
    assert abs(flat.std() - 1) < 0.06
    counts = np.array([draw[-1][0] for draw in draws])
    assert len(np.unique(counts)) == len(counts)


def test_rows_that_are_no_numbers_do_not_count():
    optimizer = one_variable(dp.DPSGD(1.0, l2_norm_clip=dp.QuantileClip(), **NO_NOISE))
    for bad in (np.nan, np.inf, -np.inf, 1e30):
        norms = np.array([0.5, bad], np.float32)
        sums, count = optimizer.clipping_set().clipped_sum(rows_of_norms(norms), tf.ones([2]))
        np.testing.assert_allclose(sums, [0.5, 0.0, 0.0])
        assert float(count) == 0.5


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows_of_any_precision_are_counted(dtype):
    optimizer = one_variable(dp.DPSGD(1.0, l2_norm_clip=dp.QuantileClip(), **NO_NOISE))
    rows = tf.cast(rows_of_norms(np.array([0.5, 4.0, 0.25], np.float32))[0], dtype)
    _, count = optimizer.clipping_set().clipped_sum([rows], tf.constant([1.0, 1.0, 0.0]))
    assert float(count) == 0.0


def test_an_empty_lot_moves_the_norm_by_noise_alone():
    optimizer = one_variable(dp.DPSGD(1.0, l2_norm_clip=dp.QuantileClip(0.5), **NO_NOISE))
    step(optimizer, rows_of_norms(np.zeros(0, np.float32)), 10)
    assert float(optimizer.current_clip_norm()) == 1.0


def test_the_norm_stays_where_float32_can_square_it():
    clip = dp.QuantileClip(0.01, learning_rate=10.0)
    optimizer = one_variable(dp.DPSGD(0.0, l2_norm_clip=clip, **NO_NOISE))
    for _ in range(20):
        step(optimizer, rows_of_norms(np.full(10, 1e-9, np.float32)), 10)
    assert 1e-7 < float(optimizer.current_clip_norm()) < 1e-5


def optimizers():
    clip = dp.QuantileClip(initial_norm=0.3, budget_share=0.05)
    common = {"noise_multiplier": 1.0, "l2_norm_clip": clip, "seed": 0}
    x, y = data(8, seed=9)
    return {
        "DPSGD": dp.DPSGD(0.1, **common),
        "DPAdam": dp.DPAdam(0.01, **common),
        "ADADP": dp.ADADP(**common),
        "ADAN": dp.ADAN(0.1, **common),
        "AdaCliP": dp.AdaCliP(0.1, **common),
        "DPOPT": dp.DPOPT(0.1, **common),
        "DPOPT, budgeted": dp.DPOPT(
            0.1, directions="budgeted", direction_noise_multiplier=2.0, **common
        ),
        "SADPSGD": dp.SADPSGD(0.1, energy_data=(x, y), **common),
        "DPLion": dp.make_private(keras.optimizers.Lion)(0.01, **common),
    }


@pytest.mark.representative(0, 9)
@pytest.mark.parametrize("name", list(optimizers()))
@pytest.mark.parametrize("engine", ["ghost", "vectorized"])
def test_every_optimizer_trains_with_it_at_the_price_of_a_fixed_norm(name, engine):
    x, y = data()
    private = private_model(optimizers()[name], wrap={"gradient_engine": engine})
    lots = dp.PoissonLots(x, y, expected_size=30)
    norms = private.fit(lots, epochs=2, verbose=0).history["clip_norm"]
    assert len(set([0.3, *norms])) == 3
    assert np.isfinite(norms).all()
    fixed = {**optimizers()[name].get_config(), "l2_norm_clip": 0.3}
    event = type(private.optimizer).from_config(fixed).event(lots.law)
    assert private.optimizer.event(lots.law) == event
    ledger = dp.PrivacyLedger()
    ledger.add(event, 8)
    assert private.epsilon(1e-5) == ledger.epsilon(1e-5) < np.inf


def test_engines_agree_on_the_count():
    x, y = data()
    norms = []
    for engine in ("ghost", "vectorized"):
        keras.utils.set_random_seed(0)
        optimizer = dp.DPSGD(0.1, l2_norm_clip=dp.QuantileClip(), noise_multiplier=1.0, seed=0)
        private = private_model(optimizer, wrap={"gradient_engine": engine})
        private.fit(x, y, batch_size=30, epochs=1, verbose=0)
        norms.append(float(private.optimizer.current_clip_norm()))
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_slots_are_counted_where_microbatches_are_clipped():
    x, y = data()
    clip = dp.QuantileClip(0.5, initial_norm=1e-3, learning_rate=0.5)
    optimizer = dp.DPSGD(0.1, l2_norm_clip=clip, microbatch_size=4, **NO_NOISE)
    private = private_model(optimizer)
    private.fit(dp.FixedSizeLots(x, y, size=120), steps_per_epoch=1, verbose=0)
    # Every slot is longer: b̃ = ½ − (slots with an example)/(2·slots), and no slot more than there.
    share = -np.log(float(optimizer.current_clip_norm()) / 1e-3) / 0.5 + 0.5
    slots = share * 2 - 1
    assert -1.001 < slots < -0.8


@pytest.mark.extended
def test_beside_released_metrics_users_and_fixed_sizes():
    x, y = data()
    users = np.arange(len(x)) // 2
    metrics = dp.ReleasedMetrics(noise_multiplier=5.0, loss_bound=2.0)
    for lots in (
        dp.PoissonLots(x, y, expected_size=30),
        dp.FixedSizeLots(x, y, size=30),
        dp.UserLots(
            x, y, user_ids=users, expected_users=15, max_records_per_user=2, expected_size=30
        ),
    ):
        epsilons = []
        for clip in (dp.QuantileClip(), 1.0):
            optimizer = dp.DPSGD(0.1, l2_norm_clip=clip, noise_multiplier=2.0)
            private = private_model(optimizer, released_metrics=metrics)
            private.fit(lots, steps_per_epoch=2, verbose=0)
            epsilons.append(private.epsilon(1e-5))
        assert epsilons[0] == epsilons[1] < np.inf


@pytest.mark.extended
def test_it_is_saved_and_goes_on_where_it_was(tmp_path):
    x, y = data()
    private = private_model(optimizers()["ADADP"])
    private.fit(x, y, batch_size=30, epochs=1, verbose=0)
    private.save(tmp_path / "model.keras")
    loaded = dp.load_model(tmp_path / "model.keras")
    clip = loaded.optimizer.l2_norm_clip
    assert clip.get_config() == private.optimizer.l2_norm_clip.get_config()
    assert float(loaded.optimizer.current_clip_norm()) == float(
        private.optimizer.current_clip_norm()
    )
    loaded.fit(x, y, batch_size=30, epochs=1, verbose=0)
    assert float(loaded.optimizer.current_clip_norm()) != float(
        private.optimizer.current_clip_norm()
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda c: dp.DPSGD(0.1, l2_norm_clip=c, automatic_clipping=0.01), "automatic_clipping"),
        (lambda c: dp.ADADP(l2_norm_clip=c, clipping="local"), 'clipping="local"'),
        (lambda c: dp.ADADP(l2_norm_clip=c, prior="raw"), 'prior="raw"'),
        (lambda c: dp.AdaCliP(l2_norm_clip=c, scale="free"), 'scale="free"'),
        (lambda c: dp.DPOPT(l2_norm_clip=c, variant="printed"), 'variant="printed"'),
        (lambda c: dp.AGD(total_epsilon=1.0, total_delta=1e-5, l2_norm_clip=c), "AGD"),
    ],
)
def test_what_has_no_one_norm_refuses_it(make, words):
    with pytest.raises(ValueError, match=f"QuantileClip.*{words}.*Give a number"):
        make(dp.QuantileClip())


@pytest.mark.parametrize(
    "arguments",
    [
        {"quantile": 0.0},
        {"quantile": 1.0},
        {"initial_norm": 0.0},
        {"initial_norm": 1e9},
        {"learning_rate": 0.0},
        {"budget_share": 0.0},
        {"budget_share": 0.6},
        {"learning_rate": 1e39},
        {"quantile": "half"},
    ],
)
def test_arguments_are_checked(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        dp.QuantileClip(**arguments)


def test_a_set_of_ones_own_must_count():
    class Fixed(dp.DPOptimizer, keras.optimizers.SGD):
        def clipping_set(self):
            return dp.clipping.L2Ball(1.0)

    optimizer = Fixed(0.1, l2_norm_clip=dp.QuantileClip(), noise_multiplier=1.0)
    private = private_model(optimizer)
    x, y = data()
    with pytest.raises(ValueError, match=r"adapts by .'count'.*self\.with_statistics"):
        private.fit(x, y, batch_size=30, epochs=1, verbose=0)

    class Counting(dp.DPOptimizer, keras.optimizers.SGD):
        def clipping_set(self):
            return self.with_statistics(dp.clipping.L2Ball(self.current_clip_norm()))

    private = private_model(Counting(0.1, l2_norm_clip=dp.QuantileClip(), noise_multiplier=1.0))
    private.fit(x, y, batch_size=30, epochs=1, verbose=0)
    assert float(private.optimizer.current_clip_norm()) != 1.0


def test_private_step_and_custom_loops_adapt_it():
    x, y = data()
    model, lots = plain_model(), dp.PoissonLots(x, y, expected_size=30)
    optimizer = dp.DPSGD(0.1, l2_norm_clip=dp.QuantileClip(), noise_multiplier=1.0)
    ledger = dp.PrivacyLedger()
    seen = [1.0]
    for lot in lots.take(2, physical_batch_size=16):
        dp.private_step(model, crossentropy(), lot, optimizer, ledger=ledger, law=lots.law)
        seen.append(float(optimizer.current_clip_norm()))
    (lot,) = lots.take(1, physical_batch_size=16)
    sums = dp.clipped_sum(model, crossentropy(), lot, optimizer)
    optimizer.apply_private(sums, 30.0)
    seen.append(float(optimizer.current_clip_norm()))
    assert len(set(seen)) == 4


@pytest.mark.extended
def test_an_attacker_learns_no_more_than_is_charged():
    """Both worlds 20,000 times; ε of one step of σ* = 1 at δ = 1e-3 is about 3.9."""
    clip = dp.QuantileClip(budget_share=0.5, initial_norm=1.0)
    optimizer = dp.DPSGD(0.1, l2_norm_clip=clip, noise_multiplier=1.0)
    optimizer.build(make_variables())
    rng = np.random.default_rng(0)
    canary = [g[0] * 100 for g in random_grads(rng, 1)]
    found = dp.audit.audit_optimizer(
        optimizer, canary, draws=20_000, delta=1e-3, expected_lot_size=4.0, seed=0
    )
    claimed = dp.accounting.epsilon(1.0, 1.0, 1, 1e-3)
    assert found.epsilon <= claimed
    assert found.epsilon > 0.5 * claimed


@pytest.mark.parametrize("radius", [-0.3, 0.0, 1e-40, -np.inf])
def test_a_ball_of_no_radius_clips_to_almost_nothing(radius):
    ball = dp.clipping.L2Ball(tf.constant(radius))
    (total,) = ball.clipped_sum(rows_of_norms(np.array([100.0, 0.0], np.float32)), tf.ones([2]))
    (std,) = ball.noise_stddev(1.0, 1)
    assert 0 < float(std) <= 1e-9
    assert np.linalg.norm(total) <= std


def test_a_ball_keeps_the_radius_that_a_variable_had():
    radius = tf.Variable(10.0)
    ball = dp.clipping.L2Ball(radius)
    radius.assign(0.1)
    (total,) = ball.clipped_sum(rows_of_norms(np.array([100.0], np.float32)), tf.ones([1]))
    np.testing.assert_allclose([np.linalg.norm(total), ball.noise_stddev(1.0, 1)[0]], 10, rtol=1e-5)


class Halved(dp.clipping.L2Ball):
    """Half of a ball: sound by itself, and no set whose rows `RowsBeside` knows."""

    def clip(self, grads):
        return [0.5 * v for v in super().clip(grads)]

    def clipped_sum(self, grads, mask):
        return dp.ClippedSums([0.5 * s for s in super().clipped_sum(grads, mask)], self)

    def noise_stddev(self, noise_multiplier, num_variables):
        return [0.5 * s for s in super().noise_stddev(noise_multiplier, num_variables)]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Halved(1.0), "an L2Ball or an Ellipsoid scales down"),
        (dp.clipping.L2Ball(1.0, gamma=0.1), "automatic clipping scales every row"),
        (dp.clipping.LayerBalls([1.0]), "an L2Ball or an Ellipsoid scales down"),
        (dp.clipping.Box([1.0]), "an L2Ball or an Ellipsoid scales down"),
    ],
)
def test_only_what_scales_rows_down_by_one_norm_is_counted(other, words):
    optimizer = one_variable(dp.DPSGD(0.1, l2_norm_clip=dp.QuantileClip(), noise_multiplier=1.0))
    with pytest.raises(ValueError, match=words):
        optimizer.with_statistics(other)


def test_the_first_norm_is_there_whoever_builds_the_optimizer(tmp_path):
    def fresh():
        return dp.DPSGD(0.1, l2_norm_clip=dp.QuantileClip(initial_norm=2.0), noise_multiplier=1.0)

    optimizer, variable = fresh(), keras.Variable(np.zeros(3, np.float32))
    assert optimizer.current_clip_norm() == 2.0

    @tf.function
    def norm():
        optimizer.build([variable])
        return optimizer.current_clip_norm()

    assert float(norm()) == float(optimizer.current_clip_norm()) == 2.0
    step(optimizer, rows_of_norms(np.full(5, 9, np.float32)), 5)
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "checkpoint")
    restored = fresh()
    tf.train.Checkpoint(optimizer=restored).restore(path)
    one_variable(restored)
    assert float(restored.current_clip_norm()) == float(optimizer.current_clip_norm()) != 2.0


def test_one_row_moves_the_count_of_slots_by_one_at_most():
    """Rule (R) for slots, at half of the multiplier: the sum and the count of one slot change."""
    optimizer = make("dpsgd", l2_norm_clip=dp.QuantileClip(budget_share=0.4))
    k = optimizer.clipping_set()
    stddevs = [np.asarray(s) for s in k.noise_stddev(SIGMA, len(SHAPES))]
    rng, largest = np.random.default_rng(0), 0.0
    for _ in range(50):
        grads = random_grads(rng, 5, scale=10.0 ** rng.uniform(-3, 1))
        slots, sums = tf.sort(tf.constant(rng.integers(0, 2, 5), tf.int32)), []
        for mask in (np.ones(5), [1, 1, 0, 1, 1]):
            slot_sums = SlotSums(k, 2, tf.constant(2))
            carry = slot_sums.initial_carry([tf.zeros(s) for s in SHAPES.values()])
            first, carry = slot_sums.add(
                grads, tf.ones([5]), tf.constant(mask, tf.float32), slots, carry
            )
            sums.append(slot_sums.finish(first, carry))
        moved = sum(np.sum(((a - b) / s) ** 2) for a, b, s in zip(*sums, stddevs, strict=True))
        largest = max(largest, np.sqrt(moved) * SIGMA)
    assert 1.0 < largest <= 2.0


def test_a_rejected_candidate_does_not_take_the_norm_back():
    clip = dp.QuantileClip(initial_norm=1e4)
    x, y = data()
    optimizer = dp.SADPSGD(
        1.0, energy_data=data(8, seed=9), l2_norm_clip=clip, noise_multiplier=1.0, seed=0
    )
    private = private_model(optimizer)
    private.fit(x, y, batch_size=30, epochs=5, verbose=0)
    assert int(optimizer.accepted) < 20
    # Nothing is clipped: every candidate but for its noise takes C down by a tenth.
    assert float(optimizer.current_clip_norm()) < 1e4 * np.exp(-0.1 * 20 * 0.7)


def test_a_metric_that_takes_the_name_of_the_released_norm_is_refused():
    private = private_model(
        dp.DPSGD(0.1, l2_norm_clip=dp.QuantileClip(), noise_multiplier=1.0),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="clip_norm")],
    )
    x, y = data()
    with pytest.raises(ValueError, match="'clip_norm' is taken"):
        private.fit(x, y, batch_size=30, verbose=0)


def test_a_class_may_have_arguments_of_other_names():
    class Named(dp.ADADP):
        def __init__(self, *args, clip_norm=None, counted=None, **kwargs):
            super().__init__(*args, **kwargs)
            self.clip_norm, self.counted = clip_norm, counted

    optimizer = Named(noise_multiplier=1.0, clip_norm=3, counted=4)
    assert (optimizer.clip_norm, optimizer.counted) == (3, 4)
