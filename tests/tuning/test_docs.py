"""The code in docs/how-to/tuning.md runs as printed, and prints the table that stands there."""

import pathlib

import pytest

import tf_adadp as dp
from tests.helpers import python_blocks

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "how-to" / "tuning.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = python_blocks(PAGE)


def test_the_table_is_what_its_code_prints(capsys):
    (block,) = [b for b in BLOCKS if "for mean in" in b]
    law = dp.accounting.PoissonSampling(num_examples=1000, expected_size=10)
    exec(compile(block, str(PAGE), "exec"), {"dp": dp, "law": law})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 8
    lines = TEXT.replace("\\*", "*").splitlines()
    assert [line for line in lines if line in printed] == printed


@pytest.mark.extended
def test_the_examples_run():
    assert len(BLOCKS) == 3
    names = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["best"].model.epsilon(1e-5) > names["planned"].epsilon(1e-5)
    event = dp.accounting.search_event(names["law"].event(names["sigma"]), 100, 10)
    ledger = dp.PrivacyLedger()
    ledger.add(event, law=names["law"])
    assert 1.99 < ledger.epsilon(1e-5) <= 2.0
