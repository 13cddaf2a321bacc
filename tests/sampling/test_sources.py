"""Tests data of every kind; lots are drawn with q = 1 where a test needs all rows."""

import resource
import sys

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf

from tf_adadp.sampling import FixedSizeLots, PoissonLots


def everything(x, y=None, sample_weight=None, **options):
    """Returns all rows of the data as one lot of one physical batch, with a row of padding."""
    lots = FixedSizeLots(x, y, 6, sample_weight, **options)
    ((data, mask),) = lots.take(1, 7)
    assert mask.numpy().tolist() == [[1.0] * 6 + [0.0]]
    (from_dataset, _) = next(iter(lots.as_dataset(7)))
    keras.tree.map_structure(same, data, from_dataset)
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[0], data)


def same(one, other):
    assert (one is None) == (other is None)
    if one is not None:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.numpy(), other.numpy())


class Items:
    """A random-access source that keeps a list of what was read."""

    def __init__(self, items):
        self.items = items
        self.read = []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.read.append(index)
        return self.items[index]


class BatchedItems(Items):
    def __getitems__(self, indices):
        assert all(type(index) is int for index in indices)
        self.read.append(list(indices))
        return [self.items[index] for index in indices]


class TestDtypes:
    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4", ">f8"])
    def test_floats_become_floatx(self, dtype):
        values = np.linspace(0, 1, 6).astype(dtype)
        x, y, weight = everything(values, values, values)
        for leaf in (x, y, weight):
            assert leaf.dtype == tf.float32
            np.testing.assert_array_equal(leaf[:6], values.astype(np.float32))

    @pytest.mark.parametrize("floatx", ["float64", "float16", "bfloat16"])
    def test_floatx_is_the_users(self, floatx):
        before = keras.config.floatx()
        keras.config.set_floatx(floatx)
        try:
            x, _, weight = everything(np.linspace(0, 1, 6), sample_weight=np.arange(6))
            from_items, *_ = everything(Items([(value, None) for value in np.linspace(0, 1, 6)]))
        finally:
            keras.config.set_floatx(before)
        assert x.dtype == from_items.dtype == weight.dtype == floatx
        same(x, from_items)

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint16", "bool"])
    def test_integers_and_booleans_stay(self, dtype):
        values = np.array([0, 1, 1, 0, 1, 1]).astype(dtype)
        x, y, weight = everything(values, values, values)
        assert x.dtype == y.dtype == dtype
        assert weight.dtype == tf.float32
        np.testing.assert_array_equal(x[:6], values)

    @pytest.mark.parametrize("kind", [str, bytes, object, tf.constant])
    def test_strings_stay(self, kind):
        words = ["a", "bé", "", "dd", "e e", "f"]
        if kind is bytes:
            values = np.array([word.encode() for word in words])
        else:
            values = kind(words) if kind is tf.constant else np.array(words, dtype=kind)
        x, y, _ = everything(values, np.array([[word, word] for word in words]))
        assert x.dtype == y.dtype == tf.string
        assert x.numpy().tolist() == [word.encode() for word in words] + [b""]
        assert y.numpy()[:, 1].tolist() == [word.encode() for word in words] + [b""]

    @pytest.mark.parametrize(
        "values",
        [
            np.array(["2020-01-01"] * 6, "M8[D]"),
            np.array([("a", 1)] * 6, [("f", "U1"), ("g", "i4")]),
            np.array(["a", None, 1, 2, 3, 4], dtype=object),
        ],
    )
    def test_other_types_are_refused(self, values):
        with pytest.raises(TypeError, match=r"y\['k'\] .*dtype"):
            everything(np.ones(6), {"k": values})


