"""The site builds: every page, link, anchor and public name is there."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("mkdocs", reason='pip install ".[docs]"')
pytest.importorskip("mkdocstrings", reason='pip install ".[docs]"')
pytestmark = pytest.mark.extended

ROOT = pathlib.Path(__file__).parents[2]
BUILD = (
    "import pathlib, runpy, sys;"
    "runpy.run_path(sys.argv[1])['build'](pathlib.Path(sys.argv[2]), False)"
)


def build(folder, root=ROOT):
    command = [sys.executable, "-c", BUILD, root / "docs" / "build.py", folder]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_site_builds_without_a_warning(tmp_path):
    done = build(tmp_path / "docs")
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "docs" / "site"
    page = (site / "docs/reference/api/optimizers.html").read_text(encoding="utf-8")
    assert 'id="tf_adadp.ADADP"' in page
    assert "InverseSqrtDecay" in (site / "search/search_index.json").read_text(encoding="utf-8")
    # The page must be whole without a network.
    for path in site.rglob("*.html"):
        assert '<script src="http' not in path.read_text(encoding="utf-8"), path
