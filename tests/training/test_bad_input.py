"""Every mistake raises an error that names it and a fix, and nothing is trained."""

import functools
import re

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

import tf_adadp as dp
from tests.helpers import ROWS, crossentropy, data, plain_model, private_model
from tf_adadp import clipping
from tf_adadp.gradients import make_engine
from tf_adadp.sampling import make_lot
from tf_adadp.training.arguments import class_weights

L = keras.layers
FLAVOURS = [dp.DPSGD, dp.DPAdam, dp.DPRMSprop, dp.ADADP, dp.ADAN]


def refused(private, match, error=ValueError, **fit):
    """Checks that `fit` raises, and changes and charges nothing."""
    before = private.get_weights()
    x, y = data()
    arguments = {"x": x, "y": y, "batch_size": 30, "verbose": 0, **fit}
    with pytest.raises(error, match=match):
        private.fit(**arguments)
    for a, b in zip(before, private.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert private.ledger.steps == 0


@pytest.mark.parametrize("optimizer", ["adam", keras.optimizers.SGD(0.1), None])
def test_a_private_model_refuses_other_optimizers(optimizer):
    with pytest.raises(ValueError, match="not private.*ADADP"):
        dp.DPModel(plain_model()).compile(optimizer=optimizer, loss="mse")


@pytest.mark.parametrize("make", FLAVOURS)
def test_a_plain_model_cannot_use_a_private_optimizer(make):
    model = plain_model()
    model.compile(optimizer=make(noise_multiplier=1.0), loss=crossentropy())
    before = model.get_weights()
    x, y = data()
    with pytest.raises(RuntimeError, match=r"DPModel\(model\)"):
        model.fit(x, y, verbose=0)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("method", ["apply", "apply_gradients", "stateless_apply"])
def test_raw_gradients_are_refused(method):
    optimizer = dp.DPSGD(noise_multiplier=1.0)
    variable = keras.Variable(np.zeros(3))
    optimizer.build([variable])
    gradient = tf.ones([3])
    arguments = {
        "apply": ([gradient], [variable]),
        "apply_gradients": ([(gradient, variable)],),
        "stateless_apply": (optimizer.variables, [gradient], [variable]),
    }[method]
    with pytest.raises(RuntimeError, match="no raw gradients"):
        getattr(optimizer, method)(*arguments)
    np.testing.assert_array_equal(variable.numpy(), np.zeros(3))


def test_a_dynamic_loss_scale_is_refused():
    wrapped = keras.optimizers.LossScaleOptimizer(dp.DPSGD(noise_multiplier=1.0))
    with pytest.raises(ValueError, match="not private"):
        dp.DPModel(plain_model()).compile(optimizer=wrapped, loss="mse")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"noise_multiplier": 0}, "allow_no_noise=True"),
        ({"noise_multiplier": np.nan}, "noise_multiplier=nan"),
        ({"noise_multiplier": "2"}, "noise_multiplier='2'"),
        ({"noise_multiplier": True}, "noise_multiplier=True"),
        ({"noise_multiplier": 1.0, "l2_norm_clip": 0.0}, "l2_norm_clip=0.0"),
        ({"noise_multiplier": 1.0, "l2_norm_clip": -1}, "l2_norm_clip=-1"),
        ({"noise_multiplier": 1.0, "l2_norm_clip": np.inf}, "l2_norm_clip=inf"),
        ({"noise_multiplier": 1.0, "l2_norm_clip": {}}, "l2_norm_clip={}"),
        ({"noise_multiplier": 1.0, "microbatch_size": 0}, "microbatch_size=0"),
        ({"noise_multiplier": 1.0, "microbatch_size": 2.5}, "microbatch_size=2.5"),
        ({"noise_multiplier": 1.0, "seed": "x"}, "seed='x'"),
        ({"noise_multiplier": 1.0, "learning_rate": np.nan}, "learning_rate=nan"),
        ({"noise_multiplier": 1.0, "gradient_accumulation_steps": 4}, "larger batch_size"),
        ({"noise_multiplier": 1.0, "loss_scale_factor": 4.0}, "loss_scale_factor=4.0"),
    ],
)
@pytest.mark.parametrize("make", [dp.DPSGD, dp.ADADP])
def test_optimizer_arguments(make, arguments, match):
    with pytest.raises(ValueError, match=match):
        make(**arguments)


