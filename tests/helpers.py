"""Small models and data shared by the tests."""

import pathlib
import re

import keras
import numpy as np
import tensorflow as tf

import tf_adadp as dp

ROOT = pathlib.Path(__file__).parents[1]
ROWS = 120


def python_blocks(page):
    """Returns the code of a page, a string for each block that is fenced as Python."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def data(rows=ROWS, features=6, classes=3, seed=0):
    """Inputs and labels that a linear model can learn."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype(np.float32)
    return x, np.argmax(x[:, :classes], 1).astype(np.int32)


def plain_model(*layers, features=6, classes=3):
    """A classifier; the hidden layers may be given."""
    layers = layers or (keras.layers.Dense(8, activation="tanh"),)
    return keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(classes)])


def crossentropy(**kwargs):
    """The loss that fits `plain_model`."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def private_model(optimizer=None, model=None, wrap=None, **compile_arguments):
    """A compiled DPModel; without XLA, since compiling takes longer than a test's few steps."""
    private = dp.DPModel(model or plain_model(), **(wrap or {}))
    arguments = {"loss": crossentropy(), "metrics": ["accuracy"], "jit_compile": False}
    private.compile(
        optimizer=optimizer or dp.DPSGD(0.1, noise_multiplier=1.0),
        **{**arguments, **compile_arguments},
    )
    return private


def exact_sgd(learning_rate=0.1, **kwargs):
    """DP-SGD without clipping or noise: on full lots it is plain gradient descent."""
    arguments = {"noise_multiplier": 0, "allow_no_noise": True, "l2_norm_clip": 1e6}
    return dp.DPSGD(learning_rate, **{**arguments, **kwargs})


class Recomputed(keras.layers.Layer):
    """A dense layer in a custom gradient, where no tape sees its weights."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(6, activation="tanh", name="inside")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return tf.recompute_grad(lambda x: self.dense(x))(x)
