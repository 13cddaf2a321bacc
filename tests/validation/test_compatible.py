"""Copies of models without the layers that private training refuses."""

import copy

import keras
import numpy as np
import pytest

import tf_adadp as dp
from tests.helpers import crossentropy, data, plain_model, private_model
from tf_adadp.validation.replacements import groups_of

L = keras.layers
DELTA = 1e-3
IMAGES = np.random.default_rng(0).random((6, 8, 8, 3), np.float32)
FILMS = np.random.default_rng(1).random((5, 4, 6), np.float32)
X6 = data()[0]


def seen(model, x):
    """Runs a model in training mode, so that its statistics are no longer the initial ones."""
    model(x, training=True)
    return model


def conv_net():
    """Nested, shared and called twice; an operation, a dict, and one layer that is frozen."""
    inputs = keras.Input((8, 8, 3), name="image")
    shared = L.BatchNormalization(name="shared")
    block = keras.Sequential(
        [keras.Input((8, 8, 8)), L.Conv2D(8, 3, padding="same", name="conv"),
         L.BatchNormalization(name="inner"), L.ReLU()], name="block",
    )  # fmt: skip
    x = shared(L.Conv2D(8, 3, padding="same", name="first")(inputs))
    x = keras.ops.relu(shared(block(x)) + block(x))
    x = L.BatchNormalization(name="frozen", trainable=False)(x)
    outputs = L.Dense(3, name="head")(L.GlobalAveragePooling2D()(x))
    model = keras.Model({"image": inputs}, outputs, name="net")
    model.get_layer("first").trainable = False
    return seen(model, {"image": IMAGES})


def weights(model):
    return {v.path: v.numpy() for v in model.variables}


def kinds(model):
    return {layer.name: type(layer).__name__ for layer in model._flatten_layers()}


def apart(model, made):
    return not {id(v) for v in model.variables} & {id(v) for v in made.variables}


def summary(model):
    return [(p.severity, p.where) for p in dp.compatibility_changes(model)]


# Batch normalization.


def test_group_normalization_takes_its_place():
    model = conv_net()
    before, kinds_before = weights(model), kinds(model)
    made = dp.make_compatible(model)
    assert apart(model, made)
    for path, value in weights(made).items():
        np.testing.assert_array_equal(value, before[path])
    assert [v.path for v in made.trainable_weights] == [v.path for v in model.trainable_weights]
    changed = {"shared": "GroupNormalization", "inner": "GroupNormalization"}
    assert kinds(made) == {**kinds_before, **changed}
    assert made.name == "net"
    assert list(made.input) == ["image"]
    assert summary(made) == [("change", "Layer 'shared'"), ("change", "Layer 'inner'")]
    assert dp.validate(made, crossentropy()) == []
    # The given model is as it was.
    assert kinds(model) == kinds_before
    for path, value in weights(model).items():
        np.testing.assert_array_equal(value, before[path])
    assert len(model.get_layer("first")._inbound_nodes) == 1


def test_it_computes_what_group_normalization_does():
    """Normalises each example by hand, one group of channels after the other."""
    model = keras.Sequential(
        [keras.Input((5, 5, 8)), L.BatchNormalization(name="bn", epsilon=0.1), L.Flatten()]
    )
    gamma, beta = np.arange(1.0, 9.0), np.arange(8.0)
    model.layers[0].set_weights([gamma, beta, beta, gamma])
    made = dp.make_compatible(model)
    assert made.layers[0].groups == 2
    x = np.random.default_rng(2).random((3, 5, 5, 8), np.float32)
    groups = x.reshape(3, 25, 2, 4)
    mean = groups.mean((1, 3), keepdims=True)
    std = np.sqrt(groups.var((1, 3), keepdims=True) + 0.1)
    by_hand = ((groups - mean) / std).reshape(x.shape) * gamma + beta
    np.testing.assert_allclose(made(x), by_hand.reshape(3, -1), rtol=1e-4, atol=1e-5)


