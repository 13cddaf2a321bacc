"""Describes an entry of the zoo: a builder, a lot size, and the limits of its group."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable

import keras
import numpy as np

LOTS_OF_DATA = 10

# Step time over that of a plain Keras step, by group. Depthwise convolutions and DenseNet have many
# small products per example, recurrent layers a loop: there the clipped sum costs more.
STEP_LIMITS = {"ordinary": 2.5, "depthwise": 4.0, "recurrent": 6.0}
MEMORY_LIMIT = 2.0  # growth of the process over that of a plain Keras run
FIRST_FIT_FACTOR, FIRST_FIT_SECONDS = 3.0, 1.5  # first step done after 3 x plain + 1.5 s


@dataclasses.dataclass(frozen=True)
class RealModel:
    """A model that stands for many users' models.

    Attributes:
        name: the name in MODELS.
        title: the model in words.
        make: a function `make(rows, small=False)` that returns `model, x, y, loss`: random weights,
            so many random examples, and the loss to compile with. `small` asks for the same layers
            on fewer and smaller tensors, for tests.
        group: a name in STEP_LIMITS.
        lot_size: the expected number of examples of a step.
        methods: names in `workloads.OPTIMIZERS`, the private optimizers to measure.
        needs: the package that `make` imports, where it is no dependency of tf_adadp.
    """

    name: str
    title: str
    make: Callable
    group: str = "ordinary"
    lot_size: int = 32
    methods: tuple[str, ...] = ("dpsgd", "adadp")
    needs: str | None = None

    @property
    def num_examples(self):
        """Examples of the data: 10 lots."""
        return LOTS_OF_DATA * self.lot_size

    @property
    def step_limit(self):
        """The limit of the step time, a multiple of the plain one."""
        return STEP_LIMITS[self.group]

    @property
    def is_available(self):
        """Tells whether the package that the model needs is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def build(self):
        """The model anew."""
        return self.make(1)[0]

    def data(self):
        """Random `x, y` that fit the model."""
        _, x, y, _ = self._made
        return x, y

    def options(self):
        """Arguments of `compile` besides the optimizer."""
        return options(self._made[3])

    def fields(self):
        """The fields of a row that say what was trained."""
        return {"model": self.name, "lot_size": self.lot_size, "examples": self.num_examples}

    @functools.cached_property
    def _made(self):
        return self.make(self.num_examples)


def options(loss):
    """Arguments of `compile` for a loss: accuracy is logged where there are classes."""
    classes = isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
    return {"loss": loss, "metrics": ["accuracy"] if classes else []}


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def images(rows, *shape):
    """Random images with values in [0, 1)."""
    return np.random.default_rng(0).random((rows, *shape), dtype=np.float32)


def tokens(rows, vocabulary, length, padded=0):
    """Random tokens from 1 on; the second half of the rows ends in so many zeros."""
    made = np.random.default_rng(1).integers(1, vocabulary, (rows, length), dtype=np.int32)
    if padded:
        made[rows // 2 :, length - padded :] = 0
    return made


def classes(rows, count, *shape):
    """Random integer labels, [rows, *shape]."""
    return np.random.default_rng(2).integers(count, size=(rows, *shape), dtype=np.int32)
