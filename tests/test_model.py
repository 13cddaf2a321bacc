"""DPModel: training equals what Keras would do where clipping and noise are off, for every form of
model, loss and weight; and the parts that are private by construction."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, crossentropy, data, exact_sgd, plain_model, private_model

L = keras.layers


def same_start(build):
    """Two models of equal weights."""
    first, second = build(), build()
    second.set_weights(first.get_weights())
    return first, second


def assert_one_step_equals_keras(build, x, y, loss, rows=ROWS, **fit):
    """A full lot without clipping and noise is one step of Keras on the whole data."""
    plain, wrapped = same_start(build)
    plain.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss())
    private = dp.DPModel(wrapped, physical_batch_size=16)
    private.compile(optimizer=exact_sgd(), loss=loss(), jit_compile=False)
    keras_fit = dict(fit)
    class_weight = keras_fit.get("class_weight")
    plain.fit(x, y, batch_size=rows, epochs=1, verbose=0, shuffle=False, **keras_fit)
    history = private.fit(x, y, batch_size=rows, epochs=1, verbose=0, **fit)
    assert class_weight is None or np.isfinite(history.history["loss"][0])
    moved = 0.0
    for a, b in zip(plain.get_weights(), wrapped.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        moved += np.abs(a).sum()
    assert moved > 0
    return history


def test_full_lots_without_noise_are_gradient_descent():
    x, y = data()
    assert_one_step_equals_keras(plain_model, x, y, crossentropy)


@pytest.mark.extended
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight"])
def test_every_mean_reduction_is_the_mean_over_the_lot(reduction):
    x, y = data()
    assert_one_step_equals_keras(plain_model, x, y, lambda: crossentropy(reduction=reduction))


@pytest.mark.extended
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_sums_over_a_batch_become_means_over_the_lot(reduction):
    x, y = data()
    by_sum, by_mean = same_start(plain_model)
    for model, loss in ((by_sum, crossentropy(reduction=reduction)), (by_mean, crossentropy())):
        private_model(exact_sgd(), model, loss=loss).fit(x, y, batch_size=ROWS, verbose=0)
    for a, b in zip(by_sum.get_weights(), by_mean.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_sample_weights_multiply_and_never_normalise():
    x, y = data()
    weights = np.random.default_rng(3).uniform(0, 2, ROWS).astype(np.float32)
    assert_one_step_equals_keras(plain_model, x, y, crossentropy, sample_weight=weights)


@pytest.mark.extended
def test_weights_survive_a_loss_that_would_cancel_them():
    x, y = data()
    weights = np.linspace(0, 3, ROWS, dtype=np.float32)
    first, second = same_start(plain_model)
    for model, reduction in ((first, "mean_with_sample_weight"), (second, "sum_over_batch_size")):
        private = private_model(exact_sgd(), model, loss=crossentropy(reduction=reduction))
        private.fit(x, y, batch_size=ROWS, sample_weight=weights, verbose=0)
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_class_weights():
    x, y = data()
    assert_one_step_equals_keras(
        plain_model, x, y, crossentropy, class_weight={0: 0.5, 1: 2.0, 2: 1.0}
    )


def _activity_factor():
    """1 where Keras averages activity regularisers over a batch; older ones sum: 1/ROWS then."""
    layer = L.Dense(1, use_bias=False, activity_regularizer=keras.regularizers.L2(1.0))
    ones = np.ones((2, 1), np.float32)
    layer(ones)
    layer.kernel.assign([[1.0]])
    layer(ones)
    return 1.0 if float(layer.losses[-1]) == 1.0 else 1.0 / ROWS


def test_regularizers_of_weights_and_activities():
    factors = iter([_activity_factor(), 1.0])

    def build():
        return plain_model(
            L.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.1)),
            L.Dense(5, "tanh", activity_regularizer=keras.regularizers.L2(0.2 * next(factors))),
        )

    x, y = data()
    assert_one_step_equals_keras(build, x, y, crossentropy)


def test_add_loss():
    class Penalty(L.Layer):
        def call(self, x):
            self.add_loss(0.3 * keras.ops.mean(keras.ops.square(x)))
            return x

    x, y = data()
    assert_one_step_equals_keras(
        lambda: plain_model(L.Dense(5, "tanh"), Penalty()), x, y, crossentropy
    )


@pytest.mark.extended
def test_two_inputs_and_two_outputs_as_dicts():
    def build():
        a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
        h = L.Dense(6, "tanh")(L.Concatenate()([a, b]))
        return keras.Model({"a": a, "b": b}, {"p": L.Dense(3)(h), "q": L.Dense(1)(h)})

    rng = np.random.default_rng(0)
    x = {"a": rng.normal(size=(ROWS, 4)), "b": rng.normal(size=(ROWS, 3))}
    y = {"p": rng.integers(0, 3, ROWS), "q": rng.normal(size=(ROWS, 1))}
    history = assert_one_step_equals_keras(
        build, x, y, lambda: {"p": crossentropy(), "q": "mean_squared_error"}
    )
    assert {"p_loss", "q_loss"} <= history.history.keys()


@pytest.mark.extended
def test_list_outputs_with_a_loss_per_output_name():
    def build():
        x = keras.Input((6,))
        h = L.Dense(6, "tanh")(x)
        return keras.Model(x, [L.Dense(3, name="kind")(h), L.Dense(1, name="size")(h)])

    x, y = data()
    size = np.random.default_rng(1).normal(size=(ROWS, 1)).astype(np.float32)
    assert_one_step_equals_keras(
        build, x, [y, size], lambda: {"kind": crossentropy(), "size": "mean_absolute_error"}
    )


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = L.Dense(8, "tanh")
        self.out = L.Dense(3)

    def call(self, x, training=False):
        return self.out(self.hidden(x))


@pytest.mark.extended
def test_subclassed_and_unbuilt_models_train():
    x, y = data()
    for model in (Subclassed(), keras.Sequential([L.Dense(4), L.Dense(3)])):
        private = private_model(model=model)
        history = private.fit(x, y, batch_size=30, verbose=0, validation_data=(x, y))
        assert np.isfinite(history.history["val_loss"][0])
        assert private.predict(x, verbose=0).shape == (ROWS, 3)
        assert private.evaluate(x, y, verbose=0, return_dict=True).keys() == {"loss", "accuracy"}


def test_metrics_count_real_rows_only():
    x, y = data()
    private = private_model(exact_sgd(0.0), wrap={"physical_batch_size": 50})
    with pytest.warns(dp.PrivacyWarning, match="moved no trainable weight"):
        history = private.fit(x, y, batch_size=ROWS, verbose=0).history
    expected = private.evaluate(x, y, verbose=0, return_dict=True)
    assert history["accuracy"][0] == pytest.approx(expected["accuracy"])
    assert history["loss"][0] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize(
    "how", [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 3}]
)
def test_every_way_of_running_gives_the_same_training(how):
    x, y = data()
    results = []
    for arguments in ({}, how):
        keras.utils.set_random_seed(5)
        private = private_model(exact_sgd(seed=4, l2_norm_clip=0.5), **arguments)
        private.fit(x, y, batch_size=40, epochs=2, verbose=0)
        results.append(private.get_weights())
        assert private.ledger.steps == 6
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.extended
def test_physical_batches_change_nothing():
    x, y = data()
    results = []
    for size in (1, 7, 64):
        keras.utils.set_random_seed(5)
        private = private_model(
            dp.ADADP(noise_multiplier=1.0, seed=9), wrap={"physical_batch_size": size}
        )
        private.fit(x, y, batch_size=40, epochs=1, verbose=0)
        results.append(private.get_weights())
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.extended
def test_one_trace_over_lots_of_many_sizes():
    x, y = data()
    traces = []

    class Counting(L.Dense):
        def call(self, inputs):
            traces.append(1)
            return super().call(inputs)

    private = private_model(model=plain_model(Counting(4)), wrap={"physical_batch_size": 4})
    private.fit(x, y, batch_size=20, epochs=1, verbose=0)
    after_one_epoch = len(traces)
    private.fit(x, y, batch_size=20, epochs=4, verbose=0)
    assert len(traces) == after_one_epoch


def test_empty_lots_are_lots():
    x, y = data()
    private = private_model(dp.DPSGD(0.1, noise_multiplier=1.0, seed=0))
    before = private.get_weights()
    lots = dp.PoissonLots(x, y, expected_size=0.001, seed=1)
    private.fit(lots, epochs=1, steps_per_epoch=3, verbose=0)
    assert private.ledger.steps == 3
    assert not np.array_equal(before[0], private.get_weights()[0])  # noise alone


def test_non_finite_examples_contribute_nothing():
    x, y = data()
    bad = np.vstack([x, np.full((1, 6), np.nan, np.float32)])
    first, second = same_start(plain_model)
    for model, inputs, labels in ((first, x, y), (second, bad, np.append(y, 0))):
        private = private_model(exact_sgd(), model)
        lots = dp.DeclaredLots(
            tf.data.Dataset.from_tensors((inputs, labels)),
            law=dp.accounting.PoissonSampling(ROWS + 1, ROWS),
        )
        private.fit(lots, steps_per_epoch=1, verbose=0)
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_state_is_never_updated_from_raw_data():
    class Remembers(L.Layer):
        def build(self, shape):
            self.seen = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

        def call(self, x, training=False):
            if training:
                self.seen.assign(keras.ops.max(x, axis=0))
            return x

    remembers = Remembers()
    x, y = data()
    private = private_model(model=plain_model(remembers))
    with pytest.warns(UserWarning, match="a private step drops that"):
        private.fit(x, y, batch_size=30, verbose=0)
    np.testing.assert_array_equal(remembers.seen.numpy(), np.zeros(6))


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("gradient_engine", "jit_compile"),
    [("vectorized", False), ("vectorized", True), ("ghost", False)],
)
def test_dropout_differs_between_examples_and_steps(gradient_engine, jit_compile):
    """The input is 1, so that a gradient shows its example's mask."""
    from tf_adadp import clipping
    from tf_adadp.clipping.row_gradients import as_rows
    from tf_adadp.gradients import make_engine
    from tf_adadp.sampling import make_lot

    class Keep(clipping.L2Ball):
        def clipped_sum(self, grads, mask):
            rows = [as_rows(g).materialize() for g in grads]
            weights = mask * tf.range(1.0, tf.cast(tf.shape(mask)[0], tf.float32) + 1.0)
            return [tf.tensordot(weights, tf.cast(g != 0, tf.float32), 1) for g in rows]

    model = keras.Sequential([keras.Input((40,)), L.Dropout(0.5), L.Dense(1, use_bias=False)])
    x = np.ones((12, 40), np.float32)

    class Output(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return y_pred[:, 0]

    from keras.src.trainers.compile_utils import CompileLoss

    loss = CompileLoss(Output())
    loss.build(x, model(x))
    spec = tf.TensorSpec((None, 40), tf.float32)
    engine, _ = make_engine(
        model,
        loss,
        jit_compile=jit_compile,
        gradient_engine=gradient_engine,
        element_spec=(spec, spec, None),
    )
    lot = make_lot(x, x, physical_batch_size=12)

    def kept(step):
        sums, _ = engine.clipped_sum(lot, Keep(1e6), tf.constant([1, step], tf.int64))
        return sums[0].numpy()[:, 0]

    # Per coordinate the sum of the numbers of the examples that kept it: 78 or 0 if all agreed.
    first, second = kept(1), kept(2)
    assert len(set(first)) > 10
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, kept(1))


