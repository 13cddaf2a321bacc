"""Defines what step_time.py measures: models, data, optimizers, and ratios to stay below.

A new optimizer is one line in OPTIMIZERS, a new model one entry in WORKLOADS.
"""

import dataclasses
from collections.abc import Callable

import keras

import tf_adadp as dp
from benchmarks import models

LOTS_OF_DATA = 10
ENGINES = ("auto", "vectorized")
JIT_COMPILE = {"": "auto", "xla": True, "noxla": False}
_NOISE = {"noise_multiplier": 4.0, "l2_norm_clip": 1.0}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Says how to make a private optimizer, and the shape of its clipping set.

    Shapes: "l2", a ball around zero; "ellipsoid", with a centre; "box", coordinate by coordinate.
    """

    make: Callable[[], dp.DPOptimizer]
    clipping_set: str


OPTIMIZERS = {
    "dpsgd": Optimizer(lambda: dp.DPSGD(**_NOISE), "l2"),
    "dpadam": Optimizer(lambda: dp.DPAdam(**_NOISE), "l2"),
    "dprmsprop": Optimizer(lambda: dp.DPRMSprop(**_NOISE), "l2"),
    "adadp": Optimizer(lambda: dp.ADADP(warmup_steps=0, **_NOISE), "ellipsoid"),
    "adan": Optimizer(lambda: dp.ADAN(warmup_steps=0, **_NOISE), "ellipsoid"),
    "adadp_local": Optimizer(lambda: dp.ADADP(clipping="local", warmup_steps=0, **_NOISE), "box"),
}

# By engine and clipping set: the peak memory of a contender over that of a plain Keras run.
MEMORY_LIMITS = {
    "auto": {"l2": 1.5, "ellipsoid": 2.0, "box": 3.0},
    "vectorized": {"l2": 3.0, "ellipsoid": 3.0, "box": 3.0},
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its random data and a lot size.

    Attributes:
        name: the name in WORKLOADS.
        title: the model in words.
        build: makes the model.
        features: a `models.Features` or a dict of them, what the model takes.
        lot_size: the expected number of examples of a step.
        num_classes: the labels are integers below it.
        limits: by engine and clipping set, the step time over that of a plain Keras step that is
            not to be exceeded. Empty where there is no mark.
        num_examples: of the data; 10 lots by default.
    """

    name: str
    title: str
    build: Callable[[], keras.Model]
    features: models.Features | dict[str, models.Features]
    lot_size: int
    num_classes: int = 10
    limits: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    num_examples: int | None = None

    def __post_init__(self):
        if self.num_examples is None:
            object.__setattr__(self, "num_examples", LOTS_OF_DATA * self.lot_size)
        if self.num_examples < self.lot_size:
            raise ValueError(
                f"{self.name}: {self.num_examples} examples are fewer than a lot of "
                f"{self.lot_size}. Give more with --examples, or a smaller lot."
            )

    def at(self, lot_size, num_examples=None):
        """The same with another lot size, and 10 lots of data if no number is given."""
        return dataclasses.replace(self, lot_size=lot_size, num_examples=num_examples)

    def data(self):
        """Random `x, y` that fit the model."""
        return models.random_data(self.num_examples, self.features, self.num_classes)

    def options(self):
        """Arguments of `compile` besides the optimizer."""
        return {"loss": models.loss(), "metrics": ["accuracy"]}

    def fields(self):
        """The fields of a row that say what was trained."""
        return {"model": self.name, "lot_size": self.lot_size, "examples": self.num_examples}


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to train a workload.

    Attributes:
        method: "keras", not private, or a name in OPTIMIZERS; with ":xla" or ":noxla" to say what
            `jit_compile="auto"` would choose.
        engine: the `gradient_engine` of the DPModel; None for "keras".
        physical_batch_size: of the DPModel, None for its own choice.
    """

    method: str
    engine: str | None = None
    physical_batch_size: int | None = None

    @property
    def name(self):
        """The method without the suffix."""
        return self.method.partition(":")[0]

    @property
    def jit_compile(self):
        """Returns the arguments of `compile`."""
        return JIT_COMPILE[self.method.partition(":")[2]]

    def fields(self):
        """The fields of a row that say how it was trained."""
        return dataclasses.asdict(self)


PLAIN = (Contender("keras"), Contender("keras:noxla"))


def time_limit(row):
    """The mark of a row's step time, a multiple of the plain one; None where there is none."""
    return _limit(row, WORKLOADS[row["model"]].limits)


def memory_limit(row):
    """The mark of a row's memory, a multiple of the plain one; None where there is none."""
    return _limit(row, MEMORY_LIMITS if WORKLOADS[row["model"]].limits else {})


def _limit(row, limits):
    optimizer = OPTIMIZERS.get(row["method"].partition(":")[0])
    # Marks are for a workload's own lot size.
    if optimizer is None or row["lot_size"] != WORKLOADS[row["model"]].lot_size:
        return None
    return limits.get(row["engine"], {}).get(optimizer.clipping_set)


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            name="mlp",
            title="MLP 784-1000-10",
            build=lambda: models.mlp(784, 1000, 10),
            features=models.Features((784,)),
            lot_size=600,
            limits={
                "auto": {"l2": 1.8, "ellipsoid": 2.8, "box": 10.0},
                "vectorized": {"l2": 60.0, "ellipsoid": 60.0, "box": 20.0},
            },
        ),
        Workload(
            name="cnn",
            title="tanh CNN, 26,010 weights",
            build=models.tanh_cnn,
            features=models.Features((28, 28, 1)),
            lot_size=512,
            limits={
                "auto": {"l2": 3.5, "ellipsoid": 4.0, "box": 4.0},
                "vectorized": {"l2": 12.0, "ellipsoid": 12.0, "box": 12.0},
            },
        ),
        Workload(
            name="cifar_cnn",
            title="CIFAR CNN, 550,570 weights",
            build=models.cifar_cnn,
            features=models.Features((32, 32, 3)),
            lot_size=256,
        ),
        Workload(
            name="transformer",
            title="transformer, 2 blocks of 128, 64 tokens",
            build=models.transformer_encoder,
            features=models.Features((64,), vocabulary=5000),
            lot_size=128,
            num_classes=2,
        ),
        Workload(
            name="tabular",
            title="tabular MLP, 8 embeddings and 16 numbers",
            build=models.tabular_mlp,
            features={
                "categorical": models.Features((8,), vocabulary=1000),
                "numeric": models.Features((16,)),
            },
            lot_size=512,
            num_classes=2,
        ),
    )
}
