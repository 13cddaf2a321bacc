"""Builds the documentation site: python docs/build.py [--execute]

The pages link to each other, to figures and to the root's pages as they lie in the repository. So
the site is built from a copy of that layout, and MkDocs checks every link and anchor.
"""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
_COPIED = ("*.md", "docs/**/*.md", "docs/tutorials/*.py", "docs/site.css")
_LINKED = ("*/results/*.png", "*/results/*.json", "LICENSE")


def build(folder: pathlib.Path, execute: bool) -> pathlib.Path:
    """Builds the site below a folder, and returns the site's own.

    Args:
        folder: a folder of build output, emptied first.
        execute: whether the tutorials are run, so that their pages show results.

    Raises:
        subprocess.CalledProcessError: a page, link, anchor or public name is missing.
    """
    pages, site = folder / "pages", folder / "site"
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in (*_COPIED, *_LINKED):
        for path in ROOT.glob(pattern):
            copy = pages / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    settings = {
        "DOCS_PAGES": str(pages),
        "DOCS_SITE": str(site),
        "DOCS_EXECUTE": str(execute).lower(),
        "NO_MKDOCS_2_WARNING": "1",
    }
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **settings})
    return site


if __name__ == "__main__":
    print(build(ROOT / "build" / "docs", "--execute" in sys.argv[1:]) / "index.html")
