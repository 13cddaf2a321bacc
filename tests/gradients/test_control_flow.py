"""Loops and branches around a layer, which `tf.vectorized_map` may be unable to convert."""

import contextlib
import logging
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import data, exact_sgd, plain_model, private_model
from tf_adadp import clipping
from tf_adadp.gradients import mapping
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.gradients.vectorized import VectorizedEngine
from tf_adadp.sampling import make_lot

L = keras.layers


class _Around(L.Layer):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(6, activation="tanh")

    def build(self, shape):
        self.dense.build(shape)


class Scan(_Around):
    def call(self, x):
        def step(carry, _):
            carry = self.dense(carry)
            return carry, carry

        return keras.ops.scan(step, x, length=2)[0]


class While(_Around):
    def call(self, x):
        return keras.ops.while_loop(
            lambda i, x: i < 2, lambda i, x: (i + 1, self.dense(x)), (0, x)
        )[1]


class Branch(_Around):
    def call(self, x):
        return keras.ops.cond(keras.ops.sum(x) > 0, lambda: self.dense(x), lambda: 2 * x)


def _gradient_step(model, x, y):
    """Takes one step of gradient descent on the mean loss, example by example, without a lot."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tf.GradientTape() as tape:
        rows = [model(x[i : i + 1], training=True) for i in range(len(x))]
        value = loss(y, tf.concat(rows, 0))
    gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
    return [
        v.numpy() - 0.1 * g.numpy()
        for v, g in zip(model.trainable_variables, gradients, strict=True)
    ]


@pytest.mark.extended
@pytest.mark.parametrize("layer", [While, Branch])
def test_a_step_equals_plain_gradient_descent(layer):
    x, y = (a[:4] for a in data())
    private = private_model(
        exact_sgd(),
        plain_model(layer()),
        metrics=[],
        jit_compile="auto",
        wrap={"gradient_engine": "vectorized"},
    )
    expected = _gradient_step(private.model, x, y)
    with pytest.warns(UserWarning, match="'dense.*' is called inside of a loop or a branch"):
        private.fit(x, y, batch_size=4, verbose=0)
    for a, b in zip(private.get_weights(), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert ("one example after the other" in private.session.prepared.plan.reason) == (
        layer is not While
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    ("engine", "layers"),
    [
        ("vectorized", lambda: [Scan()]),
        ("auto", lambda: [Scan()]),
        ("vectorized", lambda: [L.Reshape((3, 2)), L.SimpleRNN(2)]),
    ],
)
def test_xla_compiles_no_loop_in_the_map(engine, layers):
    """The error comes before the first step: TensorFlow would raise after its charge."""
    x, y = data()
    private = private_model(
        model=plain_model(*layers()),
        metrics=[],
        jit_compile=True,
        wrap={"gradient_engine": engine},
    )
    with pytest.raises(
        ValueError,
        match="XLA cannot compile the loop or branch 'sequential[_0-9]*/(scan|simple_rnn)",
    ):
        private.fit(x, y, batch_size=30, verbose=0)
    assert private.ledger.steps == 0


@pytest.mark.extended
def test_xla_compiles_recurrent_steps_that_are_written_out():
    x, y = data()
    private = private_model(
        model=plain_model(L.Reshape((3, 2)), L.SimpleRNN(2)), metrics=[], jit_compile=True
    )
    private.fit(x, y, batch_size=30, verbose=0)
    assert private.ledger.steps > 0
    assert private.gradient_plan().mapped == ()


@pytest.mark.extended
def test_why_xla_is_left_out():
    """If this fails, XLA supports the operation, and the refusal can be removed."""
    model = plain_model(L.Reshape((3, 2)), L.GRU(2))
    x, y = data(4)
    example_loss = ExampleLoss(model, None)
    engine = VectorizedEngine(example_loss, jit_compile=True)
    lot = make_lot(x, None, physical_batch_size=4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="TensorArray"):
        tf.function(engine.clipped_sum)(lot, clipping.L2Ball(1.0), tf.zeros([2], tf.int64))


@pytest.mark.extended
def test_a_loss_that_loops_like_ctc_is_worked_on_example_by_example():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8, 5)).astype(np.float32)
    y = rng.integers(1, 6, (4, 3)).astype(np.int32)
    network = keras.Sequential([keras.Input((8, 5)), L.Dense(6, activation="tanh"), L.Dense(6)])
    loss = keras.losses.CTC()
    private = private_model(exact_sgd(), network, loss=loss, metrics=[], jit_compile="auto")
    with tf.GradientTape() as tape:
        mean = tf.add_n([loss(y[i : i + 1], network(x[i : i + 1])) for i in range(4)]) / 4
    gradients_ = tape.gradient(mean, [v.value for v in network.trainable_variables])
    variables = zip(network.trainable_variables, gradients_, strict=True)
    expected = [v.numpy() - 0.1 * g.numpy() for v, g in variables]
    with tensorflow_log() as log:  # pages of errors, though all is well
        private.fit(x, y, batch_size=4, verbose=0)
    assert not [record for record in log if record.filename == "pfor.py"]
    for found, wanted in zip(private.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert "one example after the other" in private.session.prepared.plan.reason


# --- what TensorFlow's log is spared --------------------------------------------------------------


@contextlib.contextmanager
def tensorflow_log():
    """A list that gets the records of TensorFlow's log."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    tf.get_logger().addHandler(handler)
    try:
        yield records
    finally:
        tf.get_logger().removeHandler(handler)


def test_a_map_does_not_log_that_it_loops():
    x = tf.random.stateless_normal([3, 1, 6, 6, 2], [0, 1])
    kernel = tf.random.stateless_normal([3, 3, 2, 4], [0, 2])

    def gradient(row):
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            z = tf.nn.conv2d(row, kernel, 1, "SAME")
        return tape.gradient(z, kernel)

    with tensorflow_log() as log:
        tf.vectorized_map(gradient, x, warn=False)
    assert any("Conv2DBackpropFilter" in record.getMessage() for record in log)
    with tensorflow_log() as log:
        mapping.map_rows(gradient, x, sequential=False)
    assert log == []


def test_only_the_map_of_this_thread_is_left_out_of_the_log():
    def say(file, level):
        record = logging.LogRecord("tensorflow", level, f"/path/{file}", 1, file, (), None)
        tf.get_logger().handle(record)

    with tensorflow_log() as log:
        with contextlib.suppress(KeyError), mapping.without_log_of_pfor():
            say("pfor.py", logging.ERROR)
            with mapping.without_log_of_pfor(logging.WARNING):
                say("pfor.py", logging.WARNING)
            assert log == []
            say("other.py", logging.ERROR)
            thread = threading.Thread(target=say, args=("pfor.py", logging.ERROR))
            thread.start()
            thread.join()
            assert len(log) == 2
            raise KeyError
        say("pfor.py", logging.ERROR)  # as before, after an exception too
        with mapping.without_log_of_pfor(logging.WARNING):
            say("pfor.py", logging.ERROR)  # that of a failure that nobody sees to
    assert len(log) == 4