KINDS = {
    "DPSGD": dp.DPSGD,
    "DPAdam": dp.DPAdam,
    "DPRMSprop": dp.DPRMSprop,
    "ADADP": dp.ADADP,
    "raw ADADP": functools.partial(dp.ADADP, prior="raw"),
    "ADAN": dp.ADAN,
    "AdaCliP": dp.AdaCliP,
    "AutoSGD": dp.AutoSGD,
    "DPOPT": dp.DPOPT,
    "budgeted DPOPT": functools.partial(
        dp.DPOPT, directions="budgeted", direction_noise_multiplier=2.0
    ),
    "printed DPOPT": functools.partial(dp.DPOPT, variant="printed"),
    "SADPSGD": functools.partial(dp.SADPSGD, energy_data=data()),
    "printed SADPSGD": functools.partial(dp.SADPSGD, energy_data=data(), variant="printed"),
    "DPNadam": dp.make_private(keras.optimizers.Nadam),
}


@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_learning_rates(kind):
    for rate in (1, np.int64(1), np.uint8(1), np.float32(1)):
        optimizer = KINDS[kind](learning_rate=rate, noise_multiplier=1.0)
        assert float(optimizer.learning_rate) == 1.0
        assert optimizer.get_config()["learning_rate"] == 1.0
    for rate in (True, np.True_, np.inf, 10**400):
        with pytest.raises(ValueError, match="learning_rate=.*give a finite number or a Keras"):
            KINDS[kind](learning_rate=rate, noise_multiplier=1.0)


@pytest.mark.representative(1)
@pytest.mark.parametrize("allow_no_noise", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_multiplier_nothing_is_released_or_charged(kind, allow_no_noise):
    optimizer = KINDS[kind](allow_no_noise=allow_no_noise)
    name = kind.split()[-1]
    wanted = (
        rf"^{name} was made without noise_multiplier.* {name}\(noise_multiplier=.*"
        r"tf_adadp\.accounting\.calibrate_noise_multiplier\(target_epsilon="
    )
    assert optimizer.noise_multiplier is None
    config = optimizer.get_config()
    assert config["noise_multiplier"] is None
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.noise_multiplier is None
    assert again.get_config() == config
    with pytest.raises(AttributeError, match="read-only"):
        optimizer.noise_multiplier = 1.0

    with pytest.raises(ValueError, match=wanted):
        private_model(optimizer)

    # Custom loops.
    model = plain_model()
    optimizer.build(model.trainable_variables)
    optimizer.bind(model, crossentropy())
    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    sums = zeros * 2 if kind == "raw ADADP" else zeros
    law, ledger = dp.accounting.PoissonSampling(ROWS, 30), dp.PrivacyLedger()
    spec = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), data())
    loss = CompileLoss(crossentropy())
    loss.build(data()[1][:2], model(data()[0][:2]))
    engine, _ = make_engine(model, loss, element_spec=(*spec, None))
    lot, loss_function = make_lot(*data(), None, 30), crossentropy()
    before = [v.numpy() for v in [*model.weights, *optimizer.variables]]
    if name == "DPOPT":  # as in its `step_on_lot`
        optimizer._in_step = True
    for act in (
        lambda: optimizer.event(law),
        lambda: optimizer.charge(ledger, law),
        lambda: optimizer.charges.announce(ledger, law, 1),
        lambda: optimizer.charged(ledger, law, 1).__enter__(),
        lambda: optimizer.apply_private(sums, 30.0),
        lambda: tf.function(lambda: optimizer.apply_private(sums, 30.0), autograph=False)(),
        lambda: optimizer.step_on_lot(engine, lot, 30.0),
        lambda: dp.private_step(model, loss_function, lot, optimizer, ledger=ledger, law=law),
        lambda: optimizer._with_noise(zeros, zeros, 30.0, tf.constant(1, tf.int64)),
    ):
        with pytest.raises(ValueError, match=wanted):
            act()
    with pytest.raises(ValueError, match="noise_multiplier=None: give a number"):
        clipping.L2Ball(1.0).noise_stddev(None, 1)
    for value, variable in zip(before, [*model.weights, *optimizer.variables], strict=True):
        np.testing.assert_array_equal(value, variable.numpy())
    assert ledger.steps == optimizer.releases == optimizer.uncharged_releases == 0
    # The lot is still good for a step.
    made = dp.DPSGD(noise_multiplier=1.0)
    dp.private_step(model, loss_function, lot, made, ledger=ledger, law=law)
    assert ledger.steps == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"clipping": "global"}, "clipping='global'.*'local'"),
        ({"prior": "noisy"}, "prior='noisy'.*'raw'"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"local_clip_factor": 0}, "local_clip_factor=0"),
        ({"prior_decay": 1.0}, "prior_decay=1.0"),
        ({"prior_exponent": "a"}, "prior_exponent='a'"),
        ({"local_clip_threshold": -1e-6}, "local_clip_threshold"),
        ({"l2_norm_clip": {"dense": 1.0}}, "give one number"),
    ],
)
@pytest.mark.parametrize("make", [dp.ADADP, dp.ADAN])
def test_arguments_of_adaptive_noise(make, arguments, match):
    with pytest.raises(ValueError, match=match):
        make(noise_multiplier=1.0, **arguments)


