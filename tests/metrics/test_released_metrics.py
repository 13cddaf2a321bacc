"""Training metrics with noise: what a record can change, what the noise is, what they cost, who may
look at them; and the warning of those without."""

import functools
import warnings

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics
from scipy import stats

import tf_adadp as dp
from tests.helpers import ROWS, crossentropy, data, private_model
from tf_adadp.accounting import (
    FixedSizeSampling,
    PoissonSampling,
    PrivacyLedger,
    ShuffledSampling,
    UserSampling,
)
from tf_adadp.metrics.released import LotMetrics
from tf_adadp.noise import SecretKey
from tf_adadp.optimizers.base import DPOptimizer

DELTA = 1e-3
CLASSES = 3
TINY = 1e-6  # a noise multiplier at which a release shows its sum
Gaussian = dp_accounting.GaussianDpEvent


def released(noise_multiplier=20.0, loss_bound=4.0, **kwargs):
    return dp.ReleasedMetrics(noise_multiplier, loss_bound=loss_bound, **kwargs)


def fit(model, epochs=1, batch_size=30, callbacks=(), **kwargs):
    return model.fit(
        *data(),
        batch_size=batch_size,
        epochs=epochs,
        verbose=0,
        callbacks=list(callbacks),
        **kwargs,
    ).history


def lot_metrics(
    settings,
    metrics=("accuracy",),
    weighted=(),
    labels=(),
    outputs=(CLASSES,),
    weight=None,
    seed=None,
):
    """A LotMetrics by itself, on outputs of shape [B, *outputs]."""
    compiled = CompileMetrics(list(metrics), list(weighted))
    compiled.build(tf.zeros([2, *labels]), tf.zeros([2, *outputs]))
    specs = (tf.TensorSpec([None, *labels]), tf.TensorSpec([None, *outputs]), weight)
    return LotMetrics(settings, compiled, specs, seed)


def sums(metrics, y, y_pred, losses, mask=None, sample_weight=None):
    """Σ v_i/b_i over a lot, without noise."""
    metrics.begin()
    mask = np.ones(len(losses), np.float32) if mask is None else mask
    metrics.add(y, y_pred, sample_weight, mask, tf.constant(losses, tf.float32))
    return metrics._sums.numpy()


def some_rows(rows=12, seed=3):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, rows).astype(np.float32)
    return y, rng.normal(size=(rows, CLASSES)).astype(np.float32), rng.exponential(2.0, rows)


@pytest.mark.parametrize(
    "make",
    [
        dp.DPSGD,
        dp.ADADP,
        functools.partial(dp.DPOPT, directions="budgeted", direction_noise_multiplier=2.0),
        functools.partial(
            dp.SADPSGD, energy_data=data(), energy_noise_multiplier=1.0, energy_clip=1.0
        ),
        lambda noise_multiplier, seed: dp.AGD(total_epsilon=1.0, total_delta=1e-5, seed=seed),
    ],
    ids=["DPSGD", "ADADP", "DPOPT", "SADPSGD", "AGD"],
)
def test_all_keys_of_one_seed_differ(make):
    optimizer, metrics = make(noise_multiplier=1.0, seed=3), lot_metrics(released(), seed=3)
    holders = [*vars(optimizer).values(), *vars(metrics).values()]
    keys = [holder.key.numpy().tobytes() for holder in holders if isinstance(holder, SecretKey)]
    assert len(set(keys)) == len(keys) >= 3
    again = make(noise_multiplier=1.0, seed=3)
    mine = [k.key.numpy().tobytes() for k in vars(again).values() if isinstance(k, SecretKey)]
    assert mine == keys[:-1]


# What one record can change


HOSTILE = [0.0, -5.0, 3.9, 1e30, np.inf, -np.inf, np.nan]


@pytest.fixture(scope="module")
def two_metrics():
    return lot_metrics(released(), ["accuracy", keras.metrics.MeanSquaredError("mse")])


