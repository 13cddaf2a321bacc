"""Defines what is compared: budgets, models, optimizers, weights, data. NumPy only."""

import itertools
import typing

import numpy as np

_DATA_SETS = ((60000, 256), (60000, 600), (50000, 1024), (1797, 64), (2000, 400))
_NOISE_MULTIPLIERS = (0.6, 0.8, 1.1, 2.0, 5.0)
ORDERS = (1.1, 1.5, 1.9, 2, 2.5, 3, 5.5, 8, 10.9, 16, 32, 63, 128)


class Training(typing.NamedTuple):
    """Steps on lots of `lot_size` records in expectation, drawn from `num_examples`, read at delta.

    lots: "poisson"; "microbatched", Poisson lots whose clipped vectors are means over several
    records; "full", every record in every lot; "fixed", lots of a fixed size.
    """

    noise_multiplier: float
    num_examples: int
    lot_size: int
    steps: int
    delta: float
    lots: str = "poisson"

    @property
    def sampling_probability(self):
        """Expected lot size over number of records."""
        return self.lot_size / self.num_examples


class Budget(typing.NamedTuple):
    """An ε that so many steps on Poisson lots may cost."""

    target_epsilon: float
    num_examples: int
    lot_size: int
    steps: int
    delta: float

    @property
    def sampling_probability(self):
        """Expected lot size over number of records."""
        return self.lot_size / self.num_examples


GRID = tuple(
    Training(sigma, *data, steps, delta)
    for sigma, data, steps, delta in itertools.product(
        _NOISE_MULTIPLIERS, _DATA_SETS, (1, 100, 1000, 10000), (1e-5, 1e-7)
    )
)
SAMPLE = GRID[::7]  # for routines that compute anew what another has; all values occur
PLD_GRID = tuple(
    Training(sigma, *data, steps, 1e-5)
    for steps, sigma, data in itertools.product((100, 1000), (0.8, 2.0), ((60000, 600), (1797, 64)))
)
OTHER_LOTS = tuple(
    Training(sigma, *data, 100, 1e-5, lots)
    for lots, sigma, data in itertools.product(
        ("microbatched", "full", "fixed"), (1.1, 2.0, 5.0), _DATA_SETS
    )
)
BUDGETS = tuple(
    Budget(epsilon, *data, steps, 1e-5)
    for epsilon, (data, steps) in itertools.product(
        (0.5, 2.0, 8.0), (((60000, 256), 1000), ((60000, 600), 2000), ((1797, 64), 280))
    )
)

LOT_SIZE = 24
STEPS = 5
L2_NORM_CLIP = 2.5  # the norms of the gradients are 1.2 to 8.4
# In full, so that no default of either version decides. Both divide Adam's first moment by √v̂ + ε
# in the same form, η√(1−β₂ᵗ)/(1−β₁ᵗ) · m/(√v + ε), so one epsilon serves both.
OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 0.5, "momentum": 0.0, "nesterov": False}),
    "momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": False}),
    "nesterov": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (
        "Adam",
        {"learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False},
    ),
}
_SHAPES = {
    "mlp": [(8, 16), (16,), (16, 3), (3,)],
    "cnn": [(3, 3, 1, 4), (4,), (64, 3), (3,)],
}
_FEATURES = {"mlp": (8,), "cnn": (8, 8, 1)}
MODELS = tuple(_SHAPES)


def layers(keras, model):
    """The layers of a model, input first, from either version of Keras.

    Args:
        keras: the module, `keras` or `tf.keras`.
        model: a name in MODELS; its output is three logits.
    """
    of = keras.layers
    if model == "mlp":
        hidden = [of.Dense(16, activation="tanh")]
    else:
        hidden = [of.Conv2D(4, 3, strides=2, padding="same", activation="tanh"), of.Flatten()]
    return [keras.Input(_FEATURES[model]), *hidden, of.Dense(3)]


def inputs():
    """Weights and lots of every model, a dict {name: float32 or int32 array}.

    "mlp/weights/0" and so on are in the order of `model.get_weights()`; "mlp/x" is [STEPS,
    LOT_SIZE, ...], "mlp/y" integers below 3. The scales of the examples differ, so that the norms
    of their gradients lie on both sides of the bound.
    """
    # RandomState, not Generator: NumPy promises that its numbers never change.
    random = np.random.RandomState(7)
    arrays = {}
    for model, shapes in _SHAPES.items():
        for i, shape in enumerate(shapes):
            fan_in = np.prod(shape[:-1]) if len(shape) > 1 else 100
            arrays[f"{model}/weights/{i}"] = random.standard_normal(shape) / np.sqrt(fan_in)
        scales = np.exp(random.uniform(-2.0, 1.0, (STEPS, LOT_SIZE)))
        x = random.standard_normal((STEPS, LOT_SIZE, *_FEATURES[model]))
        arrays[f"{model}/x"] = x * scales.reshape(*scales.shape, *(1 for _ in _FEATURES[model]))
        arrays[f"{model}/y"] = random.randint(0, 3, (STEPS, LOT_SIZE))
    return {
        name: array.astype(np.int32 if name.endswith("/y") else np.float32)
        for name, array in arrays.items()
    }


def weights_of(arrays, model):
    """The weights of a model among `inputs()`, a list of arrays."""
    return [arrays[f"{model}/weights/{i}"] for i in range(len(_SHAPES[model]))]


def flat(arrays):
    """Lists all numbers of some arrays one after the other, as floats."""
    return np.concatenate([np.ravel(np.asarray(a)) for a in arrays]).tolist()