def test_per_layer_bounds_must_cover_every_variable():
    private = private_model(dp.DPSGD(0.1, noise_multiplier=1.0, l2_norm_clip={"nowhere": 1.0}))
    refused(private, "nowhere")


def test_batch_normalization_in_training_mode():
    model = plain_model(L.Dense(4), L.BatchNormalization(name="bn"))
    with pytest.raises(ValueError, match="'bn'.*GroupNormalization"):
        dp.DPModel(model)
    model.get_layer("bn").trainable = False
    private = private_model(model=model)
    model.get_layer("bn").trainable = True
    refused(private, "'bn'")


@pytest.mark.parametrize(("columns", "match"), [(8, "joins examples"), (11, "divisible by 11")])
def test_a_reshape_that_joins_examples(columns, match):
    """One that fails with batches of nearly any size keeps TensorFlow's own words."""
    joined = L.Lambda(lambda x: keras.ops.reshape(keras.ops.reshape(x, (-1, columns)), (-1, 4)))
    private = private_model(model=plain_model(L.Dense(4), joined))
    refused(private, match)
    problem = str(dp.validate(private.model, crossentropy(), *data())[0])
    assert ("joins examples" in problem) == (columns == 8)


def test_stateful_recurrent_layers():
    model = keras.Sequential([keras.Input((3, 2), batch_size=1), L.LSTM(2, stateful=True)])
    with pytest.raises(ValueError, match="stateful=False"):
        dp.DPModel(model)


def test_changing_trainable_after_compile():
    private = private_model()
    private.model.layers[0].trainable = False
    refused(private, "Compile again")
    x, y = data()
    private.compile(dp.DPSGD(0.1, noise_multiplier=1.0), loss=crossentropy(), jit_compile=False)
    kernel = private.model.layers[0].kernel.numpy()
    private.fit(x, y, batch_size=30, verbose=0)
    np.testing.assert_array_equal(kernel, private.model.layers[0].kernel.numpy())


def test_changing_trainable_while_training():
    class Freezes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.model.layers[0].trainable = False

    x, y = data()
    private = private_model()
    with pytest.raises(ValueError, match="Compile again"):
        private.fit(x, y, batch_size=30, epochs=3, verbose=0, callbacks=[Freezes()])
    assert private.ledger.steps == 4


def test_nothing_to_train():
    model = plain_model()
    model.trainable = False
    refused(private_model(model=model), "no trainable weights")


def _mean_error(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - keras.ops.expand_dims(y_true, -1)))


