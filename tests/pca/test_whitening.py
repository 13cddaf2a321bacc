"""Whitening by private components: what it computes, and that its cost goes along."""

import keras
import numpy as np
import pytest

import tf_adadp as dp
from tests.helpers import crossentropy
from tests.pca.test_pca import digits, exact
from tf_adadp.pca import DPPCA, ZCAWhitening
from tf_adadp.pca.rows import unit_rows

DELTA = 1e-4


def rows(x):
    return unit_rows(x.reshape(len(x), -1))


def test_without_noise_the_components_get_the_variance_of_the_last():
    x = digits()[0]
    pca = exact(20, normalize=False)
    units = rows(x)
    pca.fit(units)
    z = pca.whitening()(units).numpy().astype(float)
    along = pca.components_ @ (z.T @ z) @ pca.components_.T
    np.testing.assert_allclose(
        along, pca.explained_variance_[-1] * np.eye(20), rtol=1e-3, atol=2e-3
    )
    # What is orthogonal to them stays.
    rest = np.eye(64) - pca.components_.T @ pca.components_
    np.testing.assert_allclose(z @ rest, units @ rest, atol=1e-6)


def test_normalised_inputs_and_outputs_against_a_loop():
    x = digits()[0][:50]
    pca = DPPCA(10, 4.0, seed=0).fit(x)
    found = pca.whitening()(x).numpy()
    floor = max(2 * 4.0 * 8, pca.explained_variance_[-1])
    for row, got in zip(rows(x), found, strict=True):
        for component, value in zip(pca.components_, pca.explained_variance_, strict=True):
            factor = min(1, np.sqrt(floor / value)) if value > 0 else 1
            row = row - (1 - factor) * (component @ row) * component
        np.testing.assert_allclose(got, row / np.linalg.norm(row), atol=1e-6)


def test_directions_within_the_noise_stay_as_they_are():
    x = digits()[0]
    sigma = 30.0
    pca = DPPCA(64, sigma, seed=0).fit(x)
    factors = pca.whitening().get_weights()[1]
    strong = pca.explained_variance_ > 2 * sigma * 8
    assert 0 < strong.sum() < 10
    assert np.all(factors[strong] < 1)
    np.testing.assert_array_equal(factors[~strong], 1)
    np.testing.assert_allclose(
        factors[strong] ** 2 * pca.explained_variance_[strong], 2 * sigma * 8, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64"])
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_records_of_any_type_do_not_meet(dtype, policy):
    x = digits()[0][:20].astype(dtype)
    pca = DPPCA(5, 4.0).fit(x)
    layer = ZCAWhitening.from_config({**pca.whitening().get_config(), "dtype": policy})
    layer.set_weights(pca.whitening().get_weights())
    whole = layer(x).numpy()
    assert whole.dtype == layer.compute_dtype
    np.testing.assert_allclose(np.linalg.norm(whole.astype(float), axis=1), 1, atol=2e-3)
    if dtype != "uint8":
        x[3], x[4] = np.nan, np.inf
    x[5] = 0
    assert layer(x[:0]).shape == (0, 64)
    odd = layer(x).numpy()
    odd_rows = [3, 4, 5] if dtype != "uint8" else [5]
    assert not odd[odd_rows].any()
    np.testing.assert_array_equal(np.delete(odd, odd_rows, 0), np.delete(whole, odd_rows, 0))


def test_the_cost_goes_with_the_layer(tmp_path):
    x, y = digits()
    pca = DPPCA(20, 8.0, seed=0).fit(x)
    model = keras.Sequential([keras.Input((8, 8)), pca.whitening(), keras.layers.Dense(10)])
    private = dp.DPModel(model)
    assert private.epsilon(DELTA) == pca.ledger.epsilon(DELTA) > 0
    private.compile(
        dp.DPSGD(8.0, noise_multiplier=1.0, seed=0), crossentropy(), metrics=["accuracy"]
    )
    before = model.layers[0].get_weights()
    private.fit(x, y, batch_size=200, epochs=4, verbose=0)
    assert private.evaluate(x, y, verbose=0)[1] > 0.8  # 0.10 by guessing
    for old, new in zip(before, model.layers[0].get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    spent = private.epsilon(DELTA)
    assert spent > pca.ledger.epsilon(DELTA)

    private.save(tmp_path / "private.keras")
    model.save(tmp_path / "plain.keras")
    model.save_weights(tmp_path / "w.weights.h5")
    expected = private.predict(x, verbose=0)
    loaded = dp.load_model(tmp_path / "private.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    assert loaded.epsilon(DELTA) == spent
    plain = keras.saving.load_model(tmp_path / "plain.keras")
    np.testing.assert_array_equal(plain.predict(x, verbose=0), expected)
    assert dp.DPModel(plain).epsilon(DELTA) == spent

    stranger = ZCAWhitening(20, 64)
    other = keras.Sequential([keras.Input((8, 8)), stranger, keras.layers.Dense(10)])
    with pytest.raises(ValueError, match=r"without their ledger.*DPPCA\.layer"):
        dp.DPModel(other).epsilon(DELTA)
    other.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_array_equal(other.predict(x, verbose=0), expected)
    assert dp.DPModel(other).epsilon(DELTA) == spent
    assert dp.DPModel(keras.models.clone_model(model)).ledger.steps > 1
    # A layer that was public is so no more.
    was_public = keras.Sequential([keras.Input((8, 8)), ZCAWhitening(20, 64, public=True)])
    was_public.add(keras.layers.Dense(10))
    was_public.load_weights(tmp_path / "w.weights.h5")
    again = keras.models.clone_model(was_public)
    assert dp.DPModel(again).epsilon(DELTA) == dp.DPModel(was_public).epsilon(DELTA) == spent


def test_what_cannot_be_whitened():
    with pytest.raises(RuntimeError, match="whitening before fit"):
        DPPCA(2, 4.0).whitening()
    with pytest.raises(ValueError, match=r"n_components=3: the last of them has no variance"):
        exact(3).fit(np.eye(4)[:2]).whitening()
