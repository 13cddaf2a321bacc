"""Models come back from files with the weights that are trained, and with LoRA's adapters."""

import contextlib

import h5py
import keras
import numpy as np
import pytest

import tf_adadp as dp

rng = np.random.default_rng(0)
X, Y = rng.integers(0, 20, (60, 8)).astype("int32"), rng.integers(0, 2, 60)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ADAPTED = ["tokens", "query", "value", "dense"]


def network():
    x = keras.Input((8,), dtype="int32")
    tokens = keras.layers.Embedding(20, 8, name="tokens")(x)
    attended = keras.layers.MultiHeadAttention(2, 4, name="attention")(tokens, tokens)
    h = keras.layers.LayerNormalization()(tokens + attended)
    h = keras.layers.Conv1D(8, 3, activation="relu", name="conv")(
        keras.layers.Dense(8, name="dense")(h)
    )
    h = keras.layers.GlobalAveragePooling1D()(h)
    return keras.Model(x, keras.layers.Dense(2, name="head")(h))


def part(model, name):
    return next(layer for layer in model._flatten_layers() if layer.name == name)


def adapted(rank=2, alpha=5, names=(*ADAPTED, "conv")):
    """Adapters in layers and in parts of one; besides them the head is trained."""
    model = network()
    for layer in model._flatten_layers(include_self=False):
        layer.trainable = False
    for name in ("attention", "head"):
        part(model, name).trainable = True
    for name in ("key", "attention_output", "query", "value"):
        part(model, name).trainable = False
    for name in names:
        part(model, name).trainable = True
        part(model, name).enable_lora(rank, lora_alpha=alpha)
    return model


def compiled(plain):
    model = dp.DPModel(plain)
    optimizer = dp.DPSGD(0.1, momentum=0.9, noise_multiplier=1.0, seed=3)
    model.compile(optimizer, LOSS, log_raw_metrics=False, jit_compile=False)
    return model


def fit(model, steps=3):
    lots = dp.PoissonLots(X, Y, expected_size=20, seed=5)
    lots.step = model.ledger.steps
    model.fit(lots, steps_per_epoch=steps, verbose=0)
    return model


def paths(model):
    return [(v.path.split("/", 1)[-1], tuple(v.shape)) for v in model.trainable_variables]


def assert_same(got, wanted):
    assert [tuple(v.shape) for v in got.variables] == [tuple(v.shape) for v in wanted.variables]
    for a, b in zip(got.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def saved(model, way, folder, **network_arguments):
    """Saves a model and loads it in another object."""
    if way == "model":
        model.save(folder / "m.keras")
        return keras.saving.load_model(folder / "m.keras")
    model.save_weights(folder / "m.weights.h5")
    loaded = compiled(adapted(**network_arguments))
    loaded.load_weights(folder / "m.weights.h5")
    return loaded


@pytest.mark.representative(1)
@pytest.mark.parametrize("way", ["model", "weights"])
def test_adapters_come_back_and_train_on(way, tmp_path):
    model = fit(compiled(adapted()))
    trained = paths(model)
    assert len(trained) == 5 * 2 + 4 + 2  # A and B, the biases of adapted layers, the head
    loaded = saved(model, way, tmp_path)
    assert paths(loaded) == trained
    assert part(loaded.model, "query").lora_alpha == 5
    assert_same(loaded, model)
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-5)
    assert loaded.ledger.statement(1e-3) == model.ledger.statement(1e-3)
    assert_same(fit(loaded), fit(model))
    assert loaded.epsilon(1e-3) == model.epsilon(1e-3)


@pytest.mark.extended
def test_parts_of_a_frozen_layer_stay_frozen(tmp_path):
    plain = network()
    plain.get_layer("attention").trainable = False
    part(plain, "dense").kernel.trainable = False  # one variable alone
    model = fit(compiled(plain))
    trained = paths(model)
    assert not any("query" in path or "value" in path for path, _ in trained)
    loaded = saved(model, "model", tmp_path)
    assert paths(loaded) == trained
    assert_same(fit(loaded), fit(model))
    loaded.model.get_layer("attention").trainable = True
    assert len(loaded.trainable_variables) == len(trained) + 8


@pytest.mark.extended
def test_adapters_that_are_not_in_the_file_begin_anew(tmp_path):
    model = fit(compiled(adapted()))
    outputs = model.predict(X, verbose=0)
    path = tmp_path / "m.weights.h5"
    model.save_weights(path)
    with h5py.File(path, "a") as file:  # as older versions wrote it
        del file["_trained_adapters"]
    for rank, warning in (
        (2, contextlib.nullcontext()),
        (3, pytest.warns(UserWarning, match="the file holds")),
    ):
        loaded = compiled(adapted(rank))
        with warning:
            loaded.load_weights(path, skip_mismatch=rank == 3)
        layer = part(loaded.model, "query")
        assert np.any(layer.lora_kernel_a)
        assert not np.any(layer.lora_kernel_b)
        np.testing.assert_allclose(loaded.predict(X, verbose=0), outputs, atol=1e-5)
        fit(loaded)
        assert np.any(layer.lora_kernel_b)


@pytest.mark.extended
def test_a_file_with_adapters_fits_a_network_without_them(tmp_path):
    model = fit(compiled(adapted()))
    model.save_weights(tmp_path / "m.weights.h5")
    plain = dp.DPModel(network())
    plain.load_weights(tmp_path / "m.weights.h5")
    outputs = model.predict(X, verbose=0)
    np.testing.assert_allclose(plain.predict(X, verbose=0), outputs, atol=1e-5)