@pytest.mark.parametrize("loss", HOSTILE)
def test_a_record_moves_each_sum_by_its_bound_at_most(two_metrics, loss):
    """An added record changes the sums by a vector in [0, 1]^d, in units of the bounds."""
    metrics = two_metrics
    y, y_pred, losses = some_rows()
    before = sums(metrics, y, y_pred, losses)
    for output in ([9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [np.nan] * 3, [-np.inf, np.inf, 1e38]):
        after = sums(
            metrics,
            np.append(y, np.float32(0)),
            np.vstack([y_pred, np.float32(output)]),
            np.append(losses, loss),
        )
        moved = after - before
        assert np.all(moved >= -1e-9)
        assert np.all(moved <= 1 + 1e-9)
        expected = 1.0 if not np.isfinite(loss) else np.clip(loss, 0, 4) / 4
        assert moved[0] == pytest.approx(expected, abs=1e-6)


def test_the_bound_is_reached_so_it_could_not_be_lower():
    metrics = lot_metrics(released())
    one = sums(metrics, np.zeros(1, np.float32), np.float32([[9, 0, 0]]), [1e9])
    assert np.linalg.norm(one) == pytest.approx(np.sqrt(2))
    other = sums(metrics, np.zeros(1, np.float32), np.float32([[0, 9, 0]]), [-1.0])
    assert np.linalg.norm(one - other) == pytest.approx(np.sqrt(2)), "also where it is replaced"


def centred(y_true, y_pred):
    """Each example's error, less the mean of the batch: a metric that mixes examples."""
    error = keras.ops.mean(keras.ops.abs(y_pred), axis=-1)
    return error - keras.ops.mean(error) + 0.5


def test_a_metric_that_mixes_the_batch_sees_one_example_at_a_time():
    metrics = lot_metrics(released(loss_bound=None), [centred])
    y, y_pred, losses = some_rows()
    assert sums(metrics, y, y_pred, losses) == pytest.approx(0.5 * len(y))
    y_pred[0] = 1e6
    assert sums(metrics, y, y_pred, losses) == pytest.approx(0.5 * len(y))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("metric", "labels", "outputs"),
    [
        ("accuracy", (), (CLASSES,)),
        ("accuracy", (1,), (CLASSES,)),
        ("accuracy", (CLASSES,), (CLASSES,)),
        ("accuracy", (1,), (1,)),
        ("accuracy", (5,), (5, CLASSES)),
        ("accuracy", (5, 1), (5, CLASSES)),
        ("accuracy", (5, CLASSES), (5, CLASSES)),
        (keras.metrics.SparseTopKCategoricalAccuracy(2), (), (CLASSES,)),
        ("mae", (4,), (4,)),
    ],
)
def test_values_are_those_of_keras_for_each_row_alone(metric, labels, outputs):
    rng = np.random.default_rng(1)
    rows = 13
    y = rng.integers(0, CLASSES if outputs[-1] == CLASSES else 2, (rows, *labels))
    if labels and labels[-1] == CLASSES:
        y = np.eye(CLASSES)[rng.integers(0, CLASSES, (rows, *labels[:-1]))]
    y, y_pred = y.astype(np.float32), rng.normal(size=(rows, *outputs)).astype(np.float32)
    metrics = lot_metrics(released(loss_bound=None), [metric], labels=labels, outputs=outputs)
    (compiled,) = metrics._metrics._compiled.metrics
    expected = 0.0
    for i in range(rows):
        compiled.reset_state()
        compiled.update_state(y[i : i + 1], y_pred[i : i + 1])
        expected += np.clip(float(compiled.result()), 0, 1)
    # Two physical batches, with padding that would count if it were not masked.
    mask = np.float32([1] * rows + [0] * 3)
    y, y_pred = (np.concatenate([a, a[:3]]) for a in (y, y_pred))
    metrics.begin()
    for part in (slice(0, 8), slice(8, 16)):
        metrics.add(y[part], y_pred[part], None, mask[part], tf.zeros([8]))
    assert metrics._sums.numpy() == pytest.approx(expected, rel=1e-5)
    assert 0 < expected < rows


