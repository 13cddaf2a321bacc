"""Steps of tf.data pipelines: which keep one record in one element, and which are refused."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_adadp.sampling.datasets.pipelines import Pipeline, judge

Dataset = tf.data.Dataset
TABLE = tf.function(keras.layers.IntegerLookup(vocabulary=[1, 2]))
ORDERED, SHUFFLED = Pipeline(False, True), Pipeline(False, False)
BATCHES = Pipeline(True, True)


@pytest.fixture
def records():
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    return Dataset.from_tensor_slices((x, np.arange(20)))


def from_generator():
    spec = (tf.TensorSpec((), tf.int32), tf.TensorSpec((), tf.int32))
    return Dataset.from_generator(lambda: iter([(1, 2)]), output_signature=spec)


@pytest.fixture
def lines(tmp_path):
    """Two files of lines."""
    paths = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    for path in paths:
        with open(path, "w", encoding="utf-8") as file:
            file.write("a,b,label\n" + "1,2,0\n" * 10)
    return paths


KEPT = {
    "shuffle": (lambda d: d.shuffle(20), SHUFFLED),
    "batch": (lambda d: d.batch(4).prefetch(2), BATCHES),
    "batch in parallel": (lambda d: d.batch(4, num_parallel_calls=2, deterministic=False),
                          Pipeline(True, False)),
    "batch and unbatch": (lambda d: d.batch(4).unbatch(), ORDERED),
    "batch and rebatch": (lambda d: d.batch(4).rebatch(3), BATCHES),
    "padded to a public shape": (lambda d: d.padded_batch(4, padded_shapes=([5], [])), BATCHES),
    "map": (lambda d: d.map(lambda x, y: (x / 255.0, y)), ORDERED),
    "map in any order": (
        lambda d: d.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False), SHUFFLED),
    "map by Python": (
        lambda d: d.map(lambda x, y: (tf.numpy_function(abs, [x], tf.float32), y)), ORDERED),
    "choose": (lambda d: d.shard(2, 0).filter(lambda x, y: y > 3).skip(1).take(5).cache(), ORDERED),
    "a lookup in a function": (lambda d: d.map(lambda x, y: (x, TABLE(y))), ORDERED),
    "a branch": (lambda d: d.map(lambda x, y: (tf.cond(y > 3, lambda: x, lambda: -x), y)), ORDERED),
    "number": (lambda d: d.enumerate().map(lambda i, record: record), ORDERED),
    "repeat once": (lambda d: d.repeat(1), ORDERED),
    "options": (lambda d: d.with_options(tf.data.Options()), ORDERED),
    "errors left out": (lambda d: d.ignore_errors(), ORDERED),
    "scaled after batch": (lambda d: d.batch(4).map(lambda x, y: (x / 255.0, y)), BATCHES),
    "own maximum after batch": (
        lambda d: d.batch(4).map(lambda x, y: (x / tf.reduce_max(x, 1)[:, None], y)), BATCHES),
    "one-hot after batch": (
        lambda d: d.batch(4, drop_remainder=True).map(lambda x, y: (x, tf.one_hot(y, 9))), BATCHES),
    "a layer after batch": (
        lambda d: d.batch(4).map(lambda x, y: (keras.layers.Rescaling(0.1)(x), y)), BATCHES),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_steps_that_keep_records_apart(records, name):
    build, expected = KEPT[name]
    assert judge(build(records)) == expected


STATE = tf.Variable(0.0)
# All rows of one dataset, read in a function of each record of another.
ALL = Dataset.from_tensor_slices(np.ones((4, 3), np.float32))


def _count(x, y):
    STATE.assign_add(1.0)
    return x, y


def _windows(d):
    return d.window(3, shift=1).flat_map(lambda x, y: Dataset.zip((x, y)).batch(3))


REFUSED = {
    "repeat": (lambda d: d.repeat(2), r"repeat\(\)"),
    "repeat for ever": (lambda d: d.repeat(), r"repeat\(\)"),
    "windows": (_windows, r"window\(\)"),
    "mixup": (lambda d: Dataset.zip((d.shuffle(9), d.shuffle(9))), r"zip\(\).*mixup"),
    "mixup of batches": (lambda d: Dataset.zip((d.batch(4), d.shuffle(9).batch(4))), r"zip\(\)"),
    "twice": (lambda d: d.concatenate(d.map(lambda x, y: (-x, y))), r"concatenate\(\)"),
    "with replacement": (lambda d: Dataset.sample_from_datasets([d, d]), "interleave"),
    "chosen by records": (
        lambda d: Dataset.choose_from_datasets([d, d.map(lambda x, y: (-x, y))],
                                               d.map(lambda x, y: y % 2)), "chooses between"),
    "resampled": (
        lambda d: d.rejection_resample(lambda x, y: tf.cast(y > 3, tf.int32), [0.5, 0.5]),
        "chooses"),
    "several of one": (lambda d: d.flat_map(lambda x, y: Dataset.from_tensor_slices(x)),
                       r"flat_map\(\) makes several"),
    "unbatch a record": (lambda d: d.map(lambda x, y: x).unbatch(), r"unbatch\(\)"),
    "a dataset in a map": (
        lambda d: d.map(lambda x, y: ALL.reduce(x, lambda s, b: s + b)), "for each record"),
    "a dataset in a filter": (
        lambda d: d.filter(lambda x, y: ALL.reduce(x, lambda s, b: s + b)[0] > 3),
        "for each record"),
    "pairs of what is left": (
        lambda d: Dataset.zip((d.filter(lambda x, y: y > 3), Dataset.range(9))), "places"),
    "numbers of what is left": (lambda d: d.filter(lambda x, y: y > 3).enumerate(), "places"),
    "shards of what is left": (lambda d: d.filter(lambda x, y: y > 3).shard(2, 0), "places"),
    "whole batches of what is left": (
        lambda d: d.filter(lambda x, y: y > 3).batch(3, drop_remainder=True), "places"),
    "whole padded batches of what is left": (
        lambda d: d.map(lambda x, y: (x, y > 9)).filter(lambda x, y: y).padded_batch(
            3, padded_shapes=([3], []), padding_values=(0.0, False), drop_remainder=True),
        "places"),
    "whole batches of other sizes": (
        lambda d: d.filter(lambda x, y: y > 3).batch(4).rebatch(3, drop_remainder=True), "places"),
    "errors after batch": (lambda d: d.batch(4).ignore_errors(), r"ignore_errors\(\) drops"),
    "numbered batches": (lambda d: d.batch(4).enumerate(), "joins batches with single"),
    "batches and records": (
        lambda d: d.map(lambda x, y: x).concatenate(Dataset.range(9).map(
            lambda i: tf.fill([3], tf.cast(i, tf.float32))).batch(2)), "joins batches"),
    "state": (lambda d: d.scan(0.0, lambda s, r: (s + r[0][0], r)), r"scan\(\)"),
    "state in a variable": (lambda d: d.map(_count), "keeps state.*Assign"),
    "augmentation": (
        lambda d: d.map(lambda x, y: (x + tf.random.normal([3]), y)), "RandomFlip"),
    "augmentation by seeds": (
        lambda d: d.map(lambda x, y: (x + tf.random.stateless_normal([3], [1, 2]), y)), "random"),
    "random numbers beside": (lambda d: Dataset.zip((d, Dataset.random(seed=1))), r"random\(\)"),
    "ended by a record": (lambda d: d.take_while(lambda x, y: y < 3), r"take_while\(\)"),
    "grouped": (lambda d: d.group_by_window(lambda x, y: y % 2, lambda k, g: g.batch(3), 3),
                r"group_by_window\(\)"),
    "bucketed": (lambda d: d.bucket_by_sequence_length(lambda x, y: 3, [4], [2, 2]), "window"),
    "padded by others": (lambda d: d.padded_batch(4, padded_shapes=([None], [])), "padded_shapes"),
    "batches of batches": (lambda d: d.batch(2).batch(3), "batches of batches"),
    "centred after batch": (
        lambda d: d.batch(4).map(lambda x, y: (x - tf.reduce_mean(x, 0), y)), "after batch.*Mean"),
    "reversed after batch": (lambda d: d.batch(4).map(lambda x, y: (x[::-1], y)), "after batch"),
    "shuffled after batch": (
        lambda d: d.batch(4).map(lambda x, y: (tf.random.shuffle(x), y)), "after batch"),
    "summed after batch": (
        lambda d: d.batch(4).map(lambda x, y: (x, tf.reduce_sum(y)[None])), "after batch"),
    "filtered after batch": (
        lambda d: d.batch(4).filter(lambda x, y: tf.reduce_sum(y) > 3), r"filter\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_are_refused_by_name(records, name):
    build, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        judge(build(records))


def test_windows_of_a_series_are_refused():
    data = np.arange(20.0)
    with pytest.raises(ValueError, match="timeseries"):
        judge(keras.utils.timeseries_dataset_from_array(data, data, 5))


def test_features_and_labels_of_two_sources_are_zipped():
    x, y = Dataset.from_tensor_slices(np.zeros((5, 2))), Dataset.from_tensor_slices(np.arange(5))
    assert judge(Dataset.zip((x, y))) == ORDERED


def test_generators():
    assert judge(from_generator()) == ORDERED
    assert judge(Dataset.zip((from_generator(), from_generator()))) == ORDERED
    once = from_generator()
    with pytest.raises(ValueError, match="zip"):
        judge(Dataset.zip((once, once.map(lambda x, y: x))))
    with pytest.raises(ValueError, match="inside of another step"):
        judge(Dataset.range(3).flat_map(lambda i: from_generator()))


def test_files(lines, tmp_path):
    read = tf.data.TextLineDataset
    assert judge(read(lines)) == ORDERED
    assert judge(Dataset.from_tensor_slices(lines).interleave(read)) == ORDERED
    listed = Dataset.list_files(str(tmp_path / "*.csv"))
    assert judge(listed.interleave(lambda f: read(f).skip(1), num_parallel_calls=2)) == SHUFFLED
    csv = tf.data.experimental.make_csv_dataset
    options = {"label_name": "label", "num_epochs": 1}
    assert judge(csv(lines, 4, **options)).batched
    assert judge(csv(lines, 4, shuffle=False, **options)) == BATCHES
    with pytest.raises(ValueError, match="repeat"):
        judge(csv(lines, 4, label_name="label"))
    saved = str(tmp_path / "saved")
    Dataset.range(5).save(saved)
    assert judge(Dataset.load(saved)) == ORDERED
    for twice in (read([lines[0]] * 2), Dataset.from_tensor_slices([lines[0]] * 2).flat_map(read)):
        with pytest.raises(ValueError, match="reads a file twice"):
            judge(twice)
    with pytest.raises(ValueError, match="concatenate"):
        judge(read(lines[0]).concatenate(read(lines[0])))


def _serialized(kind):
    features = {"a": kind, "b": tf.io.FixedLenFeature([2], tf.float32)}
    return (
        Dataset.from_tensor_slices([b"", b""])
        .batch(2)
        .map(lambda s: tf.io.parse_example(s, features))
    )


def test_records_are_parsed_after_batch(lines):
    assert judge(_serialized(tf.io.FixedLenFeature([], tf.int64))) == BATCHES
    raw = tf.data.FixedLengthRecordDataset(lines[:1], 4).batch(3)
    assert judge(raw.map(lambda s: tf.io.decode_raw(s, tf.uint8))) == BATCHES
    csv = tf.data.TextLineDataset(lines).batch(3)
    assert judge(csv.map(lambda s: tf.io.decode_csv(s, [0.0, 0.0, 0]))) == BATCHES
    with pytest.raises(ValueError, match="ParseExampleV2"):
        judge(_serialized(tf.io.VarLenFeature(tf.int64)))


FILES = {
    "not by its argument": lambda f: Dataset.range(3).flat_map(lambda n: read(f[0])),
    "one for each name": lambda f: Dataset.from_tensor_slices(f).flat_map(lambda n: read(f[0])),
    "by a number": lambda f: Dataset.range(4).interleave(lambda n: read(tf.gather(f, n % 2))),
    "by names that are made": lambda f: (
        Dataset.from_tensor_slices(f).map(lambda n: tf.constant(f[0])).flat_map(read)
    ),
    "twice in a list": lambda f: Dataset.from_tensor_slices(f).flat_map(lambda n: read([n, n])),
    "beside another": lambda f: Dataset.from_tensor_slices(f).flat_map(
        lambda n: read(tf.stack([n, f[0]]))
    ),
    "crossed": lambda f: read(f[0]).flat_map(lambda line: read(f[1]).map(lambda s: s + line)),
    "for each of its lines": lambda f: Dataset.from_tensor_slices(f).flat_map(
        lambda n: read(n).flat_map(lambda line: read(n))
    ),
    "joined inside": lambda f: Dataset.from_tensor_slices(f).flat_map(
        lambda n: read(n).concatenate(read(n))
    ),
    "zipped inside": lambda f: Dataset.from_tensor_slices(f).flat_map(
        lambda n: Dataset.zip((read(n), read(n)))
    ),
    "second of a pair": lambda f: Dataset.from_tensor_slices(([0, 1], [f[0], f[0]])).interleave(
        lambda label, n: read(n)
    ),
    "in a dict": lambda f: Dataset.from_tensor_slices({"a": [0, 1], "f": [f[0]] * 2}).flat_map(
        lambda d: read(d["f"])
    ),
    "in two lists": lambda f: read(f).concatenate(read(f[:1])),
    "in another spelling": lambda f: read([f[0], f[0].replace("/a", "//a")]),
    "with state": lambda f: Dataset.from_tensor_slices(f).flat_map(_numbered),
}


def _numbered(name):
    number = STATE.assign_add(1.0)
    return read(name).map(lambda s: (s, number))


def read(names):
    return tf.data.TextLineDataset(names)


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_read_several_times_are_refused(lines, name):
    with pytest.raises(ValueError, match="The dataset's step"):
        judge(FILES[name](lines))


def test_names_beside_labels_are_told_apart(lines):
    labelled = Dataset.from_tensor_slices((["cat", "cat"], lines))
    found = judge(labelled.interleave(lambda label, n: read(n).map(lambda s: (s, label))))
    assert found == ORDERED


def test_loaded_datasets(tmp_path):
    saved = str(tmp_path / "saved")
    Dataset.range(5).save(saved)
    load = Dataset.load
    with pytest.raises(ValueError, match="concatenate"):
        judge(load(saved).concatenate(load(saved)))
    with pytest.raises(ValueError, match="inside of another step"):
        judge(Dataset.range(2).flat_map(lambda i: load(saved)))
    with pytest.raises(ValueError, match="reader_func"):
        judge(load(saved, reader_func=lambda d: d.repeat(2).interleave(lambda s: s)))


def test_image_folders(tmp_path):
    for label, number in itertools.product("ab", range(2)):
        (tmp_path / label).mkdir(exist_ok=True)
        keras.utils.save_img(tmp_path / label / f"{number}.png", np.zeros((8, 8, 3)))
    found = keras.utils.image_dataset_from_directory(
        tmp_path, image_size=(8, 8), batch_size=3, verbose=False
    )
    assert judge(found) == Pipeline(True, False)
