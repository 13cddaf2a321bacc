"""Runs checks on four logical CPU devices, in its own process; prints one JSON line per check.

Devices are laid out before TensorFlow computes anything, so pytest's process cannot have them.
"""

import itertools
import json
import re
import sys
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

DEVICES = 4
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * DEVICES
)

import tf_adadp as dp  # noqa: E402
from tf_adadp.distribution import replicas  # noqa: E402

STRATEGY = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)])
ALONE = tf.distribute.get_strategy()
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(300, 6)).astype(np.float32), rng.integers(0, 3, 300)


def make(optimizer, strategy=STRATEGY, layers=None, **compile_arguments):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = layers or [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
        model = dp.DPModel(keras.Sequential([keras.Input([6]), *layers]), physical_batch_size=8)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"], **compile_arguments)
    return model


def weights(model):
    return np.concatenate([w.ravel() for w in model.model.get_weights()])


def assert_alike_on_all(model):
    for variable in [*model.variables, *model.optimizer.variables]:
        copies = replicas.copies(variable.value)
        if not any(variable is m for m in model.metrics_variables):
            assert all(np.array_equal(copies[0].numpy(), c.numpy()) for c in copies), variable.path


def one_device_and_four_take_the_same_steps():
    def run(strategy, optimizer, **arguments):
        model = make(optimizer, strategy, **arguments)
        privacy = dp.PrivacyCallback(1e-3)
        history = model.fit(X, Y, 40, epochs=2, steps_per_epoch=3, verbose=0, callbacks=[privacy])
        return model, history.history

    for optimizer in (
        lambda: dp.ADADP(noise_multiplier=2.0, seed=3, warmup_steps=2),
        lambda: dp.DPAdam(noise_multiplier=2.0, seed=3, microbatch_size=1, use_ema=True),
        lambda: dp.DPSGD(noise_multiplier=2.0, seed=3, l2_norm_clip=dp.QuantileClip()),
    ):
        alone, expected = run(ALONE, optimizer)
        split, found = run(STRATEGY, optimizer)
        assert split.gradient_plan().engine == alone.gradient_plan().engine == "ghost"
        assert_alike_on_all(split)
        np.testing.assert_allclose(weights(split), weights(alone), rtol=1e-4, atol=1e-6)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)
        assert split.ledger.steps == alone.ledger.steps == 6


def lots_of_other_laws_are_split():
    model = make(lambda: dp.DPSGD(noise_multiplier=2.0))
    model.fit(dp.FixedSizeLots(X, Y, 20), steps_per_epoch=6, verbose=0)
    assert model.ledger.steps == model.optimizer.steps_taken == 6
    assert_alike_on_all(model)


def small_and_empty_lots_are_lots():
    model = make(lambda: dp.ADADP(noise_multiplier=2.0))
    before = weights(model)
    model.fit(dp.PoissonLots(X, Y, 0.7), steps_per_epoch=8, verbose=0)  # half of them are empty
    assert model.ledger.steps == 8
    assert np.isfinite(weights(model)).all()
    assert not np.array_equal(before, weights(model))
    assert_alike_on_all(model)


def a_lot_gets_one_noise():
    """Inputs are zero, so only the noise, of std σ*·C/L = 0.1, changes the 4,200 kernel entries.

    Added on every replica, before or after the sum, it would have a std of 0.2 or 0.4 (or 0.05).
    The sample std leaves ±5 % in fewer than 1 in 10⁵ draws (chi-square).
    """
    model = make(
        lambda: dp.DPSGD(1.0, noise_multiplier=2.0),
        layers=[keras.layers.Dense(700, use_bias=False)],
    )
    before = weights(model)
    model.fit(np.zeros_like(X), Y, 20, steps_per_epoch=1, verbose=0)
    moved = weights(model) - before
    assert abs(moved.std() / 0.1 - 1) < 0.05, moved.std()


