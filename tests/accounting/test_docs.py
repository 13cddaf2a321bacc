"""The code in docs/explanation/accounting.md and docs/explanation/choosing.md runs as printed."""

import pathlib

import pytest

from tests.helpers import python_blocks

DOCS = pathlib.Path(__file__).parents[2] / "docs"
BLOCKS = [
    block
    for page in ("accounting.md", "choosing.md")
    for block in python_blocks(DOCS / "explanation" / page)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs", "exec"), {})


def test_the_examples_were_found():
    assert len(BLOCKS) == 3
