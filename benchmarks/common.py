"""What the benchmarks share: models, data, the results file, the description of the machine."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import sys

import keras
import numpy as np
import tensorflow as tf

from benchmarks.peers.harness import peak_memory_mb  # noqa: F401, for those who import this module

DATA_DIR_VARIABLE = "TF_ADADP_DATA_DIR"
ROOT = pathlib.Path(__file__).parents[1]
_VERSIONS_OF = ("tf_adadp", "tensorflow", "keras", "numpy", "dp-accounting")


def loss():
    """Cross-entropy of the models below, which give logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(*widths):
    """Dense layers with ReLU between them; `mlp(784, 1000, 10)` has inputs of size 784."""
    inputs, *hidden, outputs = widths
    return keras.Sequential(
        [
            keras.Input([inputs]),
            *(keras.layers.Dense(width, activation="relu") for width in hidden),
            keras.layers.Dense(outputs),
        ]
    )


def tanh_cnn():
    """The convolutional network of SA-DPSGD for 28×28 images, 26,010 parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([28, 28, 1]),
            layers.Conv2D(16, 8, strides=2, padding="same", activation="tanh"),
            layers.MaxPooling2D(2, strides=1),
            layers.Conv2D(32, 4, strides=2, activation="tanh"),
            layers.MaxPooling2D(2, strides=1),
            layers.Flatten(),
            layers.Dense(32, activation="tanh"),
            layers.Dense(10),
        ]
    )


def cifar_cnn():
    """The convolutional network of SA-DPSGD for 32×32 colour images, 550,570 parameters."""
    layers = keras.layers
    blocks = []
    for filters in (32, 64, 128):
        blocks += [
            layers.Conv2D(filters, 3, padding="same", activation="tanh"),
            layers.Conv2D(filters, 3, padding="same", activation="tanh"),
            layers.MaxPooling2D(2),
        ]
    return keras.Sequential(
        [
            keras.Input([32, 32, 3]),
            *blocks,
            layers.Flatten(),
            layers.Dense(128, activation="tanh"),
            layers.Dense(10),
        ]
    )


def transformer_encoder(
    vocabulary=5000, length=64, width=128, heads=4, feed_forward=256, blocks=2, classes=2
):
    """A text classifier: embedded tokens, encoder blocks, their mean over the sequence.

    A block is attention and a feed-forward net, each added to its input and normalised. It has no
    positions: they would not change what a step costs.
    """
    layers = keras.layers
    tokens = keras.Input([length], dtype="int32")
    x = layers.Embedding(vocabulary, width)(tokens)
    for _ in range(blocks):
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = layers.LayerNormalization()(x + attention(x, x))
        hidden = layers.Dense(feed_forward, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(hidden))
    pooled = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(classes)(pooled))


def tabular_mlp(columns=8, vocabulary=1000, width=16, numeric=16, hidden=(256, 128), classes=2):
    """Categorical columns, each with an embedding of its own, and numeric ones, into an MLP.

    The inputs are a dict: "categorical" of integers [columns] and "numeric" of floats [numeric].
    """
    layers = keras.layers
    inputs = {
        "categorical": keras.Input([columns], dtype="int32", name="categorical"),
        "numeric": keras.Input([numeric], name="numeric"),
    }
    embedded = [
        layers.Embedding(vocabulary, width)(inputs["categorical"][:, column])
        for column in range(columns)
    ]
    x = layers.Concatenate()([*embedded, inputs["numeric"]])
    for units in hidden:
        x = layers.Dense(units, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(classes)(x))


@dataclasses.dataclass(frozen=True)
class Features:
    """What one input of a model takes: floats in [0, 1), or integers below `vocabulary`."""

    shape: tuple[int, ...]
    vocabulary: int | None = None

    def draw(self, rng, num_examples):
        """Random features, [num_examples, *shape]."""
        shape = (num_examples, *self.shape)
        if self.vocabulary is None:
            return rng.random(shape, dtype=np.float32)
        return rng.integers(self.vocabulary, size=shape, dtype=np.int32)


def random_data(num_examples, features, num_classes=10):
    """Features and labels that mean nothing, for timing: `x, y`.

    Args:
        num_examples: N.
        features: a `Features`, or a dict of them for a model of named inputs; x is alike.
        num_classes: labels are integers below it.
    """
    rng = np.random.default_rng(0)
    x = keras.tree.map_structure(lambda f: f.draw(rng, num_examples), features)
    return x, rng.integers(num_classes, size=num_examples)


def digits():
    """scikit-learn's 1,797 images of 8×8: x_train, y_train, x_test, y_test, a fixed split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        (x / 16).astype(np.float32), y, test_size=360, random_state=0, stratify=y
    )
    return x_train, y_train, x_test, y_test


def results_of(script):
    """Returns where a script keeps its results: results/ beside it, a JSON file of its name."""
    script = pathlib.Path(script)
    return script.parent / "results" / f"{script.stem}.json"


def machine():
    """What a figure depends on: processor, cores, memory, GPUs, versions."""
    devices = [
        tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name)
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    versions = {"python": platform.python_version()}
    for package in _VERSIONS_OF:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "source"
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": devices,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


class Results:
    """A JSON file of rows, each a flat dict, that a later run adds to instead of repeating.

    Written anew after every change, one row per line, by replacing the file, so that an
    interrupted run leaves a valid one.

    Args:
        path: the file; it need not exist.
        key: names of the fields that identify a row. A new row replaces the one with its key.
        one_machine: whether rows from another machine or other versions are refused, because
            figures are compared with each other.
        force: forget the rows there are.

    Raises:
        ValueError: with `one_machine`, where the file comes from another machine.
    """

    def __init__(self, path, key, *, one_machine, force=False):
        self.path = pathlib.Path(path)
        self._key = key
        self.machine = machine()
        self.rows, self.runs = [], []
        if self.path.exists() and not force:
            stored = json.loads(self.path.read_text())
            if one_machine and stored["machine"] != self.machine:
                raise ValueError(
                    f"{self.path} is from another machine or other versions: {stored['machine']}, "
                    f"this is {self.machine}. Give another --out, or --force to start it anew."
                )
            self.rows, self.runs = stored["rows"], stored["runs"]
        script = pathlib.Path(sys.argv[0]).resolve()
        if script.is_relative_to(ROOT):  # python -m gives the file of the module
            script = ".".join(script.relative_to(ROOT).with_suffix("").parts)
        self._run = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": " ".join([f"python -m {script}", *sys.argv[1:]]),
        }

    def find(self, **fields):
        """The first row with these fields, or None."""
        for row in self.rows:
            if all(row.get(name) == value for name, value in fields.items()):
                return row
        return None

    def put(self, row):
        """Adds a row, in place of the one with the same key, and writes the file."""
        key = [row[name] for name in self._key]
        self.rows = [r for r in self.rows if [r[name] for name in self._key] != key] + [row]
        if self._run not in self.runs:
            self.runs.append(self._run)
        self._write()

    def _write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join("  " + json.dumps(row) for row in self.rows)
        runs = ",\n".join("  " + json.dumps(run) for run in self.runs)
        text = (
            f'{{\n"machine": {json.dumps(self.machine)},\n'
            f'"runs": [\n{runs}\n],\n"rows": [\n{rows}\n]\n}}\n'
        )
        partial = self.path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(self.path)


def markdown_table(header, rows):
    """Lines of a Markdown table; cells are turned into text."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _cpu_model():
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
