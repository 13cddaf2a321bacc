"""A record with an out-of-range index neither stops a lot nor affects other records."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

import tf_adadp as dp
from tests.helpers import private_model
from tf_adadp import clipping
from tf_adadp.gradients import make_engine
from tf_adadp.gradients.indices import no_index_stops
from tf_adadp.sampling import make_lot

L = keras.layers
VOCABULARY, LENGTH, CLASSES, ROWS = 7, 4, 3, 5
BAD = 2  # the row of the bad record


class Lookup(L.Layer):
    """A table of the user's own, from which `gather` takes rows."""

    def __init__(self, gather):
        super().__init__()
        self.gather = gather

    def build(self, shape):
        self.table = self.add_weight((VOCABULARY, 3))

    def call(self, x):
        return keras.ops.mean(self.gather(keras.ops.convert_to_tensor(self.table), x), axis=1)


class Scaled(L.Embedding):
    """Has its own `call`."""

    def call(self, x):
        return 2.0 * super().call(x)


class Bag(L.Layer):
    """A layer of the user's with a table in it, which is mapped over examples."""

    def __init__(self):
        super().__init__()
        self.table = L.Embedding(VOCABULARY, 3)

    def call(self, x):
        return keras.ops.mean(self.table(x), axis=1)


def _model(*layers):
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers, L.Dense(CLASSES)])


MODELS = {
    "embedding": lambda: _model(L.Embedding(VOCABULARY, 3), L.GlobalAveragePooling1D()),
    "inside of a layer": lambda: _model(Bag()),
    "a take of one's own": lambda: _model(Lookup(lambda t, x: keras.ops.take(t, x, axis=0))),
    "a gather_nd of one's own": lambda: _model(Lookup(lambda t, x: tf.gather_nd(t, x[..., None]))),
    "an embedding's own call": lambda: _model(Scaled(VOCABULARY, 3), L.GlobalAveragePooling1D()),
    "masked recurrence": lambda: _model(L.Embedding(VOCABULARY, 3, mask_zero=True), L.GRU(2)),
}


def _data():
    rng = np.random.default_rng(0)
    x = rng.integers(1, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    return x, rng.integers(0, CLASSES, ROWS).astype(np.int32)


def _keras_loss(y, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)


def _tensorflow_loss(y, y_pred):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), y_pred)


def _sums(model, engine_name, *lots, loss=None):
    """The clipped sums of the lots, each of (x, y), as one vector each."""
    loss = CompileLoss(loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = _data()
    loss.build(y, model(x))
    spec = *(tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (x, y)), None
    engine, _ = make_engine(
        model, loss, jit_compile=False, gradient_engine=engine_name, element_spec=spec
    )
    run = tf.function(
        lambda lot: engine.clipped_sum(lot, clipping.L2Ball(0.5), tf.constant([3, 5], tf.int64))
    )
    return [
        np.concatenate([tf.reshape(s, [-1]) for s in run(make_lot(*lot, physical_batch_size=2))[0]])
        for lot in lots
    ]


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("name", "engine_name"),
    [
        ("embedding", "ghost"),
        ("embedding", "vectorized"),
        ("inside of a layer", "ghost"),
        ("a take of one's own", "ghost"),
        ("a take of one's own", "vectorized"),
        ("a gather_nd of one's own", "ghost"),
        ("a gather_nd of one's own", "vectorized"),
        ("an embedding's own call", "ghost"),
        ("an embedding's own call", "vectorized"),
        ("masked recurrence", "vectorized"),
    ],
)
def test_tokens_beyond_the_table(name, engine_name):
    x, y = _data()
    bad = np.broadcast_to(x, (3, *x.shape)).copy()
    bad[0, BAD, 1], bad[1, BAD, 0], bad[2, BAD] = VOCABULARY, -VOCABULARY - 1, 2**31 - 1
    others = np.arange(ROWS) != BAD
    sums = _sums(MODELS[name](), engine_name, (x[others], y[others]), *((b, y) for b in bad))
    for found in sums[1:]:
        np.testing.assert_allclose(found, sums[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["count", "multi_hot"])
@pytest.mark.parametrize("engine_name", ["ghost", "vectorized"])
def test_numbers_that_are_no_category_are_left_out(engine_name, mode):
    model = _model(L.CategoryEncoding(VOCABULARY, mode))
    x, y = _data()
    bad = np.broadcast_to(x, (3, *x.shape)).copy()
    bad[0, BAD, 1], bad[1, BAD, 1], bad[2, BAD, 1] = VOCABULARY, -1, -(2**31)
    first, *others = _sums(model, engine_name, *((b, y) for b in bad))
    for found in others:
        np.testing.assert_allclose(found, first, rtol=1e-6)


@pytest.mark.parametrize("engine_name", ["ghost", "vectorized"])
def test_negative_tokens_count_from_the_end_as_in_keras(engine_name):
    x, y = _data()
    x[BAD, 1] = VOCABULARY - 1
    same = x.copy()
    same[BAD, 1] = -1
    first, second = _sums(MODELS["embedding"](), engine_name, (x, y), (same, y))
    np.testing.assert_allclose(first, second, rtol=1e-6)


@pytest.mark.representative(2)
@pytest.mark.parametrize("loss", [None, _keras_loss, _tensorflow_loss])
@pytest.mark.parametrize("engine_name", ["ghost", "vectorized"])
def test_labels_beyond_the_classes(engine_name, loss):
    x, y = _data()
    bad = np.broadcast_to(y, (2, *y.shape)).copy()
    bad[0, BAD], bad[1, BAD] = CLASSES, -1
    others = np.arange(ROWS) != BAD
    model = MODELS["embedding"]()
    lots = (x[others], y[others]), *((x, b) for b in bad)
    sums = _sums(model, engine_name, *lots, loss=loss)
    for found in sums[1:]:
        np.testing.assert_allclose(found, sums[0], rtol=1e-5, atol=1e-6)


def test_metrics_do_not_stop_at_a_label_either():
    x, y = _data()
    y[BAD] = CLASSES
    metrics = ["sparse_categorical_crossentropy"]
    private = private_model(model=MODELS["embedding"](), metrics=metrics)
    history = private.fit(dp.PoissonLots(x, y, expected_size=ROWS), verbose=0).history
    assert np.isnan(history["sparse_categorical_crossentropy"][0])
    assert np.all(np.isfinite(np.concatenate([w.ravel() for w in private.get_weights()])))


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 5)])
@pytest.mark.parametrize("ignore_class", [None, -1])
def test_losses_of_labels_in_range_are_keras_own(from_logits, shape, ignore_class):
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, shape)
    if ignore_class is not None:
        y.flat[0] = ignore_class
    steps = shape if shape[-1] != 1 else shape[:-1]
    y_pred = tf.nn.softmax(tf.constant(50 * rng.normal(size=(*steps, CLASSES)), tf.float32))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits, ignore_class)
    expected = loss(y, y_pred)
    with no_index_stops():
        np.testing.assert_array_equal(loss(y, y_pred), expected)
        y.flat[1] = CLASSES
        values = keras.losses.SparseCategoricalCrossentropy(reduction=None)(y, y_pred)
    assert np.isnan(values).sum() == 1 + (ignore_class is not None)


X = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
# What gathers, from what, by which indices, one of which is beyond which axes.
GATHERS = {
    "axis 0": (tf.gather, X, [[1, 0], [2, 1]], [0]),
    "last axis": (lambda x, i: tf.gather(x, i, axis=-1), X, [3, 4, 0], [2]),
    "a scalar": (lambda x, i: tf.gather(x, i, axis=1), X, 3, [1]),
    "batch_dims": (lambda x, i: tf.gather(x, i, batch_dims=1), X, [[0, 3], [1, 2]], [1]),
    "batch_dims from the end, before an axis": (
        lambda x, i: tf.gather(x, i, axis=2, batch_dims=-1),
        X,
        [[0, 4], [1, 2]],
        [2],
    ),
    "along an axis": (
        lambda x, i: keras.ops.take_along_axis(x, i, axis=1),
        X,
        [[[0, 1, 3, 0]], [[1, 1, 1, 1]]],
        [1],
    ),
    "integers": (tf.gather, X.astype(np.int32), [1, 2], [0]),
    "pairs": (tf.gather_nd, X, [[0, 2], [1, 3], [2, 1]], [0, 1]),
    "cells": (tf.gather_nd, X[0], [[2, 3], [-1, 0]], [0, 1]),
    "pairs of a batch": (
        lambda x, i: tf.gather_nd(x, i, batch_dims=1),
        X,
        [[[0, 2]], [[3, 3]]],
        [1, 2],
    ),
}


@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.parametrize("known_shape", [True, False])
def test_gathers_as_tensorflow_does_from_a_table_that_goes_on_with_nan(name, known_shape):
    gather, table, indices, axes = GATHERS[name]
    indices = np.array(indices)
    signature = [
        tf.TensorSpec(a.shape if known_shape else [None] * a.ndim, a.dtype)
        for a in (table, indices)
    ]

    @tf.function(input_signature=signature)
    def total(table, indices):
        with no_index_stops():
            return gather(table, indices)

    missing = 0 if table.dtype == np.int32 else np.nan
    padding = [(0, 5 if axis in axes else 0) for axis in range(table.ndim)]
    longer = np.pad(table, padding, constant_values=missing)
    expected = gather(longer, np.where(indices < 0, 5, indices))
    assert np.any(np.isnan(expected) if missing else np.equal(expected, 0))
    np.testing.assert_array_equal(total(table, indices), expected)
