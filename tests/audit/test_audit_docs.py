"""The code in docs/explanation/audits.md runs as printed, one block after the other."""

import pathlib

import pytest

from tests.helpers import python_blocks

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "explanation" / "audits.md"


@pytest.mark.extended
def test_the_examples_run():
    blocks = python_blocks(PAGE)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert 0 <= names["found"].epsilon <= names["ledger"].epsilon(1e-5)
    assert names["canaries"].bound(1e-5).epsilon <= names["model"].epsilon(1e-5)
