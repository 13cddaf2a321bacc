"""Losses and layers that read a tensor of the batch past their arguments, as a VAE's loss does.

Each is worked on for one example at a time, but what it reads by itself could be of all examples.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import exact_sgd
from tf_adadp.gradients import ghost
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.utils.keras_compat import CompileLoss, get_keras_mask

L, K = keras.layers, keras.ops
ROWS, CLIP, TINY = 6, 1e-3, 1e-6
# All alike, so that what moves them moves them together.
X, TOKENS = np.ones((ROWS, 4), np.float32), np.ones((ROWS, 3), np.int32)


class Remembering(keras.Model):
    """Keeps its hidden values where losses and layers may read them."""

    def __init__(self, last):
        super().__init__()
        self.first, self.last = L.Dense(4), last

    def call(self, x):
        self.__dict__["hidden"] = hidden = self.first(x)
        return self.last(hidden)


class Looping(L.Layer):
    """Is mapped over the examples, since a loop is not followed."""

    def __init__(self, read):
        super().__init__()
        self.__dict__["read"], self.dense = read, L.Dense(3)

    def build(self, shape, *others):
        self.dense.build(shape)

    def call(self, x, other=None):
        x = K.fori_loop(0, 2, lambda _, h: K.tanh(h), x)
        return self.dense(x) * self.read(other)


class Positions(L.Layer):
    """Gives numbers that no example shapes, with the mask of the examples."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def call(self, x):
        return K.ones((1, x.shape[1], 3))


class Masked(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = L.Embedding(7, 3, mask_zero=True), Positions()
        self.block = Looping(
            lambda t: 1e10 ** (6 * K.mean(K.cast(get_keras_mask(t), "float32")) - 6)
        )

    def call(self, tokens):
        x = self.embedding(tokens)
        return self.block(x, self.positions(x))


def loss_that_reads():
    model = Remembering(L.Dense(1))
    return model, X, lambda y, z: TINY * K.square(z)[:, 0] * K.mean(K.square(model.hidden))


def layer_that_reads():
    hidden = []
    model = Remembering(Looping(lambda _: 1e-3 * K.mean(hidden[0].hidden)))
    hidden.append(model)
    return model, X, lambda y, z: K.sum(K.square(z), -1)


def mask_of_other_values():
    return Masked(), TOKENS, lambda y, z: 1e3 * K.sum(K.square(z), (1, 2))


CASES = [loss_that_reads, layer_that_reads, mask_of_other_values]


def clipped_sum(made, x):
    keras.utils.set_random_seed(1)
    model, _, loss = made()
    model(x)
    before = model.get_weights()
    private = dp.DPModel(model)
    private.compile(exact_sgd(1.0, l2_norm_clip=CLIP), loss, log_raw_metrics=False)
    private.fit(x, np.zeros((ROWS, 1)), batch_size=ROWS, verbose=0)
    pairs = zip(model.get_weights(), before, strict=True)
    return ROWS * np.concatenate([(a - b).ravel() for a, b in pairs])


@pytest.mark.representative(1)
@pytest.mark.filterwarnings("ignore:.*not proven to keep examples apart")
@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.parametrize("made", CASES)
def test_one_record_moves_the_sum_by_two_clip_norms_at_most(made):
    x = made()[1]
    other = x.copy()
    other[-1] = 0 if x.dtype == np.int32 else 1e4
    moved = clipped_sum(made, x) - clipped_sum(made, other)
    assert 0 < np.linalg.norm(moved) <= 2 * CLIP * (1 + 1e-4)


@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.parametrize("made", CASES)
def test_it_is_not_followed(made):
    model, x, loss = made()
    y = np.zeros((ROWS, 1), np.float32)
    compiled = CompileLoss(loss)
    compiled.build(y, model(x))
    spec = tuple(tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (x, y))
    with pytest.raises(ghost.CannotFollow, match="depends on examples"):
        ghost.trace_model(ExampleLoss(model, compiled), (*spec, None))