def examples_on_different_replicas_draw_different_numbers():
    with STRATEGY.scope():
        optimizer = dp.DPSGD(noise_multiplier=1.0)
        optimizer.build([keras.Variable(np.zeros(2, np.float32))])
    results = STRATEGY.run(
        tf.function(lambda: (optimizer.example_seed(), optimizer._noise_key.key))
    )
    seeds, keys = ([t.numpy().tolist() for t in r.values] for r in results)
    assert len({tuple(s) for s in seeds}) == DEVICES
    assert len({tuple(k) for k in keys}) == 1


def released_metrics_are_those_of_the_whole_lot():
    """The means, with almost no noise, are those of one device, not of a share."""

    def run(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = dp.DPModel(keras.Sequential([keras.Input([6]), keras.layers.Dense(3)]))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            released = dp.ReleasedMetrics(1e-4, loss_bound=5.0)
            optimizer = dp.DPSGD(noise_multiplier=2.0, seed=3)
            model.compile(optimizer, loss, metrics=["accuracy"], released_metrics=released)
        return model.fit(X, Y, 60, steps_per_epoch=2, verbose=0).history

    alone, split = run(ALONE), run(STRATEGY)
    assert set(split) == {"released_loss", "released_accuracy"}
    for name, values in alone.items():
        np.testing.assert_allclose(split[name], values, rtol=1e-3, err_msg=name)


def a_budget_stops_all():
    model = make(lambda: dp.DPSGD(noise_multiplier=2.0))
    privacy = dp.PrivacyCallback(1e-3, max_epsilon=0.5)
    model.fit(X, Y, 30, epochs=20, steps_per_epoch=2, verbose=0, callbacks=[privacy])
    assert 0 < model.ledger.steps < 40
    assert model.epsilon(1e-3) <= 0.5


def saved_and_loaded_it_goes_on(path="model.keras"):
    model = make(lambda: dp.ADADP(noise_multiplier=2.0))
    model.fit(X, Y, 30, steps_per_epoch=2, verbose=0)
    model.save(path)
    with STRATEGY.scope():
        loaded = dp.load_model(path)
    assert np.array_equal(weights(loaded), weights(model))
    key = loaded.optimizer._noise_key.key.numpy()
    assert not np.array_equal(key, model.optimizer._noise_key.key.numpy())
    loaded.fit(X, Y, 30, steps_per_epoch=2, verbose=0)
    assert loaded.ledger.steps == loaded.optimizer.steps_taken == 4
    assert_alike_on_all(loaded)
    alone = dp.load_model(path)  # and on one device
    alone.fit(X, Y, 30, steps_per_epoch=1, verbose=0)
    assert alone.ledger.steps == 3


def what_cannot_be_split_is_refused():
    def refused(text, function):
        with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
            function()

    data = X[:50], Y[:50]
    annealing = make(lambda: dp.SADPSGD(noise_multiplier=1.0, energy_data=data))
    refused("SADPSGD trains on one device", lambda: annealing.fit(X[50:], Y[50:], 30, verbose=0))
    windowed = make(lambda: dp.ADADP(noise_multiplier=1.0, prior=dp.priors.WindowedPrior()))
    refused("WindowedPrior trains on one device", lambda: windowed.fit(X, Y, 30, verbose=0))
    several = make(lambda: dp.DPSGD(noise_multiplier=1.0), steps_per_execution=3)
    refused("Compile with 1", lambda: several.fit(X, Y, 30, verbose=0))
    # A fifth record dealt to two devices moves the third to the first one: 4C, in place of 2C.
    slots = make(lambda: dp.DPSGD(noise_multiplier=1.0, microbatch_size=5))
    refused("microbatch_size=5 on 4 devices", lambda: slots.fit(X, Y, 30, verbose=0))
    slots.optimizer.build(slots.trainable_variables)
    loss, lot = keras.losses.SparseCategoricalCrossentropy(), dp.make_lot(X, Y, None, 8)

    def custom_loop():
        arguments = {"expected_lot_size": 30, "gradient_engine": "vectorized"}
        STRATEGY.run(lambda: dp.clipped_sum(slots.model, loss, lot, slots.optimizer, **arguments))

    refused("microbatch_size=5 on 4 devices", tf.function(custom_loop, autograph=False))
    model = make(lambda: dp.DPSGD(noise_multiplier=1.0))
    refused("train_on_batch under MirroredStrategy", lambda: model.train_on_batch(X[:5], Y[:5]))
    assert model.optimizer.steps_taken == 0
    inner = keras.Sequential([keras.Input([6]), keras.layers.Dense(3)])
    with STRATEGY.scope():
        mixed = dp.DPModel(inner)
        mixed.compile(dp.DPSGD(noise_multiplier=1.0), "mse")
    refused("was not made under", lambda: mixed.fit(X, X[:, :3], 30, verbose=0))
    with STRATEGY.scope():
        late = dp.DPModel(keras.Sequential([keras.Input([6]), keras.layers.Dense(3)]))
    late.compile(dp.DPSGD(noise_multiplier=1.0), "mse")  # its key is on one device
    refused("scope()", lambda: late.fit(X, X[:, :3], 30, verbose=0))


def losses_of_several_outputs_are_means_over_the_lot():
    labels = {"a": X[:22, :2], "b": X[:22, 2:4]}
    given = np.linspace(0.0, 2.0, 22)
    kinds = ("sum_over_batch_size", "sum", "none", "mean_with_sample_weight")
    for strategy, reduction in itertools.product((ALONE, STRATEGY), kinds):
        with strategy.scope():
            inputs = keras.Input([6])
            outputs = {name: keras.layers.Dense(2, name=name)(inputs) for name in labels}
            model = dp.DPModel(keras.Model(inputs, outputs), physical_batch_size=4)
            losses = {"a": keras.losses.MeanSquaredError(reduction=reduction), "b": "mse"}
            optimizer = dp.DPSGD(noise_multiplier=1.0)
            model.compile(optimizer, losses, loss_weights={"a": 0.5, "b": 2.0})
        found = model.model(X[:22])
        each = {n: np.mean((found[n] - labels[n]) ** 2, axis=1) for n in labels}
        wanted = {f"{n}_loss": np.mean(given * each[n]) for n in labels}
        wanted["loss"] = 0.5 * wanted["a_loss"] + 2 * wanted["b_loss"]
        weights = {"a": given, "b": given}
        logs = model.fit(X[:22], labels, 22, sample_weight=weights, verbose=0).history
        for name, value in wanted.items():
            np.testing.assert_allclose(logs[name], [value], rtol=1e-5, err_msg=name)


def weights_are_loaded_outside_of_the_scope():
    made = [make(lambda: dp.DPAdam(noise_multiplier=1.0)) for _ in range(2)]
    made[0].fit(X, Y, 40, steps_per_epoch=2, verbose=0)
    made[0].save_weights("adam.weights.h5")
    made[1].load_weights("adam.weights.h5")
    np.testing.assert_array_equal(weights(made[1]), weights(made[0]))
    assert made[1].ledger.steps == made[1].optimizer.steps_taken == 2
    assert_alike_on_all(made[1])


CHECKS = [
    one_device_and_four_take_the_same_steps,
    lots_of_other_laws_are_split,
    small_and_empty_lots_are_lots,
    a_lot_gets_one_noise,
    examples_on_different_replicas_draw_different_numbers,
    released_metrics_are_those_of_the_whole_lot,
    a_budget_stops_all,
    saved_and_loaded_it_goes_on,
    what_cannot_be_split_is_refused,
    losses_of_several_outputs_are_means_over_the_lot,
    weights_are_loaded_outside_of_the_scope,
]


if __name__ == "__main__":
    for check in CHECKS:
        try:
            check()
            failure = None
        except Exception:  # noqa: BLE001 (reported)
            failure = traceback.format_exc()
        print("RESULT " + json.dumps([check.__name__, failure]), flush=True)
    sys.exit(0)
