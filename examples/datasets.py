"""The examples' data: images in [0, 1] and class labels, as arrays in memory."""

import dataclasses
import pathlib

import numpy as np

_NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")


@dataclasses.dataclass(frozen=True)
class Data:
    """A labelled image set, split into training and test records.

    Attributes:
        name: as given to `load`.
        x_train, x_test: float32 in [0, 1], [records, height, width, channels].
        y_train, y_test: int32 class numbers in 0..num_classes−1, [records].
        num_classes: a property of the task, public.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int


def load(name, data_dir=None):
    """Loads a data set by name.

    - "digits": scikit-learn's bundled 8×8 digits, 1,437 records for training and 360 for the test,
      always the same ones. Needs no download.
    - any other name: `<data_dir>/<name>.npz` if that file exists, with uint8 arrays x_train,
      y_train, x_test, y_test; else `tfds.load(name)` of tensorflow-datasets, splits "train" and
      "test", which downloads once into `data_dir` (its own default place for None).

    Raises:
        ValueError: no such data set, or no uint8 images with one class label each.
    """
    if name == "digits":
        return _digits()
    if data_dir is not None:
        path = pathlib.Path(data_dir).expanduser() / f"{name}.npz"
        if path.is_file():
            return _from_npz(name, path)
    return _from_tfds(name, data_dir)


def _digits():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    x = (digits.images / 16.0).astype(np.float32)[..., None]
    y = digits.target.astype(np.int32)
    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=360, random_state=0, stratify=y
    )
    return Data("digits", x_train, y_train, x_test, y_test, num_classes=10)


def _from_npz(name, path):
    with np.load(path) as arrays:
        missing = [key for key in _NPZ_KEYS if key not in arrays]
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}: give {', '.join(_NPZ_KEYS)}.")
        x_train, y_train, x_test, y_test = (arrays[key] for key in _NPZ_KEYS)
    num_classes = 1 + int(max(y_train.max(initial=0), y_test.max(initial=0)))
    return _checked(name, x_train, y_train, x_test, y_test, num_classes)


def _from_tfds(name, data_dir):
    import tensorflow_datasets as tfds

    try:
        splits, info = tfds.load(
            name,
            split=["train", "test"],
            as_supervised=True,
            batch_size=1024,
            data_dir=data_dir,
            with_info=True,
        )
        arrays = [
            np.concatenate(batches)
            for split in splits
            for batches in zip(*tfds.as_numpy(split), strict=True)
        ]
    except tfds.core.DatasetNotFoundError as error:
        raise ValueError(
            f'dataset={name!r} is neither "digits", nor a file {name}.npz in data_dir, nor known '
            "to tensorflow-datasets."
        ) from error
    except Exception as error:
        error.add_note(
            f"tensorflow-datasets could not provide {name!r}. Without a network, put {name}.npz "
            f"({', '.join(_NPZ_KEYS)}; uint8) into a folder and give it as data_dir."
        )
        raise
    label = info.features[info.supervised_keys[1]]
    if not isinstance(label, tfds.features.ClassLabel):
        raise ValueError(f"dataset={name!r} has labels of {label!r}: give a classification task.")
    return _checked(name, *arrays, label.num_classes)


def _checked(name, x_train, y_train, x_test, y_test, num_classes):
    images, labels = [], []
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.dtype != np.uint8 or x.ndim not in (3, 4):
            raise ValueError(
                f"dataset={name!r}: x_{split} has dtype {x.dtype} and shape {x.shape}; give uint8 "
                "images of shape [records, height, width] or [records, height, width, channels]."
            )
        y = y.reshape(-1)
        if len(x) != len(y) or not len(x) or not np.issubdtype(y.dtype, np.integer):
            raise ValueError(
                f"dataset={name!r}: x_{split} has {len(x)} records and y_{split} {len(y)} of dtype "
                f"{y.dtype}; give one integer label per record, and at least one record."
            )
        x = x.astype(np.float32) / 255.0
        images.append(x if x.ndim == 4 else x[..., None])
        labels.append(y.astype(np.int32))
    return Data(name, images[0], labels[0], images[1], labels[1], num_classes)
