"""The study of the bounds at a small size: a few hundred points, each part for real."""

import numpy as np
import pytest

from verification import bounds as study


def test_invariants():
    found = study.invariants(lattices=1, shape=(4, 4, 5, 4), seed=5)
    assert found["points"] == 4 * 4 * 5 * 4
    assert len(found["worst"]) == 4 * 5 + 3
    assert {key: value for key, value in found["worst"].items() if value > study.ROUNDING} == {}


def test_the_checks_find_a_violation():
    names = ("noise", "probability", "steps", "delta")
    good = np.ones((2, 2, 2, 2))
    for axis, name in enumerate(names):
        direction = "falls" if name in ("probability", "steps") else "rises"
        bad = good.copy()
        np.moveaxis(bad, axis, 0)[1] = 0.5 if direction == "falls" else 2.0
        by_name = dict.fromkeys(study.RENYI, good) | {"rdp": bad}
        worst = study.violations(names, by_name)
        assert worst[f"rdp, {direction} with {name}"] == 1.0
        assert worst[f"theorem1, {direction} with {name}"] == 0.0
    by_name = dict.fromkeys(study.RENYI, good) | {"rdp": 1.5 * good}
    assert study.violations(names, by_name)["rdp above wang_theorem27"] == pytest.approx(0.5)


def test_pld():
    found = study.pld_invariants(3, seed=5)
    # One step of the grid of losses, 1e-4, against ε of 0.01 and more.
    assert max(found["worst"].values()) < 1e-3
    assert 0.5 < found["median pld / rdp"] < 1


def test_integrals():
    found = study.integrals(16, seed=5)
    least, largest = found["least error"], found["largest error"]
    assert -1e-9 < least["whole orders"] <= largest["whole orders"] < 1e-9
    assert least["fractional orders"] > -1e-9  # dp_accounting may be far above there
    assert least["below 1e-6, absolute"] > -1e-12
    assert max(found["bounds below the integral"].values()) < 1e-9
