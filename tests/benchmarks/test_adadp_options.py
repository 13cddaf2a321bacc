"""The options beside ADADP: each against its formula in NumPy, its sensitivity, a short run."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from benchmarks import adadp_default as study
from benchmarks import adadp_geoclip as geoclip
from benchmarks import adadp_options as options
from benchmarks import adadp_report
from benchmarks.adadp_variants import OPTION_CELLS, OPTION_SEARCH, OPTIONS
from tests.helpers import data, private_model
from tests.optimizers.cases import SHAPES, SIGMA, advance, make_variables, random_grads, step
from tests.optimizers.test_sensitivity import moved_by
from tf_adadp import accounting

SIZE = sum(math.prod(shape) for shape in SHAPES.values())
NO_NOISE = {"noise_multiplier": 0, "allow_no_noise": True}
# The others differ from these, or from ADADP and DPSGD, in arguments alone.
NEW = (
    "ADADP, bias-corrected",
    "DPAdam, bias-corrected",
    "ADADP, low-pass",
    "DP-MicroAdam",
    "scale then privatize",
    "scale then privatize, Adam",
    "GeoClip",
    "GeoClip, RMSprop",
)


def built(make, **arguments):
    optimizer = make(**{"noise_multiplier": SIGMA, "seed": 3, **arguments})
    optimizer.build(make_variables())
    return optimizer


def flat(tensors):
    return np.concatenate([np.asarray(t, np.float64).reshape(-1) for t in tensors])


def broadcast(tensors):
    """Returns tensors that broadcast to the variables as one vector."""
    pairs = zip(tensors, SHAPES.values(), strict=True)
    return flat([np.broadcast_to(np.asarray(t), shape) for t, shape in pairs])


def weights(optimizer):
    return flat([v.value for v in optimizer._trainable_variables])


def releases(optimizer, steps, rows=20):
    """Takes noisy steps; returns what each released, its noise's std, and r and η before it."""
    seen, observe = [], optimizer._observe

    def recording(released, stddevs):
        seen.append([flat(released), broadcast(stddevs)])
        observe(released, stddevs)

    optimizer._observe = recording
    rng = np.random.default_rng(1)
    for _ in range(steps):
        shaped = hasattr(optimizer, "noise_shape")
        r = broadcast(optimizer.noise_shape()) if shaped else 1.0
        rate = float(optimizer.learning_rate)
        step(optimizer, random_grads(rng, rows))
        seen[-1] += [r, rate]
    return seen


def test_adadp_divides_by_the_corrected_moment():
    optimizer = built(options.CorrectedADADP, learning_rate=dp.InverseSqrtDecay(), moment_floor=0.2)
    v = n = theta = 0.0
    for g, s, r, rate in releases(optimizer, 6):
        v, n = 0.9 * v + 0.1 * g**2, 0.9 * n + 0.1 * s**2
        corrected = np.maximum(v - n, 0.2 * n)
        theta -= rate / r * g / np.sqrt(corrected + 1e-7)
    assert 0.1 < np.mean(v - n < 0.2 * n) < 0.9  # both sides of the maximum
    np.testing.assert_allclose(weights(optimizer), theta, rtol=1e-3, atol=1e-6)


