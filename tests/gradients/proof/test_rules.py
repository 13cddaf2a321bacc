"""Every rule against experiments: rows are rows, what mixes is mixed, what is harmless passes."""

import pytest

from tests.gradients.proof import cases_of_shapes
from tests.gradients.proof.cases import CASES
from tests.gradients.proof.experiments import follow, influence, with_gradient
from tf_adadp.gradients.proof import Mixed, Rows
from tf_adadp.gradients.proof.rules import RULES

# Harmless as well, but their gradients are made of operations that are not followed.
_GRADIENT_IS_MIXED = {"Prod", "TopKV2", "Cholesky", "Tile", "GatherV2", "Slice"}
# Operations that read or keep a shape: they have examples nowhere to mix.
_CANNOT_MIX = {"Transpose", "ExpandDims", "Shape", "ShapeN", "Size", "Rank", "IdentityN"}


def _numbered(cases):
    """The first use of each of the many operations on entries is in the first run."""
    seen, found = set(), []
    for i, case in enumerate(cases):
        later = case.op in seen and case.op in cases_of_shapes.ENTRIES
        seen.add(case.op)
        found.append(pytest.param(case, id=f"{case.op}-{i}", marks=[pytest.mark.extended] * later))
    return found


def _types(followed):
    return {op.type for op in followed.outputs[0].graph.get_operations()}


@pytest.mark.parametrize("case", _numbered(c for c in CASES if c.keeps))
def test_harmless_uses_are_rows(case):
    function = case.function
    followed = follow(function, *case.specs)
    assert case.op in _types(followed)
    assert all(isinstance(v, Rows) for v in followed.values), followed.values
    assert influence(followed, case.sample, moves=case.moves) is None


@pytest.mark.extended
@pytest.mark.parametrize("case", _numbered(c for c in CASES if c.keeps and c.differentiable))
def test_gradients_of_harmless_uses_are_rows(case):
    followed = follow(with_gradient(case.function), *case.specs)
    if case.op not in _GRADIENT_IS_MIXED:
        assert all(isinstance(v, Rows) for v in followed.values), followed.values
    assert influence(followed, case.sample, moves=case.moves) is None


@pytest.mark.parametrize("case", _numbered(c for c in CASES if not c.keeps))
def test_what_mixes_is_mixed(case):
    try:
        followed = follow(case.function, *case.specs)
    except ValueError:  # shapes that can never fit
        return
    for value in followed.values:
        assert isinstance(value, Mixed)
        assert value.op.type == case.op, value


def test_every_operation_has_uses():
    kept = {c.op for c in CASES if c.keeps}
    assert set(RULES) - kept == set()
    refused = {c.op for c in CASES if not c.keeps}
    several = {op for op in RULES if op not in cases_of_shapes.ENTRIES}
    assert several - refused - _CANNOT_MIX == set()
