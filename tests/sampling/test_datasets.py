"""Datasets that are read once, into memory or into a folder, and trained on."""

import json
import os
import resource
import stat
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tf_adadp.sampling.datasets import columns, read_dataset, reading, record_spec

Dataset = tf.data.Dataset
N = 50


def arrays():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(N, 3)).astype(np.float32)
    return x, np.arange(N), generator.uniform(size=N)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(reading, "_BATCH", 7)
    monkeypatch.setattr(columns, "_COMMIT_BYTES", 100)


@pytest.fixture(params=["memory", "folder"])
def cache_dir(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "records"


def read(dataset, cache_dir=None, **options):
    return read_dataset(dataset, cache_dir=cache_dir, verbose=False, **options)


@pytest.mark.parametrize("batch", [None, 4])
def test_records_are_those_of_the_dataset(cache_dir, batch):
    x, y, weight = arrays()
    dataset = Dataset.from_tensor_slices(({"a": x, "b": x[:, :0]}, y, weight))
    found = read(dataset if batch is None else dataset.batch(batch), cache_dir)
    assert set(found[0]) == {"a", "b"}
    np.testing.assert_array_equal(found[0]["a"], x)
    assert found[0]["b"].shape == (N, 0)
    np.testing.assert_array_equal(found[1], y)
    assert found[1].dtype == np.int64
    np.testing.assert_array_equal(found[2], weight.astype(np.float32))
    spec = record_spec(dataset)
    assert spec[0]["a"] == tf.TensorSpec((None, 3), tf.float32)
    assert spec[2].dtype == tf.float32


def test_elements_without_labels():
    x, y, weight = read(Dataset.from_tensor_slices(arrays()[0]))
    assert x.shape == (N, 3)
    assert y is None
    assert weight is None


def test_strings_stay_in_memory(tmp_path):
    words = np.array([b"a", b"bc\0"] * 5, object)
    dataset = Dataset.from_tensor_slices((words, np.arange(10)))
    assert read(dataset)[0].tolist() == words.tolist()
    with pytest.raises(ValueError, match="x holds strings.*StringLookup"):
        read(dataset, tmp_path / "records")


def test_a_dataset_is_read_once():
    passes = []

    def generate():
        passes.append(1)
        yield from ((np.float32(i), i) for i in range(N))

    spec = (tf.TensorSpec((), tf.float32), tf.TensorSpec((), tf.int32))
    dataset = Dataset.from_generator(generate, output_signature=spec)
    assert read(dataset)[0] is read(dataset)[0]
    assert len(passes) == 1


def test_a_folder_is_opened_again_and_private(tmp_path):
    x, y, _ = arrays()
    folder = tmp_path / "records"
    dataset = Dataset.from_tensor_slices((x, y))
    read(dataset.shuffle(N), folder)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert {stat.S_IMODE(os.stat(folder / n).st_mode) for n in ("0.npy", "1.npy")} == {0o600}
    before = os.stat(folder / "0.npy").st_mtime_ns
    again = read(dataset.shuffle(N), folder)
    assert os.stat(folder / "0.npy").st_mtime_ns == before
    assert isinstance(again[0], np.memmap)
    np.testing.assert_array_equal(again[0], x[again[1]])
    np.testing.assert_array_equal(np.load(folder / "0.npy", mmap_mode="r"), again[0])


OTHERS = {
    "values": lambda x, y: (x + 1, y),
    "labels": lambda x, y: (x, y + 1),
    "number": lambda x, y: (x[:-1], y[:-1]),
    "columns": lambda x, y: (x, y.astype(np.int32)),
    "structure": lambda x, y: ({"x": x}, y),
    "shape": lambda x, y: (x[:, :2], y),
    "half": lambda x, y: (x[: N // 2], y[: N // 2]),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_folder_of_another_dataset_is_refused(tmp_path, other, shuffled, batched):
    x, y, _ = arrays()
    dataset, given = (Dataset.from_tensor_slices(d) for d in ((x, y), OTHERS[other](x, y)))
    if shuffled:
        dataset, given = dataset.shuffle(N), given.shuffle(N)
    if batched:
        dataset, given = dataset.batch(7), given.batch(7)
    read(dataset, tmp_path / "records")
    with pytest.raises(ValueError, match="another dataset"):
        read(given, tmp_path / "records")


def test_other_folders_are_refused(tmp_path):
    dataset = Dataset.from_tensor_slices(arrays()[:2])
    for name in ("photo.jpg", "0.npy"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match="holds other files"):
            read(dataset, tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        read(dataset, tmp_path / "file")
    folder = tmp_path / "records"
    read(dataset, folder)
    os.truncate(folder / "0.npy", 200)
    with pytest.raises(ValueError, match="damaged: 0.npy"):
        read(dataset, folder)
    (folder / "records.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="damaged, or of another version"):
        read(dataset, folder)


class Interrupted(Exception):
    pass


def interrupted(folder, dataset, monkeypatch, after=30):
    """Reads until so many records were appended."""
    append = columns.FolderColumns.append

    def failing(self, leaves):
        if self.rows >= after:
            raise Interrupted
        append(self, leaves)

    with monkeypatch.context() as patched:
        patched.setattr(columns.FolderColumns, "append", failing)
        with pytest.raises(Interrupted):
            read(dataset, folder)
    rows = json.loads((folder / "records.json").read_text(encoding="utf-8"))["rows"]
    assert 0 < rows <= after + 7
    return rows


@pytest.mark.parametrize("shuffled", [False, True])
def test_an_interrupted_read_goes_on(tmp_path, monkeypatch, shuffled):
    x, y, _ = arrays()
    dataset = Dataset.from_tensor_slices((x, y)).batch(7)
    dataset = dataset.shuffle(N) if shuffled else dataset
    rows = interrupted(tmp_path / "records", dataset, monkeypatch)
    appended = []
    append = columns.FolderColumns.append
    monkeypatch.setattr(
        columns.FolderColumns,
        "append",
        lambda self, leaves: (appended.append(len(leaves[0])), append(self, leaves)),
    )
    found = read(dataset, tmp_path / "records")
    assert sum(appended) == (N if shuffled else N - rows)
    order = np.argsort(found[1])
    np.testing.assert_array_equal(found[0][order], x)
    np.testing.assert_array_equal(found[1][order], y)


def test_an_interrupted_read_of_a_dataset_that_changes_is_refused(tmp_path, monkeypatch):
    x, y, _ = arrays()
    interrupted(tmp_path / "records", Dataset.from_tensor_slices((x, y)), monkeypatch)
    with pytest.raises(ValueError, match="changes between passes"):
        read(Dataset.from_tensor_slices((x + 1, y)), tmp_path / "records")
    with pytest.raises(ValueError, match="another dataset"):
        read(Dataset.from_tensor_slices((x[:10], y[:10])), tmp_path / "records")


def test_a_shuffled_read_may_be_interrupted_twice(tmp_path, monkeypatch):
    x, y, _ = arrays()
    dataset = Dataset.from_tensor_slices((x, y)).shuffle(N)
    for after in (30, 10):
        interrupted(tmp_path / "records", dataset, monkeypatch, after)
    assert len(read(dataset, tmp_path / "records")[0]) == N


def test_an_empty_dataset_leaves_no_complete_folder(tmp_path):
    x, y, _ = arrays()
    dataset = Dataset.from_tensor_slices((x, y))
    with pytest.raises(ValueError, match="no records"):
        read(dataset.filter(lambda x, y: y < 0), tmp_path / "records")
    assert len(read(dataset.filter(lambda x, y: y >= 0), tmp_path / "records")[0]) == N


def test_two_processes_do_not_write_one_folder(tmp_path):
    folder = tmp_path / "records"

    def opened():
        return columns.FolderColumns(folder, ["x"], [np.dtype("float32")], 3)

    one, late = opened(), opened()
    one.begin(ordered=True)
    with pytest.raises(ValueError, match="written by another process"):
        opened().begin(ordered=True)
    one.append([np.ones((3, 2))])
    found = one.finish()
    one.close()
    late.begin(ordered=True)  # it opened the folder before there was anything
    assert late.complete
    assert found[0].sum() == 6
    late.close()


def ragged():
    return Dataset.from_tensor_slices(tf.ragged.constant([[1.0], [1.0, 2.0]]))


def unequal():
    return Dataset.from_generator(
        lambda: (np.zeros(1 + i // 9, np.float32) for i in range(20)),
        output_signature=tf.TensorSpec((None,), tf.float32),
    )


BAD = {
    "without end": (lambda: Dataset.range(5).repeat(), {}, "has no end"),
    "empty": (lambda: Dataset.range(0), {}, "no records"),
    "found empty": (lambda: Dataset.range(5).filter(lambda i: i > 5), {}, "no records"),
    "ragged": (ragged, {}, "x is a Ragged"),
    "unequal in a batch": (unequal, {}, "unequal shapes"),
    "unequal after a map": (lambda: unequal().map(lambda x: x + 1.0), {}, "unequal shapes"),
    "unequal batches": (lambda: unequal().batch(1), {}, "unequal shapes"),
    "no batches": (lambda: Dataset.range(5), {"batched": True}, "x is a scalar"),
    "rows": (
        lambda: Dataset.from_tensor_slices((np.zeros((2, 3)), np.zeros((2, 4)))),
        {"batched": True},
        "y has 4 rows",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_datasets_are_refused(cache_dir, name):
    build, options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        read(build(), cache_dir, **options)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="dataset"):
        read(np.zeros(3))
    with pytest.raises(TypeError, match="batched"):
        read(Dataset.range(5), batched=1)
    with pytest.raises(ValueError, match="UserLots.from_dataset"):
        dp.PoissonLots.from_dataset(Dataset.range(5), expected_size=2, user_ids="user")


def test_more_records_than_memory_are_refused():
    column = columns.Columns(["x"], [np.dtype("float32")], limit=100)
    column.append([np.zeros((10, 2))])
    with pytest.raises(ValueError, match="first 20 records take 160 bytes.*cache_dir"):
        column.append([np.zeros((10, 2))])


@pytest.mark.parametrize("kind", [dp.PoissonLots, dp.ShuffledLots])
def test_lots_are_those_of_the_arrays(cache_dir, kind):
    x, y, weight = arrays()
    sized = {"expected_size": 10} if kind is dp.PoissonLots else {"size": 10}
    ours = kind.from_dataset(
        Dataset.from_tensor_slices((x, y, weight)).batch(4),
        cache_dir=cache_dir, verbose=False, seed=1, **sized,
    )  # fmt: skip
    theirs = kind(x, y, sample_weight=weight, seed=1, **sized)
    for one, other in zip(ours.take(2, 4), theirs.take(2, 4), strict=True):
        keras.tree.map_structure(np.testing.assert_array_equal, one, other)


def test_lots_of_users_take_their_ids_out_of_the_features():
    x, y, _ = arrays()
    dataset = Dataset.from_tensor_slices(({"x": x, "user": y // 5}, y))
    sizes = {"expected_users": 3, "max_records_per_user": 2, "expected_size": 5}
    lots = dp.UserLots.from_dataset(dataset, user_ids="user", verbose=False, **sizes)
    assert lots.law.num_users == 10
    assert set(lots.element_spec[0]) == {"x"}
    with pytest.raises(ValueError, match="user_ids='person'"):
        dp.UserLots.from_dataset(dataset, user_ids="person", verbose=False, **sizes)
    with pytest.raises(ValueError, match="user_ids is an array beside a dataset"):
        dp.UserLots.from_dataset(dataset, user_ids=np.arange(4), verbose=False, **sizes)
    with pytest.raises(ValueError, match="present is an array beside a dataset"):
        dp.PoissonLots.from_dataset(dataset, expected_size=1, present=np.ones(4, bool))
    with pytest.raises(TypeError, match="expected_users"):
        dp.UserLots.from_dataset(dataset, user_ids="user")


def a_model(**options):
    keras.utils.set_random_seed(0)
    model = dp.DPModel(keras.Sequential([keras.Input([3]), keras.layers.Dense(2)]))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = dp.DPSGD(0.5, noise_multiplier=1.0, seed=1)
    model.compile(optimizer, loss, log_raw_metrics=False, **options)
    return model


def test_fit_takes_a_dataset_as_it_takes_arrays(capsys):
    x, y, weight = arrays()
    y = y % 2
    one, other = a_model(), a_model()
    dataset = Dataset.from_tensor_slices((x, y, weight)).batch(4)
    settings = {"batch_size": 10, "epochs": 2, "class_weight": {0: 0.5}, "validation_split": 0.2}
    one.fit(dataset, verbose=0, **settings)
    other.fit(x, y, sample_weight=weight, verbose=0, **settings)
    for ours, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert one.epsilon(1e-5) == other.epsilon(1e-5)
    assert "record" not in capsys.readouterr().out
    assert dp.validate(one, x=dataset).ok
    with pytest.raises(ValueError, match="y is given beside"):
        one.fit(dataset, y, batch_size=10)
    with pytest.raises(ValueError, match="batch_size"):
        one.fit(dataset)


def test_the_bar_counts_records(capsys):
    dp.PoissonLots.from_dataset(Dataset.from_tensor_slices(arrays()[0]), expected_size=5)
    assert f"{N}/{N}" in capsys.readouterr().out


class Batches(keras.utils.PyDataset):
    def __init__(self, size=4):
        super().__init__()
        self.x, self.y, _ = arrays()
        self.size, self.read = size, []

    def __len__(self):
        return -(-N // self.size)

    def __getitem__(self, index):
        self.read.append(index)
        part = slice(index * self.size, (index + 1) * self.size)
        return self.x[part], self.y[part]


def test_rows_of_a_pydataset():
    source = Batches()
    ours = dp.PoissonLots(source, expected_size=10, seed=1)
    theirs = dp.PoissonLots(source.x, source.y, expected_size=10, seed=1)
    assert ours.num_examples == N
    source.read.clear()
    (one,), (other,) = ours.take(1, 4), theirs.take(1, 4)
    keras.tree.map_structure(np.testing.assert_array_equal, one, other)
    assert len(source.read) == len(set(source.read))  # each batch once
    everything = dp.PoissonLots(source, expected_size=N)
    source.x = source.x[1:]
    with pytest.raises(ValueError, match="batch 12 of x has 1 rows, and 2 were expected"):
        next(iter(everything.take(1, 4)))


@pytest.mark.extended
def test_more_records_than_the_process_may_hold(tmp_path):
    """400 MB of records, in a process whose own memory may grow by 200 MB."""
    program = """
import resource, sys
import numpy as np, tensorflow as tf, keras, tf_adadp as dp
model = dp.DPModel(keras.Sequential([keras.Input([1000]), keras.layers.Dense(1)]))
model.compile(dp.DPSGD(0.1, noise_multiplier=1.0), "mse", log_raw_metrics=False)
model.fit(np.zeros((8, 1000), "float32"), np.zeros((8, 1)), batch_size=4, verbose=0)
used = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 2 * 10**8, resource.RLIM_INFINITY))
def one(i):
    return tf.fill([1000], tf.cast(i, tf.float32)), tf.zeros([1])
dataset = tf.data.Dataset.range(100_000).map(one)
lots = dp.PoissonLots.from_dataset(dataset, expected_size=64, cache_dir=sys.argv[1], verbose=False)
model.fit(lots, steps_per_epoch=5, verbose=0)
x = lots.source.rows(np.array([99_999]), 1)[1][0]
assert x[0, 0] == 99_999
"""
    subprocess.run(
        [sys.executable, "-c", program, tmp_path / "records"],
        check=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert (tmp_path / "records" / "0.npy").stat().st_size > 4e8
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
