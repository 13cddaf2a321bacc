"""Describes problems of a model, each with a fix."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that private training refuses, or that it does otherwise than one may expect.

    Attributes:
        where: the part of the model, e.g. "Layer 'bn'".
        what: what is wrong with it; where and what are one sentence.
        fix: what to do instead.
        severity: "error" where training refuses; "warning" where it goes on; "change" where
            `make_compatible` put something else.
    """

    where: str
    what: str
    fix: str
    severity: str = "error"

    def __str__(self):
        return f"{self.where} {self.what}. {self.fix}"


def raise_first(problems):
    """Raises ValueError for the first error of an iterable of problems."""
    for problem in problems:
        if problem.severity == "error":
            raise ValueError(str(problem))
