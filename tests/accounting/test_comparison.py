"""The table and the figure of all bounds for one run."""

import math
import os
import pathlib
import re
import subprocess
import sys

import dp_accounting
import pytest

from tf_adadp import accounting
from tf_adadp.accounting import FixedSizeSampling, PoissonSampling, PrivacyLedger

Relation = dp_accounting.NeighboringRelation
RUN = (4.0, 0.02, 200, 1e-5)


@pytest.fixture(scope="module")
def comparison():
    return accounting.compare(*RUN)


def test_poisson_rows_are_the_accountants_figures(comparison):
    rows = {row.name: row for row in comparison.rows if row.lots == "Poisson"}
    assert set(rows) == {*accounting.ACCOUNTANTS, "gdp_clt"}
    for name in accounting.ACCOUNTANTS:
        assert rows[name].epsilon == accounting.epsilon(*RUN, name)
        assert rows[name].is_guarantee
        assert rows[name].neighboring_relation is Relation.ADD_OR_REMOVE_ONE
    assert rows["gdp_clt"].epsilon == accounting.clt_epsilon(*RUN)


def test_only_the_central_limit_is_no_guarantee_and_the_table_says_so(comparison):
    assert [row.name for row in comparison.rows if not row.is_guarantee] == ["gdp_clt"]
    (line,) = [line for line in str(comparison).splitlines() if line.startswith("gdp_clt")]
    assert " NO " in line
    assert "APPROXIMATION" in line


def test_fixed_size_rows_are_replace_one_at_half_the_noise(comparison):
    law = FixedSizeSampling(50, 1)
    ledger = PrivacyLedger()
    ledger.add(law.event(RUN[0]), RUN[2], law=law)
    rows = {row.name: row for row in comparison.rows if row.lots == "fixed size"}
    assert set(rows) == set(accounting.ACCOUNTANTS)
    for name, row in rows.items():
        assert row.neighboring_relation is Relation.REPLACE_ONE
        if name == "pld":
            assert row.epsilon is None
            assert row.remark.startswith("not available")
        else:
            assert row.epsilon == pytest.approx(ledger.epsilon(1e-5, name), rel=1e-9)
            halved = accounting.epsilon(RUN[0] / 2, *RUN[1:], "wang_theorem27")
            if name == "wang_theorem27":
                assert row.epsilon == pytest.approx(halved, rel=1e-9)
    text = str(comparison)
    assert "REPLACING one record" in text
    assert "half the noise multiplier" in text


def test_the_table_is_whole(comparison):
    """Every bound with an ε has a line of all columns, and every other one its whole reason."""
    table, *notes = str(comparison).split("\n\n")[1:]
    header, *lines = (re.split(r"  +", line) for line in table.splitlines())
    assert header == ["bound", "lots", "neighbours", "ε", "guarantee", "remark"]
    shown = [row for row in comparison.rows if row.epsilon is not None]
    assert [line[:2] for line in lines] == [[row.name, row.lots] for row in shown]
    for line, row in zip(lines, shown, strict=True):
        assert len(line) == len(header)
        assert line[3] == f"{row.epsilon:.4g}"
        assert line[5] == row.remark
    (missing,) = [row for row in comparison.rows if row.epsilon is None]
    assert (missing.name, missing.lots) == ("pld", "fixed size")
    said = " ".join(notes[-1].split())
    assert said.startswith("pld (fixed size, replace): not available: ")
    assert said.endswith(" ".join(missing.remark.split()))
    assert "…" not in str(comparison)


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "expected"), [(0, 0.1, 3, math.inf), (1, 0.0, 3, 0), (1, 0.1, 0, 0)]
)
def test_free_and_non_private_runs(sigma, q, steps, expected):
    comparison = accounting.compare(sigma, q, steps, 1e-5)
    assert {row.epsilon for row in comparison.rows} == {expected}
    assert str(comparison)


def test_full_lots():
    rows = accounting.compare(3.0, 1.0, 4, 1e-5).rows
    exact = {row.name: row.epsilon for row in rows if row.lots == "Poisson"}
    assert exact["gdp_clt"] == pytest.approx(exact["pld"], rel=1e-3)
    halved = next(row.epsilon for row in rows if (row.name, row.lots) == ("rdp", "fixed size"))
    assert halved == accounting.epsilon(1.5, 1.0, 4, 1e-5)


def test_of_a_ledger():
    law = PoissonSampling(60000, 600)
    ledger = PrivacyLedger()
    ledger.add(dp_accounting.GaussianDpEvent(7.0))
    ledger.add(law.event(2.0), 100, law=law)
    ledger.add(dp_accounting.GaussianDpEvent(7.0))
    comparison = ledger.compare(1e-5)
    for row in comparison.rows:
        if row.name != "gdp_clt":
            assert row.epsilon == ledger.epsilon(1e-5, row.name)
    assert comparison.title == "102 recorded releases"
    steps, epsilons = comparison.figure(points=102, slow_points=1).axes[0].lines[3].get_data()
    # "rdp" after the first release, and before the last.
    assert list(steps) == list(range(1, 103))
    assert epsilons[0] == accounting.epsilon(7.0, 1.0, 1, 1e-5)
    shorter = PrivacyLedger()
    shorter.add(dp_accounting.GaussianDpEvent(7.0))
    shorter.add(law.event(2.0), 100, law=law)
    assert epsilons[-2] == shorter.epsilon(1e-5)


def test_of_a_ledger_with_other_releases():
    ledger = PrivacyLedger()
    ledger.add(dp_accounting.ZCDpEvent(0.01))
    rows = {row.name: row for row in ledger.compare(1e-5).rows}
    assert rows["gdp_clt"].epsilon is None
    assert rows["rdp"].epsilon == ledger.epsilon(1e-5)
    ledger.add(dp_accounting.NonPrivateDpEvent())
    assert {row.epsilon for row in ledger.compare(1e-5).rows} == {math.inf}
    ledger.mark_unknown("a test")
    with pytest.raises(ValueError, match="incomplete"):
        ledger.compare(1e-5)


def test_figure_shows_every_bound(comparison, tmp_path):
    figure = comparison.figure(points=4, slow_points=2)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    available = [row for row in comparison.rows if row.epsilon is not None]
    assert len(lines) == len(available)
    for row in available:
        (line,) = [
            line for label, line in lines.items() if label.startswith(f"{row.name}, {row.lots},")
        ]
        assert line.get_ydata()[-1] == row.epsilon
        assert line.get_xdata()[-1] == RUN[2]
        assert (line.get_linestyle() == "--") == (not row.is_guarantee)
    figure.savefig(tmp_path / "bounds.png")
    assert (tmp_path / "bounds.png").stat().st_size > 5000


def test_the_table_needs_no_matplotlib():
    root = pathlib.Path(accounting.__file__).parents[2]
    code = (
        "import sys; sys.modules['matplotlib'] = None; import tf_adadp.accounting as a;"
        "print(a.compare(4.0, 0.1, 3, 1e-5)); assert 'tensorflow' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_bad_arguments():
    with pytest.raises(ValueError, match="noise_multiplier=.*: give"):
        accounting.compare(-1, 0.1, 3, 1e-5)
    with pytest.raises(ValueError, match="delta=.*: give"):
        accounting.compare(1, 0.1, 3, 0)
    with pytest.raises(ValueError, match="steps=.*: give"):
        accounting.compare(1, 0.1, -3, 1e-5)