def test_weights_multiply_weighted_metrics_and_no_others():
    metrics = lot_metrics(
        released(loss_bound=None, metric_bounds={"weighted_mse": 2.0, "mse": 2.0}),
        [keras.metrics.MeanSquaredError("mse")],
        [keras.metrics.MeanSquaredError("weighted_mse")],
        labels=(2,),
        outputs=(2,),
        weight=tf.TensorSpec([None]),
    )
    y, y_pred = np.zeros([3, 2], np.float32), np.float32([[1, 1], [1, 1], [0.5, 0.5]])
    weights = tf.constant([0.5, 9.0, 2.0])
    plain, weighted = 2.0 * sums(metrics, y, y_pred, np.zeros(3), sample_weight=weights)
    assert plain == pytest.approx(1 + 1 + 0.25)
    assert weighted == pytest.approx(0.5 + 2.0 + 0.5), "w·v, clipped to [0, 2]"


# The noise


def draws(metrics, count, size):
    """`count` releases of a lot that is empty, over L = `size`."""
    release = tf.function(lambda step: list(metrics.release(size, step).values()))
    found = []
    for step in range(count):
        metrics.reset()
        found.append([float(v) for v in release(tf.constant(step, tf.int64))])
    return np.array(found)


def test_the_noise_has_the_std_it_claims_also_on_an_empty_lot():
    """χ² of 800 draws per value: two-sided false-alarm rate 1e-6 each; the seed is fixed."""
    metrics = lot_metrics(released(3.0, metric_bounds={"accuracy": 0.5}), seed=5)
    metrics.begin()
    found = draws(metrics, 800, 10.0)
    for values, bound in zip(found.T, (4.0, 0.5), strict=True):
        claimed = bound * 3.0 * np.sqrt(2) / 10.0
        statistic = np.sum((values / claimed) ** 2)
        low, high = stats.chi2.ppf([0.5e-6, 1 - 0.5e-6], len(values))
        assert low < statistic < high
        for wrong in (0.67, 1.5):  # the test can tell
            assert not low < statistic / wrong**2 < high
        assert stats.kstest(values / claimed, "norm").pvalue > 1e-6
    assert abs(np.corrcoef(found.T)[0, 1]) < 0.2  # 5.6 standard deviations


def test_the_noise_is_another_at_every_step_and_another_than_the_gradients():
    metrics = lot_metrics(released(1.0), seed=5)
    found = draws(metrics, 20, 1.0).ravel()
    assert len(np.unique(found)) == len(found)
    optimizer = dp.DPSGD(noise_multiplier=1.0, seed=5)
    assert np.any(optimizer._noise_key.key.numpy() != metrics._key.key.numpy())
    assert np.any(optimizer._example_key.key.numpy() != metrics._key.key.numpy())
    secret = [lot_metrics(released(1.0))._key.key.numpy() for _ in range(2)]
    assert np.any(secret[0] != secret[1])


def test_the_raw_sums_do_not_outlive_the_release():
    metrics = lot_metrics(released())
    assert sums(metrics, *some_rows()).min() > 0
    metrics.release(10.0)
    assert not metrics._sums.numpy().any()


# What it costs


def replaced(sigma, sigma_m):
    """Under replace-one: the gradient moves by 2/σ*, the metrics by 1/σ_m."""
    return Gaussian((4 / sigma**2 + 1 / sigma_m**2) ** -0.5)


def poisson(q, sigma, sigma_m):
    return dp_accounting.PoissonSampledDpEvent(q, Gaussian((sigma**-2 + sigma_m**-2) ** -0.5))


LAWS = {
    PoissonSampling(600, 60): poisson(0.1, 4.0, 20.0),
    PoissonSampling(600, 600): Gaussian((1 / 16 + 1 / 400) ** -0.5),
    FixedSizeSampling(600, 60): dp_accounting.SampledWithoutReplacementDpEvent(
        600, 60, replaced(4.0, 20.0)
    ),
    ShuffledSampling(600, 60): replaced(4.0, 20.0),
    UserSampling(100, 10, 3, 30): poisson(0.1, 4.0 / 3, 20.0 / 3),
}


