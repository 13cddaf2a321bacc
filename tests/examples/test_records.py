"""examples/records: features against their definitions, records of digits, of text and a table."""

import json
import pathlib
import subprocess
import sys

import affairs
import charged_search
import cifar10_frozen
import components
import convergence
import dp_accounting
import images
import keras
import linear
import numpy as np
import public_convolutions
import pytest
import record
import reviews
import scipy.ndimage
import scipy.signal
import table
from copies import DrawnCopy
from patches import PatchFeatures, drawn_filters
from scattering import Scattering
from straighten import Straighten

import tf_adadp as dp
from tf_adadp import accounting

RECORDS = pathlib.Path(__file__).parents[2] / "examples" / "records"


def image(rng, side=16):
    """A smooth image that is 0 at its edges."""
    window = np.hanning(side + 2)[1:-1]
    return (rng.random((side, side)) * window * window[:, None]).astype(np.float32)


def coefficients(x, **arguments):
    return Scattering(**arguments)(x[None, ..., None])[0].numpy()


def gaussian(sigma, slant=1.0, theta=0.0, radius=24):
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    across = x * np.cos(theta) + y * np.sin(theta)
    along = y * np.cos(theta) - x * np.sin(theta)
    bump = np.exp(-(across**2 + slant**2 * along**2) / (2 * sigma**2))
    return bump / bump.sum(), across


def test_it_is_what_convolution_in_space_gives():
    x = image(np.random.default_rng(0))
    padded = np.pad(x, 4, "reflect")
    wide = np.pad(padded, 24, "wrap")  # circular convolution is a valid one of this

    def convolved(kernel, y):
        return scipy.signal.convolve2d(y, kernel, mode="valid")

    def wavelet(scale, angle):
        bump, across = gaussian(0.8 * 2**scale, 0.5, np.pi * angle / 8)
        wave = np.exp(1j * 0.75 * np.pi / 2**scale * across)
        return bump * (wave - (bump * wave).sum())

    def averaged(y):
        low = convolved(gaussian(1.6)[0], np.pad(y, 24, "wrap"))
        return low[4:-4:4, 4:-4:4]

    found = coefficients(x)
    assert found.shape == (4, 4, 81)
    np.testing.assert_allclose(found[..., 0], averaged(padded), atol=1e-5)
    for angle in (0, 3):
        fine = np.abs(convolved(wavelet(0, angle), wide))
        coarse = np.abs(convolved(wavelet(1, angle), wide))
        np.testing.assert_allclose(found[..., 1 + angle], averaged(fine), atol=1e-5)
        np.testing.assert_allclose(found[..., 9 + angle], averaged(coarse), atol=1e-5)
        second = np.abs(convolved(wavelet(1, 5), np.pad(fine, 24, "wrap")))
        np.testing.assert_allclose(found[..., 17 + 8 * angle + 5], averaged(second), atol=1e-5)


def test_an_image_without_contrast_has_its_mean_alone():
    found = coefficients(np.full((16, 16), 0.7, np.float32))
    np.testing.assert_allclose(found[..., 0], 0.7, atol=1e-5)
    np.testing.assert_allclose(found[..., 1:], 0, atol=1e-5)


def test_a_shift_by_a_cell_shifts_the_coefficients():
    inner = image(np.random.default_rng(1), 12)
    x, shifted = np.zeros((2, 32, 32), np.float32)
    x[8:20, 8:20], shifted[12:24, 8:20] = inner, inner
    before, after = coefficients(x), coefficients(shifted)
    np.testing.assert_allclose(after[2:-1], before[1:-2], atol=2e-4)


def test_a_small_shift_changes_features_less_than_pixels():
    """Lipschitz to deformations (Mallat 2012): what the features are for."""
    x = image(np.random.default_rng(2), 32)

    def change(a, b):
        return np.linalg.norm(a - b) / np.linalg.norm(a)

    shifted = np.roll(x, 1, axis=1)
    assert change(coefficients(x), coefficients(shifted)) < 0.3 * change(x, shifted)


