"""The page on privacy statements shows what its program prints."""

import pathlib

from tests.helpers import python_blocks

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "how-to" / "statement.md"


def test_the_program_prints_what_the_page_shows(capsys):
    program = python_blocks(PAGE)[0]
    exec(compile(program, PAGE.name, "exec"), {})
    assert f"\n```\n{capsys.readouterr().out}```\n" in PAGE.read_text(encoding="utf-8")
