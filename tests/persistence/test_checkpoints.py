"""Every way to save, with every kind of optimizer state: all of it comes back, and no key is in it.

One fit per optimizer writes all files; they are restored into models that never trained.
"""

import json
import shutil
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import data, private_model
from tf_adadp import noise

X, Y = data(rows=100)
HELD_OUT = (X[80:], Y[80:])
ENERGY = {"energy_data": HELD_OUT, "energy_noise_multiplier": 1.0, "energy_clip": 1.0}
OPTIMIZERS = {
    "adadp": lambda: dp.ADADP(noise_multiplier=1.0, warmup_steps=1),
    "adaclip": lambda: dp.AdaCliP(noise_multiplier=1.0),
    "dpopt": lambda: dp.DPOPT(
        noise_multiplier=1.0, directions="budgeted", direction_noise_multiplier=2.0, pruning=0.5
    ),
    "sadpsgd": lambda: dp.SADPSGD(noise_multiplier=1.0, momentum=0.5, **ENERGY),
    "agd": lambda: dp.AGD(total_epsilon=5.0, total_delta=1e-3),
    "autosgd": lambda: dp.AutoSGD(noise_multiplier=1.0, momentum=0.5),
}
STEPS, INTERRUPTED = 4, 3


def state(model):
    """Returns all public state after training, and the ledger's releases."""
    variables = [*model.model.variables, *model.optimizer.variables]
    ledger = sorted((entry.id, entry.count) for entry in model.ledger.entries)
    return [keras.ops.convert_to_numpy(v).copy() for v in variables], ledger


def assert_equal_states(a, b):
    for v, w in zip(a[0], b[0], strict=True):
        assert v.dtype == w.dtype
        np.testing.assert_array_equal(v, w)
    assert a[1] == b[1]


class Recorder(keras.callbacks.Callback):
    """The state after each step."""

    def __init__(self):
        super().__init__()
        self.states = []

    def on_train_batch_end(self, batch, logs=None):
        self.states.append(state(self.model))


@pytest.fixture(scope="module", params=OPTIMIZERS)
def run(request, tmp_path_factory):
    """(how to make the model, the trained one, its states after each step, the folder)."""
    folder = tmp_path_factory.mktemp(request.param)

    def make():
        return private_model(OPTIMIZERS[request.param]())

    model, recorder = make(), Recorder()
    checkpoint = keras.callbacks.ModelCheckpoint
    model.fit(
        X[:80], Y[:80], batch_size=20, epochs=1, verbose=0,
        callbacks=[
            checkpoint(folder / "step.keras", save_freq=INTERRUPTED),
            checkpoint(folder / "step.weights.h5", save_weights_only=True, save_freq=INTERRUPTED),
            checkpoint(folder / "epoch.keras", save_freq="epoch"),
            checkpoint(folder / "epoch.weights.h5", save_weights_only=True, save_freq="epoch"),
            keras.callbacks.BackupAndRestore(
                folder / "step_backup", save_freq=INTERRUPTED, delete_checkpoint=False
            ),
            keras.callbacks.BackupAndRestore(folder / "epoch_backup", delete_checkpoint=False),
            dp.PrivacyCallback(1e-3, ledger_path=folder / "ledger.json"),
            recorder,
        ],
    )  # fmt: skip
    model.save(folder / "saved.keras")
    model.save_weights(folder / "saved.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "tf"))
    return make, model, recorder.states, folder


def restored(make, folder, name):
    """A new model, that never trained, with what a file holds."""
    if name.endswith(".keras"):
        return dp.load_model(folder / name)
    model = make()
    if name.endswith(".weights.h5"):
        model.load_weights(folder / name)
        return model
    model.optimizer.build(model.trainable_variables)
    if name == "tf":
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.read(str(folder / name)).assert_consumed()
        return model
    callback = keras.callbacks.BackupAndRestore(folder / name, delete_checkpoint=False)
    callback.set_model(model)
    callback.on_train_begin()
    return model


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step.keras", INTERRUPTED),
        ("step.weights.h5", INTERRUPTED),
        ("step_backup", INTERRUPTED),
        ("epoch.keras", STEPS),
        ("epoch.weights.h5", STEPS),
        ("epoch_backup", STEPS),
        ("saved.keras", STEPS),
        ("saved.weights.h5", STEPS),
        ("tf", STEPS),
    ],
)
def test_weights_optimizer_state_and_ledger_come_back(run, name, step):
    make, trained, states, folder = run
    model = restored(make, folder, name)
    assert_equal_states(state(model), states[step - 1])
    assert int(model.optimizer.iterations) == model.ledger.steps == step
    assert model.ledger.epsilon(1e-3) > 0
    if step == STEPS:
        assert model.epsilon(1e-3) == trained.epsilon(1e-3)