class _BatchMean(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean(y_pred, axis=0)


@pytest.mark.parametrize("loss", [_mean_error, _BatchMean()])
def test_losses_that_reduce_the_batch(loss):
    refused(private_model(loss=loss), "reduces the batch axis.*leave the reduction to Keras")


def test_outputs_without_an_axis_for_the_loss():
    x = keras.Input((3,))
    numbers = keras.Model(x, keras.ops.squeeze(keras.layers.Dense(1)(x), -1))
    private = dp.DPModel(numbers)
    private.compile(dp.DPSGD(0.1, noise_multiplier=1.0), "mse", log_raw_metrics=False)
    with pytest.raises(ValueError, match=r"return \[batch, 1\] instead of \[batch\]"):
        private.fit(np.ones((8, 3)), np.ones(8), batch_size=4, verbose=0)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"batch_size": None}, ValueError, "batch_size=None"),
        ({"batch_size": 0}, ValueError, "batch_size=0: give the expected lot size"),
        ({"y": np.zeros(ROWS - 1, np.int32)}, ValueError, "rows|length"),
        ({"y": np.array(["a"] * ROWS)}, ValueError, "dtype string"),
        ({"y": np.zeros((ROWS, 2), np.int32)}, ValueError, "shape"),
        ({"y": np.full(ROWS, 3)}, ValueError, "labels from 3 to 3"),
        ({"y": np.full(ROWS, -1)}, ValueError, "labels from -1 to -1"),
        ({"y": np.where(np.arange(ROWS) == 7, np.nan, 1.0)}, ValueError, "labels from nan to nan"),
        ({"x": np.full((ROWS, 6), "a")}, ValueError, "takes numbers.*dtype string"),
        ({"y": None}, ValueError, "y=None"),
        ({"x": None}, TypeError, "x=None"),
        ({"x": tf.data.Dataset.range(3)}, ValueError, "y is given beside a tf.data.Dataset"),
        ({"x": tf.data.Dataset.range(3).repeat(), "y": None}, ValueError, "has no end"),
        ({"x": iter([1]), "y": None}, TypeError, "sampl"),
        ({"sample_weight": np.ones(3)}, ValueError, "rows|length"),
        ({"sample_weight": np.full(ROWS, "a")}, TypeError, "sample_weight has dtype string"),
        ({"class_weight": [1.0, 2.0]}, TypeError, "class_weight=.*dict"),
        ({"class_weight": {0: 2.0}, "y": None}, ValueError, "class_weight is for one array"),
        ({"batch_size": ROWS + 1}, ValueError, f"batch_size={ROWS + 1}.*at most the {ROWS}"),
        ({"batch_size": "30"}, ValueError, "batch_size='30'"),
        ({"x": scipy.sparse.csr_matrix(np.ones((ROWS, 6)))}, TypeError, r"sparse.*toarray\(\)"),
        ({"x": tf.ragged.constant([[1.0]] * ROWS)}, TypeError, "x is a RaggedTensor.*pad"),
        ({"x": tf.sparse.eye(ROWS, 6)}, TypeError, "x is a SparseTensor.*dense"),
        ({"validation_split": 1.5}, ValueError, "validation_split"),
        ({"shuffle": False}, ValueError, "shuffle"),
        ({"steps_per_epoch": -1}, ValueError, "steps_per_epoch=-1: give the lots per epoch"),
        ({"steps_per_epoch": 0}, ValueError, "steps_per_epoch=0"),
        ({"steps_per_epoch": 1.5}, ValueError, "steps_per_epoch=1.5"),
        ({"steps_per_epoch": True}, ValueError, "steps_per_epoch=True"),
        ({"epochs": -1}, ValueError, "epochs=-1"),
        ({"epochs": "2"}, ValueError, "epochs='2'"),
        ({"initial_epoch": -1}, ValueError, "initial_epoch=-1"),
        ({"class_weight": {"0": 1.0}}, ValueError, "class_weight has the key '0'"),
        ({"class_weight": {0.5: 1.0}}, ValueError, "class_weight has the key 0.5"),
        ({"class_weight": {1: -1.0}}, ValueError, r"class_weight\[1\]=-1.0: give a finite weight"),
        ({"class_weight": {1: np.nan}}, ValueError, r"class_weight\[1\]=nan"),
        ({"class_weight": {1: np.inf}}, ValueError, r"class_weight\[1\]=inf"),
        ({"class_weight": {1: "a"}}, ValueError, r"class_weight\[1\]='a'"),
        ({"class_weight": {0: 1.0, 7: 3.0}}, ValueError, "class_weight has labels from 0 to 7"),
    ],
)
def test_data(arguments, error, match):
    refused(private_model(), match, error, **arguments)


def test_arguments_beside_lots():
    x, y = data()
    lots = dp.PoissonLots(x, y, expected_size=30)
    refused(private_model(), "y is given beside lots", x=lots, batch_size=None)
    refused(private_model(), "batch_size is given", x=lots, y=None)
    refused(
        private_model(), "validation_split", x=lots, y=None, batch_size=None, validation_split=0.1
    )


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, "a"])
def test_delta(delta):
    with pytest.raises(ValueError, match="delta"):
        dp.PrivacyCallback(delta)


def test_callback_arguments():
    with pytest.raises(ValueError, match="accountant.*rdp"):
        dp.PrivacyCallback(1e-5, accountant="magic")
    with pytest.raises(ValueError, match="max_epsilon=0"):
        dp.PrivacyCallback(1e-5, max_epsilon=0)
    for arguments in (
        {"ledger_interval": 0},
        {"ledger_interval": 2.5},
        {"dataset": ""},
        {"same_data": None},
        {"extra_deltas": [1e-6, 2.0]},
    ):
        with pytest.raises(ValueError, match=next(iter(arguments)).removeprefix("extra_")[:5]):
            dp.PrivacyCallback(1e-5, **arguments)
    model = plain_model()
    model.compile(loss=crossentropy())
    x, y = data()
    with pytest.raises(ValueError, match="DPModel"):
        model.fit(x, y, verbose=0, callbacks=[dp.PrivacyCallback(1e-5)])


