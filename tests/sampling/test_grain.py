"""Grain datasets as sources: read where they are, and refused where one record is in several."""

import copy
import dataclasses

import grain
import numpy as np
import pytest

import tf_adadp as dp
from tests.helpers import data, private_model
from tf_adadp.sampling.sources import ItemSource, as_source

X, Y = data()


def records():
    return grain.MapDataset.source(list(zip(X, Y, strict=True)))


def plus_one(item):
    return item[0] + 1, item[1]


class Own(grain.MapDataset):
    def __len__(self):
        return len(self._parent)

    def __getitem__(self, index):
        return self._parent[index]


class Noisy(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return element[0] + rng.normal(), element[1]


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (records(), X),
        (records().map(plus_one), X + 1),
        (records()[10:50:2], X[10:50:2]),
        (grain.MapDataset.concatenate([records()[:3], records().map(plus_one)]), [*X[:3], *X + 1]),
        (grain.experimental.ZipMapDataset([records(), records()]).map(lambda pair: pair[0]), X),
    ],
    ids=["source", "map", "slice", "concatenate", "zip"],
)
def test_steps_of_one_element_for_a_record_are_read_where_they_are(dataset, expected):
    source = as_source(dataset)
    _, leaves = source.rows(np.arange(len(source)), 1)
    np.testing.assert_array_equal(leaves[0], np.array(expected))


def test_a_shuffled_dataset_trains():
    lots = dp.PoissonLots(records().shuffle(seed=3), expected_size=30)
    model = private_model(dp.ADADP(noise_multiplier=1.0))
    model.fit(lots, epochs=1, verbose=0)
    assert model.ledger.steps == len(X) // 30


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (lambda d: d.repeat(2), "Repeat.*fit.epochs"),
        (lambda d: d.repeat(), "Repeat.*fit.epochs"),
        (lambda d: d.repeat(2).shuffle(seed=1).map(plus_one), "Repeat.*fit.epochs"),
        (lambda d: d.batch(4), "Batch.*single records"),
        (lambda d: d.filter(lambda item: item[1] > 0), "Filter.*beforehand"),
        (lambda d: d.seed(1).random_map(Noisy()), "RandomMap.*random layers"),
        (lambda d: grain.MapDataset.mix([d, records()], [0.9, 0.1]), "Mixed.*source itself"),
        (lambda d: grain.MapDataset.concatenate([d, d.map(plus_one)]), "one source twice"),
        (lambda d: grain.experimental.ZipMapDataset([d[1:], d[:-1]]), "one source twice"),
        (lambda d: grain.MapDataset.source(d.repeat(2)), "Repeat.*fit.epochs"),
        (lambda d: grain.MapDataset.concatenate([d, grain.MapDataset.source(d)]), "one source"),
        (lambda d: Own(d.repeat(2)), "Own.*source itself"),
    ],
)
def test_steps_that_put_a_record_into_several_elements_are_refused(dataset, message):
    with pytest.raises(ValueError, match=message):
        dp.PoissonLots(dataset(records()), expected_size=10)


def concatenated(*sources):
    as_datasets = [
        s if isinstance(s, grain.MapDataset) else grain.MapDataset.source(s) for s in sources
    ]
    return grain.MapDataset.concatenate(as_datasets)


def with_label(value):
    return np.float32(value), 0


@pytest.fixture
def record_file(tmp_path):
    """Returns a function that writes a file of 10 records and returns its path."""
    from array_record.python import array_record_module

    def write(name):
        path = tmp_path / name
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for number in range(10):
            writer.write(str(number).encode())
        writer.close()
        return str(path)

    return write


@dataclasses.dataclass
class Stretch:
    """Reads some records of a file, as the instructions of tensorflow_datasets do."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int = 10


def test_files_that_are_apart_are_read(record_file):
    files = [record_file("a"), record_file("b")]
    halves = [Stretch(files[0], 0, 5), Stretch(files[0], 5, 5)]
    for sources in (files, halves):
        dataset = concatenated(*map(grain.sources.ArrayRecordDataSource, sources)).map(with_label)
        assert len(as_source(dataset)) == 10 * len(set(map(str, sources))) / (
            1 + (sources is halves)
        )


def test_one_file_in_two_sources_is_refused(record_file, tmp_path):
    path = record_file("a")
    (tmp_path / "link").symlink_to(path)
    source = grain.sources.ArrayRecordDataSource
    for dataset in (
        concatenated(source(path), source(path)),
        concatenated(source(path), copy.deepcopy(source(path))),
        concatenated(source(path), source(str(tmp_path / "link"))),
        concatenated(source(Stretch(path, 0, 6)), source(Stretch(path, 5, 5))),
        source([path, path]),
    ):
        with pytest.raises(ValueError, match="reads one source twice .*a\\)"):
            as_source(dataset, transform=with_label)


def test_overlapping_memory_and_ranges_are_refused():
    values = np.arange(20.0)
    apart = [values[:10], values[10:]], [values[::2], values[1::2]]
    for arrays in apart:
        assert len(as_source(concatenated(*arrays).map(with_label))) == 20
    for arrays in ([values[:11], values[10:]], [values, values[::-1]]):
        with pytest.raises(ValueError, match=r"reads one source twice \(ndarray"):
            as_source(concatenated(*arrays).map(with_label))
    numbers = grain.MapDataset.range
    assert len(as_source(concatenated(numbers(0, 9, 2), numbers(1, 9, 2)).map(with_label))) == 9
    with pytest.raises(ValueError, match=r"reads one source twice \(range"):
        as_source(concatenated(numbers(5), numbers(4, 9)).map(with_label))


def test_a_source_that_changes_its_length_is_refused():
    items = list(zip(X, Y, strict=True))
    dataset = grain.MapDataset.source(items)[1:]
    source = as_source(dataset)
    del items[-5:]
    with pytest.raises(ValueError, match="slice of 120 elements, which are 115 by now"):
        as_source(dataset)
    with pytest.raises(ValueError, match="another number of items"):
        source.rows(np.arange(3), 1)


def test_a_list_that_grows_is_refused():
    items = list(zip(X, Y, strict=True))
    source = ItemSource(items)
    items.append(items[0])
    with pytest.raises(ValueError, match="another number of items"):
        source.rows(np.arange(3), 1)
