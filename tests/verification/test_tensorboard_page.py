"""The look into TensorBoard: what the check refuses, and the page itself where Chromium is."""

import io
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imsave

from benchmarks import harness
from verification import tensorboard_page


def png(seed, coloured=True):
    """A picture of noise in grey, with a line of the chart's colour if asked for."""
    grey = np.random.default_rng(seed).integers(0, 256, (40, 40, 1), np.uint8)
    pixels = np.repeat(grey, 3, axis=2)
    if coloured:
        pixels[10:20] = tensorboard_page.CHART_COLOUR
    file = io.BytesIO()
    imsave(file, pixels, format="png")
    return file.getvalue()


def pages(chart, lines, smooth_chart, smooth_lines):
    return dict(
        zip(
            tensorboard_page.SMOOTHINGS,
            [(chart, lines, b"", ""), (smooth_chart, smooth_lines, b"", "")],
            strict=True,
        )
    )


def test_check():
    tensorboard_page.check(pages(png(0), png(1), png(0), png(2)))
    with pytest.raises(AssertionError, match="smoothing changed metrics_over_epsilon"):
        tensorboard_page.check(pages(png(0), png(1), png(3), png(2)))
    with pytest.raises(AssertionError, match="no smoothing"):
        tensorboard_page.check(pages(png(0), png(1), png(0), png(1)))
    blank = png(0, coloured=False)
    with pytest.raises(AssertionError, match="shows no line"):
        tensorboard_page.check(pages(blank, png(1), blank, png(2)))


def test_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tensorboard_page"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="apt-get install chromium chromium-driver"):
        tensorboard_page.main()


@pytest.mark.skipif(
    bool(tensorboard_page.missing()), reason="needs " + ", ".join(tensorboard_page.missing())
)
def test_the_page_shows_epsilon_and_the_chart(tmp_path):
    path = tmp_path / "page.png"
    command = [sys.executable, "-m", "verification.tensorboard_page", "--epochs=3", f"--out={path}"]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "are shown" in done.stdout
    assert "with smoothing 0.999: Run Smoothed Value Step" in done.stdout
    assert tensorboard_page.pixels(path.read_bytes()).shape[1] == tensorboard_page.WINDOW[0]
