"""Batches of several forms between two compiles: each is traced, checked and charged for itself."""

import keras
import numpy as np
import pytest

import tf_adadp as dp
from tests.helpers import ROWS, data, exact_sgd, private_model

X, Y = data()
WEIGHTS = np.linspace(0.0, 2.0, ROWS)
FORMS = {
    "as before": (X, Y, None),
    "weights": (X, Y, WEIGHTS),
    "int64 labels": (X, Y.astype(np.int64), None),
    "labels as a column": (X, Y[:, None], None),
    "float16": (X.astype(np.float16), Y, None),
}


@pytest.mark.representative(1, 3)
@pytest.mark.parametrize("engine", ["ghost", "vectorized"])
@pytest.mark.parametrize(
    "compiled",
    [
        {},
        pytest.param({"steps_per_execution": 2}, marks=pytest.mark.extended),
        pytest.param({"run_eagerly": True}, marks=pytest.mark.extended),
    ],
)
def test_each_fit_may_have_data_of_another_form(engine, compiled):
    """Compares fits on all records, without noise, with gradient descent on the same data."""
    private = private_model(exact_sgd(), wrap={"gradient_engine": engine}, **compiled)
    steps, model = 2, keras.models.clone_model(private.model)
    model.set_weights(private.model.get_weights())
    model.compile(keras.optimizers.SGD(0.1), private.loss, run_eagerly=True)
    for number, name in enumerate([*FORMS, "as before", "weights"]):
        x, y, sample_weight = FORMS[name]
        private.fit(
            x, y, batch_size=ROWS, steps_per_epoch=steps, sample_weight=sample_weight, verbose=0
        )
        for _ in range(steps):
            model.train_on_batch(x, y, sample_weight)
        for mine, theirs in zip(private.model.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
        assert private.ledger.steps == private.optimizer.releases == steps * (number + 1)


@keras.saving.register_keras_serializable()
class MeanOverLength(keras.layers.Layer):
    """Divides by a length that is known when it is traced."""

    def call(self, x):
        return keras.ops.sum(x, axis=1) / x.shape[1]


@pytest.mark.representative(0)
@pytest.mark.parametrize("kept", [16, 0])
def test_each_length_has_an_engine_of_its_own(kept, monkeypatch):
    monkeypatch.setattr("tf_adadp.training.session._MOST_FORMS", kept)
    layers = [keras.layers.Embedding(9, 4), MeanOverLength(), keras.layers.Dense(3)]
    private = private_model(exact_sgd(), keras.Sequential(layers))
    tokens = np.random.default_rng(1).integers(0, 9, (ROWS, 12))
    private.model(tokens)
    model = keras.models.clone_model(private.model)
    model(tokens)
    model.set_weights(private.model.get_weights())
    model.compile(keras.optimizers.SGD(0.1), private.loss, run_eagerly=True)
    law = dp.accounting.PoissonSampling(ROWS, ROWS)
    for length in (12, 3, 7, 12, 3):
        private.train_on_batch(tokens[:, :length], Y, law=law)
        model.train_on_batch(tokens[:, :length], Y)
        for mine, theirs in zip(private.model.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6, err_msg=str(length))
    assert len(private.session._of_other_forms) == min(kept, 2)


def test_released_means_begin_anew_with_each_form():
    metrics = dp.ReleasedMetrics(noise_multiplier=1e-6, loss_bound=10.0)
    private = private_model(exact_sgd(1e-4), released_metrics=metrics, log_raw_metrics=True)
    for name in ("as before", "int64 labels", "as before"):
        x, y, _ = FORMS[name]
        history = private.fit(x, y, batch_size=ROWS, steps_per_epoch=1, verbose=0).history
        for metric in ("loss", "accuracy"):
            assert history[f"released_{metric}"] == pytest.approx(history[metric], abs=1e-3)


def test_data_that_cannot_be_trained_on_are_refused_before_they_are_charged():
    private = private_model()
    private.fit(X, Y, batch_size=30, verbose=0)
    before = private.ledger.steps
    with pytest.raises(ValueError, match="y=None"):
        private.fit(X, batch_size=30, verbose=0)
    with pytest.raises((TypeError, ValueError), match="string"):
        private.fit(X, Y.astype(str), batch_size=30, verbose=0)
    assert private.ledger.steps == before
    private.fit(X, Y, batch_size=30, verbose=0)  # goes on as before
    assert private.ledger.steps == 2 * before


@pytest.mark.parametrize("look_first", [False, True])
def test_given_statistics_work_without_an_input(look_first):
    """Keras keeps them as tensors of the graph in which it builds such a model."""
    mean, variance = X.mean(0), X.var(0)
    layers = [keras.layers.Normalization(mean=mean, variance=variance), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    if look_first:
        assert dp.validate(model, "mse", X, X[:, :3]).ok
    private = private_model(None, model)
    private.fit(X, Y, batch_size=30, verbose=0)
    np.testing.assert_allclose(layers[0](X), (X - mean) / variance**0.5, rtol=1e-4, atol=1e-5)
