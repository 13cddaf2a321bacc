"""Looks at the documentation site through a browser: make docs, then

    python -m verification.docs_site

Opens a page of each kind in headless Chromium, at the width of a desktop and of a phone, light and
dark. No page may be wider than its window, and the search has to find a public name. Writes the
pictures below build/docs/pictures.

Needs Chromium with its driver, and selenium: see `verification.tensorboard_page`.
"""

import contextlib
import functools
import http.server
import itertools
import sys
import threading
import time

from benchmarks import harness
from verification import tensorboard_page

SITE = harness.ROOT / "build" / "docs" / "site"
PAGES = {
    "home": "index.html",
    "how-to": "docs/how-to/data.html",
    "api": "docs/reference/api/optimizers.html",
    "results": "docs/results/performance.html",
    "tutorial": "docs/tutorials/first_private_model.html",
}
WIDTHS = {"desktop": 1280, "phone": 390}
SCHEMES = ("light", "dark")
SOUGHT = "QuantileClip"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Logs nothing."""


@contextlib.contextmanager
def served(folder):
    """Serves a folder, and yields its address."""
    handler = functools.partial(_Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def set_view(browser, width, scheme):
    """Sets the width of the window and the reader's colour scheme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def found_by_search(browser, address, text):
    """Returns the headings that the site's search finds."""
    from selenium.webdriver.common.by import By

    browser.get(address)
    field = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    browser.execute_script("document.querySelector('#__search').click()")
    field.send_keys(text)
    for _ in range(100):
        results = browser.find_elements(By.CSS_SELECTOR, ".md-search-result__item")
        if results:
            return [result.text for result in results]
        time.sleep(0.1)
    return []


def look(folder):
    """Takes all pictures into a folder, and returns what is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    wrong = []
    with served(SITE) as address:
        for scheme in SCHEMES:
            with tensorboard_page.browser() as browser:  # a new one: the site remembers the scheme
                wrong += _look_in(browser, address, scheme, folder)
    return wrong


def _look_in(browser, address, scheme, folder):
    """Takes the pictures of one colour scheme, and returns what is wrong."""
    wrong = []
    for (view, width), (name, page) in itertools.product(WIDTHS.items(), PAGES.items()):
        set_view(browser, width, scheme)
        browser.get(address + page)
        browser.save_screenshot(folder / f"{name}-{view}-{scheme}.png")
        shown = browser.execute_script("return document.body.dataset.mdColorScheme")
        if (shown == "slate") != (scheme == "dark"):
            wrong.append(f"{page} is {shown} for readers who prefer {scheme}")
        is_wide = "return document.documentElement.scrollWidth > window.innerWidth"
        if browser.execute_script(is_wide):
            wrong.append(f"{page} is wider than {width} pixels")
    set_view(browser, WIDTHS["desktop"], scheme)
    results = found_by_search(browser, address, SOUGHT)
    browser.save_screenshot(folder / f"search-{scheme}.png")
    if not any(SOUGHT in result for result in results):
        wrong.append(f"the search does not find {SOUGHT}")
    return wrong


def main():
    """Takes the pictures, and ends with an error where something is wrong."""
    if missing := tensorboard_page.missing():
        sys.exit("Install: " + "; ".join(missing))
    if not SITE.exists():
        sys.exit(f"{SITE} is not there: make docs builds it.")
    pictures = SITE.parent / "pictures"
    wrong = look(pictures)
    print(f"Pictures: {pictures}")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
