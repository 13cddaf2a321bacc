"""Compares both engines' clipped sums with a Python loop over single examples, for a few models.

Run as `python zoo.py NAME NAME`; prints the largest relative errors as JSON, a line per model. A
process apart from pytest's, since a model that TensorFlow cannot vectorise may take it along.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

from tf_adadp import clipping
from tf_adadp.gradients import make_engine
from tf_adadp.sampling import make_lot

L = keras.layers
ROWS, BATCH = 11, 4  # three physical batches, the last one padded
SEED = tf.constant([3, 5], tf.int64)


def _sequential(shape, *layers):
    return keras.Sequential([keras.Input(shape), *layers])


def dense():
    return (
        _sequential((6,), L.Dense(8, "tanh"), L.Dense(3)),
        _images(6),
        _classes(3),
        _crossentropy(),
    )


def conv():
    model = _sequential(
        (8, 8, 2), L.Conv2D(4, 3, activation="tanh"), L.MaxPooling2D(), L.Flatten(), L.Dense(3)
    )
    return model, _images(8, 8, 2), _classes(3), _crossentropy()


def separable_conv():
    model = _sequential(
        (8, 8, 2),
        L.SeparableConv2D(4, 3, activation="tanh"),
        L.DepthwiseConv2D(3),
        L.GroupNormalization(2),
        L.GlobalAveragePooling2D(),
        L.Dense(3),
    )
    return model, _images(8, 8, 2), _classes(3), _crossentropy()


def lstm():
    return _sequential((5, 3), L.LSTM(4), L.Dense(3)), _images(5, 3), _classes(3), _crossentropy()


def masked_lstm():
    model = _sequential((6,), L.Embedding(9, 4, mask_zero=True), L.LSTM(4), L.Dense(3))
    return model, _tokens(9, 6), _classes(3), _crossentropy()


def embedding():
    model = _sequential((6,), L.Embedding(9, 4), L.GlobalAveragePooling1D(), L.Dense(3))
    return model, _tokens(9, 6), _classes(3), _crossentropy()


def attention():
    x = keras.Input((5,), dtype="int32")
    h = L.Embedding(9, 8)(x)
    h = L.LayerNormalization()(h + L.MultiHeadAttention(2, 4)(h, h))
    model = keras.Model(x, L.Dense(3)(L.GlobalAveragePooling1D()(h)))
    return model, _tokens(9, 5), _classes(3), _crossentropy()


def layer_norm():
    model = _sequential((6,), L.Dense(8), L.LayerNormalization(), L.Dense(3))
    return model, _images(6), _classes(3), _crossentropy()


def shared_layers():
    x = keras.Input((6,))
    shared = L.Dense(6, "tanh")
    model = keras.Model(x, L.Dense(3)(shared(shared(x))))
    return model, _images(6), _classes(3), _crossentropy()


def two_inputs_two_outputs():
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    h = L.Dense(6, "tanh")(L.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, {"kind": L.Dense(3)(h), "size": L.Dense(1)(h)})
    x = {"a": _images(4), "b": _images(3)}
    y = {"kind": _classes(3), "size": _images(1)}
    return model, x, y, {"kind": _crossentropy(), "size": "mse"}


def dropout():
    model = _sequential((6,), L.Dropout(0.4), L.Dense(16, "tanh"), L.Dropout(0.5), L.Dense(3))
    return model, _images(6), _classes(3), _crossentropy()


def regularizers():
    model = _sequential(
        (6,),
        L.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l2"),
        L.Dense(3, bias_regularizer="l1"),
    )
    return model, _images(6), _classes(3), _crossentropy()


def frozen_batch_norm():
    model = _sequential((6,), L.BatchNormalization(trainable=False), L.Dense(3))
    return model, _images(6), _classes(3), _crossentropy()


MODELS = [
    dense, conv, separable_conv, lstm, masked_lstm, embedding, attention, layer_norm,
    shared_layers, two_inputs_two_outputs, dropout, regularizers, frozen_batch_norm,
]  # fmt: skip


def _images(*shape):
    return np.random.default_rng(0).normal(size=(ROWS, *shape)).astype(np.float32)


def _tokens(vocabulary, length):
    tokens = np.random.default_rng(1).integers(1, vocabulary, (ROWS, length)).astype(np.int32)
    tokens[:, length - 2 :] = 0
    return tokens


def _classes(count):
    return np.random.default_rng(2).integers(0, count, ROWS)


def _crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def reference(model, loss, x, y, clip_norm, rows=ROWS):
    """Σ clip(gradient) by one eager call per example, in float64 after the gradient."""
    generators = [g for layer in model._flatten_layers() for g in layer._seed_generators]
    # The states in the order of non_trainable_variables, as the engine sees them.
    ids = [id(v) for v in model.non_trainable_variables]
    generators.sort(key=lambda g: ids.index(id(g.state)))
    total = [np.zeros(v.shape) for v in model.trainable_variables]
    for i in range(rows):
        seeds = tf.random.stateless_uniform(
            [BATCH, len(generators), 2],
            SEED + tf.constant([i // BATCH + 1, 0], tf.int64),
            minval=None,
            maxval=None,
            dtype=tf.uint32,
        )
        for generator, seed in zip(generators, seeds[i % BATCH], strict=True):
            generator.state.assign(seed)
        x_i, y_i = tf.nest.map_structure(lambda a, i=i: tf.constant(a[i : i + 1]), (x, y))
        with tf.GradientTape() as tape:
            y_pred = model(x_i, training=True)
            if isinstance(loss, dict):
                value = sum(keras.losses.get(loss[k])(y_i[k], y_pred[k]) for k in loss)
                value = tf.reduce_sum(value)
            else:
                value = loss(y_i, y_pred)
            regularizers = sum(v.regularizer is not None for v in model.trainable_variables)
            value += sum(model.losses[: len(model.losses) - regularizers])
        grads = tape.gradient(value, [v.value for v in model.trainable_variables])
        grads = [np.asarray(tf.convert_to_tensor(g), np.float64) for g in grads]
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        total = [t + g * min(1.0, clip_norm / norm) for t, g in zip(total, grads, strict=True)]
    return total


def clipped_sum(model, x, y, loss, clip_norm, **options):
    """Σ clip(gradient) by an engine, in physical batches of BATCH.

    Args:
        model, x, y, loss: as the builders return them.
        clip_norm: of the ball that gradients are clipped to.
        **options: of `make_engine`.

    Returns:
        The sums, a list of arrays, and the `GradientPlan`.
    """
    compile_loss = CompileLoss(loss)
    compile_loss.build(y, model(x))
    spec = tf.nest.map_structure(lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), (x, y))
    engine, plan = make_engine(model, compile_loss, element_spec=(*spec, None), **options)
    before = [v.numpy() for v in model.non_trainable_variables]
    run = tf.function(lambda lot: engine.clipped_sum(lot, clipping.L2Ball(clip_norm), SEED))
    sums, _ = run(make_lot(x, y, physical_batch_size=BATCH))
    for a, v in zip(before, model.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(a, v.numpy())
    return [np.asarray(s) for s in sums], plan


def relative_error(sums, expected):
    """The largest difference of an entry, over the norm of all that is expected."""
    return max(np.abs(s - e).max() for s, e in zip(sums, expected, strict=True)) / norm(expected)


def norm(sums):
    """The norm of all sums together."""
    return np.sqrt(sum((s**2).sum() for s in sums))


def main(name):
    keras.utils.set_random_seed(7)
    model, x, y, loss = {f.__name__: f for f in MODELS}[name]()
    if isinstance(loss, dict):
        # A function loss gives one value per example; both references need the mean of it.
        loss = {k: keras.losses.MeanSquaredError() if v == "mse" else v for k, v in loss.items()}
    clip_norm = 0.7
    expected = reference(model, loss, x, y, clip_norm)
    errors = {}
    for gradient_engine in ("vectorized", "ghost"):
        if (name, gradient_engine) == ("dropout", "ghost"):
            continue  # it draws other masks, by design
        sums, _ = clipped_sum(
            model,
            x,
            y,
            loss,
            clip_norm,
            # XLA draws another stream from the same seed: masks are compared without it.
            jit_compile=False if name == "dropout" else "auto",
            gradient_engine=gradient_engine,
            max_rows=8,
        )
        errors[gradient_engine] = float(relative_error(sums, expected))
    print(json.dumps({"name": name, "errors": errors, "norm": float(norm(expected))}), flush=True)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(each)