def contents(folder):
    """Returns a folder as bytes: files, members of zip files, data sets of HDF5 files."""
    for path in folder.rglob("*"):
        if path.is_dir():
            continue
        yield path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield from (archive.read(name) for name in archive.namelist())
                with archive.open("model.weights.h5") as member:
                    yield from datasets(member)
        if h5py.is_hdf5(path):
            yield from datasets(path)


def datasets(file):
    found = []

    def visit(_, node):
        if isinstance(node, h5py.Dataset):
            found.append(np.asarray(node).tobytes())

    with h5py.File(file, "r") as stored:
        stored.visititems(visit)
    return found


@pytest.mark.representative(1)
def test_no_file_holds_a_key(run):
    _, model, _, folder = run
    keys = [k for k in vars(model.optimizer).values() if isinstance(k, noise.SecretKey)]
    words = [int(word) for key in keys for word in key.key.numpy()]
    lots = model.session.run.lots.key._key
    words += [(lots & (2**64 - 1)) - 2**63, (lots >> 64) - 2**63]  # as signed words, shifted
    assert len(words) >= 6
    patterns = [lots.to_bytes(16, order) for order in ("little", "big")]
    patterns += [str(lots).encode(), f"{lots:x}".encode()]
    for word in words[:-2]:
        patterns += [word.to_bytes(8, order, signed=True) for order in ("little", "big")]
        patterns.append(str(word).encode())
    blobs = list(contents(folder))
    assert len(blobs) > 100
    for pattern in patterns:
        assert not any(pattern in blob for blob in blobs)
    # The search does find what is there: the number of steps, an int64 like the words.
    assert any((STEPS).to_bytes(8, "little") == blob for blob in blobs)


# --- versions -------------------------------------------------------------------------------------


of_one_optimizer = pytest.mark.parametrize("run", ["adadp"], indirect=True)


def edited(folder, tmp_path, change):
    """A copy of the .keras file whose optimizer configuration was changed."""
    with (
        zipfile.ZipFile(folder / "saved.keras") as archive,
        zipfile.ZipFile(tmp_path / "edited.keras", "w") as copy,
    ):
        for name in archive.namelist():
            content = archive.read(name)
            if name == "config.json":
                config = json.loads(content)
                change(config["compile_config"]["optimizer"]["config"])
                content = json.dumps(config)
            copy.writestr(name, content)
    return tmp_path / "edited.keras"


@of_one_optimizer
def test_arguments_that_a_file_does_not_know_yet_get_their_defaults(run, tmp_path):
    _, trained, states, folder = run
    path = edited(folder, tmp_path, lambda config: config.pop("secure_noise"))
    model = dp.load_model(path)
    assert model.optimizer.get_config() == trained.optimizer.get_config()
    assert_equal_states(state(model), states[-1])


@of_one_optimizer
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda config: config.update(noise_shape="future"), "noise_shape.*another version"),
        (lambda config: config.pop("noise_multiplier"), "noise_multiplier.*another version"),
        (lambda config: config.update(noise_multiplier=-1.0), "noise_multiplier=-1.*or edited"),
    ],
)
def test_configurations_that_cannot_be_honoured_are_refused(run, tmp_path, change, reason):
    with pytest.raises(ValueError, match=f"(?s)can make no ADADP .*{reason}"):
        dp.load_model(edited(run[3], tmp_path, change))


