"""Describes problems of a model, each with a fix."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """Describes one thing that private training refuses, or does differently than expected.

    Attributes:
        where: the part of the model, e.g. "Layer 'bn'".
        what: the problem; where and what form one sentence.
        fix: the advice.
        severity: "error" where training is refused; "warning" where it goes on; "change" where
            `make_compatible` replaced the part.
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
