"""The attacks on all mechanisms, in small: sound ones keep their claim, printed ones do not.

Seeds are fixed. Over random seeds, "bound ≤ claim" raises a false alarm less than once in a
thousand (the confidence of a bound), and so is a printed form refuted wrongly.
"""

import json

import audits
import pytest


@pytest.mark.parametrize(
    ("name", "target", "draws"),
    [
        ("ADADP, prior=raw", 4.0, 2000),
        ("SADPSGD, accepted steps only", 1.0, 10_000),
        ("AGD, printed", 1.0, 4000),
        ("DPOPT, printed", 1.0, 100_000),
    ],
)
def test_printed_forms_are_caught(name, target, draws):
    row = audits.measure(name, target, draws, seed=1)
    assert row["lower_bound"] > row["claim"] >= target * 0.99


def test_dppca_keeps_its_claim():
    row = audits.measure("DPPCA", 4.0, 2000, seed=1)
    assert 0.1 < row["lower_bound"] <= row["claim"]


def test_all_optimizers_are_in():
    covered = " ".join(audits.SOUND)
    for name in (
        "DPSGD", "DPAdam", "DPRMSprop", "ADAL", "ADADP", "ADAN", "AdaCliP", "DPOPT", "AutoSGD",
        "SADPSGD", "AGD", "DPPCA",
    ):  # fmt: skip
        assert name in covered


def test_the_stored_results_say_what_the_docs_say():
    """Every sound row at or below its claim, every printed row above, and DP-SGD near it."""
    stored = json.loads((audits.common.RESULTS_DIR / "audits.json").read_text())
    rows = {(r["mechanism"], r["target"]): r for r in stored["rows"]}
    assert set(rows) == {
        (name, target) for name in (*audits.SOUND, *audits.PRINTED) for target in audits.EPSILONS
    }
    for row in rows.values():
        assert (row["lower_bound"] > row["claim"]) == row["printed"]
    for target in audits.EPSILONS:
        row = rows["DPSGD", target]
        assert row["draws"] >= 10**5
        assert row["lower_bound"] > row["claim"] / 1.5