def test_a_quarter_turn_turns_the_angles():
    rng = np.random.default_rng(3)
    wave = np.cos(1.5 * np.arange(15) + 0.4)
    x = np.pad(image(rng, 15) * wave, [(9, 8), (9, 8)])
    turned = np.pad(np.rot90(x[9:-8, 9:-8]), [(9, 8), (9, 8)])
    total, of_turned = (coefficients(a).sum((0, 1)) for a in (x, turned))
    first, of_first = total[1:17].reshape(2, 8), of_turned[1:17].reshape(2, 8)
    # A sum over every fourth pixel is that over all to a few percent.
    np.testing.assert_allclose(of_first, np.roll(first, 4, axis=1), rtol=0.05)
    second, of_second = total[17:].reshape(8, 8), of_turned[17:].reshape(8, 8)
    np.testing.assert_allclose(of_second, np.roll(second, (4, 4), axis=(0, 1)), rtol=0.1)
    assert first[0].max() > 2 * first[0].min()  # the angles differ


def test_colours_and_images_do_not_meet():
    rng = np.random.default_rng(4)
    x = rng.random((3, 8, 8, 2)).astype(np.float32)
    whole = Scattering(num_angles=4)(x).numpy()
    assert whole.shape == (3, 2, 2, 2 * 25)
    np.testing.assert_allclose(
        whole[1, ..., 25:], coefficients(x[1, ..., 1], num_angles=4), atol=1e-6
    )
    x[0] = np.nan
    np.testing.assert_array_equal(Scattering(num_angles=4)(x).numpy()[1:], whole[1:])