class TestArrays:
    def test_tf_tensors_and_variables(self):
        values = np.arange(12.0).reshape(6, 2)
        x, y, _ = everything(tf.constant(values), tf.Variable(values))
        np.testing.assert_array_equal(x[:6], values)
        np.testing.assert_array_equal(y[:6], values)

    def test_data_frames(self):
        frame = pandas.DataFrame({"a": [1.5] * 6, "b": range(6), "c": list("uvwxyz")})
        x, y, _ = everything({"t": frame[["a", "b"]], "c": frame["c"]}, frame["b"][::-1])
        np.testing.assert_array_equal(x["t"][:6], [[1.5, row] for row in range(6)])
        assert x["c"].numpy().tolist() == [b"u", b"v", b"w", b"x", b"y", b"z", b""]
        assert y.numpy().tolist() == [5, 4, 3, 2, 1, 0, 0]
        assert y.dtype == tf.int64
        with pytest.raises(TypeError, match=r"DataFrame of numbers with other columns, \['c'\]"):
            PoissonLots(frame, frame["b"], expected_size=2)

    @pytest.mark.parametrize("layout", ["fortran", "reversed", "columns", "read_only"])
    def test_layouts(self, layout):
        values = np.arange(24, dtype=np.float32).reshape(6, 4)
        array = {
            "fortran": np.asfortranarray(values),
            "reversed": values[::-1],
            "columns": values[:, ::2],
            "read_only": values.copy(),
        }[layout]
        array.setflags(write=layout != "read_only")
        np.testing.assert_array_equal(everything(array)[0][:6], array)

    def test_the_users_arrays_are_not_written_to(self):
        values = np.arange(6.0)
        everything(values, values, values)
        np.testing.assert_array_equal(values, np.arange(6.0))

    @pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_a_memory_map_is_not_loaded(self, tmp_path, order):
        records, columns = 10**7, 25  # 1 GB, sparse on disk
        before = peak_kilobytes()
        file = np.memmap(tmp_path / "x", np.float32, "w+", shape=(records, columns), order=order)
        lots = PoissonLots(file, np.arange(records, dtype=np.int32), expected_size=20, seed=0)
        drawn = [y.numpy()[m.numpy() == 1] for (_, y, _), m in lots.take(3, 32)]
        for rows in drawn:
            file[rows, 7] = rows
        lots.step = 0
        for rows, ((x, _, _), mask) in zip(drawn, lots.as_dataset(32, 3), strict=True):
            x = x.numpy()[mask.numpy() == 1]
            np.testing.assert_array_equal(x[:, 7], rows.astype(np.float32))
            assert np.count_nonzero(x) == np.count_nonzero(rows)
        assert peak_kilobytes() - before < 400_000
        assert lots.element_spec[0] == tf.TensorSpec((None, columns), tf.float32)


def peak_kilobytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class TestItems:
    items = [(np.full(2, row, np.float64), row) for row in range(6)]

    def test_items_are_read_one_by_one(self):
        source = Items(self.items)
        lots = FixedSizeLots(source, size=3, seed=0)
        assert source.read == [0]  # for the spec
        ((x, y, weight), _), *_ = lots.take(1, 3)
        assert source.read[1:] == y[0].numpy().tolist()
        assert (x.dtype, y.dtype, weight) == (tf.float32, tf.int64, None)
        np.testing.assert_array_equal(x[0], y[0].numpy()[:, None] * [1, 1])

    def test_items_are_read_at_once_where_the_source_can(self):
        source = BatchedItems([{"image": x, "label": y} for x, y in self.items])
        lots = PoissonLots(
            source, expected_size=3, seed=0, transform=lambda item: (item["image"], item["label"])
        )
        drawn = [y.numpy()[m.numpy() == 1].tolist() for (_, y, _), m in lots.take(40, 2)]
        assert [] in drawn
        assert source.read == [0, *filter(None, drawn)]

    def test_items_with_weights_structures_and_strings(self):
        source = Items(
            [({"a": [row, (float(row),)]}, (f"{row}", b"\x00x\x00"), row) for row in range(6)]
        )
        x, y, weight = everything(source)
        assert x["a"][0].numpy().tolist() == [0, 1, 2, 3, 4, 5, 0]
        assert x["a"][1][0].dtype == weight.dtype == tf.float32
        assert y[0].numpy().tolist() == [b"0", b"1", b"2", b"3", b"4", b"5", b""]
        # Bytes keep their trailing zeros, which numpy's own type would drop.
        assert y[1].numpy().tolist() == [b"\x00x\x00"] * 6 + [b""]
        np.testing.assert_array_equal(weight, [0, 1, 2, 3, 4, 5, 0])

    def test_a_source_is_sampled_like_arrays(self):
        arrays = PoissonLots(np.arange(50.0), np.arange(50), expected_size=8, seed=3)
        items = Items([(float(row), row) for row in range(50)])
        source = PoissonLots(items, expected_size=8, seed=3)
        assert arrays.law == source.law
        for one, other in zip(arrays.take(5, 4), source.take(5, 4), strict=True):
            keras.tree.map_structure(same, one, other)

    @pytest.mark.parametrize(
        ("bad", "error", "message"),
        [
            ((np.zeros(3), 1), ValueError, r"x of item 1 has shape \(3,\), but item 0 has \(2,\)"),
            ((np.zeros(2), 1.5), ValueError, "y of item 1 has dtype float64"),
            ((np.zeros(2), "1"), ValueError, "y of item 1 has dtype object"),
            ((np.zeros(2), None), ValueError, "y of item 1 is NoneType"),
            ((np.zeros(2), {"k": 1}), ValueError, "item 1 of x has another structure"),
            ((np.zeros(2), 1, 1.0), ValueError, "sample_weight of item 1 is float"),
            (np.zeros(2), TypeError, "item 1 of x must be .*ndarray.*transform="),
            ({"image": 1}, TypeError, "item 1 of x must be .*dict.*transform="),
            ((np.zeros(2), object()), TypeError, "y of item 1 has dtype object"),
        ],
    )
    def test_items_that_do_not_agree_are_named(self, bad, error, message):
        lots = FixedSizeLots(Items([(np.zeros(2), 0), bad]), size=2)
        with pytest.raises(error, match=message):
            next(lots.take(1, 2))
        with pytest.raises(tf.errors.OpError, match=message):
            next(iter(lots.as_dataset(2)))