@pytest.mark.extended
def test_validation_split_is_taken_off_before_q():
    x, y = data()
    private = private_model()
    private.fit(x, y, batch_size=24, validation_split=0.2, verbose=0)
    assert private.step_law.num_examples == 96
    assert private.step_law.probability == pytest.approx(0.25)
    assert private.ledger.steps == 4


@pytest.mark.extended
def test_learning_rate_schedules_and_weight_averages():
    x, y = data()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
    optimizer = dp.DPSGD(schedule, noise_multiplier=1.0, use_ema=True, weight_decay=1e-3)
    private = private_model(optimizer)
    private.fit(x, y, batch_size=30, epochs=2, verbose=0)
    assert float(optimizer.learning_rate) == pytest.approx(0.5 * 0.5**4)


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_other_precisions_train(policy):
    x, y = data()
    keras.config.set_dtype_policy(policy)
    try:
        model = plain_model()
    finally:
        keras.config.set_dtype_policy("float32")
    private = private_model(dp.ADADP(noise_multiplier=0.5), model)
    history = private.fit(x, y, batch_size=60, epochs=3, verbose=0).history
    assert np.all(np.isfinite(history["loss"]))
    assert isinstance(private.optimizer, dp.ADADP)


@pytest.mark.extended
def test_microbatches_of_slots_are_the_mean_over_the_lot():
    x, y = data()
    first, second = same_start(plain_model)
    private_model(exact_sgd(microbatch_size=4), first).fit(x, y, batch_size=ROWS, verbose=0)
    private_model(exact_sgd(), second).fit(x, y, batch_size=ROWS, verbose=0)
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_microbatches_are_charged_at_half_the_multiplier():
    x, y = data()
    private = private_model(dp.DPSGD(0.1, noise_multiplier=2.0, microbatch_size=4))
    private.fit(x, y, batch_size=30, epochs=2, verbose=0)
    expected = dp.accounting.epsilon(1.0, 0.25, 8, 1e-3)
    assert private.epsilon(1e-3) == pytest.approx(expected)