def test_dpadam_divides_by_the_corrected_moment():
    optimizer = built(options.CorrectedDPAdam, learning_rate=0.01, moment_floor=0.2)
    m = v = theta = 0.0
    for t, (g, s, _, _) in enumerate(releases(optimizer, 6), 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
        theta -= 0.01 * m_hat / np.sqrt(np.maximum(v_hat - s**2, 0.2 * s**2))
    np.testing.assert_allclose(weights(optimizer), theta, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("corrected", "plain"),
    [(options.CorrectedADADP, dp.ADADP), (options.CorrectedDPAdam, dp.DPAdam)],
)
def test_without_noise_there_is_nothing_to_correct(corrected, plain):
    found = []
    for make in (corrected, plain):
        optimizer = built(make, **NO_NOISE)
        advance(optimizer, np.random.default_rng(2), 4)
        found.append(weights(optimizer))
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_the_low_pass_filter():
    optimizer = built(options.LowPassADADP, learning_rate=dp.InverseSqrtDecay(), pole=0.8)
    seen = releases(optimizer, 6)
    v = theta = 0.0
    for t, (_, _, r, rate) in enumerate(seen):
        # Its answer to an impulse, k steps later: b, then b·(1 + p)·p^(k−1).
        answer = [0.1 if k == 0 else 0.1 * 1.8 * 0.8 ** (k - 1) for k in range(t + 1)]
        mean = sum(a * seen[t - k][0] for k, a in enumerate(answer)) / sum(answer)
        v = 0.9 * v + 0.1 * mean**2
        theta -= rate / r * mean / np.sqrt(v + 1e-7)
    np.testing.assert_allclose(weights(optimizer), theta, rtol=1e-3, atol=1e-6)


def test_the_prior_of_the_low_pass_sees_the_releases():
    found = []
    for make in (options.LowPassADADP, dp.ADADP):
        optimizer = built(make)
        advance(optimizer, np.random.default_rng(2), 5)
        found.append(broadcast(optimizer.noise_shape()))
    np.testing.assert_array_equal(*found)


def test_micro_adam_against_lists():
    """A window of 3 over 7 steps, the 4 largest of 10 entries."""
    variable = keras.Variable(np.zeros((2, 5), np.float32), trainable=True)
    optimizer = options.MicroAdam(0.1, density=0.4, window=3)
    optimizer.build([variable])
    rng = np.random.default_rng(0)
    theta, error, past = np.zeros(10), np.zeros(10), []
    for t in range(1, 8):
        g = rng.normal(size=10)
        optimizer.apply([tf.constant(g.reshape(2, 5), tf.float32)], [variable])
        total = g + error
        largest = set(sorted(range(10), key=lambda i: -abs(total[i]))[:4])
        past.append(np.array([total[i] if i in largest else 0.0 for i in range(10)]))
        error = total - past[-1]
        m = v = 0.0
        for age, w in enumerate(past[::-1][:3]):
            m = m + 0.1 / (1 - 0.9**t) * 0.9**age * w
            v = v + 0.001 / (1 - 0.999**t) * 0.999**age * w**2
        theta -= 0.1 * m / (1e-8 + np.sqrt(v))
        np.testing.assert_allclose(flat([variable.value]), theta, rtol=1e-3, atol=1e-5)


def test_dp_micro_adam_sees_the_release():
    optimizer = built(options.DPMicroAdam, density=1.0)
    (g, *_), *_ = releases(optimizer, 1)
    np.testing.assert_allclose(weights(optimizer), -1e-3 * np.sign(g), rtol=1e-3)


@pytest.mark.parametrize(
    ("make", "decay"),
    [(options.scale_then_privatize, 0.9), (options.ScaleThenPrivatizeAdam, 0.999)],
)
def test_gradients_are_scaled_by_the_optimizers_own_second_moment(make, decay):
    optimizer = built(make, l2_norm_clip=2.0)
    sigma = SIGMA / np.sqrt(1 - optimizer.loss_share)  # the loss has its share of the budget
    v = 0.0
    for g, s, r, _ in releases(optimizer, 5):
        if np.any(v):  # not the first step
            wanted = np.sqrt(0.4**2 + (1 - 0.4**2) * v / np.mean(v))
            np.testing.assert_allclose(r, wanted, rtol=1e-3)
        np.testing.assert_allclose(s, sigma * 2.0 * r / 20, rtol=1e-5)
        v = decay * v + (1 - decay) * g**2
    np.testing.assert_allclose(flat([v.value for v in optimizer._velocities]), v, rtol=1e-4)


def test_eigenvectors_follow_the_covariance():
    """Exact while the rank has room; then the best of rank k of the one before and a vector."""
    rng = np.random.default_rng(0)
    size, rank, d = 30, 4, 0.9
    u, values = tf.zeros((size, rank)), tf.zeros(rank)
    covariance, trace, rest = np.zeros((size, size)), 0.0, 0.0
    for _ in range(12):
        x = rng.normal(size=size) * np.linspace(3, 0.1, size)
        before = u.numpy() @ np.diag(values.numpy()) @ u.numpy().T
        u, values, dropped = geoclip.next_eigenvectors(u, values, tf.constant(x, tf.float32), d)
        covariance = d * before + (1 - d) * np.outer(x, x)
        wanted = np.linalg.eigvalsh(covariance)[::-1]
        np.testing.assert_allclose(values[::-1], wanted[:rank], atol=1e-4)
        np.testing.assert_allclose(dropped, wanted[rank], atol=1e-4)
        found = u.numpy() @ np.diag(values.numpy()) @ u.numpy().T
        np.testing.assert_allclose(covariance @ u.numpy(), found @ u.numpy(), atol=1e-3)
        trace, rest = d * trace + (1 - d) * x @ x, d * rest + float(dropped)
        np.testing.assert_allclose(float(tf.reduce_sum(values)) + rest, trace, rtol=1e-4)
    np.testing.assert_allclose(u.numpy().T @ u.numpy(), np.eye(rank), atol=1e-5)


def test_lengths_are_fourth_roots_of_a_mean_square_of_one():
    eigenvalues = tf.constant([0.5, 3.0, 16.0, 1e9])
    lengths, rest = geoclip.shaped_lengths(eigenvalues, tf.constant(1.0), 100, 1e4)
    np.testing.assert_allclose(lengths / rest, [1.0, 3**0.25, 2.0, 10.0], rtol=1e-5)
    np.testing.assert_allclose(tf.reduce_sum(lengths**2) + 96 * rest**2, 100.0, rtol=1e-5)


def trained_geoclip(**arguments):
    optimizer = built(geoclip.GeoClip, rank=5, learning_rate=0.1, **arguments)
    advance(optimizer, np.random.default_rng(5), 12, scale=30.0)
    return optimizer


def dense(optimizer):
    """B as a matrix."""
    u = optimizer._directions.numpy().astype(np.float64)
    rest = float(optimizer._rest_length.value)
    return rest * (np.eye(SIZE) - u @ u.T) + u @ np.diag(optimizer._lengths.numpy()) @ u.T


def test_geoclip_against_matrices():
    optimizer = trained_geoclip(**NO_NOISE, l2_norm_clip=2.0)
    b, a = dense(optimizer), flat([c.value for c in optimizer._center])
    np.testing.assert_allclose(np.trace(b @ b) / SIZE, 2.0**2, rtol=1e-4)
    assert optimizer._lengths.numpy().max() > 1.5 * float(optimizer._rest_length.value)
    before, grads = weights(optimizer), random_grads(np.random.default_rng(6), 7, 3.0)
    total = np.zeros(SIZE)
    for i in range(7):
        w = np.linalg.solve(b, flat([g[i] for g in grads]) - a)
        total += w / max(1.0, np.linalg.norm(w))
    step(optimizer, grads, 10)  # seven came of ten that were expected
    released = b @ total / 10 + a
    np.testing.assert_allclose(weights(optimizer), before - 0.1 * released, rtol=1e-3, atol=1e-5)
    center = flat([c.value for c in optimizer._center])
    np.testing.assert_allclose(center, 0.9 * a + 0.1 * released, rtol=1e-3, atol=1e-5)


def test_the_frame_of_geoclip_is_left_as_it_was_entered():
    optimizer = trained_geoclip()
    k, b = optimizer.clipping_set(), dense(optimizer)
    (row,) = zip(*random_grads(np.random.default_rng(7), 1), strict=True)
    inside = [w[0] for w in k.enter_frame([g[None] for g in row])]
    np.testing.assert_allclose(flat(inside), np.linalg.solve(b, flat(row)), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(flat(k.leave_frame(inside)), flat(row), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat(k.variances()), np.diag(b @ b), rtol=1e-4)


def test_the_noise_of_geoclip_has_the_covariance_of_its_lengths():
    """Over 500 lots of no example: λ is off by 5 standard errors once in 10⁶ times."""
    optimizer = trained_geoclip()
    k = optimizer.clipping_set()
    sums = k.zero_sums(list(SHAPES.values()))
    b, count = dense(optimizer), 500

    @tf.function
    def draw(number):
        noisy, _ = optimizer._with_noise(sums, k.noise_stddev(SIGMA, len(SHAPES)), 20.0, number)
        return tf.concat([tf.reshape(g, [-1]) for g in k.leave_frame(noisy)], 0)

    found = np.array([draw(tf.constant(i, tf.int64)) for i in range(count)]) * 20 / SIGMA
    for j in range(5):
        u = optimizer._directions.numpy()[:, j].astype(np.float64)
        np.testing.assert_allclose(np.var(found @ u), u @ b @ b @ u, rtol=5 * math.sqrt(2 / count))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6, 1e15, 1e30])
