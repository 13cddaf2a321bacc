"""The main environment's half of `make parity`, against the stored figures of the other half."""

import copy
import json
import math
import sys

import numpy as np
import pytest
import tensorflow as tf
from scipy import integrate

from verification.parity import accounting_figures, cases, checks, compare, run_tf_adadp


@pytest.fixture(scope="module")
def peer():
    return compare.stored()


@pytest.fixture(scope="module")
def results():
    return json.loads(compare.STORED.read_text())["rows"]


def differences(found):
    return {check.what: check for check in found if not check.holds}


def test_epsilon_is_that_of_tensorflow_privacy(peer):
    # The privacy loss distributions and unusual lots of `make parity` take half a minute.
    ours = {
        "epsilon": [accounting_figures.epsilon(training) for training in cases.GRID],
        "pld": [accounting_figures.epsilon(cases.PLD_GRID[0], "pld")],
        "other_lots": [accounting_figures.epsilon(t) for t in cases.OTHER_LOTS[::4]],
    }
    theirs = {
        "epsilon": peer["accounting"]["epsilon"],
        "pld": peer["accounting"]["pld"][:1],
        "other_lots": peer["accounting"]["other_lots"][::4],
    }
    assert len(ours["epsilon"]) == 200
    assert not differences(checks.main_epsilon_checks(ours, theirs))


def test_noise_is_that_of_tensorflow_privacy(peer):
    ours = {"noise_multiplier": [accounting_figures.noise_multiplier(b) for b in cases.BUDGETS]}
    assert not differences(checks.main_noise_checks(ours, peer["accounting"]))


def exact_renyi_divergence(sigma, q, order):
    """Quadrature of E[((1−q) + q·e^{(2x−1)/(2σ²)})^α], x ~ N(0, σ²)."""

    def integrand(x):
        ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
        return math.exp(order * ratio - x**2 / (2 * sigma**2)) / math.sqrt(2 * math.pi) / sigma

    middle = sigma**2 * math.log(1 / q - 1) + 0.5
    value, _ = integrate.quad(
        integrand, -12 * sigma, order + 12 * sigma, epsabs=0, epsrel=1e-12, limit=500,
        points=(0, order, middle),
    )  # fmt: skip
    return math.log(value) / (order - 1)


@pytest.mark.parametrize("index", [0, 40, 88, 120])
def test_renyi_bounds_are_never_below_the_divergence(index):
    training = cases.GRID[index]
    orders = [order for order in cases.ORDERS if order < 16]
    found = accounting_figures.renyi_divergences(training, orders)
    for order, bound in zip(orders, found, strict=True):
        exact = exact_renyi_divergence(
            training.noise_multiplier, training.sampling_probability, order
        )
        assert bound > exact * (1 - 1e-7)
        if order == round(order):
            assert bound == pytest.approx(exact, rel=1e-7)


def test_gradients_and_steps_are_those_of_tensorflow_privacy(peer):
    ours = run_tf_adadp.training_figures(cases.inputs(), ("mlp",))
    found = checks.training_checks(ours, peer["training"])
    assert [check.numbers for check in found] == [2 * 195, 3 * 195, 3 * 195, 195, 195]
    assert not differences(found)


def test_convolutions_are_clipped_as_by_tensorflow_privacy(peer):
    gradient = run_tf_adadp.mean_gradient(cases.inputs(), "cnn", "ghost")
    theirs = peer["training"]["cnn"]["DPKeras"]["gradient"]
    assert checks.absolute("gradient", gradient, theirs, checks._GRADIENT).holds


@pytest.mark.parametrize("model", cases.MODELS)
def test_examples_lie_on_both_sides_of_the_bound(model):
    arrays = cases.inputs()
    plain = run_tf_adadp._plain(arrays, model)
    lot = zip(arrays[f"{model}/x"][0], arrays[f"{model}/y"][0], strict=True)
    norms = [gradient_norm(plain, x, y) for x, y in lot]
    clipped = np.mean(np.array(norms) > cases.L2_NORM_CLIP)
    assert 0.25 < clipped < 0.75


def gradient_norm(model, x, y):
    with tf.GradientTape() as tape:
        loss = run_tf_adadp._loss()(y[None], model(x[None]))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    return float(tf.linalg.global_norm(gradients))


def test_the_stored_comparison_is_whole_and_holds(results):
    stored = [row for row in results if row["figure"] == "check"]
    assert len(stored) == 29
    assert all(row["holds"] for row in stored)
    versions = {row["of"]: row for row in results if row["figure"] == "versions"}
    assert versions["tf_privacy"]["tensorflow-privacy"] == "0.9.0"
    assert versions["tf_privacy"]["dp-accounting"] == "0.4.3"


def test_a_difference_is_a_miss(peer):
    theirs = peer["training"]
    ours = {
        "mlp": {
            "gradients": {"ghost": theirs["mlp"]["DPKeras"]["gradient"]},
            "weights": theirs["mlp"]["DPKeras"]["weights"],
        }
    }
    assert not differences(checks.training_checks(ours, theirs))
    wrong = copy.deepcopy(ours)
    wrong["mlp"]["weights"]["adam"][1][7] += 2e-5
    assert list(differences(checks.training_checks(wrong, theirs))) == [
        "DPKeras: weights, Adam, 5 steps"
    ]
    wrong = copy.deepcopy(ours)
    wrong["mlp"]["gradients"]["ghost"][0] = math.nan
    assert list(differences(checks.training_checks(wrong, theirs))) == [
        "DPKeras: clipped mean gradients"
    ]


def test_an_epsilon_below_is_a_miss_and_above_by_little_is_none(peer):
    theirs = peer["accounting"]
    for factor, misses in ((1 + 1e-4, 0), (1 - 1e-8, 2), (1.01, 1)):
        ours = {**theirs, "epsilon": np.array(theirs["epsilon"]) * factor}
        assert len(differences(checks.main_epsilon_checks(ours, theirs))) == misses


def test_other_numbers_are_refused():
    with pytest.raises(ValueError, match=r"\(2,\) numbers of ours for \(1,\)"):
        checks.absolute("x", [1.0, 2.0], [1.0], 1.0)


def test_a_side_that_fails_says_what_it_said(tmp_path):
    with pytest.raises(RuntimeError, match="No module named verification.parity.no_such_side"):
        compare.finish(*compare.start(sys.executable, "no_such_side", tmp_path))