@pytest.mark.extended
def test_fixed_size_lots_train_and_are_charged_for_replacement():
    x, y = data()
    private = private_model(dp.DPSGD(0.1, noise_multiplier=4.0))
    private.fit(dp.FixedSizeLots(x, y, size=30), epochs=1, verbose=0)
    law = dp.accounting.FixedSizeSampling(ROWS, 30)
    ledger = dp.PrivacyLedger()
    ledger.add(law.event(4.0), 4, law=law)
    assert private.epsilon(1e-3) == ledger.epsilon(1e-3)


def test_a_step_costs_what_the_accountant_says():
    x, y = data()
    private = private_model(dp.DPAdam(noise_multiplier=1.5))
    private.fit(x, y, batch_size=20, epochs=2, verbose=0)
    for accountant in ("rdp", "pld", "theorem1"):
        expected = dp.accounting.epsilon(1.5, 20 / ROWS, 12, 1e-3, accountant)
        assert private.epsilon(1e-3, accountant) == pytest.approx(expected, rel=1e-6)


@pytest.mark.extended
def test_full_batches_are_legal():
    x, y = data()
    private = private_model(dp.DPSGD(0.1, noise_multiplier=5.0))
    private.fit(x, y, batch_size=ROWS, epochs=3, verbose=0)
    assert private.epsilon(1e-3) == dp.accounting.epsilon(5.0, 1.0, 3, 1e-3)