def test_frozen_it_computes_the_same():
    model = conv_net()
    made = dp.make_compatible(model, batch_normalization="freeze")
    assert apart(model, made)
    before = weights(model)
    after = weights(made)
    assert list(after) == list(before)
    for path, value in after.items():
        np.testing.assert_array_equal(value, before[path])
    x = {"image": IMAGES}
    np.testing.assert_array_equal(made(x), model(x))
    np.testing.assert_array_equal(made(x, training=True), model(x))
    assert summary(made) == [("change", "Layer 'shared'"), ("change", "Layer 'inner'")]
    assert not any("shared" in v.path or "inner" in v.path for v in made.trainable_weights)
    assert dp.validate(made, crossentropy()) == []


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (3, 1), (6, 1), (8, 2), (16, 4), (24, 6), (64, 16), (112, 28), (144, 24), (128, 32),
     (160, 32), (1280, 32), (127, 1), (254, 2)],
)  # fmt: skip
def test_number_of_groups(channels, groups):
    assert groups_of(channels) == groups


def test_arguments_are_kept():
    given = {
        "axis": 1, "epsilon": 0.01, "scale": False, "beta_initializer": "ones",
        "beta_regularizer": "l2", "beta_constraint": "non_neg", "dtype": "mixed_float16",
    }  # fmt: skip
    layer = L.BatchNormalization(name="bn", momentum=0.5, synchronized=True, **given)
    made = dp.make_compatible(plain_model(L.Reshape((8, 3)), layer, L.Flatten(), features=24))
    config = made.get_layer("bn").get_config()
    wanted = L.GroupNormalization(2, name="bn", **given).get_config()
    assert config == wanted
    assert made.get_layer("bn").beta.dtype == "float32"


def test_a_normalised_vector_still_says_something():
    """A group of one channel would be normalised to 0, one of two to ±1."""
    made = dp.make_compatible(plain_model(L.Dense(8), L.BatchNormalization(name="bn")))
    out = np.asarray(keras.Sequential(made.layers[:2])(X6))
    assert len(np.unique(out.round(3))) > out.size / 2


# Where it stands.


def timewise(inner):
    return keras.Sequential(
        [keras.Input((4, 6)), L.TimeDistributed(inner, name="outer"), L.LSTM(3)]
    )


def functional():
    inputs = keras.Input((6,))
    return keras.Model(inputs, L.BatchNormalization(name="bn")(L.Dense(8)(inputs)))


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    "inner",
    [
        lambda: L.BatchNormalization(name="bn"),
        lambda: keras.Sequential([L.Dense(8), L.BatchNormalization(name="bn")]),
        functional,
    ],
)
@pytest.mark.parametrize("how", ["group", "freeze"])
def test_inside_of_wrappers(inner, how):
    model = seen(timewise(inner()), FILMS)
    made = dp.make_compatible(model, how)
    assert summary(made) == [("change", "Layer 'bn'")]
    assert dp.validate(made, "mse") == []
    assert apart(model, made)
    if how == "freeze":
        np.testing.assert_array_equal(made(FILMS), model(FILMS))
    else:
        assert kinds(made)["bn"] == "GroupNormalization"
        for a, b in zip(model.trainable_weights, made.trainable_weights, strict=True):
            np.testing.assert_array_equal(a, b)


def test_masks_go_through():
    inputs = keras.Input((4,), dtype="int32")
    x = L.BatchNormalization(name="bn")(L.Embedding(5, 8, mask_zero=True)(inputs))
    model = keras.Model(inputs, L.LSTM(3)(x))
    made = dp.make_compatible(model)
    tokens = np.array([[1, 2, 0, 0], [1, 2, 3, 4]])
    layer = made.layers[-1]
    assert dp.validate(made, "mse") == []
    hidden = made.get_layer("bn")(made.layers[1](tokens))
    by_hand = layer(np.asarray(hidden), mask=tokens != 0)
    np.testing.assert_allclose(made(tokens), by_hand, rtol=1e-5)


