"""Validation data that cannot be evaluated is refused before an epoch is charged."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, crossentropy, data, private_model

L = keras.layers
X, Y = data()
ONE_HOT = keras.utils.to_categorical(Y, 3)
STRINGS = np.array(["a"] * ROWS)


class Batches(keras.utils.PyDataset):
    """Batches of 40 of these arrays."""

    def __init__(self, *arrays, length=3):
        super().__init__()
        self.arrays, self.length = arrays, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return tuple(array[40 * index : 40 * (index + 1)] for array in self.arrays)


def fit(private, validation_data, **arguments):
    arguments = {"x": X, "y": Y, "batch_size": 30, "verbose": 0, **arguments}
    return private.fit(validation_data=validation_data, **arguments).history


def dataset(*parts):
    return tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0])


def endless():
    while True:
        yield X[:10], Y[:10]


@pytest.mark.representative(3)
@pytest.mark.parametrize(
    ("give", "match"),
    [
        (
            lambda: (X[:, :3], Y),
            r"has x float32 \(None, 3\).* training data has x float32 \(None, 6",
        ),
        (lambda: (X, Y[:5]), "same number of samples.*one row per example"),
        (lambda: (X, Y + 5), "validation_data has labels from 5 to 7"),
        (lambda: (X, STRINGS), "Encode strings as numbers"),
        (lambda: (X, STRINGS.astype(object)), "string in place of int32"),
        (lambda: (X.astype(str), Y), "Encode strings as numbers"),
        (lambda: (tf.strings.as_string(X), Y), "string in place of float32"),
        (lambda: X, r"Give the labels too, validation_data=\(x, y\)"),
        (lambda: (X, ONE_HOT), r"y float32 \(None, 3\).*y int32 \(None,\)"),
        (lambda: (X, Y, np.ones((ROWS, 7))), r"sample_weight float32 \(None, 7\)"),
        (lambda: (X[:0], Y[:0]), "has no rows"),
        (lambda: (X, list(Y)), r"\(ndarray, list\) has single values where arrays belong"),
        (lambda: (X, Y, Y, Y), "has 4 parts"),
        (lambda: "abc", "validation_data=str"),
        (lambda: iter([(X, Y)]), "validation_data=list_iterator: Unrecognized"),
        (lambda: ({"a": X}, Y), "Give it in that form"),
        (lambda: dataset(X, Y), r"Batch it, validation_data=dataset\.batch"),
        (lambda: dataset(X, Y).batch(9).take(0), "has no rows"),
        (lambda: dataset(X[:, :3], Y).batch(9), "Give it in that form"),
        (lambda: dataset(X).batch(9), "Give the labels too"),
        (lambda: Batches(X[:, :3], Y), "Give it in that form"),
        (lambda: Batches(X), "Give the labels too"),
        (lambda: Batches(X, Y, length=0), "validation_data=Batches: .*length 0"),
    ],
)
def test_refused_before_anything_is_charged(give, match):
    private = private_model()
    with pytest.raises(ValueError, match=match) as caught:
        fit(private, give())
    assert "validation_data" in str(caught.value)
    assert private.ledger.steps == 0


@pytest.mark.extended
def test_refused_beside_lots_and_where_layers_run_eagerly():
    lots = dp.PoissonLots(X, Y, expected_size=30)
    for validation_data, error, eagerly in (
        (lots, TypeError, False),
        ((X[:, :3], Y), ValueError, False),
        ((X[:, :3], Y), ValueError, True),
    ):
        private = private_model(run_eagerly=eagerly)
        with pytest.raises(error, match="validation_data"):
            fit(private, validation_data, x=lots, y=None, batch_size=None)
        assert private.ledger.steps == 0


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # of unknown length: it must
def test_all_that_keras_evaluates():
    private = private_model()
    dataset_of_unknown_width = tf.data.Dataset.from_generator(
        lambda: iter([(X, Y)]),
        output_signature=(tf.TensorSpec((None, None)), tf.TensorSpec((None,), tf.int64)),
    )
    for validation_data in (
        (X, Y),
        [X, Y],
        (X[:7].astype(np.float64), Y[:7].astype(np.float32)),
        ((10 * X).astype(np.int8), Y[:, None].astype(np.uint8)),
        (tf.constant(X), tf.constant(Y), np.ones(ROWS, np.int64)),
        (X, Y, np.ones((ROWS, 1))),
        dataset(X.astype(np.float64), Y[:, None]).batch(9),
        dataset_of_unknown_width,
        Batches(X, Y, np.ones(ROWS)),
    ):
        assert "val_loss" in fit(private, validation_data)
    for validation_data in (dataset(X, Y).batch(9).repeat(), endless()):
        assert "val_loss" in fit(private, validation_data, validation_steps=2)


def test_nothing_is_taken_from_a_generator():
    taken = []

    def batches():
        for index in range(4):
            taken.append(index)
            yield X[:10], Y[:10]

    private = private_model()
    validation_data = batches()
    with pytest.raises(ValueError, match="steps_per_epoch"):
        fit(private, validation_data, steps_per_epoch=0)
    with pytest.raises(ValueError, match="labels"):
        fit(private, validation_data, y=Y + 3)
    stops = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(private, validation_data, callbacks=[stops])
    assert taken == []


@pytest.mark.extended
def test_several_inputs_and_outputs():
    a, b = keras.Input((6,), name="a"), keras.Input((2,), name="b")
    hidden = L.Concatenate()([a, b])
    outputs = {"p": L.Dense(3, name="p")(hidden), "q": L.Dense(1, name="q")(hidden)}
    private = private_model(
        model=keras.Model({"a": a, "b": b}, outputs),
        loss={"p": crossentropy(), "q": "mse"},
        metrics=None,
    )
    x, y = {"a": X, "b": X[:, :2]}, {"p": Y, "q": X[:, :1]}
    for bad, match in (
        (({"a": X, "b": X}, y), r"x\['b'\] float32 \(None, 6\)"),
        (({"a": X}, y), "Missing data"),
        ((x, {"p": Y}), "different structures"),
        ((x, {"p": Y + 3, "q": X[:, :1]}), "labels from 3 to 5"),
        ((x, {"p": Y, "q": X[:50, :1]}), "same number"),
    ):
        with pytest.raises(ValueError, match=match) as caught:
            fit(private, bad, x=x, y=y)
        assert "validation_data" in str(caught.value)
    assert private.ledger.steps == 0
    for good in ((x, y), (x, y, np.ones(ROWS)), (x, [Y, X[:, :1]]), dataset(x, y).batch(9)):
        assert "val_p_loss" in fit(private, good, x=x, y=y)


@pytest.mark.extended
def test_tokens_without_a_row():
    model = keras.Sequential([keras.Input((5,)), L.Embedding(10, 4), L.Flatten(), L.Dense(3)])
    tokens = np.random.default_rng(0).integers(0, 10, (ROWS, 5))
    private = private_model(model=model)
    with pytest.raises(ValueError, match="validation_data has tokens from 1 to 10"):
        fit(private, (tokens + 1, Y), x=tokens)
    assert private.ledger.steps == 0
    assert "val_loss" in fit(private, (tokens.astype(np.int8), Y), x=tokens)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"validation_freq": 0}, "validation_freq=0"),
        ({"validation_freq": (1, 2)}, r"validation_freq=\(1, 2\): .* or a list of epochs"),
        ({"validation_freq": [1, 0]}, r"validation_freq\[1\]=0"),
        ({"validation_steps": 1.5}, "validation_steps=1.5"),
        ({"validation_steps": 0}, "validation_steps=0"),
        ({"validation_batch_size": -3}, "validation_batch_size=-3"),
        ({"validation_data": dataset(X, Y).batch(9).repeat()}, "without an end.*validation_steps"),
    ],
)
def test_numbers_of_evaluations_that_are_none(arguments, match):
    private = private_model()
    with pytest.raises(ValueError, match=match):
        fit(private, **{"validation_data": (X, Y), **arguments})
    assert private.ledger.steps == 0


@pytest.mark.extended
def test_evaluations_at_some_epochs():
    history = fit(private_model(), (X, Y), epochs=3, validation_freq=[2, 3])
    assert len(history["val_loss"]) == 2


@pytest.mark.extended
@pytest.mark.parametrize("sizes", [{}, {"validation_batch_size": 20}])
def test_validation_steps_cover_the_records_that_keras_covers(sizes, recwarn):
    private = private_model()
    history = fit(private, (X, Y), validation_steps=2, batch_size=29.5, **sizes)
    rows = 2 * sizes.get("validation_batch_size", 30)
    loss, _ = private.evaluate(X[:rows], Y[:rows], verbose=0)
    assert history["val_loss"] == pytest.approx([loss], rel=1e-5)
    assert not any("ran out of data" in str(w.message) for w in recwarn)


@pytest.mark.extended
def test_validation_steps_beside_lots_cover_all_records(recwarn):
    private = private_model()
    lots = dp.PoissonLots(X, Y, expected_size=30)
    history = fit(private, (X, Y), x=lots, y=None, batch_size=None, validation_steps=3)
    loss, _ = private.evaluate(X, Y, verbose=0)
    assert history["val_loss"] == pytest.approx([loss], rel=1e-5)
    assert not any("ran out of data" in str(w.message) for w in recwarn)