def test_no_example_moves_the_sum_of_geoclip_by_more_than_one(scale):
    optimizer = trained_geoclip()
    rng = np.random.default_rng(8)
    k = optimizer.clipping_set()
    clipped = k.clip(random_grads(rng, 50, scale))
    norms = [np.linalg.norm(flat([v[i] for v in clipped])) for i in range(50)]
    assert max(norms) <= 1.0
    if 1e5 < scale < 1e18:
        assert min(norms) > 0.9999
    # Along the shortest and the longest axis of the set, too.
    for column in (0, 4):
        u = tf.split(
            optimizer._directions.value[:, column], [math.prod(s) for s in SHAPES.values()]
        )
        along = [
            scale * tf.reshape(part, (1, *shape))
            for part, shape in zip(u, SHAPES.values(), strict=True)
        ]
        assert moved_by(optimizer, random_grads(rng, 2), along) <= 1.0 + 1e-5


def test_an_example_that_is_not_finite_counts_nothing_in_geoclip():
    k = trained_geoclip().clipping_set()
    grads = random_grads(np.random.default_rng(9), 3)
    wanted = k.clipped_sum([g[:2] for g in grads], tf.ones(2))
    for value in (np.nan, np.inf):
        spoiled = [*grads[:3], tf.concat([grads[3][:2], [value]], 0)]
        np.testing.assert_allclose(
            flat(k.clipped_sum(spoiled, tf.ones(3))), flat(wanted), atol=1e-6
        )


