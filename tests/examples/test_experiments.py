"""The experiments' figures against closed forms and against second ways to compute them."""

import pathlib
import subprocess
import sys

import accept_only
import cosine
import dimensions
import distortion_rate
import matplotlib.image
import min_max_swap
import noise_scales
import noisy_min
import numpy as np
import pytest
import tensorflow as tf
import trajectories
from scipy import optimize, special, stats

import tf_adadp as dp

pytestmark = [
    # Data are read in a graph even where steps are eager.
    pytest.mark.filterwarnings("ignore:Even though the `tf.config.experimental_run_functions"),
    # So few steps that some noise has not changed yet.
    pytest.mark.filterwarnings("ignore:An input array is constant"),
]
SCRIPTS = pathlib.Path(cosine.__file__).parent


@pytest.fixture
def eager():
    """A few steps cost less than the tracing of their graphs."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def _is_a_figure(path):
    pixels = matplotlib.image.imread(path)
    return min(pixels.shape[:2]) > 300 and len(np.unique(pixels[..., :3].reshape(-1, 3))) > 3


# --- cosine


@pytest.mark.parametrize("std", [2.0, 13.5, 100.0])
def test_cosine_of_isotropic_noise_has_its_closed_form(std):
    snr = np.hypot(*cosine.VECTOR) / std
    x = snr**2 / 4
    bessel = special.ive(0, x) + special.ive(1, x)  # scaled by exp(−x)
    closed = np.sqrt(np.pi / 8) * snr * bessel
    assert cosine.expected_cosine((std, std)) == pytest.approx(closed, abs=1e-10)


@pytest.mark.parametrize(
    ("stddevs", "measured"),
    [((17.0, 8.5), 0.471), ((13.5, 13.5), 0.478), ((12.4, 24.8), 0.399)],
)
def test_cosine_of_the_papers_three_noises_is_not_the_printed(stddevs, measured):
    exact = cosine.expected_cosine(stddevs)
    assert exact == pytest.approx(measured, abs=1.2e-3)  # 2 std of a mean over 2e6 draws
    assert abs(exact - cosine.PRINTED[stddevs]) > 0.04
    drawn = cosine.sampled_cosine(stddevs, np.random.default_rng(1), 200_000)
    assert drawn == pytest.approx(exact, abs=5e-3)  # 3 std: a cosine's is below 0.72


def test_cosine_example_has_adadps_noise_rounded_and_better_shapes_exist():
    np.testing.assert_allclose(cosine.box_stddevs("adadp"), (17.0, 8.5), rtol=3e-3)
    isotropic = cosine.expected_cosine(cosine.stddevs_of_ratio(1.0))
    adadp = cosine.expected_cosine(cosine.box_stddevs("adadp"))
    best = cosine.expected_cosine(cosine.box_stddevs("least_squares"))
    assert adadp < isotropic < best


# --- accept_only


def test_accepting_everything_is_the_gaussian_mechanism():
    claimed = accept_only.gaussian_delta(accept_only.SIGMA, 1.0)
    assert claimed == pytest.approx(0.0668, abs=1e-4)
    assert claimed == pytest.approx(dp.accounting.delta(1.23, 1.0, 1, 1.0, "pld"), rel=1e-4)
    for threshold, limit in ((0.3, 0), (-50.0, 10)):
        delta = accept_only.accept_only_delta(threshold, accept_only.SIGMA, 1.0, limit)
        assert delta == pytest.approx(claimed, rel=1e-9)


@pytest.mark.parametrize("threshold", [0.0, 1.93, 4.0])
def test_accept_only_delta_is_the_integral_of_the_density(threshold):
    x = np.linspace(-12, 13, 500_001)

    def density(mean):
        f, r = stats.norm.pdf(x, mean, 1.23), stats.norm.cdf(threshold, mean, 1.23)
        return f * np.where(x >= threshold, sum(r**k for k in range(11)), r**10)

    p, q = density(0.0), density(1.0)
    assert np.trapezoid(p, x) == pytest.approx(1.0, abs=1e-4)
    deltas = [np.trapezoid(np.maximum(a - np.e * b, 0), x) for a, b in ((p, q), (q, p))]
    exact = accept_only.accept_only_delta(threshold, 1.23, 1.0, 10)
    assert exact == pytest.approx(max(deltas), abs=1e-4)


def test_accept_only_charging_is_five_times_too_cheap():
    threshold, delta = accept_only.worst_threshold(1.23, 1.0, 10)
    assert delta == pytest.approx(0.3512, abs=5e-4)
    # The event of the worst D-against-D' ratio, simulated: a forced release below the threshold.
    rng, events = np.random.default_rng(0), []
    for mean in (0.0, 1.0):
        released = accept_only.simulate(mean, threshold, 1.23, 10, rng, 200_000)
        events.append(np.mean(released < threshold))
    assert events[0] - np.e * events[1] == pytest.approx(delta, abs=0.01)
    assert delta < accept_only.gaussian_delta(1.23 / np.sqrt(11), 1.0)  # all charged: enough


# --- noisy_min


def test_wrong_sign_multiplies_epsilon_by_the_other_candidates():
    for candidates in (2, 5, 21):
        worst = noisy_min.worst_log_ratio("added", candidates, 0.3)
        assert worst == pytest.approx(0.3 * (candidates - 1), rel=1e-6)


@pytest.mark.parametrize("noise", ["subtracted", "gumbel"])
def test_right_signs_keep_epsilon_and_use_it_up(noise):
    worst = noisy_min.worst_log_ratio(noise, 21, 0.3)
    assert 0.29 < worst < 0.3 * (1 + 1e-7)


@pytest.mark.parametrize("noise", noisy_min.NOISES)
def test_selection_probabilities_sum_to_one_and_are_what_is_drawn(noise):
    scores = np.array([0.0, 0.7, -1.3, 2.0, 0.7])
    exact = [noisy_min.selection_probability(scores, i, noise, 1.0) for i in range(5)]
    assert sum(exact) == pytest.approx(1.0, abs=1e-9)
    if noise == "gumbel":
        np.testing.assert_allclose(exact, special.softmax(-scores), atol=1e-9)
    exact = noisy_min.selection_probability([1.0, 0.0, 0.0, 0.0], 0, noise, 1.0)
    drawn = noisy_min.simulated_frequency(1.0, noise, np.random.default_rng(0), 200_000, 4, 1.0)
    assert drawn == pytest.approx(exact, abs=4 * np.sqrt(exact / 200_000))


# --- min_max_swap


def test_printed_form_meets_its_constraint_where_it_was_made_and_breaks_elsewhere():
    w = np.random.default_rng(0).standard_normal(min_max_swap.SIZE)
    s = min_max_swap.printed_stddevs(w)
    assert np.sum((w / np.linalg.norm(w) / s) ** 2) == pytest.approx(1.0, rel=1e-9)
    size = np.abs(w)
    closed = np.sum(size**2) / (size.min() ** (2 / 3) * np.sum(size ** (4 / 3)))
    assert min_max_swap.worst_in_ball(s) == pytest.approx(closed, rel=1e-9)
    # A half-normal's least of m is exponential with mean √(π/2)/m: the law of the factor.
    quantiles = -np.log([0.9, 0.1]) * np.sqrt(np.pi / 2) / min_max_swap.SIZE
    high, low = 1 / (quantiles ** (2 / 3) * stats.norm.expect(lambda x: np.abs(x) ** (4 / 3)))
    assert low < closed < high
    assert low < 1264 < high  # another draw's, of another generator


def test_sound_forms_meet_the_constraint_with_equality_and_cost_less():
    w = np.random.default_rng(0).standard_normal(5000)
    rows = {name: rest for name, *rest in min_max_swap.evaluate(w, 4.0)}
    isotropic = rows["ball: isotropic (DP-SGD)"][2]
    for name in ("box", "ellipsoid"):
        excess, sigma, cost = rows[name]
        assert 1 - 1e-5 < excess <= 1
        assert sigma == pytest.approx(4.0, rel=1e-5)
        assert cost < 0.95 * isotropic
    assert rows["printed"][0] > 50
    assert rows["printed, scaled until it holds"][2] > 5 * isotropic


def test_closed_forms_are_the_least_of_their_problems():
    w, u = np.array([0.2, -1.0, 3.0, 0.5]), np.array([1.0, 0.3, 0.1, 2.0])

    def least(spread):
        constraint = {"type": "ineq", "fun": lambda t: 1 - np.sum(spread / np.exp(2 * t))}
        found = optimize.minimize(
            lambda t: np.sum(np.abs(w) * np.exp(t)), np.full(4, 2.0), constraints=constraint
        )
        assert found.success
        return np.exp(found.x)

    scales = min_max_swap.ellipsoid_scales(w, u)
    np.testing.assert_allclose(scales, least(u), rtol=2e-3)
    assert np.sum(u / scales**2) == pytest.approx(1.0)
    bounds = np.array([1.0, 0.5, 0.2, 2.0])
    box, _ = min_max_swap.box(w, bounds)
    np.testing.assert_allclose(box.noise_stddev(1.0, 1)[0], least(bounds**2), rtol=2e-3)


# --- distortion_rate


def test_water_filling_is_the_least_distortion_at_its_rate():
    u = distortion_rate.spectrum(6)
    for rate in (0.3, 2.0, 20.0):
        d = distortion_rate.water_filling(u, rate)
        assert np.sum(np.log(u / d)) / 2 == pytest.approx(rate, rel=1e-9)
        rng = np.random.default_rng(0)
        for _ in range(50):  # no other split of the rate does better
            split = rng.dirichlet(np.ones(6)) * rate
            assert np.sum(u * np.exp(-2 * split)) >= d.sum()


def test_theorem_3_is_reached_by_shrunk_gaussian_noise():
    u = distortion_rate.spectrum()
    for level in (1e-4, 0.01, 0.3):
        rate, distortion = distortion_rate.shrunk(u, level)
        assert distortion == pytest.approx(distortion_rate.water_filling(u, rate).sum(), rel=1e-9)


@pytest.mark.parametrize("rate", [0.01, 1.0, 30.0, 500.0])
def test_the_bounds_lie_below_every_unbiased_release(rate):
    u = distortion_rate.spectrum()
    least = distortion_rate.unbiased_bound(u, rate)
    assert distortion_rate.noise_rate(u, least) == pytest.approx(rate, rel=1e-6)
    assert distortion_rate.water_filling(u, rate).sum() < least.sum()
    for b in distortion_rate.shapes(u).values():
        noise = distortion_rate.additive(b, u, rate)
        assert distortion_rate.noise_rate(u, noise) == pytest.approx(rate, rel=1e-6)
        assert noise.sum() >= least.sum() * (1 - 1e-6)


def test_best_unbiased_noise_is_adaclips_far_above_the_signal_and_isotropic_far_below():
    u = distortion_rate.spectrum()
    low = distortion_rate.unbiased_bound(u, 1e-4)
    np.testing.assert_allclose(low / np.sqrt(u), (low / np.sqrt(u))[0], rtol=1e-2)
    assert low.sum() == pytest.approx(np.sum(np.sqrt(u)) ** 2 / 2e-4, rel=1e-2)
    high = distortion_rate.unbiased_bound(u, 500.0)
    np.testing.assert_allclose(high, high[0], rtol=1e-2)


def test_clipped_releases_lie_above_theorem_3_at_their_information():
    u, sigmas = distortion_rate.spectrum(16), np.array([0.05, 0.3, 1.0])
    scales = np.geomspace(0.05, 4, 6)
    rng = np.random.default_rng(0)
    found = distortion_rate.released_distortion(u, sigmas, rng, draws=400, scales=scales)
    assert len(found) == 7
    for values in found.values():
        for sigma, value in zip(sigmas, values, strict=True):
            assert value > distortion_rate.water_filling(u, 1 / (2 * sigma**2)).sum()
            assert value < 1.1  # a clip scale near 0 releases next to nothing: E‖g‖² = 1
    # Same noise, and the box lies inside the ellipsoid.
    assert np.all(found["u^(1/2) (ADADP)"] < found["box, ADADP's noise"])


# --- dimensions


def test_dpsgds_error_grows_with_the_dimension():
    """The spread is that of a random walk, η·σ²·C²/(L²·(2 − η)) per coordinate, within a third."""
    one, many = (np.mean(dimensions.errors("DPSGD", d, 2.0, 120, 3, 0)) for d in (1, 300))
    walk = dimensions.RATE * 2.0**2 / dimensions.LOT**2 / (2 - dimensions.RATE)
    assert many - one == pytest.approx(299 * walk, rel=0.33)


def test_adaclip_gains_where_few_coordinates_are_empty():
    dpsgd, adaclip = (
        np.mean(dimensions.errors(method, 10, 1.0, 250, 2, 0))
        for method in ("DPSGD", "AdaCliP, normalized")
    )
    assert adaclip < 0.5 * dpsgd


# --- trajectories


@pytest.mark.parametrize(
    ("name", "minimum"),
    [
        ("Beale", (3.0, 0.5)),
        ("Rosenbrock", (1.0, 1.0)),
        ("Himmelblau", (3.0, 2.0)),
        ("Booth", (1.0, 3.0)),
        ("three-hump camel", (0.0, 0.0)),
    ],
)
def test_test_functions_are_zero_at_their_known_minimum(name, minimum):
    function, start = trajectories.FUNCTIONS[name]
    assert function(*minimum) == pytest.approx(0.0, abs=1e-12)
    assert function(*start) > 0.1


def test_distance_of_two_paths():
    first = np.zeros((4, 2))
    second = np.array([[3.0, 4.0], [0, 0], [0, 1], [2, 0]])
    assert trajectories.distance(first, second) == 2.0


def _noisy_dpsgd_walker(steps):
    return trajectories.Walker(trajectories.private_optimizer("DPSGD", 1.0, 1.0, 0), steps)


def test_paths_start_afresh_and_dpsgd_without_noise_is_clipped_descent(eager):
    silent = trajectories.Walker(trajectories.private_optimizer("DPSGD", 0.0, 1.0, 0), 5)
    path = silent.path("Booth")
    np.testing.assert_array_equal(path, silent.path("Booth"))
    point, expected = np.array(trajectories.FUNCTIONS["Booth"][1]), []
    for _ in range(5):
        x, y = point
        g = np.array([10 * x + 8 * y - 34, 8 * x + 10 * y - 38])
        point = point - trajectories.RATES["SGD"] * g / max(1, np.linalg.norm(g))
        expected.append(point)
    np.testing.assert_allclose(path, expected, atol=1e-4)

    noisy, again = _noisy_dpsgd_walker(5), _noisy_dpsgd_walker(5)
    first, second = noisy.path("Booth"), noisy.path("Booth")
    assert trajectories.distance(first, second) > 1e-3
    np.testing.assert_array_equal(first, again.path("Booth"))


def test_dpsgd_deviates_by_the_random_walk_of_its_noise():
    """D is the mean norm of a Gaussian walk if the clipped gradient does not turn."""
    steps, paths = 20, 60
    silent = trajectories.Walker(trajectories.private_optimizer("DPSGD", 0.0, 0.01, 0), steps)
    noisy = trajectories.Walker(trajectories.private_optimizer("DPSGD", 1.0, 0.01, 0), steps)
    base = silent.path("Himmelblau")  # C = 0.01: all points stay near the start
    measured = [trajectories.distance(noisy.path("Himmelblau"), base) for _ in range(paths)]
    step = trajectories.RATES["SGD"] * 0.01
    expected = step * np.sqrt(np.pi / 2) * np.mean(np.sqrt(np.arange(1, steps + 1)))
    assert np.mean(measured) == pytest.approx(expected, rel=0.2)  # 3 std of the mean of 60


@pytest.mark.parametrize("method", ["ADAL", "ADADP", "ADADP, printed"])
def test_rmsprop_paths_take_steps_of_the_rate_however_large_the_noise(eager, method):
    """|g̃|/√E[g̃²] ≤ 1/√(1 − ρ), and the first step is as long as that in each coordinate."""
    walker = trajectories.Walker(trajectories.private_optimizer(method, 100.0, 1.0, 0), 3)
    points = np.vstack([trajectories.FUNCTIONS["Booth"][1], walker.path("Booth")])
    moves = np.abs(np.diff(points, axis=0))
    longest = trajectories.RATES["RMSprop"] / np.sqrt(0.1)
    np.testing.assert_allclose(moves[0], longest, rtol=1e-4)
    # From step 2 on, sound ADADP's is divided by r, which lies above its floor of 0.4.
    assert np.all(moves <= longest / (0.4 if method == "ADADP" else 1.0) * (1 + 1e-5))


# --- noise_scales


def test_printed_noise_scale_tells_the_gradient(eager):
    look = noise_scales.train("printed", (2,), 2.0, 50, 8, 0)[2]
    live = np.count_nonzero(look["sigma"])  # a box counts coordinates with c > 0
    np.testing.assert_allclose(look["sigma"], 1.2 * 2.0 * np.sqrt(live) * look["root"], rtol=1e-4)
    # A pixel that is 0 in every image has noise of std exactly 0.
    assert np.all(look["sigma"][:8] == 0)
    assert noise_scales.rank_correlation(look["root"], look["gradient"]) > 0.7


def test_sound_noise_keeps_its_scale(eager):
    seen = noise_scales.train("sound", (1, 3), 2.0, 50, 8, 0)
    for look in seen.values():
        assert look["sigma"].shape == look["gradient"].shape == (64 * 8 + 8 + 8 * 10 + 10,)
        assert np.sqrt(np.mean(look["sigma"] ** 2)) == pytest.approx(2.0, rel=1e-4)  # σ*·C
    assert noise_scales.rank_correlation(seen[3]["root"], seen[3]["gradient"]) < 0.5


def test_gradient_of_the_figure_is_that_of_the_mean_loss():
    model = noise_scales.build("sound", 2.0, 4, 0)
    x, y = np.random.default_rng(0).random((6, 64), np.float32), np.arange(6, dtype=np.int32)
    model(x)
    model.optimizer.build(model.trainable_variables)
    found = noise_scales.look(model, x, y)["gradient"][-10:]  # the output bias
    expected = np.mean(tf.nn.softmax(model(x)).numpy() - np.eye(10)[y], axis=0)
    np.testing.assert_allclose(found, np.abs(expected), atol=1e-6)


# --- the scripts


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        (cosine, {"draws": 500}, ["0.52", "0.4704", "0.478"]),
        (accept_only, {"draws": 500}, ["0.06684", "0.3512"]),
        (noisy_min, {"draws": 500}, ["added", "0.3", "6"]),
        (min_max_swap, {"size": 300, "repeats": 5}, ["printed", "ellipsoid"]),
        (distortion_rate, {"size": 8, "draws": 30}, ["Theorem 3", "AdaCliP"]),
        (dimensions, {"steps": 2, "runs": 1, "largest": 10}, ["DPSGD", "free", "d = 10"]),
        (trajectories, {"steps": 2, "paths": 2}, ["0.90", "0.21", "Booth"]),
        (
            noise_scales,
            {"first_step": 1, "last_step": 2, "hidden": 4, "lot_size": 50},
            ["NOT PRIVATE", "sound", "printed"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mains_print_their_table_and_write_their_figure(
    script, arguments, words, tmp_path, capsys, eager, monkeypatch
):
    if script is trajectories:
        for name, kept in (
            ("FUNCTIONS", ("Beale", "Booth")),
            ("METHODS", ("DPSGD", "ADADP, printed")),
        ):
            every = getattr(script, name)
            monkeypatch.setattr(script, name, {key: every[key] for key in kept})
    out = tmp_path / "new" / "figure.png"
    script.main(out=str(out), **arguments)
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed.split() or word in printed
    assert _is_a_figure(out)


def _run_script(folder, *arguments):
    command = [sys.executable, SCRIPTS / "accept_only.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_a_script_takes_its_flags(tmp_path):
    done = _run_script(tmp_path, "--seed=3", "--sigma=2.15", "--draws=100")
    assert done.returncode == 0, done.stderr
    assert "σ = 2.15" in done.stdout
    assert (tmp_path / "figures" / "accept_only.png").is_file()


@pytest.mark.parametrize("wrong", ["--sigma=-1", "unknown_word"])
def test_a_script_refuses_what_it_does_not_know(tmp_path, wrong):
    refused = _run_script(tmp_path, wrong)
    assert refused.returncode != 0
    assert wrong.strip("-").split("=")[0] in refused.stdout + refused.stderr
    assert not list(tmp_path.iterdir())
