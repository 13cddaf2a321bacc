"""The report of a validation."""

import itertools
import textwrap
from collections.abc import Iterable

from tf_adadp.utils.problems import Problem

_WIDTHS = (8, 22, 40, 36)  # of the printed columns


class Report(list):
    """Lists the problems of a model, errors first, and prints them as a table."""

    def __init__(self, problems: Iterable[Problem] = ()) -> None:
        super().__init__(sorted(problems, key=lambda p: p.severity != "error"))

    @property
    def errors(self) -> list[Problem]:
        """Lists what private training refuses."""
        return [p for p in self if p.severity == "error"]

    @property
    def warnings(self) -> list[Problem]:
        """Lists what private training accepts, and does otherwise than one may expect."""
        return [p for p in self if p.severity != "error"]

    @property
    def ok(self) -> bool:
        """Tells whether there is no error."""
        return not self.errors

    def raise_if_any(self) -> None:
        """Raises ValueError with all errors, one per line."""
        if self.errors:
            raise ValueError("\n".join(str(p) for p in self.errors))

    def __str__(self) -> str:
        if not self:
            return "no problems found"
        rows = [("severity", "where", "problem", "fix")]
        rows += [(p.severity, p.where, p.what, p.fix) for p in self]
        lines = []
        for row in rows:
            cells = [
                textwrap.wrap(cell, width, break_on_hyphens=False)
                for cell, width in zip(row, _WIDTHS, strict=True)
            ]
            lines += [
                "  ".join(p.ljust(w) for p, w in zip(parts, _WIDTHS, strict=True)).rstrip()
                for parts in itertools.zip_longest(*cells, fillvalue="")
            ]
        return "\n".join(lines)

    __repr__ = __str__