@pytest.mark.parametrize("orders", [1, 65, [2, 100], 2.5])
def test_orders_outside_the_grid(orders):
    with pytest.raises(ValueError, match="order"):
        dp.accounting.rdp_theorem1(1.0, 0.01, orders)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"physical_batch_size": 0}, ValueError),
        ({"physical_batch_size": 1.5}, ValueError),
        ({"gradient_engine": "fast"}, ValueError),
    ],
)
def test_wrapper_arguments(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        dp.DPModel(plain_model(), **arguments)
    with pytest.raises(TypeError, match="keras.Model"):
        dp.DPModel("model")
    with pytest.raises(TypeError, match="already"):
        dp.DPModel(dp.DPModel(plain_model()))


def test_compile_arguments():
    private = dp.DPModel(plain_model())
    with pytest.raises(ValueError, match="jit_compile"):
        private.compile(dp.DPSGD(noise_multiplier=1.0), loss="mse", jit_compile="yes")
    for steps in (0, 2.5, "2", True):
        with pytest.raises(ValueError, match="steps_per_execution="):
            private.compile(dp.DPSGD(noise_multiplier=1.0), loss="mse", steps_per_execution=steps)
    with pytest.raises(ValueError, match="run_eagerly"):
        private.compile(
            dp.DPSGD(noise_multiplier=1.0), loss="mse", jit_compile=True, run_eagerly=True
        )


def test_attention_without_xla_is_an_error_and_no_crash():
    x = keras.Input((4, 6))
    model = keras.Model(x, L.Dense(3)(L.Flatten()(L.MultiHeadAttention(2, 3)(x, x))))
    private = private_model(model=model, wrap={"gradient_engine": "vectorized"})
    refused(private, "attention layers need XLA", x=np.ones((ROWS, 4, 6), np.float32))


def test_sums_of_another_model():
    optimizer = dp.DPSGD(noise_multiplier=1.0)
    optimizer.build([keras.Variable(np.zeros(3))])
    with pytest.raises(ValueError, match="shapes"):
        optimizer.apply_private([tf.zeros([4])], 10)


@pytest.mark.parametrize("size", [0, -30, np.nan, np.inf, None, "30", tf.constant(0)])
def test_a_lot_size_that_would_turn_the_step_around(size):
    """Divided by a number below 0, a step climbs."""
    optimizer = dp.DPSGD(noise_multiplier=1.0)
    optimizer.build([keras.Variable(np.zeros(3))])
    with pytest.raises(ValueError, match="expected_lot_size"):
        optimizer.apply_private([tf.zeros([3])], size)
    assert not optimizer.iterations.numpy()


def test_a_microbatched_custom_loop_needs_the_lot_size():
    x, y = data()
    model, optimizer = plain_model(), dp.DPSGD(noise_multiplier=1.0, microbatch_size=2)
    optimizer.build(model.trainable_variables)
    (lot,) = dp.PoissonLots(x, y, expected_size=30).take(1, 16)
    with pytest.raises(ValueError, match="expected_lot_size=None"):
        dp.clipped_sum(model, crossentropy(), lot, optimizer)


def test_distribution_strategies():
    x, y = data()
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    outside = private_model()
    with strategy.scope(), pytest.raises(ValueError, match="was not made under"):
        outside.fit(x, y, batch_size=30, verbose=0)
    with tf.distribute.experimental.CentralStorageStrategy(["cpu:0"], "cpu:0").scope():
        private = private_model()
        refused(private, "CentralStorageStrategy: DPModel trains under")


@pytest.mark.parametrize("give", [lambda x, y: (x, y), lambda x, y: ((x, y, None), np.ones(4))])
def test_a_lot_of_another_form(give):
    model, optimizer = plain_model(), dp.DPSGD(noise_multiplier=1.0)
    optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match=r"lot must be .*take\(num_lots.*make_lot"):
        dp.clipped_sum(model, crossentropy(), give(*data()), optimizer)