class Block(L.Layer):
    """Makes its layers itself; not registered."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense, self.norm = L.Dense(units, name="d"), L.BatchNormalization(name="norm")

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build((*shape[:-1], self.units))

    def call(self, x, training=None):
        return self.norm(self.dense(x), training=training)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def test_a_layer_that_makes_its_own_is_named_or_frozen():
    model = seen(plain_model(Block(8, name="block")), X6)
    with pytest.raises(
        ValueError, match=r"(?s)'norm' is a Batch.*GroupNormalization\(groups=2\).*freeze"
    ):
        dp.make_compatible(model)
    made = dp.make_compatible(model, "freeze")
    np.testing.assert_array_equal(made(X6, training=True), model(X6))
    assert dp.validate(made, crossentropy()) == []


class Mine(L.BatchNormalization):
    """May do anything."""


def test_a_class_of_the_users_is_not_replaced():
    with pytest.raises(ValueError, match="'mine' is a Mine"):
        dp.make_compatible(plain_model(L.Dense(8), Mine(name="mine")))


class Net(keras.Model):
    def __init__(self):
        super().__init__(name="net")
        self.dense, self.norm = L.Dense(3), L.BatchNormalization(name="norm")

    def call(self, x):
        return self.norm(self.dense(x))


class Backbone(keras.Model):
    """A functional model with a constructor of its own, as keras_hub has them."""

    def __init__(self, units):
        inputs = keras.Input((6,))
        super().__init__(inputs, L.BatchNormalization(name="bn")(L.Dense(units)(inputs)))


class Doubled(Backbone):
    def call(self, x):
        return 2.0 * super().call(x)


@pytest.mark.parametrize("make", [Net, lambda: Doubled(8)])
def test_a_model_that_calls_its_layers_itself_is_refused(make):
    with pytest.raises(ValueError, match="called by code of its own"):
        dp.make_compatible(make())


def test_a_functional_model_with_a_constructor_of_its_own():
    model = seen(Backbone(8), X6)
    made = dp.make_compatible(model, "freeze")
    np.testing.assert_array_equal(made(X6), model(X6))
    assert [p.what for p in dp.compatibility_changes(made)][0].startswith("was a Backbone and is")


class Steps(keras.Model):
    """A functional model that trains in a way of its own."""

    def train_step(self, data):
        return super().train_step(data)


def test_a_training_method_stays_refused():
    inputs = keras.Input((6,))
    made = dp.make_compatible(Steps(inputs, L.Dense(3)(inputs)))
    assert type(made) is Steps
    (problem,) = dp.compatibility_changes(made)
    assert problem.what.startswith("overrides train_step")


def test_models_that_are_not_built():
    def unbuilt():
        return keras.Sequential([L.Dense(8), L.BatchNormalization(name="bn")])

    with pytest.raises(ValueError, match=r"'bn' is a Batch.*not built.*keras.Input"):
        dp.make_compatible(unbuilt())
    made = dp.make_compatible(unbuilt(), "freeze")
    assert not made.built
    assert not made.layers[1].trainable
    late = unbuilt()
    late(X6)
    assert kinds(dp.make_compatible(late))["bn"] == "GroupNormalization"


def test_one_number_cannot_be_normalised_alone():
    with pytest.raises(ValueError, match="(?s)'bn' is a Batch.*one number per example.*freeze"):
        dp.make_compatible(plain_model(L.Dense(1), L.BatchNormalization(name="bn")))


def test_bad_arguments():
    with pytest.raises(TypeError, match="model.model"):
        dp.make_compatible(dp.DPModel(plain_model()))
    with pytest.raises(TypeError, match="give a keras.Model"):
        dp.make_compatible(L.Dense(3))
    with pytest.raises(ValueError, match="batch_normalization='drop'.*group.*freeze"):
        dp.make_compatible(plain_model(), "drop")
    with pytest.raises(ValueError, match="not a result of make_compatible"):
        dp.compatibility_changes(plain_model())


# What else is replaced, and what is not.


def spectral():
    return L.SpectralNormalization(L.Dense(8, name="inner"), name="outer")


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: plain_model(spectral()), X6),
        (lambda: keras.Sequential([keras.Input((4, 6)), L.TimeDistributed(spectral()), L.GRU(3)]),
         FILMS),
    ],
)  # fmt: skip
def test_spectral_normalization_leaves_its_layer(make, x):
    model = seen(make(), x)
    made = dp.make_compatible(model)
    np.testing.assert_array_equal(made(x), model(x))
    assert kinds(made)["outer"] == "Dense"
    assert summary(made) == [("change", "Layer 'outer'")]
    assert dp.validate(made, crossentropy()).ok
    assert apart(model, made)


def test_recurrence_forgets():
    model = keras.Sequential(
        [keras.Input(batch_shape=(5, 4, 6)),
         L.LSTM(3, stateful=True, return_sequences=True, name="a"),
         L.Bidirectional(L.GRU(3, stateful=True, name="b")), L.Dense(3)],
    )  # fmt: skip
    first = model(FILMS)
    made = dp.make_compatible(model)
    for _ in range(2):  # the state of the first batch is not there in the second
        np.testing.assert_array_equal(made(FILMS), first)
    where = [p.where for p in dp.compatibility_changes(made)]
    assert where == ["Layer 'a'", "Layer 'forward_b'", "Layer 'backward_b'"]
    assert dp.validate(made, crossentropy()).ok


@pytest.mark.extended
def test_lots_of_any_size_fit_what_was_stateful():
    """The input keeps the size of its batch, which states had to have."""
    model = keras.Sequential(
        [keras.Input(batch_shape=(5, 4, 6)), L.LSTM(3, stateful=True), L.Dense(3)]
    )
    private = private_model(model=dp.make_compatible(model))
    private.fit(FILMS, np.zeros(5), 2, steps_per_epoch=2, verbose=0)
    assert private.ledger.steps == 2


def test_what_was_learnt_by_adapt_stays_refused():
    """A copy must not make raw statistics look like given ones."""
    norm, bins = L.Normalization(name="norm"), L.Discretization(num_bins=3, name="bins")
    norm.adapt(X6)
    bins.adapt(X6)
    words = L.StringLookup(name="words")
    words.adapt(["a", "b"])
    inputs, text = keras.Input((6,)), keras.Input((1,), dtype="string")
    x = L.BatchNormalization(name="bn")(L.Concatenate()([norm(inputs), bins(inputs)]))
    model = keras.Model([inputs, text], [L.Dense(3)(x), words(text)])
    made = dp.make_compatible(model)
    report = dp.compatibility_changes(made)
    assert sorted(p.where for p in report.errors) == [
        "Layer 'bins'", "Layer 'norm'", "Layer 'words'"
    ]  # fmt: skip
    assert not report.ok
    np.testing.assert_array_equal(made.get_layer("norm")(X6), norm(X6))
    with pytest.raises(ValueError, match="without given"):
        dp.DPModel(made)


def test_other_layers_are_copied_whole():
    """A Lambda of a closure, an adapter, and a loss without a configuration."""
    shift = np.float32(2)
    adapted = L.Dense(8, name="adapted")
    model = plain_model(adapted, L.Lambda(lambda x: x + shift), Block(8), L.Dense(8))
    adapted.enable_lora(2)
    for weight in (adapted.lora_kernel_a, adapted.lora_kernel_b):
        weight.assign(keras.random.normal(weight.shape, seed=3))
    model.compile("sgd", lambda y, y_pred: keras.ops.mean(y_pred - y, -1))
    made = dp.make_compatible(model, "freeze")
    assert not made.compiled
    assert model.compiled
    np.testing.assert_array_equal(made(X6), model(X6))
    ours, theirs = (m.get_layer("adapted").trainable_weights for m in (model, made))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_trainable_flags_are_kept():
    inner = keras.Sequential([keras.Input((8,)), L.Dense(8, name="one"), L.Dense(8, name="two")])
    model = plain_model(L.Dense(8, trainable=False, name="zero"), inner, L.BatchNormalization())
    inner.trainable = False
    inner.layers[0].trainable = True  # below a model that is not
    made = dp.make_compatible(model)
    assert [v.path for v in made.trainable_weights] == [v.path for v in model.trainable_weights]
    assert any("one" in v.path for v in made.trainable_weights)


class Tied(L.Layer):
    """Uses the weights of another layer."""

    def __init__(self, dense, **kwargs):
        super().__init__(**kwargs)
        self.dense = dense

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.dense.kernel))

    def get_config(self):
        return {**super().get_config(), "dense": keras.saving.serialize_keras_object(self.dense)}

    @classmethod
    def from_config(cls, config):
        dense = keras.saving.deserialize_keras_object(config.pop("dense"))
        return cls(dense, **config)


def test_shared_variables_are_not_torn_apart():
    dense = L.Dense(8, name="dense")
    inputs = keras.Input((6,))
    with pytest.raises(ValueError, match="'dense/kernel' is shared"):
        dp.make_compatible(keras.Model(inputs, Tied(dense)(dense(inputs))))


class Forgets(L.Layer):
    """Leaves an argument out of its configuration."""

    def __init__(self, number=0, **kwargs):
        super().__init__(**kwargs)
        for i in range(number):
            self.add_weight(shape=(), name=f"weight_{i}")

    def call(self, x):
        return x

    def get_config(self):
        return super().get_config()


class Grows(L.Layer):
    """Makes layers after it was made."""

    def call(self, x):
        return x


def test_weights_and_layers_that_a_copy_has_no_place_for():
    with pytest.raises(ValueError, match="'it' has 2 variables and its copy 0.*get_config"):
        dp.make_compatible(plain_model(Forgets(2, name="it")))
    layer = Grows(name="it")
    layer.inner = L.Dropout(0.1)
    with pytest.raises(ValueError, match="'it' has 1 layers and its copy 0"):
        dp.make_compatible(plain_model(layer), "freeze")


# Training, files and privacy.


def test_it_trains_on_the_ghost_engine():
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), L.Conv2D(8, 3), L.BatchNormalization(), L.ReLU(), L.Flatten(),
         L.Dense(8), L.BatchNormalization(), L.Dense(3)],
    )  # fmt: skip
    private = private_model(model=dp.make_compatible(model))
    before = private.get_weights()
    private.fit(IMAGES, np.arange(6) % 3, batch_size=3, steps_per_epoch=1, verbose=0)
    plan = private.gradient_plan()
    assert (plan.engine, plan.mapped) == ("ghost", ())
    for a, b in zip(before, private.get_weights(), strict=True):
        assert np.isfinite(b).all()
        assert (a != b).any()


def test_plain_keras_saves_and_loads_it(tmp_path):
    made = dp.make_compatible(conv_net())
    assert "tf_adadp" not in made.to_json()
    made.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    x = {"image": IMAGES}
    np.testing.assert_array_equal(loaded(x), made(x))


def trained():
    model = plain_model(L.Dense(8), L.BatchNormalization(name="bn", trainable=False))
    private = private_model(model=model)
    private.fit(*data(), batch_size=30, verbose=0)
    return private


def again(made):
    """Another training, of what `make_compatible` returned."""
    private = private_model(model=made)
    private.fit(*data(), batch_size=30, verbose=0)
    return private


@pytest.mark.representative(1)
@pytest.mark.parametrize("how", ["group", "freeze"])
def test_a_copy_costs_what_its_weights_cost(how):
    private = trained()
    cost = private.epsilon(DELTA)
    private.model.get_layer("bn").trainable = True  # now there is something to replace
    made = dp.make_compatible(private.model, how)
    assert summary(made) == [("change", "Layer 'bn'")]
    assert dp.DPModel(made).epsilon(DELTA) == cost > 0
    assert dp.DPModel(copy.deepcopy(made)).epsilon(DELTA) == cost
    assert dp.DPModel(dp.make_compatible(made)).epsilon(DELTA) == cost
    # From here each has a history of its own.
    second = again(made)
    assert second.ledger.steps == 8
    assert second.epsilon(DELTA) > cost
    assert private.ledger.steps == 4


def test_a_part_that_was_trained_brings_its_cost():
    part = trained()
    inputs = keras.Input((6,))
    whole = keras.Model(inputs, L.BatchNormalization()(L.Dense(8)(part.model(inputs))))
    assert dp.DPModel(dp.make_compatible(whole)).epsilon(DELTA) == part.epsilon(DELTA) > 0


def test_the_cost_of_a_custom_loop_goes_along():
    model, ledger = plain_model(), dp.PrivacyLedger()
    lots = dp.PoissonLots(*data(), expected_size=30)
    optimizer = dp.DPSGD(0.1, noise_multiplier=1.0)
    for lot in lots.take(3, 16):
        dp.private_step(model, crossentropy(), lot, optimizer, ledger=ledger, law=lots.law)
    made = dp.DPModel(dp.make_compatible(model))
    assert made.epsilon(DELTA) == ledger.epsilon(DELTA) > 0
    assert made.ledger is not ledger


@pytest.mark.representative(1)
@pytest.mark.parametrize("copied", [dp.make_compatible, copy.deepcopy])
def test_what_was_not_charged_is_not_forgotten(copied):
    model, x, y = plain_model(), *data()
    private = private_model(model=model)
    private.fit(x, y, batch_size=30, steps_per_epoch=1, verbose=0)
    sums = dp.clipped_sum(model, crossentropy(), dp.make_lot(x[:30], y[:30]), private.optimizer)
    private.optimizer.apply_private(sums, 30)
    for made in (model, copied(model)):
        with pytest.raises(ValueError, match="1 releases of the optimizer were not charged"):
            dp.DPModel(made).epsilon(DELTA)


def test_an_unknown_or_changed_history_stays_so():
    private = trained()
    private.model.set_weights([w + 1 for w in private.model.get_weights()])
    made = dp.DPModel(dp.make_compatible(private.model))
    assert "the weights are not those that the last" in " ".join(
        made.ledger.statement(DELTA).split()
    )
    private.ledger.mark_unknown("a file was lost")
    with pytest.raises(ValueError, match="a file was lost"):
        dp.DPModel(dp.make_compatible(private.model)).epsilon(DELTA)


def test_public_weights_stay_public():
    assert dp.DPModel(dp.make_compatible(conv_net())).epsilon(DELTA) == 0.0


def test_noisy_components_are_charged_once():
    pca = dp.DPPCA(3, 4.0)
    x, _ = data()
    pca.fit(x)
    model = keras.Sequential([keras.Input((6,)), pca.layer(), L.BatchNormalization(), L.Dense(3)])
    made = dp.make_compatible(model)
    assert dp.DPModel(made).epsilon(DELTA) == pca.ledger.epsilon(DELTA) > 0


# Networks of keras.applications.


@pytest.mark.representative(0, 1)
@pytest.mark.parametrize(
    ("name", "layers", "end"),
    [
        ("MobileNetV2", 52, "block_2_add"),
        ("ResNet50V2", 49, "conv2_block2_out"),
        ("EfficientNetB0", 49, "block2b_add"),
        ("DenseNet121", 121, "pool2_pool"),
    ],
)
def test_networks_of_keras(name, layers, end):
    """Copied whole; trained up to the end of the first blocks of each kind, to save time."""
    make = getattr(keras.applications, name)
    model = make(weights=None, include_top=False, input_shape=(32, 32, 3))
    x = np.random.default_rng(0).random((4, 32, 32, 3), np.float32)
    np.testing.assert_array_equal(dp.make_compatible(model, "freeze")(x), model(x))
    made = dp.make_compatible(model)
    assert len(dp.compatibility_changes(made)) == layers
    assert dp.compatibility_changes(made).ok
    assert [v.path for v in made.trainable_weights] == [v.path for v in model.trainable_weights]
    pooled = L.GlobalAveragePooling2D()(model.get_layer(end).output)
    part = keras.Model(model.inputs, L.Dense(10)(pooled))
    report = dp.validate(part, crossentropy())
    assert f"{len(report.errors)} layers: " in str(report)
    assert len(str(report).splitlines()) < 9  # one row
    made = dp.make_compatible(part)
    assert dp.validate(made, crossentropy()).ok
    private = private_model(model=made)
    private.fit(x, np.arange(4), batch_size=2, steps_per_epoch=1, verbose=0)
    plan = private.gradient_plan()
    assert (plan.engine, plan.mapped) == ("ghost", ())
    assert all(np.isfinite(w).all() for w in made.get_weights())


def test_single_variables_stay_frozen():
    model = plain_model(L.Dense(5, name="half"), L.BatchNormalization())
    model.get_layer("half").kernel.trainable = False
    fixed = dp.make_compatible(model)
    half = fixed.get_layer("half")
    assert not half.kernel.trainable
    assert half.bias.trainable
    assert len(fixed.trainable_variables) == len(model.trainable_variables)
