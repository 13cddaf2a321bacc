from unittest import mock

import datasets
import numpy as np
import pytest
import tensorflow_datasets as tfds


def _write_npz(folder, name="tiny", **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (20, 8, 8), dtype=np.uint8),
        "y_train": np.arange(20, dtype=np.uint8) % 4,
        "x_test": rng.integers(0, 256, (8, 8, 8), dtype=np.uint8),
        "y_test": np.arange(8, dtype=np.uint8) % 4,
    }
    arrays.update(changes)
    np.savez(folder / f"{name}.npz", **{k: v for k, v in arrays.items() if v is not None})
    return arrays


def test_digits_are_split_the_same_way_every_time_and_without_overlap():
    data, again = datasets.load("digits"), datasets.load("digits")
    assert data.x_train.shape == (1437, 8, 8, 1)
    assert data.x_test.shape == (360, 8, 8, 1)
    assert (data.x_train.min(), data.x_train.max()) == (0.0, 1.0)
    assert data.x_train.dtype == np.float32
    assert data.num_classes == len(set(data.y_train)) == len(set(data.y_test)) == 10
    np.testing.assert_array_equal(data.x_train, again.x_train)
    np.testing.assert_array_equal(data.y_test, again.y_test)
    train_rows = {x.tobytes() for x in data.x_train}
    assert not any(x.tobytes() in train_rows for x in data.x_test)


def test_npz_in_data_dir_is_read_and_scaled(tmp_path):
    arrays = _write_npz(tmp_path)
    data = datasets.load("tiny", tmp_path)
    np.testing.assert_allclose(data.x_train[..., 0], arrays["x_train"] / 255.0, rtol=1e-6)
    np.testing.assert_array_equal(data.y_test, arrays["y_test"])
    assert data.x_test.shape == (8, 8, 8, 1)
    assert data.num_classes == 4


def test_npz_takes_colour_images_and_labels_with_an_axis(tmp_path):
    images = np.zeros((20, 8, 8, 3), np.uint8)
    labels = np.arange(20, dtype=np.int64)[:, None] % 4
    _write_npz(tmp_path, x_train=images, y_train=labels)
    data = datasets.load("tiny", str(tmp_path))
    assert data.x_train.shape == (20, 8, 8, 3)
    np.testing.assert_array_equal(data.y_train, labels[:, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "has no y_test"),
        ({"x_train": np.zeros((20, 8, 8), np.float32)}, "dtype float32"),
        ({"x_train": np.zeros((20, 64), np.uint8)}, r"shape \(20, 64\)"),
        ({"y_train": np.zeros(19, np.uint8)}, "20 records and y_train 19"),
        ({"y_train": np.zeros(20, np.float32)}, "integer label"),
        ({"x_test": np.zeros((0, 8, 8), np.uint8), "y_test": np.zeros(0, np.uint8)}, "at least"),
    ],
)
def test_a_broken_npz_is_refused(tmp_path, changes, message):
    _write_npz(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        datasets.load("tiny", tmp_path)


def test_any_other_name_is_loaded_by_tensorflow_datasets(tmp_path):
    with tfds.testing.mock_data(num_examples=12):
        data = datasets.load("cifar10", str(tmp_path))
    assert data.x_train.shape == data.x_test.shape == (12, 32, 32, 3)
    assert 0.0 <= data.x_train.min() < data.x_train.max() <= 1.0
    assert data.num_classes == 10


def test_data_dir_goes_to_tensorflow_datasets_and_its_errors_name_the_way_out(tmp_path):
    def as_dataset(*args, **kwargs):
        raise OSError("no network")

    with (
        tfds.testing.mock_data(as_dataset_fn=as_dataset),
        mock.patch.object(tfds, "load", wraps=tfds.load) as load,
        pytest.raises(OSError, match="no network") as raised,
    ):
        datasets.load("mnist", str(tmp_path))
    assert load.call_args.kwargs["data_dir"] == str(tmp_path)
    assert "mnist.npz" in raised.value.__notes__[0]


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match='neither "digits", nor a file no_such_set.npz'):
        datasets.load("no_such_set", tmp_path)