@of_one_optimizer
def test_a_ledger_of_the_first_version_is_read_and_one_of_a_later_version_refused(run, tmp_path):
    make, trained, _, folder = run
    from tf_adadp.accounting.files import document as ledger_document

    content = json.loads(trained.ledger.to_json())["ledger"]
    entries = [
        {k: v for k, v in entry.items() if k not in ("adaptive", "dataset")}
        for entry in content["entries"]
    ]
    first = {"history_lost": content["history_lost"], "entries": entries}
    document = {"format": "tf_adadp.PrivacyLedger", "sha256": ledger_document.checksum_of(first)}
    path = tmp_path / "other.weights.h5"
    for version, migrated in ((1, True), (3, False)):
        shutil.copy(folder / "saved.weights.h5", path)
        text = json.dumps({**document, "version": version, "ledger": first})
        with h5py.File(path, "a") as file:
            del file["vars/ledger"]
            file["vars/ledger"] = np.frombuffer(text.encode(), np.uint8)
        model = make()
        if migrated:
            model.load_weights(path)
            assert model.epsilon(1e-3) == trained.epsilon(1e-3)
        else:
            with pytest.raises(ValueError, match="its version is 3"):
                model.load_weights(path)
            with pytest.raises(ValueError, match="ledger of the loaded weights is damaged"):
                model.epsilon(1e-3)


def without_last_variable(file):
    variables = file["optimizer/vars"]
    del variables[str(len(variables) - 1)]


def of_another_shape(file):
    variables = file["optimizer/vars"]
    last = str(len(variables) - 1)
    shape = variables[last].shape
    del variables[last]
    variables[last] = np.zeros((*shape, 2), np.float32)


@of_one_optimizer
@pytest.mark.parametrize("change", [without_last_variable, of_another_shape])
def test_optimizer_state_that_does_not_fit_is_refused(run, tmp_path, change):
    make, trained, _, folder = run
    path = shutil.copy(folder / "saved.weights.h5", tmp_path / "other.weights.h5")
    with h5py.File(path, "a") as file:
        change(file)
    model = make()
    with pytest.raises(
        ValueError, match=r"(?s)variables of an optimizer, this ADADP has .*version"
    ):
        model.load_weights(path)
    assert int(model.optimizer.iterations) == 0  # nothing of it, rather than a part
    assert model.epsilon(1e-3) == trained.epsilon(1e-3)  # the weights did come in
    with pytest.warns(UserWarning, match="variables of an optimizer"):
        model.load_weights(path, skip_mismatch=True)
    assert model.epsilon(1e-3) == trained.epsilon(1e-3)


@of_one_optimizer
def test_weights_saved_before_training_leave_the_optimizer_as_it_is(run, tmp_path):
    make = run[0]
    untrained = make()
    untrained.save_weights(tmp_path / "first.weights.h5")
    model = make()
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        model.load_weights(tmp_path / "first.weights.h5")
    assert int(model.optimizer.iterations) == 0
    assert model.epsilon(1e-3) == 0.0


# --- damage ---------------------------------------------------------------------------------------


@of_one_optimizer
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_half_a_file_is_named_and_nothing_of_it_loaded(run, tmp_path, share):
    make, _, states, folder = run
    whole = (folder / "saved.weights.h5").read_bytes()
    backup = tmp_path / "backup"
    backup.mkdir()
    damaged = backup / "latest.weights.h5"
    damaged.write_bytes(whole[: int(share * len(whole))])
    model = make()
    before = state(model)[0][:4]
    with pytest.raises(OSError, match=r"latest.weights.h5 is damaged.*Nothing was loaded.*delete"):
        restored(lambda: model, tmp_path, "backup")
    for a, b in zip(before, state(model)[0][:4], strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.epsilon(1e-3) == 0.0  # nor was its history lost
    # Keras's second copy is taken where there is one.
    (backup / "latest.weights.h5.bkp").write_bytes(whole)
    assert_equal_states(state(restored(make, tmp_path, "backup")), states[-1])


@of_one_optimizer
def test_a_missing_file_loses_no_history(run, tmp_path):
    model = run[0]()
    with pytest.raises(FileNotFoundError, match="no such file"):
        model.load_weights(tmp_path / "none.weights.h5")
    assert model.epsilon(1e-3) == 0.0


@of_one_optimizer
@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_what_was_there_stays_until_the_new_file_is_whole(run, tmp_path, monkeypatch, name):
    _, model, _, _ = run
    path = tmp_path / name
    write = model.save if name.endswith(".keras") else model.save_weights
    write(path)
    path.chmod(0o600)
    before = path.read_bytes()

    def power_cut(store):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.optimizer, "save_own_variables", power_cut)
        with pytest.raises(KeyboardInterrupt):
            write(path)
    assert path.read_bytes() == before
    write(path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert path.stat().st_mode & 0o777 == 0o600
    with h5py.File(path) if name.endswith(".h5") else zipfile.ZipFile(path):
        pass
