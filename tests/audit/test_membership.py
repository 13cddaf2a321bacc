"""Membership inference on a model that learns by heart, and on one that learns nothing."""

import keras
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.helpers import crossentropy
from tf_adadp import audit

pytestmark = pytest.mark.extended

N, DELTA = 120, 1e-5


def records():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, 400)).astype(np.float32), rng.integers(0, 3, N)


def train(present):
    """A linear model after one step from 0, of the summed loss: it remembers what it saw."""
    x, y = records()
    model = keras.Sequential([keras.Input((400,)), keras.layers.Dense(3, use_bias=False)])
    model.compile(loss=crossentropy())
    targets = np.eye(3)[y[present]] - 1 / 3
    model.layers[0].kernel.assign(0.03 * x[present].T @ targets)
    model.compute_loss(x, y, model(x))
    return model


@pytest.mark.parametrize("online", [True, False])
def test_lira_on_a_model_that_learned_by_heart(online):
    report, target = audit.lira(train, *records(), num_shadows=6, online=online, seed=1)
    assert report.auc > 0.9
    assert report.epsilon_lower_bound(DELTA).epsilon > 1.0
    simple = audit.loss_attack(target, *records(), report.members, fair_coins=True)
    assert simple.auc > 0.8


def test_random_scores_tell_nothing():
    """The AUC of 1,000 random scores is within 0.09 of 1/2 but once in a million."""
    rng = np.random.default_rng(3)
    report = audit.MembershipReport(rng.random(1000), rng.random(1000) < 0.5, fair_coins=True)
    assert abs(report.auc - 0.5) < 0.09
    assert report.epsilon_lower_bound(DELTA, 0.999).epsilon == 0.0


def test_rates_by_hand():
    members = np.array([True, True, False, True, False, False])
    report = audit.MembershipReport(np.array([6.0, 5, 4, 3, 2, 1]), members)
    assert report.auc == pytest.approx(8 / 9)
    assert report.tpr_at(0.0) == pytest.approx(2 / 3)
    assert report.tpr_at(0.3) == pytest.approx(2 / 3)
    assert report.tpr_at(0.34) == 1.0


def test_the_figure_is_logarithmic():
    rng = np.random.default_rng(3)
    report = audit.MembershipReport(rng.random(50), rng.random(50) < 0.5, name="guess")
    axes = report.plot()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "guess, AUC" in axes.get_legend().get_texts()[-1].get_text()
    own = Figure().subplots()
    assert report.plot(own) is own


def test_no_epsilon_without_coins():
    report = audit.MembershipReport(np.arange(4.0), np.array([True, False, True, False]))
    with pytest.raises(ValueError, match="fair_coins=False"):
        report.epsilon_lower_bound(DELTA)


@pytest.mark.parametrize(
    ("scores", "members", "message"),
    [
        ([1.0, 2.0], [1, 0], "members of bool"),
        ([1.0, np.nan], [True, False], "NaN"),
        ([1.0, 2.0], [True, True], "all alike"),
    ],
)
def test_what_a_report_refuses(scores, members, message):
    with pytest.raises(ValueError, match=message):
        audit.MembershipReport(np.array(scores), np.array(members))


def test_every_record_is_in_half_of_the_shadows():
    seen = []

    def remember(present):
        seen.append(present.copy())
        return train(present)

    report, _ = audit.lira(remember, *records(), num_shadows=4, seed=2)
    np.testing.assert_array_equal(seen[0], report.members)
    np.testing.assert_array_equal(np.sum(seen[1:], axis=0), 2)
    with pytest.raises(ValueError, match="num_shadows=3"):
        audit.lira(train, *records(), num_shadows=3)