def test_a_lot_of_a_number_of_rows_that_is_not_known_yet():
    """One leaf has a known shape and the other not, as in a traced loop."""
    model, optimizer = plain_model(), dp.DPSGD(noise_multiplier=1.0)
    optimizer.build(model.trainable_variables)
    x, y = data()
    (x, y, _), mask = dp.make_lot(x, y, physical_batch_size=16)

    @tf.function(input_signature=[tf.TensorSpec([None, 16, 6]), tf.TensorSpec([8, 16], tf.int32)])
    def sums(x, y):
        return dp.clipped_sum(model, crossentropy(), ((x, y, None), mask), optimizer)

    assert [s.shape for s in sums(x, y)] == [v.shape for v in model.trainable_variables]


def test_a_custom_loop_builds_its_optimizer():
    x, y = data()
    (lot,) = dp.PoissonLots(x, y, expected_size=30).take(1, 16)
    with pytest.raises(ValueError, match=r"DPSGD is not built.*trainable_variables"):
        dp.clipped_sum(plain_model(), crossentropy(), lot, dp.DPSGD(noise_multiplier=1.0))


@pytest.mark.extended
def test_lots_of_another_relation_or_unit():
    """No ε could be reported for both together, for any spending on the second."""
    x, y = data()
    private = private_model()
    private.fit(x, y, batch_size=30, verbose=0)
    steps = private.ledger.steps
    fixed = dp.FixedSizeLots(x, y, size=30)
    with pytest.raises(ValueError, match="ADD_OR_REMOVE_ONE and REPLACE_ONE.*FixedSizeLots"):
        private.fit(fixed, verbose=0)
    users = dp.UserLots(
        x, y, user_ids=np.arange(ROWS) // 2, expected_users=20, max_records_per_user=2,
        expected_size=40,
    )  # fmt: skip
    with pytest.raises(ValueError, match="some releases protect one .* and others one user"):
        private.fit(users, verbose=0)
    law = dp.accounting.FixedSizeSampling(ROWS, 30)
    with pytest.raises(ValueError, match="relations"):
        private.train_on_batch(x[:30], y[:30], law=law)
    assert private.ledger.steps == steps
    assert private.epsilon(1e-3) > 0
    private.train_on_batch(x[:30], y[:30])  # of an unknown law, as `epsilon` says then
    with pytest.raises(ValueError, match="the sampling of the batches is unknown"):
        private.epsilon(1e-3)
    printed = private_model(dp.ADADP(noise_multiplier=1.0, prior="raw"))
    printed.fit(x, y, batch_size=30, verbose=0)
    printed.fit(fixed, verbose=0)  # ε is ∞ whatever comes
    assert printed.epsilon(1e-3) == np.inf


def test_an_optimizer_class_is_no_optimizer():
    with pytest.raises(ValueError, match=r"optimizer=ADADP is a class: give ADADP\(noise_mult"):
        private_model(dp.ADADP)


def test_made_optimizers_take_the_rate_by_position_and_nothing_else():
    made = dp.make_private(keras.optimizers.Nadam)
    assert made(0.25, noise_multiplier=1.0).learning_rate == 0.25
    assert made(noise_multiplier=1.0).learning_rate == keras.optimizers.Nadam().learning_rate
    with pytest.raises(TypeError, match="positional"):
        made(0.25, 1.0)


def test_class_weights_multiply_row_by_row():
    """[N] by [N, 1] must not broadcast: one label would be in every example's weight."""
    y, given = np.array([[0], [1], [1]]), np.array([[1.0], [2.0], [3.0]])
    found = class_weights(y, {1: 10.0}, given)
    np.testing.assert_array_equal(found, [[1.0], [20.0], [30.0]])
    np.testing.assert_array_equal(class_weights(y, {1: 10.0}, given[:, 0]), [1.0, 20.0, 30.0])
    with pytest.raises(ValueError, match=r"sample_weight has shape \(2, 1\), and there are 3"):
        class_weights(y, {1: 10.0}, given[:2])


@pytest.mark.parametrize("names", [["a"], ["a", "c"]])
def test_weights_of_some_outputs_are_refused(names):
    inputs = keras.Input((6,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"}
    model = dp.DPModel(keras.Model(inputs, outputs))
    model.compile(dp.DPSGD(noise_multiplier=1.0), {"a": "mse", "b": "mse"}, log_raw_metrics=False)
    y, weights = ({name: np.ones(ROWS) for name in of} for of in ("ab", names))
    match = re.escape(f"sample_weight is for the outputs {names}, and y for ['a', 'b']")
    with pytest.raises(ValueError, match=match):
        model.fit(np.ones((ROWS, 6)), y, batch_size=30, sample_weight=weights, verbose=0)
    assert model.ledger.steps == 0
