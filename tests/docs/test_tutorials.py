"""The tutorials run as notebooks, and come to the results that they speak of."""

import pathlib
import re

import pytest

jupytext = pytest.importorskip("jupytext", reason='pip install ".[docs]"')
nbclient = pytest.importorskip("nbclient", reason='pip install ".[docs]"')
pytestmark = pytest.mark.extended

TUTORIALS = pathlib.Path(__file__).parents[2] / "docs" / "tutorials"
# Patterns of printed numbers, and the bounds of each. Noise is unseeded. Three runs of each
# tutorial were at least four of their standard deviations away from these bounds. A lower bound on
# ε exceeds the claim once in 1000 runs at most: its confidence is 99.9 %.
EXPECTED = {
    "first_private_model": {r"private: ([\d.]+)% at": (80, 97), r"at epsilon = ([\d.]+)": (1.9, 2)},
    "transfer_learning": {
        r"^130 trained weights: ([\d.]+)%": (80, 99),
        r"^84546 trained weights: ([\d.]+)%": (55, 97),
    },
    "raw_table": {r"private: ([\d.]+)% at": (58, 68), r"at epsilon = ([\d.]+)": (0.95, 1)},
    "choosing_epsilon": {
        r"epsilon =   1: at most ([\d.]+)%": (73, 73.2),
        r"one run: epsilon = ([\d.]+)": (2.0, 2.1),
    },
    "auditing": {
        r"^([\d.]+) <= epsilon, for Gaussian": (3.0, 4.1),
        r"claimed 4.09, but epsilon >= ([\d.]+)": (4.6, 7),
        r"without privacy: area under the ROC curve ([\d.]+)": (0.8, 1),
        r"private: area under the ROC curve ([\d.]+)": (0.4, 0.75),
    },
    "own_optimizer": {
        r"LayerwiseSGD: ([\d.]+)%": (60, 97),
        r"training and its replay: ([\d.]+)": (0, 0),
        r"([\d.]+) <= epsilon <= 3.71": (2.8, 3.71),
    },
    "text_with_lora": {r"accuracy ([\d.]+)% at": (68, 95), r"at epsilon = ([\d.]+)": (2.9, 3)},
}


def test_every_tutorial_is_tried():
    assert set(EXPECTED) == {path.stem for path in TUTORIALS.glob("*.py")}


@pytest.mark.representative(0, 3)
@pytest.mark.parametrize("name", EXPECTED)
def test_tutorial_runs(name, tmp_path):
    if name == "text_with_lora":
        pytest.importorskip("keras_hub", reason='pip install ".[hub]"')
    if name == "raw_table":
        pytest.importorskip("statsmodels", reason='pip install ".[studies]"')
    notebook = jupytext.read(TUTORIALS / f"{name}.py")
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.get("name") == "stdout"
    )
    for pattern, (low, high) in EXPECTED[name].items():
        found = re.search(pattern, printed, re.MULTILINE)
        assert found, f"{pattern} is not in {printed}"
        assert low <= float(found[1]) <= high, found[0]