def assert_same(event, expected):
    """Equal events, but for the last digits of a multiplier."""
    assert type(event) is type(expected)
    inner, wanted = getattr(event, "event", event), getattr(expected, "event", expected)
    assert inner.noise_multiplier == pytest.approx(wanted.noise_multiplier, rel=1e-12)
    for name in ("sampling_probability", "sample_size", "source_dataset_size"):
        assert getattr(event, name, None) == getattr(expected, name, None)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_a_step_is_charged_as_one_gaussian_on_the_lot(law):
    optimizer = dp.DPSGD(noise_multiplier=4.0)
    optimizer.charges.cover_metrics(20.0)
    assert_same(optimizer.event(law), LAWS[law])
    ledger = PrivacyLedger()
    optimizer.charge(ledger, law)
    assert ledger.entries[0].origin == "DPSGD, with released metrics"
    optimizer.charges.cover_metrics(None)
    assert optimizer.event(law) == law.event(4.0)


def test_truncated_lots_and_microbatches():
    law = dp.accounting.TruncatedPoissonSampling(600, 60, 80)
    both = (1 / 16 + 1 / 400) ** -0.5
    event = law.event_with_metrics(4.0, 20.0)
    assert event.noise_multiplier == pytest.approx(both)
    assert law.matches(event)
    microbatched = dp.DPSGD(noise_multiplier=4.0, microbatch_size=2)
    microbatched.charges.cover_metrics(20.0)
    event = microbatched.event(PoissonSampling(600, 60))
    assert event.event.noise_multiplier == pytest.approx((1 / 2**2 + 1 / 20**2) ** -0.5)


def test_optimizers_with_events_of_their_own():
    law = PoissonSampling(600, 60)
    budgeted = dp.DPOPT(noise_multiplier=4.0, directions="budgeted", direction_noise_multiplier=8.0)
    budgeted.charges.cover_metrics(20.0)
    assert budgeted.event(law).event.noise_multiplier == pytest.approx(
        (1 / 16 + 1 / 64 + 1 / 400) ** -0.5
    )
    annealing = dp.SADPSGD(
        noise_multiplier=4.0, energy_data=data(), energy_noise_multiplier=5.0, energy_clip=1.0
    )
    annealing.charges.cover_metrics(20.0)
    step, energy = annealing.event(law).events
    assert_same(step, poisson(0.1, 4.0, 20.0))
    assert energy == Gaussian(5.0)
    for without in (
        dp.ADADP(noise_multiplier=4.0, prior="raw", clipping="local"),
        dp.DPSGD(noise_multiplier=0, allow_no_noise=True),
    ):
        without.charges.cover_metrics(20.0)
        assert without.event(law) == dp_accounting.NonPrivateDpEvent()


def test_steps_that_cannot_cover_metrics_are_refused():
    agd = dp.AGD(total_epsilon=4.0, total_delta=1e-5)
    with pytest.raises(ValueError, match=r"released_metrics with AGD.*log_raw_metrics=False"):
        private_model(agd, released_metrics=released())

    class OwnEvent(dp.DPSGD):
        def event(self, law):
            return law.event(self.noise_multiplier)

    class Mixin:
        def step_on_lot(self, *args, **kwargs):
            return super().step_on_lot(*args, **kwargs)

    class OwnStep(Mixin, DPOptimizer, keras.optimizers.SGD):
        pass

    for kind in (OwnEvent, OwnStep):
        with pytest.raises(ValueError, match="by itself, without other releases"):
            private_model(kind(noise_multiplier=1.0), released_metrics=released())
        private_model(kind(noise_multiplier=1.0))


# In training


@pytest.fixture(scope="module")
def trained():
    """A model with released and raw metrics side by side, with hardly any noise on the first."""
    keras.utils.set_random_seed(3)
    model = private_model(
        dp.DPSGD(0.1, noise_multiplier=1.0),
        released_metrics=released(TINY, 50.0),
        log_raw_metrics=True,
    )
    history = fit(model, 3, ROWS, validation_data=data(seed=1))
    return model, history


@pytest.mark.extended
def test_full_lots_release_what_keras_logs(trained):
    _, history = trained
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(history[f"released_{name}"], history[name], atol=1e-4)
        assert f"val_released_{name}" not in history