class PyDataset(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.zeros((4, 2)), np.zeros(4)


class TestErrors:
    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (tf.data.Dataset.range(3), r"Dataset.*PoissonLots\.from_dataset"),
            ((row for row in range(3)), "generator, an iterator.*random access"),
            (iter([1, 2]), "iterator"),
            (None, "NoneType"),
            (3.0, "float.*no random access"),
            ({1, 2}, "set.*no random access"),
            ([1.0, 2.0], r"x\[0\] is a float, not an array.*np.asarray"),
            (tf.ragged.constant([[1], [2, 3]]), "RaggedTensor"),
            ({"k": tf.sparse.eye(3)}, r"x\['k'\] is a SparseTensor.*dense"),
            ("abc", r"item 0 of x must be \(x, y\)"),
        ],
    )
    def test_data_without_random_access_is_refused(self, x, message):
        with pytest.raises(TypeError, match=message):
            PoissonLots(x, expected_size=1)

    def test_unequal_lengths_are_named(self):
        with pytest.raises(ValueError, match="^y has 9 rows, but x has 10"):
            PoissonLots(np.ones(10), np.ones(9), 2)
        with pytest.raises(ValueError, match=r"^sample_weight has 11 rows, but x\['a'\] has 10"):
            PoissonLots({"a": np.ones(10)}, np.ones(10), 2, np.ones(11))
        with pytest.raises(ValueError, match=r"^x\['b'\]\[1\] has 3 rows, but x\['a'\] has 10"):
            PoissonLots({"a": np.ones(10), "b": [np.ones(10), np.ones(3)]}, expected_size=2)

    @pytest.mark.parametrize("x", [np.ones((0, 3)), [np.ones(0)], Items([])])
    def test_empty_data_are_refused(self, x):
        with pytest.raises(ValueError, match="at least one example"):
            PoissonLots(x, expected_size=1)

    @pytest.mark.parametrize("x", [[], {}, {"a": None}])
    def test_structures_without_arrays_are_refused(self, x):
        with pytest.raises(ValueError, match="x holds no array"):
            PoissonLots(x, expected_size=1)

    def test_scalars_are_refused(self):
        with pytest.raises(ValueError, match="y is a scalar"):
            PoissonLots(np.ones(3), np.float32(1.0), 1)

    def test_arguments_that_do_not_go_together_are_refused(self):
        source = Items([(1.0, 2.0)])
        with pytest.raises(ValueError, match="y must be None when x is a random-access source"):
            PoissonLots(source, np.ones(1), 1)
        with pytest.raises(ValueError, match="sample_weight must be None when x is a random"):
            PoissonLots(source, None, 1, np.ones(1))
        with pytest.raises(ValueError, match="transform=.*but x holds arrays"):
            PoissonLots(np.ones(3), expected_size=1, transform=print)
        with pytest.raises(TypeError, match="transform must be a function of one item, got 3"):
            PoissonLots(source, expected_size=1, transform=3)