@pytest.mark.parametrize(
    "arguments",
    [{"l2_norm_clip": dp.QuantileClip()}, {"l2_norm_clip": {"": 1.0}}, {"automatic_clipping": 0.1}],
)
def test_geoclip_refuses_other_ways_to_clip(arguments):
    with pytest.raises(ValueError, match="GeoClip takes one number"):
        geoclip.GeoClip(noise_multiplier=1.0, **arguments)


@pytest.mark.parametrize("name", NEW)
def test_rule_r_holds_after_training(name):
    optimizer = built(OPTIONS[name])
    rng = np.random.default_rng(4)
    advance(optimizer, rng, 4)
    for scale in (1.0, 1e8):
        moved = moved_by(optimizer, random_grads(rng, 3), random_grads(rng, 1, scale))
        assert moved <= 1.0 + 1e-5
    assert moved > 0.99


@pytest.mark.parametrize("name", NEW)
def test_a_short_run(name):
    x, y = data()
    model = private_model(OPTIONS[name](noise_multiplier=1.0, seed=0), metrics=[])
    before = [w.numpy() for w in model.model.trainable_variables]
    model.fit(x, y, batch_size=40, epochs=1, verbose=0)
    for a, b in zip(before, model.model.trainable_variables, strict=True):
        assert np.all(np.isfinite(b.numpy()))
        assert np.any(a != b.numpy())
    charged = accounting.epsilon(1.0, 40 / len(x), 3, 1e-5)
    assert model.epsilon(1e-5) == pytest.approx(charged, rel=1e-6)


def test_the_part_of_the_study():
    jobs = list(study.jobs(("options",), list(study.TASKS)))
    assert len(jobs) == len(set(map(str, jobs))) == len(OPTION_CELLS) * len(OPTIONS)
    for task, epsilon in OPTION_CELLS:
        assert epsilon in study.TASKS[task].cells
    assert set(OPTION_SEARCH) <= set(OPTIONS)
    assert {len(rates) for rates in OPTION_SEARCH.values()} == {5}
    for name, make in OPTIONS.items():
        searched = isinstance(make(noise_multiplier=1.0)._learning_rate, keras.Variable)
        assert searched == (name in OPTION_SEARCH)


def test_a_rate_is_searched_where_there_is_no_default(monkeypatch):
    monkeypatch.setattr(study, "train", lambda task, optimizer, *_, **__: (0.5, 1.0))
    tried = {}
    monkeypatch.setattr(study, "search", lambda score, rates: tried.update(rates=rates) or {2.0: 1})
    row = study.run_job(("options", "digits", 1.0, "GeoClip", ()))
    assert tried["rates"] == OPTION_SEARCH["GeoClip"]
    assert row["arguments"] == {"learning_rate": 2.0}
    tried.clear()
    assert study.run_job(("options", "digits", 1.0, "ADADP, low-pass", ()))["arguments"] == {}
    assert not tried


def test_the_table_has_adadp_beside_the_options():
    def row(part, method, accuracies, **arguments):
        return {
            "part": part,
            "task": "digits",
            "epsilon": 1.0,
            "method": method,
            "setting": None,
            "accuracies": accuracies,
            "arguments": arguments,
        }

    rows = [
        row("study", "ADADP", [0.93, 0.95]),
        row("options", "GeoClip", [0.91, 0.91], learning_rate=0.5),
        row("options", "ADADP, low-pass", [0.9, 0.9]),
    ]
    lines = adadp_report.tables(rows).splitlines()
    for line in (
        "| variant (η where searched) | digits, ε = 1 |",
        "| ADADP, default | 94.00 ± 1.41 |",
        "| GeoClip | 91.00 ± 0.00 (0.5) |",
        "| ADADP, low-pass | 90.00 ± 0.00 |",
    ):
        assert line in lines