@pytest.mark.extended
def test_train_on_batch_with_a_declared_law():
    x, y = data()
    private = private_model()
    law = dp.accounting.PoissonSampling(ROWS, 30, declared=True)
    logs = private.train_on_batch(x[:28], y[:28], return_dict=True, law=law)
    assert logs.keys() == {"loss", "accuracy"}
    with pytest.warns(dp.PrivacyWarning, match="declared"):
        assert private.epsilon(1e-3) == dp.accounting.epsilon(1.0, 0.25, 1, 1e-3)


def test_train_on_batch_refuses_a_law_that_draws_no_such_batch():
    x, y = data()
    private = private_model()
    full = dp.accounting.PoissonSampling(ROWS, ROWS)
    with pytest.raises(ValueError, match=r"lots of 30 records, .*probability 0: full batches"):
        private.train_on_batch(x[:30], y[:30], law=full)
    assert not private.ledger.entries
    private.train_on_batch(x, y, law=full)
    assert private.ledger.steps == 1


def test_train_on_batch_without_a_law_refuses_epsilon():
    x, y = data()
    private = private_model()
    private.train_on_batch(x[:30], y[:30])
    with pytest.raises(ValueError, match="sampled"):
        private.epsilon(1e-3)


def test_a_custom_loop_that_forgets_to_charge_gets_no_epsilon():
    x, y = data()
    private = private_model()
    optimizer, lots = private.optimizer, dp.PoissonLots(x, y, expected_size=30)
    optimizer.build(private.trainable_variables)
    for lot in lots.take(2, 16):
        optimizer.apply_private(
            dp.clipped_sum(private.model, crossentropy(), lot, optimizer, jit_compile=False),
            lots.expected_size,
        )
    with pytest.raises(ValueError, match="not charged"):
        private.epsilon(1e-3)
    optimizer.charge(private.ledger, lots.law, 2)
    assert private.epsilon(1e-3) == dp.accounting.epsilon(1.0, 0.25, 2, 1e-3)


@pytest.mark.extended
def test_the_custom_loop_equals_fit():
    x, y = data()
    first, second = same_start(plain_model)
    private_model(exact_sgd(), first).fit(x, y, batch_size=ROWS, verbose=0)
    optimizer = exact_sgd()
    optimizer.build(second.trainable_variables)
    lots = dp.PoissonLots(x, y, expected_size=ROWS)
    (lot,) = lots.take(1, 16)
    sums = dp.clipped_sum(second, crossentropy(), lot, optimizer, jit_compile=False)
    optimizer.apply_private(sums, lots.expected_size)
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.extended
def test_the_plain_model_stands_alone(tmp_path):
    x, y = data()
    private = private_model()
    private.fit(x, y, batch_size=30, verbose=0)
    private.model.save(tmp_path / "plain.keras")
    plain = keras.saving.load_model(tmp_path / "plain.keras")
    assert type(plain) is keras.Sequential
    np.testing.assert_array_equal(plain.predict(x, verbose=0), private.predict(x, verbose=0))
