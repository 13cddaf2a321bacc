"""Lists the problems of a validation as a report."""

import itertools
import textwrap
from collections.abc import Iterable

from tf_adadp.utils.problems import Problem

_ORDER = ("error", "warning", "change")
_WIDTHS = (8, 22, 40, 36)  # of the printed columns
_NAMED = 3  # of layers with one problem in common


class Report(list):
    """Lists the problems of a model, errors first, and prints them as a table.

    The list has one `Problem` for each layer. In the table, layers with the same problem and fix
    have one row in common.
    """

    def __init__(self, problems: Iterable[Problem] = ()) -> None:
        super().__init__(sorted(problems, key=lambda p: _ORDER.index(p.severity)))

    @property
    def errors(self) -> list[Problem]:
        """Lists the problems that private training refuses."""
        return [p for p in self if p.severity == "error"]

    @property
    def warnings(self) -> list[Problem]:
        """Lists the problems that private training accepts, but treats in its own way."""
        return [p for p in self if p.severity == "warning"]

    @property
    def ok(self) -> bool:
        """Tells whether there is no error."""
        return not self.errors

    def raise_if_any(self) -> None:
        """Raises ValueError with all errors, one per line."""
        if self.errors:
            raise ValueError("\n".join(str(p) for p in self.errors))

    def _rows(self):
        """Yields the cells of each row, in the order of the list."""
        places = {}
        for p in self:
            # Only layers share a row.
            alone = None if p.where.startswith("Layer ") else p.where
            places.setdefault((p.severity, alone, p.what, p.fix), []).append(p.where)
        for (severity, _, what, fix), wheres in places.items():
            yield severity, _together(wheres), what, fix

    def __str__(self) -> str:
        if not self:
            return "no problems found"
        lines = []
        for row in (("severity", "where", "what", "fix"), *self._rows()):
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


def _together(wheres):
    """Returns one name of several places: "52 layers: bn_1, bn_2, bn_3, …"."""
    if len(wheres) == 1:
        return wheres[0]
    names = [where.removeprefix("Layer ").strip("'") for where in wheres[:_NAMED]]
    more = [] if len(wheres) <= _NAMED else ["…"]
    return f"{len(wheres)} layers: {', '.join(names + more)}"