@pytest.mark.extended
def test_the_saved_model_releases_on_and_holds_no_sums_or_keys(trained, tmp_path):
    model, _ = trained
    model.save(tmp_path / "model.keras")
    loaded = dp.load_model(tmp_path / "model.keras")
    assert loaded.get_compile_config() == model.get_compile_config()
    settings = model.session.compiled.released_metrics
    assert loaded.session.compiled.released_metrics == settings
    assert loaded.optimizer.metrics_noise_multiplier == TINY
    held = {id(v) for v in (*model.variables, *model.optimizer.variables)}
    hidden = model.session.prepared.released
    assert not held & {id(hidden._sums), *(id(v) for m in hidden._means for v in m.variables)}
    x, y = data()
    x[0] = np.nan
    logs = loaded.train_on_batch(x, y, law=PoissonSampling(ROWS, ROWS), return_dict=True)
    # Its charge as before; a loss that is not a number counts as the bound, 50.
    assert {e.event for e in loaded.ledger.entries} == {e.event for e in model.ledger.entries}
    others = logs["released_loss"] - 50 / ROWS
    assert 0 < others < 5
    assert np.all(np.isfinite(loaded.get_weights()[0]))
    assert np.any(loaded.session.prepared.released._key.key.numpy() != hidden._key.key.numpy())


def test_an_optimizer_that_another_model_compiled_charges_nothing_it_does_not_know(trained):
    model, _ = trained
    before = model.ledger.steps
    other = dp.DPModel(model.model)
    other.compile(model.optimizer, loss=crossentropy())
    with pytest.raises(ValueError, match="other released_metrics since"):
        fit(model)
    assert model.ledger.steps == before
    model.optimizer.charges.cover_metrics(TINY)


def test_released_metrics_are_charged_and_steer_and_raw_ones_are_not_in_the_logs():
    model = private_model(released_metrics=released(), steps_per_execution=2)
    seen = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(set(logs))

    stop = keras.callbacks.EarlyStopping("released_accuracy", patience=0, min_delta=100.0)
    slower = keras.callbacks.ReduceLROnPlateau("released_loss", min_delta=1e9, patience=1)
    history = fit(model, 9, callbacks=[Sees(), stop, slower, dp.PrivacyCallback(DELTA)])
    assert (stop.mode, slower.mode) == ("max", "min")
    names = {"released_loss", "released_accuracy", "epsilon"}
    assert set(history) == names | {"learning_rate"}
    assert all(logs == names for logs in seen)
    assert len(history["released_loss"]) == 2, "the second epoch is no improvement of 100"
    assert [e.count for e in model.ledger.entries] == [2] * 4 or model.ledger.steps == 8
    for entry in model.ledger.entries:
        assert_same(entry.event, poisson(30 / ROWS, 1.0, 20.0))
    merged = (1 + 1 / 400) ** -0.5
    assert model.epsilon(DELTA) == pytest.approx(
        dp.accounting.epsilon(merged, 30 / ROWS, 8, DELTA), rel=1e-9
    )
    assert "odometer reading" in model.ledger.statement(DELTA)
    assert "EarlyStopping(monitor='released_accuracy')" in " ".join(
        model.ledger.statement(DELTA).split()
    )
    # Nothing raw was even worked out.
    assert all(float(v) == 0 for m in model.metrics for v in m.variables)
    for monitor in ("loss", "accuracy", "released_auc"):
        with pytest.raises(
            ValueError, match="or a released one, one of released_loss, released_acc"
        ):
            fit(model, callbacks=[keras.callbacks.EarlyStopping(monitor, mode="min")])
    # Lots are mostly empty at q = 1/4000: noise over L, and no error.
    lots = dp.PoissonLots(*data(), expected_size=0.03)
    empty = model.fit(lots, steps_per_epoch=4, verbose=0).history
    spread = 20 * np.sqrt(2) / 0.03
    assert 0 < abs(empty["released_accuracy"][0]) < 6 * spread


