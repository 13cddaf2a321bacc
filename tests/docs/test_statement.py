"""The page on privacy statements shows what its program prints."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "how-to" / "statement.md"


def test_the_program_prints_what_the_page_shows(capsys):
    text = PAGE.read_text(encoding="utf-8")
    program, printed = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(program, PAGE.name, "exec"), {})
    assert capsys.readouterr().out == printed
