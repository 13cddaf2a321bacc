"""The private state file: one bit-identical continuation, once, and for nobody else."""

import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest

import tf_adadp as dp
from tests.helpers import ROOT, data, plain_model, private_model
from tf_adadp import noise

X, Y = data()


def make(optimizer=None):
    """Has dropout, whose masks come from their own secret key."""
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.3)]
    return private_model(optimizer or dp.ADADP(noise_multiplier=1.0), plain_model(*layers))


def train(model, steps, before=0, of=None):
    """Trains `steps` of a run of `of` steps, an epoch each, after `before` of them."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch + 1 == before + steps

    run = {"initial_epoch": before, "epochs": of or before + steps, "steps_per_epoch": 1}
    model.fit(X, Y, batch_size=30, verbose=0, callbacks=[Stop()], **run)


def save(model, folder):
    folder.mkdir()
    model.save_weights(folder / "w.weights.h5")
    model.save_private_state(folder / "private")


def load(folder, private="private", model=None):
    model = model or make()
    model.load_weights(folder / "w.weights.h5")
    model.load_private_state(folder / private)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with weights and private state after two steps; copied, not loaded, by tests."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    model = make()
    train(model, 2)
    before = secrets(model)
    save(model, folder)
    assert not before & secrets(model)  # this model goes on under new keys
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def secrets(model):
    """The words of the noise keys."""
    keys = [k for k in vars(model.optimizer).values() if isinstance(k, noise.SecretKey)]
    assert len(keys) >= 2
    return {int(word) for key in keys for word in key.key.numpy()}


def run_here(folder, lines):
    """Runs lines of Python, with this file as `t` and `folder`, in a process of its own."""
    script = (
        "import pathlib, sys\nfolder = pathlib.Path(sys.argv[1])\n"
        "from tests.persistence import test_private_state as t\n" + textwrap.dedent(lines)
    )
    result = subprocess.run(
        [sys.executable, "-c", script, folder], cwd=ROOT,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.extended
def test_ten_steps_are_five_and_five_in_another_process(saved, tmp_path):
    for copy in ("straight", "parts"):
        shutil.copytree(saved, tmp_path / copy)
    # All in new processes: in this one other tests chose how TensorFlow rounds.
    run_here(
        tmp_path,
        """
        straight = t.load(folder / "straight")
        t.train(straight, 10, of=10)
        t.save(straight, folder / "ten")
        first = t.load(folder / "parts")
        t.train(first, 5, of=10)
        t.save(first, folder / "half")
        assert t.secrets(first).isdisjoint(t.secrets(straight))
        """,
    )
    run_here(
        tmp_path,
        """
        model = t.load(folder / "half")
        t.train(model, 5, before=5, of=10)
        t.save(model, folder / "done")
        """,
    )
    straight, done = make(), make()
    straight.load_weights(tmp_path / "ten" / "w.weights.h5")
    done.load_weights(tmp_path / "done" / "w.weights.h5")
    variables = [m.model.weights + m.optimizer.variables for m in (straight, done)]
    for a, b in zip(*variables, strict=True):
        assert keras.ops.convert_to_numpy(a).tobytes() == keras.ops.convert_to_numpy(b).tobytes()
    assert int(done.optimizer.iterations) == 12
    assert done.epsilon(1e-3) == straight.epsilon(1e-3)
    # It is the keys that make them equal: without them the same weights go elsewhere.
    without = make()
    without.load_weights(tmp_path / "half" / "w.weights.h5")
    train(without, 5, before=5, of=10)
    kernels = [keras.ops.convert_to_numpy(m.trainable_variables[0]) for m in (without, done)]
    assert np.mean(kernels[0] == kernels[1]) < 0.1


def test_the_file_is_for_its_owner_alone(saved):
    assert stat.S_IMODE(os.stat(saved / "private").st_mode) == 0o600
    content = json.loads((saved / "private").read_text())
    assert content["version"] == 1
    assert set(content["state"]["keys"]) == {"_noise_key", "_example_key"}


def test_it_is_loaded_once(folder):
    model = load(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["w.weights.h5"]
    with pytest.raises(FileNotFoundError, match="no such private state. It may have been loaded"):
        model.load_private_state(folder / "private")


def test_of_two_that_load_at_once_one_gets_it(folder, monkeypatch):
    """The second comes while the first is about to read."""
    first, second = make(), make()
    for model in (first, second):
        model.load_weights(folder / "w.weights.h5")
    rename, refused = os.rename, []

    def rename_and_let_the_other_try(source, target):
        rename(source, target)
        if not refused:
            refused.append(None)
            with pytest.raises(FileNotFoundError, match="loaded"):
                second.load_private_state(folder / "private")

    monkeypatch.setattr(os, "rename", rename_and_let_the_other_try)
    first.load_private_state(folder / "private")
    assert refused
    assert secrets(first).isdisjoint(secrets(second))


def test_a_kill_after_the_file_is_gone_and_before_the_keys_are_used(folder, monkeypatch):
    """The order of things: deleted first. A crash then loses the keys, and repeats none."""
    model = make()
    model.load_weights(folder / "w.weights.h5")
    own = secrets(model)

    def power_cut(*_):
        assert [p.name for p in folder.iterdir()] == ["w.weights.h5"]
        raise KeyboardInterrupt

    monkeypatch.setattr(noise.SecretKey, "take_over", power_cut)
    with pytest.raises(KeyboardInterrupt):
        model.load_private_state(folder / "private")
    assert secrets(model) == own


def test_a_run_that_goes_on_after_saving_shares_no_noise_with_the_loaded_one(tmp_path):
    model = make(dp.DPSGD(1.0, noise_multiplier=1.0, l2_norm_clip=1e-6))  # noise alone
    train(model, 1)
    save(model, tmp_path / "run")
    other = load(
        tmp_path / "run", model=make(dp.DPSGD(1.0, noise_multiplier=1.0, l2_norm_clip=1e-6))
    )
    start = [v.numpy() for v in model.trainable_variables]
    for run in (model, other):
        train(run, 1)
    moves = [
        np.concatenate(
            [(v.numpy() - s).ravel() for v, s in zip(m.trainable_variables, start, strict=True)]
        )
        for m in (model, other)
    ]
    # Equal noise would make this 1; 5/√n is a false alarm in 1.7 million.
    assert abs(np.corrcoef(*moves)[0, 1]) < 5 / np.sqrt(moves[0].size)


# --- refused --------------------------------------------------------------------------------------


def loose_mode(path):
    path.chmod(0o640)


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def hard_link(path):
    os.link(path, path.with_name("second"))


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-20])


def edit(change):
    def apply(path):
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return apply


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (loose_mode, "others can read or replace it .mode 640"),
        (link, "symbolic link"),
        (hard_link, "not a plain file with one name"),
        (cut_short, "not a private state, or its writing was interrupted"),
        (edit(lambda d: d["state"].update(iterations=1)), "edited or damaged"),
        (edit(lambda d: d.update(version=2)), "version is 2, this tf_adadp reads 1"),
        (edit(lambda d: d.update(format="other")), "not a private state"),
    ],
    ids=["mode", "link", "hard_link", "cut", "edited", "version", "format"],
)
def test_a_file_that_may_be_known_or_false_is_refused_and_left(folder, spoil, reason):
    spoil(folder / "private")
    before = sorted(os.listdir(folder))
    model = make()
    model.load_weights(folder / "w.weights.h5")
    own = secrets(model)
    with pytest.raises(ValueError, match=f"private: .*{reason}"):
        model.load_private_state(folder / "private")
    assert secrets(model) == own
    assert sorted(os.listdir(folder)) == before


def test_it_belongs_to_one_state_of_training(folder):
    fresh = make()
    fresh.optimizer.build(fresh.trainable_variables)
    with pytest.raises(ValueError, match="its iterations is 2, that of this model 0"):
        fresh.load_private_state(folder / "private")
    later = make()
    later.load_weights(folder / "w.weights.h5")
    later.ledger.add(dp.accounting.PoissonSampling(120, 30).event(1.0))
    with pytest.raises(ValueError, match="(?s)its ledger is .*Load the weights that were saved"):
        later.load_private_state(folder / "private")
    other = make(dp.ADAN(noise_multiplier=1.0))
    with pytest.warns(UserWarning, match="1 objects could not be loaded"):
        other.load_weights(folder / "w.weights.h5", skip_mismatch=True)
    with pytest.raises(ValueError, match="its optimizer is 'ADADP', that of this model 'ADAN'"):
        other.load_private_state(folder / "private")
    assert (folder / "private").exists()


@pytest.mark.extended
def test_it_continues_lots_of_its_law_alone(folder):
    model = load(folder)
    lots = dp.PoissonLots(X, Y, expected_size=40)
    with pytest.raises(ValueError, match="continues lots of .*Give the data and sampling"):
        model.fit(lots, verbose=0)
    seeded = dp.PoissonLots(X, Y, expected_size=30, seed=1)
    with pytest.raises(ValueError, match="continues lots of"):
        model.fit(seeded, verbose=0)
    fitting = dp.PoissonLots(X, Y, expected_size=30)
    model.fit(fitting, steps_per_epoch=1, verbose=0)
    assert fitting.step == 3


def test_nothing_is_written_over_or_through_a_link(tmp_path):
    model = make()
    model.optimizer.build(model.trainable_variables)
    own = secrets(model)
    (tmp_path / "there").write_text("something")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError, match="Delete this one, or give another path"):
            model.save_private_state(tmp_path / name)
    assert (tmp_path / "there").read_text() == "something"
    assert not (tmp_path / "nowhere").exists()
    assert secrets(model) == own


def test_states_that_could_not_be_continued_are_refused(tmp_path):
    with pytest.raises(ValueError, match="before training"):
        make().save_private_state(tmp_path / "p")
    seeded = make(dp.DPSGD(noise_multiplier=1.0, seed=1))
    seeded.optimizer.build(seeded.trainable_variables)
    with pytest.raises(ValueError, match="seed=1: a seeded run has no secrets"):
        seeded.save_private_state(tmp_path / "p")
    with pytest.raises(ValueError, match="seed=1"):
        seeded.load_private_state(tmp_path / "p")
    uncharged = make()
    uncharged.optimizer.build(uncharged.trainable_variables)
    uncharged.optimizer._noise_key.next_step()
    with pytest.raises(ValueError, match="1 releases were not charged"):
        uncharged.save_private_state(tmp_path / "p")
    assert not (tmp_path / "p").exists()


@pytest.mark.extended
def test_lots_that_something_else_drew_from_are_not_continued(tmp_path):
    model, lots = make(), dp.PoissonLots(X, Y, expected_size=30)
    model.fit(lots, steps_per_epoch=1, verbose=0)
    list(lots.take(1, 8))
    with pytest.raises(ValueError, match="were drawn from elsewhere since"):
        model.save_private_state(tmp_path / "p")
    assert not (tmp_path / "p").exists()


@pytest.mark.extended
def test_it_waits_for_the_end_of_a_fit_and_of_a_pass(tmp_path):
    model = make()
    refused = []

    class Saves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            for method in (self.model.save_private_state, self.model.load_private_state):
                with pytest.raises(RuntimeError, match="was called while fit runs"):
                    method(tmp_path / "p")
                refused.append(method)

    lots = dp.ShuffledLots(X, Y, size=30)
    model.fit(lots, steps_per_epoch=2, verbose=0, callbacks=[Saves()])
    assert len(refused) == 4
    with pytest.raises(ValueError, match="ended 2 lots into a pass of 4"):
        model.save_private_state(tmp_path / "p")
    assert not (tmp_path / "p").exists()