def test_one_record_moves_gradient_and_metrics_together_by_what_is_charged():
    """Two steps under the same noise, on neighbouring lots: all that comes out, over its noise's
    std, differs by 1/σ of the event, no more, and for a record that reaches all bounds no less."""
    sigma, sigma_m, clip, bound, rate = 2.0, 3.0, 1e-3, 1e-2, 1e3
    optimizer = dp.DPSGD(rate, noise_multiplier=sigma, l2_norm_clip=clip, seed=1)
    model = private_model(optimizer, released_metrics=released(sigma_m, bound))
    law = PoissonSampling(2 * ROWS, ROWS)
    x, y = data()

    def step(rows):
        if optimizer.built:
            model.model.set_weights(start)
            optimizer.iterations.assign(0)
        logs = model.train_on_batch(x[rows], y[rows], law=law, return_dict=True)
        weights = np.concatenate([w.ravel() for w in model.get_weights()])
        values = np.array([logs["released_loss"] / bound, logs["released_accuracy"]])
        gradient = weights * ROWS / (rate * sigma * clip)
        return np.concatenate([gradient, values * ROWS / (sigma_m * np.sqrt(2))])

    model.model.build((None, 6))
    start = model.model.get_weights()
    right = np.argmax(model.model.predict(x, verbose=0), 1) == y
    lot = np.arange(ROWS // 2)
    step(lot)  # builds the optimizer
    alone, worst = step(lot), 0.0
    for record in range(ROWS // 2, ROWS, 8):
        moved = np.linalg.norm(step(np.append(lot, record)) - alone)
        charged = 1 / optimizer.event(law).event.noise_multiplier
        assert moved <= charged * 1.01
        if right[record]:  # its loss and gradient are beyond the bounds, like everyone's
            worst = max(worst, moved / charged)
    assert worst > 0.99


@pytest.mark.extended
def test_two_outputs_with_weights_and_the_plain_engine():
    """Every output's metrics under Keras's names; the loss is that of the example, both outputs."""
    inputs = keras.Input((6,))
    inner = keras.Model(
        inputs,
        {
            "a": keras.layers.Dense(3, name="a")(inputs),
            "b": keras.layers.Dense(1, name="b")(inputs),
        },
    )
    model = dp.DPModel(inner, gradient_engine="vectorized")
    model.compile(
        dp.DPSGD(1e-6, noise_multiplier=1.0),
        loss={"a": crossentropy(), "b": "mse"},
        metrics={"a": ["accuracy"], "b": ["mae", keras.metrics.AUC(name="auc")]},
        jit_compile=False,
        released_metrics=released(
            TINY, 100.0, metrics=["a_accuracy", "b_mae"], metric_bounds={"b_mae": 10.0}
        ),
        log_raw_metrics=True,
    )
    x, label = data()
    y = {"a": label, "b": x[:, :1]}
    model.train_on_batch(x, y, law=PoissonSampling(ROWS, ROWS))
    weights = np.linspace(0, 2, ROWS, dtype=np.float32)
    logs = model.train_on_batch(
        x, y, sample_weight=weights, law=PoissonSampling(ROWS, ROWS), return_dict=True
    )
    outputs = inner.predict(x, verbose=0)
    losses = crossentropy(reduction="none")(label, outputs["a"]).numpy() + np.mean(
        (outputs["b"] - y["b"]) ** 2, -1
    )
    assert logs["released_loss"] == pytest.approx(np.mean(weights * losses), rel=1e-4)
    assert logs["released_a_accuracy"] == pytest.approx(logs["a_accuracy"], abs=1e-4)
    assert logs["released_b_mae"] == pytest.approx(logs["b_mae"], abs=1e-3)
    assert "released_b_auc" not in logs


# What is refused, before anything is trained


def keeps_state(counter, y_true, y_pred):
    counter.assign_add(1.0)
    return keras.ops.mean(y_pred, axis=-1)


def accuracy_named(name):
    return keras.metrics.SparseCategoricalAccuracy(name)


class Halved(keras.metrics.MeanSquaredError):
    def result(self):
        return super().result() / 2


@pytest.mark.parametrize("metric", [keras.metrics.AUC, keras.metrics.RootMeanSquaredError, Halved])
def test_metrics_that_are_no_means_are_refused_by_name(metric):
    compiled = ["accuracy", metric(name="odd")]
    message = rf"'odd' is a {metric.__name__}, not a mean.*metrics=\['accuracy'\]"
    with pytest.raises(ValueError, match=message):
        lot_metrics(released(), compiled, labels=(CLASSES,))
    chosen = lot_metrics(released(metrics=["accuracy"]), compiled, labels=(CLASSES,))
    assert chosen.names == ("released_loss", "released_accuracy")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("settings", "metrics", "message"),
    [
        (released(metrics=["acc"]), ["accuracy"], "'acc' is none of the compiled metrics 'accu"),
        (released(metric_bounds={"acc": 2.0}), ["accuracy"], r"metric_bounds has \['acc'\]"),
        (released(loss_bound=None), [], "no metrics are compiled: nothing to release"),
        (released(), ["accuracy", accuracy_named("released_loss")], "'released_loss' is taken"),
    ],
)
def test_metrics_that_cannot_be_released(settings, metrics, message):
    model = private_model(metrics=metrics, released_metrics=settings)
    with pytest.raises(ValueError, match=message):
        fit(model)
    assert not model.ledger.entries


def test_a_metric_that_keeps_state_is_refused():
    counter = tf.Variable(0.0)
    with pytest.raises(ValueError, match="a released metric keeps state"):
        lot_metrics(released(), [functools.partial(keeps_state, counter)])
    with pytest.raises(ValueError, match="A released metric reads the variable"):
        lot_metrics(released(), [lambda y, p: keras.ops.mean(p, -1) * counter])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_multiplier": 0}, "noise_multiplier=0: give a finite number above 0"),
        ({"loss_bound": 0.0}, r"loss_bound=0.0: give a number in \[1e-10, 1e10\]"),
        ({"loss_bound": None, "metrics": []}, "nothing to release"),
        ({"metrics": "accuracy"}, "metrics='accuracy': give a list"),
        ({"metric_bounds": {"mae": np.inf}}, r"metric_bounds\['mae'\]=inf"),
        ({"metric_bounds": 3.0}, "metric_bounds=3.0: give a dict"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        released(**arguments)


def test_compile_arguments():
    with pytest.raises(ValueError, match=r"released_metrics=20: give a tf_adadp\.ReleasedMetrics"):
        private_model(released_metrics=20)
    with pytest.raises(ValueError, match="log_raw_metrics='no': give True, False or None"):
        private_model(log_raw_metrics="no")
    settings = released(metrics=["accuracy"], metric_bounds={"accuracy": 1})
    assert dp.ReleasedMetrics.from_config(settings.get_config()) == settings


def test_nobody_says_which_way_is_better():
    metrics = lot_metrics(released(), [lambda y, p: keras.ops.mean(p, -1)])
    name = metrics.names[1]
    with pytest.raises(ValueError, match="mode='auto'.*Give mode='min' or mode='max'"):
        metrics.set_modes([keras.callbacks.EarlyStopping(name)])
    metrics.set_modes([keras.callbacks.EarlyStopping(name, mode="max")])


# The warning


@pytest.mark.extended
def test_raw_metrics_warn_once_per_model_and_can_be_left_out():
    model = private_model(jit_compile=False, metrics=[])
    with pytest.warns(
        dp.RawMetricsWarning, match="released_metrics=.*log_raw_metrics=False"
    ) as got:
        fit(model)
    assert len(got) == 1
    assert got[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", dp.RawMetricsWarning)
        fit(model)
        quiet = private_model(log_raw_metrics=False)
        history = fit(quiet, callbacks=[dp.PrivacyCallback(DELTA)])
    assert set(history) == {"epsilon"}
    assert quiet.train_on_batch(*data(), return_dict=True) == {}
    assert all(float(v) == 0 for m in quiet.metrics for v in m.variables)


@pytest.mark.parametrize(
    "metric",
    [
        lambda: keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="loss_of"),
        lambda: keras.metrics.MeanMetricWrapper(
            lambda y, z: keras.ops.take(tf.constant([1.0, 0.5, 0.2]), keras.ops.cast(y, "int32")),
            name="taken",
        ),
    ],
)
def test_a_label_out_of_range_stops_no_metric(metric):
    """An exception would tell of the record, and print the labels of its lot."""
    x, y = data()
    private = private_model(
        metrics=[metric()], released_metrics=released(), log_raw_metrics=False, loss=crossentropy()
    )
    law = PoissonSampling(num_examples=10 * ROWS, expected_size=ROWS)
    for labels in (y, np.where(np.arange(ROWS) == 3, 7, y)):
        logs = private.train_on_batch(x, labels, law=law, return_dict=True)
        assert all(np.isfinite(value) for value in logs.values())
    assert private.ledger.steps == 2
