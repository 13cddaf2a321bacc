"""Checks the agreement of workers without starting any."""

import keras
import pytest

import tf_adadp as dp
from tests.helpers import data, private_model
from tf_adadp.training.chief import privacy_arguments


def arguments(optimizer, callbacks=()):
    private = private_model(optimizer)
    found = []

    class Sees(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            found.append(privacy_arguments(self.model))
            raise KeyboardInterrupt

    x, y = data()
    with pytest.raises(KeyboardInterrupt):
        private.fit(x, y, batch_size=30, verbose=0, callbacks=[*callbacks, Sees()])
    return found[0]


def test_what_sets_privacy_is_compared_and_nothing_else():
    usual = arguments(dp.DPSGD(noise_multiplier=1.0))
    assert arguments(dp.DPSGD(0.3, noise_multiplier=1.0, name="other")) == usual
    for other, differs in (
        (dp.DPSGD(noise_multiplier=1.0, l2_norm_clip=100.0), "optimizer"),
        (dp.DPSGD(noise_multiplier=0.5), "optimizer"),
        (dp.DPAdam(noise_multiplier=1.0), "optimizer"),
    ):
        found = arguments(other)
        assert [k.split()[0].rstrip("'s,") for k in usual if usual[k] != found[k]] == [differs]
    budget = arguments(dp.DPSGD(noise_multiplier=1.0), [dp.PrivacyCallback(1e-3, max_epsilon=9.0)])
    assert [k for k in usual if usual[k] != budget[k]] == ["budgets of PrivacyCallbacks, hashed"]
