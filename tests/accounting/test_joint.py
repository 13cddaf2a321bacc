"""Several Gaussian releases from the same records, as one."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld

from tf_adadp import accounting
from tf_adadp.accounting import FixedSizeSampling, PoissonSampling, joint_noise_multiplier

Gaussian = dp_accounting.GaussianDpEvent


def test_of_one_and_of_several():
    assert joint_noise_multiplier(4.0) == pytest.approx(4.0)
    assert joint_noise_multiplier(5.0, 5.0, 5.0, 5.0) == pytest.approx(2.5)
    assert joint_noise_multiplier(4.0, 20.0) == pytest.approx(3.92232, rel=1e-5)
    assert joint_noise_multiplier(4.0, 0.0) == 0.0, "one release without noise hides nothing"


def test_composed_gaussians_cost_what_the_joint_one_does():
    def epsilon(event):
        return pld.PLDAccountant().compose(event).get_epsilon(1e-6)

    both = dp_accounting.ComposedDpEvent([Gaussian(1.5), Gaussian(4.0)])
    joint = Gaussian(joint_noise_multiplier(1.5, 4.0))
    assert epsilon(joint) == pytest.approx(epsilon(both), rel=1e-3)


def test_two_releases_from_one_poisson_lot_cost_more_than_from_two_lots():
    law = PoissonSampling(60000, 600)
    one, two = accounting.PrivacyLedger(), accounting.PrivacyLedger()
    one.add(law.event_with_metrics(1.0, 1.0), 100, law=law)
    two.add(law.event(1.0), 200, law=law)
    assert one.epsilon(1e-6, "pld") > 1.05 * two.epsilon(1e-6, "pld")


def test_a_replaced_record_moves_clipped_vectors_twice_as_far_and_a_box_by_its_diagonal():
    """The whitened distance of two neighbouring lots, at worst, against the event's multiplier."""
    sigma, sigma_m, rng = 2.0, 3.0, np.random.default_rng(0)
    box = np.array([4.0, 1.0])
    corners = [box * corner for corner in ([0, 0], [0, 1], [1, 0], [1, 1])]
    worst = 0.0
    for _ in range(20):
        gradient = rng.normal(size=5)
        gradient /= np.linalg.norm(gradient)  # C = 1, and the other one opposite
        for a in corners:
            for b in corners:
                moved = np.concatenate(
                    [2 * gradient / sigma, (a - b) / (sigma_m * np.linalg.norm(box))]
                )
                worst = max(worst, np.linalg.norm(moved))
    event = FixedSizeSampling(600, 60).event_with_metrics(sigma, sigma_m).event
    assert 1 / event.noise_multiplier == pytest.approx(worst)


def test_errors():
    with pytest.raises(ValueError, match="at least one"):
        joint_noise_multiplier()
    with pytest.raises(ValueError, match="noise_multiplier=.*: give a finite number"):
        joint_noise_multiplier(1.0, float("nan"))
    with pytest.raises(ValueError, match="noise_multiplier=.*: give a finite number"):
        PoissonSampling(600, 60).event_with_metrics(1.0, -1.0)
    unknown = accounting.UnknownSampling("not said")
    assert unknown.event_with_metrics(1.0, 1.0) == dp_accounting.UnsupportedDpEvent()
