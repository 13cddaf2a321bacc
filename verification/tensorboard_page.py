"""Looks at a private training in TensorBoard through a browser, and takes the picture of the docs.

    python -m verification.tensorboard_page

Trains the digits of examples/train.py, serves the logs with TensorBoard, opens the page in
headless Chromium and checks what it shows: ε at every step as `batch_epsilon`, and the chart of
accuracy over ε. The page is opened without smoothing and with heavy smoothing. The chart over ε has
to be the same in both, pixel by pixel; the scalar `batch_epsilon` must not be, or the smoothing was
not on. Writes `results/tensorboard_page.png`, without smoothing.

Needs Chromium with its driver, and selenium: `apt-get install chromium chromium-driver`, `pip
install ".[browser,examples]"`.
"""

import contextlib
import importlib.util
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse

import numpy as np

from benchmarks import harness

CHART, SCALAR = "metrics_over_epsilon", "batch_epsilon"
CHART_COLOUR = (31, 119, 180)  # matplotlib's first
SMOOTHINGS = ("0", "0.999")
WINDOW, SECONDS = (1400, 720), 60
# The chart, the scalar's lines, and the table below them, which has the values of the lines.
_PARTS = ["image-card img", "scalar-card line-chart", "scalar-card scalar-card-data-table"]
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # Chromium does not start as root with one; the page is this machine's own
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def missing():
    """Lists what has to be installed before a page can be opened."""
    found = []
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        found.append("apt-get install chromium chromium-driver")
    if importlib.util.find_spec("selenium") is None:
        found.append('pip install ".[browser]"')
    return found


def train(folder, epochs):
    """Trains the example into a folder."""
    script = harness.ROOT / "examples" / "train.py"
    command = [sys.executable, script, f"--log_dir={folder}", f"--epochs={epochs}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def serve(folder):
    """Starts TensorBoard on a free port of this machine; returns its address."""
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(argv=[None, f"--logdir={folder}", "--port=0", "--load_fast=false"])
    return board.launch()


@contextlib.contextmanager
def browser():
    """Opens headless Chromium with a new profile."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        width, height = WINDOW
        for option in (*_OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(option)
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        driver = webdriver.Chrome(options, service)
        try:
            yield driver
        finally:
            driver.quit()


def look(driver, address, smoothing):
    """Opens the page.

    Returns:
        PNGs of the chart over ε, of the scalar's lines and of the page, and the text of the table
        below the lines.
    """
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    tags = urllib.parse.quote(f"{SCALAR}|{CHART}")
    driver.get("about:blank")  # else a change of the address alone would load nothing
    driver.get(f"{address}?smoothing={smoothing}&tagFilter={tags}#timeseries")
    ready = f"return {json.dumps(_PARTS)}.every(part => document.querySelector(part))"
    wait = WebDriverWait(driver, SECONDS)
    wait.until(lambda d: d.execute_script(ready))
    _settle(driver, wait)
    for button in driver.find_elements(By.CSS_SELECTOR, "[aria-label='Close side pane']"):
        button.click()  # on the first page: the browser remembers it
    page = _settle(driver, wait)
    chart, lines, table = (driver.find_element(By.CSS_SELECTOR, part) for part in _PARTS)
    return chart.screenshot_as_png, lines.screenshot_as_png, page, table.text


def _settle(driver, wait):
    """Waits until cards stop moving and lines are drawn; returns a picture of the page."""
    pictures = []

    def alike(driver):
        time.sleep(1.0)
        pictures.append(driver.get_screenshot_as_png())
        return len(pictures) > 2 and pictures[-1] == pictures[-2]

    wait.until(alike)
    return pictures[-1]


def pixels(png):
    """Reads the colours of a PNG, [height, width, 3] in 0..255."""
    from matplotlib.image import imread

    return (imread(io.BytesIO(png))[..., :3] * 255).round().astype(int)


def drawn(png, colour=CHART_COLOUR):
    """Counts the pixels of a picture that have about a colour."""
    return int((np.abs(pixels(png) - colour).max(-1) < 60).sum())


def check(pages):
    """Raises an AssertionError unless pages, {smoothing: `look`}, show what they have to."""
    (chart, lines, *_), (smooth_chart, smooth_lines, *_) = (pages[s] for s in SMOOTHINGS)
    assert drawn(chart) > 100, f"{CHART} shows no line."
    assert np.array_equal(pixels(chart), pixels(smooth_chart)), f"smoothing changed {CHART}."
    assert pixels(lines).std() > 5, f"{SCALAR} is blank."
    assert not np.array_equal(pixels(lines), pixels(smooth_lines)), "there was no smoothing."


def main():
    parser = harness.parser(__doc__, __file__)
    parser.set_defaults(out=pathlib.Path(__file__).parent / "results" / "tensorboard_page.png")
    parser.add_argument("--epochs", type=harness.count, default=40, help="of the training")
    args = parser.parse_args()
    if missing():
        sys.exit(f"To open a page: {'; '.join(missing())}")
    with tempfile.TemporaryDirectory() as folder:
        train(folder, args.epochs)
        address = serve(folder)
        with browser() as driver:
            pages = {smoothing: look(driver, address, smoothing) for smoothing in SMOOTHINGS}
    check(pages)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(pages[SMOOTHINGS[0]][2])
    for smoothing, (*_, table) in pages.items():
        print(f"{SCALAR} with smoothing {smoothing}: {' '.join(table.split())}")
    print(f"{SCALAR} and {CHART} are shown, and smoothing leaves {CHART} as it is: {args.out}")


if __name__ == "__main__":
    main()
