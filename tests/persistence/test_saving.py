"""Tests saved files: their content, and ε after every way of loading."""

import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, data, plain_model, private_model
from tf_adadp.persistence import files as saving

OPTIMIZERS = [
    dp.DPSGD(0.1, noise_multiplier=1.0, momentum=0.5, nesterov=True),
    dp.DPAdam(noise_multiplier=1.0, l2_norm_clip={"": 2.0}),
    dp.DPRMSprop(noise_multiplier=1.0, microbatch_size=2, rho=0.8),
    dp.ADADP(noise_multiplier=1.0, clipping="local", warmup_steps=3, prior_decay=0.5),
    dp.ADADP(noise_multiplier=1.0, prior="raw", local_clip_threshold=0.1),
    dp.ADAN(keras.optimizers.schedules.CosineDecay(0.1, 10), noise_multiplier=1.0, seed=3),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_optimizer_configs_round_trip(optimizer):
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(restored) is type(optimizer)
    assert keras.optimizers.serialize(restored) == keras.optimizers.serialize(optimizer)


def test_callback_config_round_trips():
    callback = dp.PrivacyCallback(
        1e-5, max_epsilon=2.0, accountant="pld", ledger_path="a.json", ledger_interval=7,
        dataset="census", same_data=True, extra_deltas=(1e-6,), log_dir="logs",
    )  # fmt: skip
    assert dp.PrivacyCallback.from_config(callback.get_config()).get_config() == (
        callback.get_config()
    )


@pytest.mark.representative(1)
@pytest.mark.parametrize("make", [dp.ADADP, dp.DPAdam, dp.ADAN])
def test_a_saved_model_continues_where_it_was(make, tmp_path):
    x, y = data()
    private = private_model(make(noise_multiplier=1.0))
    private.fit(x, y, batch_size=30, epochs=2, verbose=0)
    private.save(tmp_path / "m.keras")
    restored = dp.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(restored.predict(x, verbose=0), private.predict(x, verbose=0))
    assert restored.optimizer.get_config() == private.optimizer.get_config()
    for a, b in zip(restored.optimizer.variables, private.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert restored.epsilon(1e-3) == private.epsilon(1e-3) > 0
    restored.fit(x, y, batch_size=30, epochs=1, verbose=0)
    assert restored.epsilon(1e-3) == pytest.approx(dp.accounting.epsilon(1.0, 30 / ROWS, 12, 1e-3))


def test_weights_made_after_their_ledger_was_restored_have_it(tmp_path):
    def unbuilt():
        plain = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(3)])
        private = dp.DPModel(plain)
        private.compile(dp.DPSGD(noise_multiplier=1.0), "sparse_categorical_crossentropy")
        return private

    x, y = data()
    private = unbuilt()
    private.fit(x, y, batch_size=30, verbose=0)
    path = tf.train.Checkpoint(model=private).save(tmp_path / "ckpt")
    restored = unbuilt()
    tf.train.Checkpoint(model=restored).restore(path)
    assert not restored.weights
    restored.model(x[:1])
    assert restored.ledger.steps == private.ledger.steps
    other = dp.DPModel(keras.Sequential([restored.model.layers[0], keras.layers.Dense(2)]))
    assert other.ledger.is_one_with(restored.ledger)


def test_weights_files_carry_the_ledger(tmp_path):
    x, y = data()
    private = private_model()
    private.fit(x, y, batch_size=30, verbose=0)
    private.save_weights(tmp_path / "w.weights.h5")
    other = private_model()
    other.load_weights(tmp_path / "w.weights.h5")
    assert other.epsilon(1e-3) == private.epsilon(1e-3)
    # Going back to an earlier checkpoint takes back no release.
    private.fit(x, y, batch_size=30, verbose=0)
    spent = private.epsilon(1e-3)
    private.load_weights(tmp_path / "w.weights.h5")
    assert private.epsilon(1e-3) == spent


def test_weights_without_a_ledger_fail_closed(tmp_path):
    class Other(keras.Model):
        def __init__(self):
            super().__init__()
            self.model = plain_model()

        def call(self, x):
            return self.model(x)

    other = Other()
    other(np.zeros((1, 6)))
    other.save_weights(tmp_path / "w.weights.h5")
    private = private_model()
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        private.load_weights(tmp_path / "w.weights.h5")
    with pytest.raises(ValueError, match="without a ledger"):
        private.epsilon(1e-3)


def test_public_weights_go_into_the_plain_model(tmp_path):
    plain_model().save_weights(tmp_path / "w.weights.h5")
    with (
        pytest.raises(ValueError, match=r"w\.weights\.h5 does not fit.*model\.model\.load_weights"),
        pytest.warns(UserWarning, match="Skipping variable loading for optimizer"),
    ):
        private_model().load_weights(tmp_path / "w.weights.h5")
    private = private_model()
    private.model.load_weights(tmp_path / "w.weights.h5")
    assert private.epsilon(1e-3) == 0.0


@pytest.mark.extended
@pytest.mark.parametrize(
    "save",
    [
        lambda model, path: model.save(path / "m.h5"),
        lambda model, path: model.save(path / "m.hdf5"),
        lambda model, path: model.save(path / "m.weights.h5"),  # the whole model, by this name
        lambda model, path: keras.saving.save_model(model, path / "m.h5"),
        lambda model, path: keras.Sequential([model]).save(path / "m.h5"),
    ],
)
def test_the_legacy_format_which_has_no_ledger_is_refused(save, tmp_path):
    private = private_model()
    x, y = data()
    private.fit(x, y, batch_size=30, verbose=0)
    before = private.epsilon(1e-3)
    with pytest.raises(ValueError, match=r"legacy \.h5 format.*\.keras"):
        save(private, tmp_path)
    private.save(tmp_path / "m.keras")  # a trial at the other format leaves no trace in this one
    assert dp.load_model(tmp_path / "m.keras").epsilon(1e-3) == before
    private.model.save(tmp_path / "plain.h5")
    keras.models.load_model(tmp_path / "plain.h5")


