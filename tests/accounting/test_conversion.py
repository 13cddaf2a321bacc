"""The fast conversion gives dp_accounting's numbers."""

import math

import numpy as np
import pytest
from dp_accounting import rdp
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta, compute_epsilon

from tf_adadp.accounting.bounds.conversion import improved_delta, improved_epsilon

ORDERS = np.array([1.001, *rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS])


def bounds():
    rng = np.random.default_rng(0)
    for scale in 10.0 ** np.arange(-14, 4):
        yield scale * ORDERS
        yield scale * np.cumsum(rng.exponential(size=len(ORDERS)))
        partly = scale * ORDERS
        partly[rng.random(len(ORDERS)) < 0.5] = math.inf
        yield partly
    yield np.zeros(len(ORDERS))
    yield np.full(len(ORDERS), math.inf)


@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-12])
def test_epsilon(delta):
    for vector in bounds():
        assert improved_epsilon(ORDERS, vector, delta) == compute_epsilon(ORDERS, vector, delta)[0]


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 30.0])
def test_delta(epsilon):
    for vector in bounds():
        assert improved_delta(ORDERS, vector, epsilon) == pytest.approx(
            compute_delta(ORDERS, vector, epsilon)[0], rel=1e-12, abs=1e-300
        )


@pytest.mark.parametrize("sigma", [1e8, 1e9, 1e12, 1e150])
def test_delta_of_nearly_nothing(sigma):
    """Compares δ with one Gaussian's 2Φ(1/2σ) − 1 at ε = 0, where dp_accounting takes log(0)."""
    delta = improved_delta(ORDERS, ORDERS / (2 * sigma**2), 0.0)
    assert math.erf(1 / (2**1.5 * sigma)) <= delta < 2e-8
    assert improved_delta(ORDERS, ORDERS / (2 * sigma**2), 1.0) < 1e-20
