"""Attacks by losses with side effects in their gradients, or by words of records."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import data
from tf_adadp.gradients.example_graph import _may_keep

L = keras.layers


class Watching(L.Layer):
    """Keeps the gradients of raw records, in a function for the gradient alone."""

    def __init__(self, keep):
        super().__init__()
        self._keep = keep

    def call(self, x):
        @tf.custom_gradient
        def watched(z):
            def gradient(upstream):
                self._keep(upstream)
                return upstream

            return tf.identity(z), gradient

        return watched(x)


class Positive(L.Layer):
    """Means over as many entries as a record has positive ones."""

    def call(self, x):
        return tf.reduce_sum(tf.boolean_mask(x, x > 0)) * x


class LabelledOnly(keras.losses.Loss):
    """Takes as many labels as a record has."""

    def call(self, y, y_pred):
        errors = tf.ragged.boolean_mask(tf.square(y - y_pred), y >= 0)
        return tf.reduce_sum(errors, axis=-1)


def _model(*layers, engine="auto", loss="sparse_categorical_crossentropy", **compiled):
    model = keras.Sequential([*layers, L.Dense(3, activation="softmax")])
    private = dp.DPModel(model, gradient_engine=engine)
    private.compile(
        dp.DPSGD(learning_rate=0.1, noise_multiplier=1.0),
        loss=loss,
        log_raw_metrics=False,
        **compiled,
    )
    return private


@pytest.mark.parametrize("engine", ["ghost", "vectorized"])
def test_state_kept_by_a_custom_gradient(engine):
    x, y = data()
    seen, calls = tf.Variable(0.0), []
    keeps = (
        lambda upstream: seen.assign_add(tf.reduce_sum(upstream)),
        lambda upstream: tf.py_function(lambda raw: calls.append(raw), [upstream], []),
    )
    for keep in keeps:
        model = _model(L.Dense(4), Watching(keep), engine=engine)
        with pytest.raises(ValueError, match="keeps state or calls Python"):
            model.fit(x, y, batch_size=len(x), verbose=0)
        assert model.ledger.steps == 0
    assert seen.numpy() == 0
    assert not calls


def keeps_in_a_file(path, x):
    before = tf.strings.to_number(tf.io.read_file(path))
    with tf.control_dependencies(
        [tf.io.write_file(path, tf.strings.as_string(tf.reduce_max(x)))],
    ):
        return x + before


def keeps_in_an_accumulator(path, x):
    sums = tf.raw_ops.ResourceConditionalAccumulator(
        dtype=tf.float32, shape=[], shared_name="sums_of_records"
    )
    step = tf.constant(0, tf.int64)
    tf.raw_ops.ResourceAccumulatorApplyGradient(
        handle=sums, local_step=step, gradient=tf.reduce_max(x)
    )
    return x


def writes_a_summary(path, x):
    with tf.summary.create_file_writer(path + ".events").as_default():
        tf.summary.scalar("largest", tf.reduce_max(x), step=0)
    return x


@pytest.mark.representative(3)
@pytest.mark.parametrize("engine", ["ghost", "vectorized"])
@pytest.mark.parametrize("keep", [keeps_in_a_file, keeps_in_an_accumulator, writes_a_summary])
def test_state_kept_outside_of_variables(tmp_path, keep, engine):
    """Records follow each other in a recurrent layer with a mask."""
    path = tmp_path / "state"
    path.write_text("0")

    class Keeps(L.Layer):
        def call(self, x):
            return keep(str(path), x)

    layers = [keras.Input((5, 4)), L.Masking(), L.LSTM(4), Keeps()]
    model = _model(*layers, engine=engine)
    x = np.ones((12, 5, 4), np.float32)
    with pytest.raises(ValueError, match="keeps state or calls Python"):
        model.fit(x, np.arange(12) % 3, batch_size=6, verbose=0)
    assert model.ledger.steps == 0
    assert path.read_text() == "0"


def test_what_writes_by_its_name_may_keep_and_what_reads_does_not():
    """TensorFlow 1's tables, queues and variables among them, which no operation calls stateful."""
    for name in (
        "Assign", "AssignAdd", "AssignSub", "AssignVariableOp", "BarrierInsertMany",
        "LookupTableImport", "LookupTableInsert", "LookupTableInsertV2", "LookupTableRemoveV2",
        "MapStage", "OrderedMapStage", "QueueEnqueue", "QueueEnqueueManyV2",
        "ResourceApplyAdam", "ResourceScatterAdd", "ResourceStridedSliceAssign", "ScatterUpdate",
        "Stage", "StackPush", "StackPushV2", "WriteFile",
    ):  # fmt: skip
        assert _may_keep(name), name
    for name in (
        "LookupTableFindV2", "MatMul", "RandomUniform", "ReadVariableOp", "ResourceGather",
        "StatefulPartitionedCall", "StatelessWhile", "TensorArrayWriteV3", "While", "a_function",
    ):  # fmt: skip
        assert not _may_keep(name), name


def test_records_of_unequal_numbers_of_words():
    x = np.array([["a b"], [""], ["zz"], ["c d e f"]], object)
    words = L.TextVectorization(vocabulary=["a", "b"], output_mode="multi_hot")
    model = _model(keras.Input((1,), dtype="string"), words)
    model.fit(x, np.arange(4) % 3, batch_size=4, verbose=0)
    assert model.ledger.steps == 1


@pytest.mark.representative(1)
@pytest.mark.parametrize("engine", ["ghost", "vectorized"])
def test_records_of_unequal_numbers_of_positive_entries(engine):
    x, y = data()
    model = _model(L.Dense(4), Positive(), engine=engine)
    with pytest.warns(UserWarning, match="not proven to keep examples apart"):
        model.fit(x, y, batch_size=len(x), verbose=0)
    assert model.ledger.steps == 1


@pytest.mark.representative(1)
@pytest.mark.parametrize("engine", ["ghost", "vectorized"])
def test_records_of_unequal_numbers_of_labels(engine):
    x, y = data()
    y = np.eye(3, dtype=np.float32)[y]
    y[3, 1:] = -1
    model = _model(
        L.Dense(4),
        engine=engine,
        loss=LabelledOnly(),
        metrics=[lambda y, y_pred: tf.reduce_mean(tf.boolean_mask(y_pred, y >= 0))[None]],
        released_metrics=dp.ReleasedMetrics(noise_multiplier=5.0, loss_bound=1.0),
    )
    with pytest.warns(UserWarning, match="The loss '.*' is not proven to keep examples apart"):
        model.fit(x, y, batch_size=len(x), verbose=0)
    assert model.ledger.steps == 1


@pytest.mark.parametrize(
    "layer",
    [
        lambda: L.CategoryEncoding(num_tokens=4, output_mode="multi_hot"),
        lambda: L.Discretization(bin_boundaries=[0.0, 1.0], output_mode="multi_hot"),
    ],
)
def test_layers_that_xla_cannot_compile(layer):
    x = np.arange(8, dtype=np.int32).reshape(4, 2) % 4
    model = _model(keras.Input((2,), dtype="int32"), layer(), engine="vectorized")
    model.fit(x, np.arange(4) % 3, batch_size=4, verbose=0)
    assert model.ledger.steps == 1