@pytest.mark.extended
def test_a_legacy_file_is_not_loaded(monkeypatch, tmp_path):
    """One that was written before it was refused."""
    private = private_model()
    x, y = data()
    private.fit(x, y, batch_size=30, verbose=0)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "refuse_legacy_format", lambda *_: None)
        private.save(tmp_path / "m.h5")
        found = keras.models.load_model(
            tmp_path / "m.h5", custom_objects={"DPModel": dp.DPModel}, compile=False
        )
        assert found.epsilon(1e-3) == 0.0  # which is why
    for load in (keras.models.load_model, dp.load_model):
        with pytest.raises(ValueError, match=r"legacy \.h5 format"):
            load(tmp_path / "m.h5", custom_objects={"DPModel": dp.DPModel}, compile=False)


@pytest.mark.extended
def test_a_state_tree_has_no_ledger():
    private, other = private_model(), private_model()
    x, y = data()
    private.fit(x, y, batch_size=30, verbose=0)
    other.fit(x, y, batch_size=30, verbose=0)
    other.set_state_tree(private.get_state_tree())
    with pytest.raises(ValueError, match="set_state_tree"):
        other.epsilon(1e-3)


@pytest.mark.extended
def test_export_is_that_of_the_inner_model(tmp_path):
    x, y = data()
    private = private_model()
    private.fit(x, y, batch_size=30, verbose=0)
    private.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(x), private.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.representative(1)
@pytest.mark.parametrize("wrapped", [True, False])
def test_clones_and_copies_never_share_noise(wrapped):
    """Equal noise on two models would cancel in their difference."""
    import copy

    x, y = data()
    first = private_model(dp.DPSGD(1.0, noise_multiplier=1.0, l2_norm_clip=1e-6))
    first.fit(x, y, batch_size=30, epochs=1, verbose=0)
    start = first.get_weights()
    if wrapped:
        second = copy.deepcopy(first)
    else:
        optimizer = copy.deepcopy(first.optimizer)
        second = private_model(optimizer)
    moves = []
    for model in (first, second):
        model.model.set_weights(start)
        model.fit(dp.PoissonLots(x, y, expected_size=30), steps_per_epoch=1, verbose=0)
        moves.append(model.get_weights()[0] - start[0])
    assert np.abs(moves[0] - moves[1]).max() > 0


def test_no_key_is_written_anywhere(tmp_path):
    x, y = data()
    private = private_model(dp.ADADP(noise_multiplier=1.0))
    private.fit(
        x, y, batch_size=30, verbose=0,
        callbacks=[
            dp.PrivacyCallback(1e-3, ledger_path=tmp_path / "ledger.json"),
            keras.callbacks.TensorBoard(tmp_path / "logs"),
            keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
        ],
    )  # fmt: skip
    private.save(tmp_path / "m.keras")
    private.save_weights(tmp_path / "m.weights.h5")
    import tensorflow as tf

    tf.train.Checkpoint(model=private, optimizer=private.optimizer).save(tmp_path / "ckpt")
    words = [
        int(word).to_bytes(8, "little", signed=True)
        for key in (private.optimizer._noise_key, private.optimizer._example_key)
        for word in key.key.numpy()
    ]
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        contents += [archive.read(name) for name in archive.namelist()]
    assert len(contents) > 8
    for word in words:
        assert not any(word in content for content in contents)
        number = str(int.from_bytes(word, "little", signed=True)).encode()
        assert not any(number in content for content in contents)


@pytest.mark.extended
@pytest.mark.parametrize("first", ["tf_adadp", "keras"])
def test_keras_loads_private_models_whichever_is_imported_first(first, tmp_path):
    x, y = data()
    private = private_model()
    private.fit(x, y, batch_size=30, verbose=0)
    path = tmp_path / "m.keras"
    private.save(path)
    second = {"tf_adadp": "keras", "keras": "tf_adadp"}[first]
    code = (
        f"import {first}\nimport {second}\nimport sys\n"
        "model = keras.saving.load_model(sys.argv[1])\n"
        "print(type(model).__name__, model.epsilon(1e-3))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    name, epsilon = result.stdout.split()[-2:]
    assert name == "DPModel"
    assert float(epsilon) == private.epsilon(1e-3)


def test_importing_the_package_alone_loads_no_tensorflow():
    code = (
        "import sys, tf_adadp, tf_adadp.accounting as a\n"
        "assert a.epsilon(1.0, 0.01, 10, 1e-5) > 0\n"
        "assert 'tensorflow' not in sys.modules and 'keras' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.extended
def test_backup_and_restore_resumes_with_the_ledger(tmp_path):
    x, y = data()

    class Crash(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def fit(*extra):
        private = private_model(dp.ADADP(noise_multiplier=1.0))
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        private.fit(x, y, batch_size=30, epochs=4, verbose=0, callbacks=[backup, *extra])
        return private

    with pytest.raises(KeyboardInterrupt):
        fit(Crash())
    private = fit()
    assert private.ledger.steps == 16
    assert private.epsilon(1e-3) == pytest.approx(dp.accounting.epsilon(1.0, 30 / ROWS, 16, 1e-3))
