"""Grain datasets as sources: read where they are, and refused where one record is in several."""

import grain
import numpy as np
import pytest

import tf_adadp as dp
from tests.helpers import data, private_model
from tf_adadp.sampling.sources import as_source

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
    with pytest.raises(ValueError, match=f"grain dataset.*{message}"):
        dp.PoissonLots(dataset(records()), expected_size=10)