def slow_patch_features(x, kernel, cells, threshold):
    """Returns them by the definition, one patch and one filter at a time."""
    size, number = kernel.shape[0], kernel.shape[-1]
    side = x.shape[0] - size + 1
    cell = -(-side // cells)
    before = (cells * cell - side) // 2
    sums = np.zeros((cells, cells, 2 * number))
    for row, column in np.ndindex(side, side):
        patch = x[row : row + size, column : column + size].astype(float)
        patch = (patch - patch.mean()) / np.sqrt(patch.var() + 0.001)
        for k in range(number):
            found = (patch * kernel[..., k]).sum()
            place = (row + before) // cell, (column + before) // cell
            sums[(*place, k)] += max(found - threshold, 0)
            sums[(*place, number + k)] += max(-found - threshold, 0)
    return sums / cell**2


@pytest.mark.parametrize("cells", [2, 3])
def test_patch_features_are_their_definition(cells):
    x = np.random.default_rng(5).random((2, 11, 11, 3)).astype(np.float32)
    layer = PatchFeatures(num_filters=4, patch_size=4, cells=cells, threshold=0.3)
    found = layer(x).numpy()
    assert found.shape == layer.compute_output_shape(x.shape) == (2, cells, cells, 8)
    expected = slow_patch_features(x[1], layer.kernel.numpy(), cells, 0.3)
    np.testing.assert_allclose(found[1], expected, atol=1e-5)


def test_filters_of_drawn_patches_find_contrasts_alone():
    filters = drawn_filters(300, 5, 16, 16, 1)  # some drawn patches have one colour
    assert np.isfinite(filters).all()
    # Whitening keeps what has mean 0.
    np.testing.assert_allclose(filters.sum((0, 1, 2)), 0, atol=1e-4)
    layer = PatchFeatures(num_filters=300)
    np.testing.assert_array_equal(layer(np.full((1, 16, 16, 1), 0.7, np.float32)), 0)


def test_straightened_images_are_their_definition():
    x = image(np.random.default_rng(7), 14)
    rows, columns = np.mgrid[:14, :14]
    row, column = (np.average(places, weights=x) for places in (rows, columns))
    covariance = np.average((rows - row) * (columns - column), weights=x)
    slant = covariance / np.average((rows - row) ** 2, weights=x)
    down, right = rows - 6.5, columns - 6.5
    places = [row + down, column + right + slant * down]
    wanted = scipy.ndimage.map_coordinates(x, places, order=1, mode="grid-constant")
    np.testing.assert_allclose(Straighten()(x[None, ..., None])[0, ..., 0], wanted, atol=2e-3)


def test_a_slanted_stroke_becomes_upright():
    rows, columns = np.mgrid[:20, :20]
    upright = np.exp(-(((columns - 9.5) / 2) ** 2) - ((rows - 9.5) / 4) ** 4)
    leaning = np.exp(-(((columns - 7.5 - 0.5 * (rows - 8)) / 2) ** 2) - ((rows - 8) / 4) ** 4)
    found = Straighten()(np.stack([upright, leaning]).astype(np.float32)[..., None])[..., 0].numpy()
    np.testing.assert_allclose(found[0], upright, atol=2e-3)
    np.testing.assert_allclose(found[1], upright, atol=0.1)
    assert np.abs(leaning - upright).max() > 0.7


def test_images_that_have_no_slant():
    np.testing.assert_array_equal(Straighten()(np.zeros((2, 8, 8, 1), np.float32)), 0)
    with pytest.raises(ValueError, match="3 channels"):
        Straighten()(np.zeros((1, 8, 8, 3), np.float32))


@pytest.mark.parametrize(
    "layer", [PatchFeatures(8, cells=3), Scattering(1, num_angles=4), Straighten()]
)
def test_features_of_images_do_not_meet_and_are_those_of_a_copy(layer):
    x = np.random.default_rng(6).random((3, 12, 12, 1)).astype(np.float32)
    whole = layer(x).numpy()
    x[0] = np.nan
    np.testing.assert_array_equal(layer(x).numpy()[1:], whole[1:])
    config = keras.saving.serialize_keras_object(layer)
    copy = keras.saving.deserialize_keras_object(config)
    np.testing.assert_array_equal(copy(x).numpy()[1:], whole[1:])


DRIVER = """
import images, record
from linear import Recipe
recipes = {3.0: Recipe(40, 20.0, lot_size=300, pca_noise_multiplier=8.0)}
how = {"features": images.FEATURES, "floor": 0.001, "mirror": MIRROR, "straighten": STRAIGHTEN}
record.run("digits", images.task("digits", recipes, **how))
"""


@pytest.mark.representative(0, 1)
@pytest.mark.parametrize(
    ("features", "mirror", "straighten", "least"),
    [
        ("scattering_features", False, True, 88),
        ("scattering_features", False, False, 88),
        ("patch_features", True, False, 60),
        ("pixels", False, False, 60),
    ],  # 10 by guessing
)
def test_a_record_of_digits(tmp_path, features, mirror, straighten, least):
    paths = [str(RECORDS), str(RECORDS.parent)]
    driver = DRIVER.replace("FEATURES", features).replace("MIRROR", str(mirror))
    driver = driver.replace("STRAIGHTEN", str(straighten))
    code = f"import sys; sys.path[:0] = {paths!r}; sys.argv[0] = 'record'\n{driver}"
    out = tmp_path / "records.json"
    command = [sys.executable, "-c", code, "--epsilons=3", "--seeds=2", f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = json.loads(out.read_text())["digits"]["3"]
    assert len(row["runs"]) == 2
    for run in row["runs"]:
        assert 2.99 < run["epsilon_pld"] <= 3.0 < run["epsilon_rdp"] < 3.6
        assert run["accuracy"] > least
    again = subprocess.run(command, capture_output=True, text=True)
    assert "seed 1" in done.stdout
    assert "seed" not in again.stdout
    changed = [*command[:2], code.replace("40, 20.0", "41, 20.0"), *command[3:]]
    refused = subprocess.run(changed, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "Remove them" in refused.stderr + refused.stdout


def test_private_components_are_charged_to_every_training():
    rng = np.random.default_rng(7)
    x = rng.normal(size=(600, 20)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    train = linear.trainer(record.Split(x[:500], y[:500], x[500:], y[500:]), classes=2)
    recipe = linear.Recipe(4, 1.0, lot_size=100, pca_noise_multiplier=20.0)
    for epsilon in (2.0, 1.0):
        model, _ = train(recipe, epsilon, seed=0)
        assert [entry.origin for entry in model.ledger.entries] == ["DPPCA", "DPSGD"]
        assert 0.99 * epsilon < model.epsilon(1e-5, accountant="pld") <= epsilon


def blobs(rng, shape):
    """A `Split` of 500 and 100 records of two classes that a linear model tells apart."""
    y = rng.integers(2, size=600).astype(np.int32)
    x = rng.normal(size=(600, *shape)).astype(np.float32) + 2 * y.reshape(-1, *[1] * len(shape))
    x = (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)
    return record.Split(x[:500], y[:500], x[500:], y[500:])


def test_defaults_and_a_charged_search_stay_within_their_budget():
    train = linear.trainer(blobs(np.random.default_rng(8), (20,)), classes=2)
    defaults = linear.Defaults(steps=10, lot_size=100)
    plan = linear.Searched(mean_trials=2, speeds=(0.5, 1), steps=10, lot_size=100)
    for recipe, origin in ((defaults, "ADADP"), (plan, "search")):
        model, accuracy = train(recipe, 3.0, seed=0)
        assert accuracy > 0.8  # 0.5 by guessing
        assert [entry.origin.split(",")[0] for entry in model.ledger.entries] == [origin]
        assert 2.9 < model.epsilon(1e-5) <= 3.0
    assert "50 held-out records" in model.ledger.statement(1e-5)


def test_a_search_is_charged_for_records_that_score_it():
    """A held-out record changes the count by 1, in each of a random number of trials."""
    plan = linear.Searched(mean_trials=5)
    for records in (50, 6000):
        law = accounting.PoissonSampling(records, records)
        sigma = charged_search.noise_of_trials(law, 1, plan, 1.0, dp.PrivacyLedger())
        spent = dp.PrivacyLedger()
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        spent.add(accounting.search_event(gaussian, 1, plan.mean_trials))
        assert 0.99 < spent.epsilon(plan.delta) <= 1.0
    for accurate in (0, 25, 50):  # a score is the count with noise, of the std that was found
        scores = np.array([charged_search.noisy_share(accurate, 50, 4.0) for _ in range(2000)])
        # Five standard errors: a false alarm in 1 of 1e6.
        assert abs(50 * scores.mean() - accurate) < 5 * 4 / 2000**0.5
        assert abs(50 * scores.std() / 4.0 - 1) < 5 / (2 * 2000) ** 0.5 + 0.01  # of rounding


def test_a_search_scores_by_noisy_counts_and_leaves_no_other(monkeypatch):
    seen = []

    def share(count, number, sigma):
        seen.append((count, number, sigma))
        return count / number

    monkeypatch.setattr(charged_search, "noisy_share", share)
    split = blobs(np.random.default_rng(14), (20,))
    plan = linear.Searched(mean_trials=2, speeds=(0.5, 1), steps=5, lot_size=100)

    def classifier(shape):
        layers = [keras.Input(shape), keras.layers.Dense(2, kernel_initializer="zeros")]
        return dp.DPModel(keras.Sequential(layers))

    held_out = record.held_out(split, seed=1)
    best = charged_search.searched(held_out, classifier, plan, 3.0)
    law = accounting.PoissonSampling(50, 50)
    sigma = charged_search.noise_of_trials(law, 1, plan, 3.0, dp.PrivacyLedger())
    for count, number, used in seen:
        assert isinstance(count, int)  # a count, whose sensitivity is 1
        assert (number, used) == (50, sigma)
    assert len(seen) >= 1
    right = (best.predict(held_out.x_test, verbose=0).argmax(1) == held_out.y_test).sum()
    assert right in [count for count, _, _ in seen]
    assert all(float(value) == 0 for value in best.get_metrics_result().values())


def test_copies_are_drawn_in_training_and_averaged_else():
    split = blobs(np.random.default_rng(9), (3, 4))
    layer = DrawnCopy(seed=1)
    np.testing.assert_allclose(layer(split.x), split.x.mean(axis=1), atol=1e-6)
    drawn = layer(split.x, training=True).numpy()
    places = (np.abs(split.x - drawn[:, None]).max(axis=2) == 0).argmax(axis=1)
    np.testing.assert_array_equal(split.x[np.arange(500), places], drawn)
    assert np.bincount(places, minlength=3).min() > 110  # 167 expected, std 10.5
    config = keras.saving.serialize_keras_object(layer)
    copy = keras.saving.deserialize_keras_object(config)
    np.testing.assert_array_equal(copy(split.x, training=True), drawn)


def test_a_record_of_copies():
    train = linear.trainer(blobs(np.random.default_rng(10), (2, 20)), classes=2)
    recipe = linear.Recipe(
        10, 5.0, lot_size=100, pca_noise_multiplier=20.0, augmentation_multiplicity=2
    )
    model, accuracy = train(recipe, 3.0, seed=0)
    assert accuracy > 0.8
    assert 2.9 < model.epsilon(1e-5, accountant="pld") <= 3.0


def test_features_of_the_mirror_image():
    x = np.random.default_rng(11).random((4, 12, 12, 1)).astype(np.float32)

    def features(x, mirror):
        model = images.feature_model(x, images.patch_features, None, mirror)
        return model.predict(x, verbose=0)

    alone, mirrored = features(x, False), features(x[:, :, ::-1], False)
    np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1, atol=1e-5)
    copies = features(x, "copies")
    np.testing.assert_allclose(copies[:, 0], alone, atol=1e-5)
    np.testing.assert_allclose(copies[:, 1], mirrored, atol=1e-5)
    added = features(x, True)
    np.testing.assert_allclose(added, features(x[:, :, ::-1], True), atol=1e-5)


def test_the_network_of_the_papers_is_charged_its_components():
    rng = np.random.default_rng(12)
    x = rng.random((300, 10, 10, 1)).astype(np.float32)
    y = rng.integers(2, size=300).astype(np.int32)
    train = components.prepare(record.Split(x, y, x, y))
    for straighten in (False, True):
        recipe = components.Recipe(3, 20.0, lot_size=50, delta=1e-4, straighten=straighten)
        model, _ = train(recipe, 3.0, seed=0)
        assert [entry.origin for entry in model.ledger.entries] == ["DPPCA", "ADADP"]
        assert 2.9 < model.epsilon(1e-4, accountant="pld") <= 3.0


def test_a_search_behind_components_is_charged_for_both(monkeypatch):
    rng = np.random.default_rng(15)
    split = record.Split(
        *(rng.random((300, 10, 10, 1)).astype(np.float32), rng.integers(2, size=300)),
        *(rng.random((40, 10, 10, 1)).astype(np.float32), rng.integers(2, size=40)),
    )
    fitted, fit = [], dp.DPPCA.fit

    def watched(self, x):
        fitted.append(np.array(x))
        return fit(self, x)

    monkeypatch.setattr(dp.DPPCA, "fit", watched)
    plan = components.Searched(
        pca_noise_multiplier=20.0, mean_trials=3, steps=5, lot_size=50, delta=1e-4
    )
    model, accuracy = components.prepare(split)(plan, 3.0, seed=4)
    assert 0 <= accuracy <= 1
    assert [entry.origin.split(",")[0] for entry in model.ledger.entries] == ["DPPCA", "search"]
    assert model.ledger.entries[1].law.num_units == 270
    assert 2.9 < model.epsilon(1e-4) <= 3.0
    # Once for all trials, and never on a record that scores them.
    (rows,) = fitted
    np.testing.assert_array_equal(rows, record.held_out(split, seed=5).x.reshape(270, 100))


def test_images_that_scattering_would_cut_are_refused():
    with pytest.raises(ValueError, match="multiples of 4"):
        coefficients(np.zeros((14, 16), np.float32))


def test_a_table_of_what_there_is():
    run = {"accuracy": 50.0, "epsilon_rdp": 1.1, "minutes": 0.1}
    settings = {"steps": 10, "delta": 1e-5}
    row = {"settings": settings, "runs": [run, {**run, "accuracy": 52.0}]}
    results = {"affairs": {"baselines": {"trees": 60.0}, "1": row, "2": {**row, "runs": [run]}}}
    lines = table.table(results).splitlines()[2:]
    assert lines == [
        "| affairs (table) | 1 | 1.10 | 51.00 ± 1.41 | 10 | 0.1 |",
        "| affairs (table): trees | ∞ | ∞ | 60.00 | | |",
    ]


def test_held_out_records_are_training_records():
    numbers = np.arange(100)
    whole = record.Split(numbers, numbers % 7, "never", "read")
    split = record.held_out(whole)
    assert len(split.x_test) == 10
    np.testing.assert_array_equal(np.sort(np.concatenate([split.x, split.x_test])), numbers)
    np.testing.assert_array_equal(split.x % 7, split.y)
    np.testing.assert_array_equal(split.x_test % 7, split.y_test)


def test_a_survey_is_coded_by_its_questionnaire():
    x = np.array([[3, 22, 9, 1, 4, 16, 2, 6], [3, 23, 9, 1, 4, 16, 2, 6]], np.float32)
    codes = affairs.features(x)
    assert codes.shape == (2, 46)
    assert codes.sum(axis=1).tolist() == [8, 7]  # 23 is no answer that is listed
    assert np.flatnonzero(codes[0] - codes[1]).tolist() == [5 + 1]


def test_a_private_survey_and_its_baselines(tmp_path):
    pytest.importorskip("statsmodels")
    split = record.held_out(affairs.load())
    train = affairs.prepare(split)
    model, accuracy = train(affairs.RECIPES[1.0], 1.0, 0)
    assert 0.99 < model.epsilon(1e-5, accountant="pld") <= 1.0
    known = {title: baseline(split) for title, baseline in affairs.BASELINES.items()}
    assert accuracy > known["the more frequent class"] + 0.02
    assert accuracy > known["logistic regression"] - 0.03


def test_reviews_are_hashed_each_by_itself():
    texts = np.array(["好书", "不好", "好书好书"], dtype=object)
    rows = reviews.hashed(texts).toarray()
    np.testing.assert_allclose((rows**2).sum(axis=1), 1)
    np.testing.assert_array_equal(reviews.hashed(texts[1:2]).toarray()[0], rows[1])
    assert not np.array_equal(rows[0], rows[1])


def test_variants_are_tabled_beside_their_recipe():
    def row(*accuracies, delta=1e-5):
        runs = [{"accuracy": a, "epsilon_rdp": 3.0, "minutes": 1.0} for a in accuracies]
        return {"settings": {"steps": 10, "delta": delta}, "runs": runs}

    results = {
        "mnist": {"3": row(98.0, 99.0)},
        "mnist, defaults": {"3": row(97.0, 97.0)},
        "mnist, pixels": {"3": row(91.0, 93.0)},
        "mnist, held out": {"3": row(10.0, 10.0)},
        "mnist, pixels, held out": {"3": row(10.0, 10.0)},
        "mnist, held out, defaults": {"3": row(10.0, 10.0)},
        "mnist_components": {"1.4": row(95.0, 95.0, delta=1e-4)},
    }
    unchosen, parts = table.variants(results).split("\n\n")
    assert unchosen.splitlines()[2:] == ["| MNIST | 3 | 98.50 ± 0.71 | 97.00 ± 0.00 |  |"]
    assert parts.splitlines()[2:] == [
        "| recipe | 98.50 ± 0.71 |  |  |",
        "| pixels | 92.00 ± 1.41 |  |  |",
    ]
    assert "| MNIST, 60 components | 1.4 (δ = 1e-4) | 3.00 |" in table.table(results)


def test_steps_to_an_accuracy_are_the_first():
    run = {"steps": [10, 20, 30], "epsilon": [0.5, 0.7, 0.8], "accuracy": [0.8, 0.91, 0.90]}
    assert convergence.reached(run, 0.9) == (20, 0.7)
    assert convergence.reached(run, 0.95) is None
    lines = convergence.table({"A": [run, {**run, "steps": [20, 40, 60]}]}).splitlines()
    assert lines[2] == "| A | 30 | 0.70 | 2 of 2 do not reach it |  |"


def test_a_curve_has_the_charge_of_its_steps(monkeypatch):
    recipe = components.Recipe(4, 20.0, lot_size=50, average=None, accountant="rdp")
    monkeypatch.setattr(convergence, "RECIPE", recipe)
    monkeypatch.setattr(convergence, "EVERY", 2)
    rng = np.random.default_rng(15)
    x = rng.random((300, 10, 10, 1)).astype(np.float32)
    y = rng.integers(2, size=300).astype(np.int32)
    projected = components.projector(record.Split(x, y, x, y))
    run = convergence.curve(projected, convergence.OPTIMIZERS["DPSGD"], seed=0)
    assert run["steps"] == [2, 4]
    ledger, _ = projected(recipe, 0)
    assert ledger.epsilon(1e-5) < run["epsilon"][0] < run["epsilon"][1] <= 4.0
    assert run["epsilon"][1] > 3.9
    assert all(0 <= accuracy <= 1 for accuracy in run["accuracy"])


def test_frozen_convolutions_are_pooled_and_stay_as_they_are():
    network = public_convolutions.network()
    features = cifar10_frozen.frozen_features(network)
    x = np.random.default_rng(13).random((2, 32, 32, 3)).astype(np.float32)
    found = features(x).numpy()
    assert found.shape == (2, 4 * (64 + 128 + 256))
    assert not features.trainable_variables
    np.testing.assert_allclose(features(x, training=True), found, atol=1e-4)
    pooled = keras.Model(network.input, network.get_layer("pooled").output)(x)
    np.testing.assert_allclose(found[:, -1024:].reshape(2, 4, 256).mean(axis=1), pooled, atol=1e-5)


def test_public_images_are_mixed_with_their_labels():
    x = np.stack([np.full((32, 32, 3), k / 100, np.float32) for k in range(100)] * 2)
    mixed, labels = next(iter(public_convolutions.batches(x, np.arange(200) % 100)))
    assert mixed.shape == (128, 32, 32, 3)
    np.testing.assert_allclose(labels.numpy().sum(axis=1), 1, atol=1e-5)
    means = mixed.numpy().mean(axis=(1, 2, 3))  # shifts and mirrors do not change these
    np.testing.assert_allclose(means, labels.numpy() @ (np.arange(100) / 100), atol=1e-4)
