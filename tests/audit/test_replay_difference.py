"""A replay of an optimizer's releases tells whether its state takes anything else from the data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.attacks.test_replay import OPTIMIZERS

rng = np.random.default_rng(0)
SHAPES = [(3, 2), (2,)]
GRADIENTS = [rng.normal(size=(6, *shape)) for shape in SHAPES]


def built(make, **arguments):
    optimizer = make(noise_multiplier=1.0, **arguments)
    optimizer.build([keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES])
    return optimizer


def difference(make, **arguments):
    return dp.audit.replay_difference(built(make, **arguments), GRADIENTS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_private_optimizers_follow_from_their_releases(name):
    assert difference(OPTIMIZERS[name]) == 0.0


def test_state_and_keys_are_as_before():
    optimizer = built(dp.DPAdam)
    before = [v.numpy() for v in optimizer.variables]
    key = optimizer._noise_key
    dp.audit.replay_difference(optimizer, GRADIENTS)
    assert optimizer._noise_key is key
    assert optimizer.steps_taken == 0
    for variable, value in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


class LeaksWeights(dp.DPSGD):
    def apply_private(self, sums, expected_lot_size, regularization_gradients=None):
        super().apply_private(sums, expected_lot_size, regularization_gradients)
        for variable, raw in zip(self._trainable_variables, sums, strict=True):
            variable.assign_sub(1e-4 * raw)


class LeaksIntoTheNextStep(dp.DPSGD):
    """The raw norm of a lot decides the next clip norm; the weights of one step are private."""

    def _build_private(self, variables):
        self._norm = self._add_state((), "norm", initializer="ones")

    def clipping_set(self):
        return dp.clipping.L2Ball(self._norm.value)

    def apply_private(self, sums, expected_lot_size, regularization_gradients=None):
        super().apply_private(sums, expected_lot_size, regularization_gradients)
        self._norm.assign(tf.linalg.global_norm(sums))


@pytest.mark.parametrize("leaky", [LeaksWeights, LeaksIntoTheNextStep])
def test_leaks_past_the_release_are_seen(leaky):
    assert difference(leaky) > 1e-5


def test_the_printed_prior_leaks():
    assert difference(dp.ADADP, prior="raw") > 0


def test_values_that_are_not_finite_differ_infinitely():
    class Leaks(dp.DPSGD):
        def apply_private(self, sums, *args):
            super().apply_private(sums, *args)
            self._trainable_variables[0].assign(sums[0] / (sums[0] - sums[0]))

    assert difference(Leaks) == np.inf


def test_bad_arguments():
    optimizer = built(dp.DPSGD)
    with pytest.raises(ValueError, match="steps"):
        dp.audit.replay_difference(optimizer, GRADIENTS, steps=0)
    with pytest.raises(ValueError, match=r"gradients of shapes \[\(6, 3\)\]"):
        dp.audit.replay_difference(optimizer, [np.ones((6, 3))])
    with pytest.raises(ValueError, match="not built"):
        dp.audit.replay_difference(dp.DPSGD(noise_multiplier=1.0), GRADIENTS)


def test_releases_that_a_class_changes_in_place_are_no_leak_and_sums_added_to_them_are():
    class Halves(dp.DPSGD):
        def _noisy_mean(self, *args):
            released, stddevs = super()._noisy_mean(*args)
            for i in range(len(released)):
                released[i] *= 0.5
            return released, stddevs

    class Adds(dp.DPSGD):
        def _noisy_mean(self, clipping_set, sums, expected_lot_size):
            released, stddevs = super()._noisy_mean(clipping_set, sums, expected_lot_size)
            for i in range(len(released)):
                released[i] += 0.5 * sums[i]
            return released, stddevs

    assert difference(Halves) == 0.0
    assert difference(Adds) > 1e-3


def test_an_error_leaves_the_state_as_it_was():
    class Fails(dp.DPSGD):
        def apply_private(self, *args):
            super().apply_private(*args)
            raise InterruptedError

    optimizer = built(Fails)
    with pytest.raises(InterruptedError):
        dp.audit.replay_difference(optimizer, GRADIENTS)
    assert not np.any(optimizer._trainable_variables[0].numpy())
