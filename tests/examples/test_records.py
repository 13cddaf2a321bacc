"""examples/records: scattering features against their definition, and a record of digits."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import scipy.signal
from scattering import Scattering

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


DRIVER = """
import record
record.run("digits", {3.0: record.Recipe(40, 20.0, lot_size=300)}, pca_noise_multiplier=8.0)
"""


def test_a_record_of_digits(tmp_path):
    paths = [str(RECORDS), str(RECORDS.parent)]
    code = f"import sys; sys.path[:0] = {paths!r}; sys.argv[0] = 'record'\n{DRIVER}"
    out = tmp_path / "records.json"
    command = [sys.executable, "-c", code, "--epsilons=3", "--seeds=2", f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = json.loads(out.read_text())["digits"]["3"]
    assert len(row["runs"]) == 2
    for run in row["runs"]:
        assert 2.99 < run["epsilon_pld"] <= 3.0 < run["epsilon_rdp"] < 3.6
        assert run["accuracy"] > 88  # 10 by guessing
    again = subprocess.run(command, capture_output=True, text=True)
    assert "seed 0" in done.stdout
    assert "seed 0" not in again.stdout
