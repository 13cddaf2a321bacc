"""Tests reports of all problems of a model, and layers that changed since."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROOT, ROWS, crossentropy, data, plain_model, private_model
from tf_adadp.gradients.example_loss import ExampleLoss
from tf_adadp.gradients.settings import LayerSettings
from tf_adadp.validation import mixing

L = keras.layers
LOSSES = sorted(
    name
    for name, cls in vars(keras.losses).items()
    if isinstance(cls, type)
    and issubclass(cls, keras.losses.Loss)
    and name not in ("Loss", "LossFunctionWrapper", "CTC")
)
MIXING_LOSSES = {
    "Circle": "Equal combines every example with every other one",
    "Dice": "reduces the batch axis",
    # They look for labels of 0 in the whole batch.
    "Hinge": "All works along the axis of the examples",
    "SquaredHinge": "All works along the axis of the examples",
    "Tversky": "reduces the batch axis",
}


def validated(*layers, loss=None, **kwargs):
    x, y = data()
    return dp.validate(plain_model(*layers), loss or crossentropy(), x, y, **kwargs)


def only(report, severity, where, what, fix=""):
    """The report has one problem, and it is this one."""
    (problem,) = report
    assert (problem.severity, problem.where) == (severity, where)
    assert what in problem.what
    assert fix in problem.fix


class Running(L.Layer):
    """Keeps a running sum of its inputs in a Keras variable."""

    def build(self, shape):
        self.total = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="running_sum"
        )

    def call(self, x):
        self.total.assign_add(keras.ops.sum(x))
        return x


class SideEffect(L.Layer):
    """Keeps one where Keras does not see it."""

    def __init__(self):
        super().__init__(name="side_effect")
        self.total = tf.Variable(0.0)

    def call(self, x):
        self.total.assign_add(tf.reduce_sum(x))
        return x


class Noise(L.Layer):
    """Draws with what it is given: a function of the shape."""

    def __init__(self, draw):
        super().__init__(name="noise")
        self.draw = draw

    def call(self, x):
        return x + self.draw(keras.ops.shape(x))


class InModel(keras.Model):
    """Mixes between its layers."""

    def __init__(self):
        super().__init__(name="in_model")
        self.first, self.second = L.Dense(4), L.Dense(3)

    def call(self, x):
        return self.second(keras.ops.flip(self.first(x), axis=0))


@tf.custom_gradient
def mixes_backwards(x):
    return x, lambda d: tf.zeros_like(x) + tf.reduce_mean(d * x, 0)


def contrasts(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - keras.ops.mean(y_pred, 0)), -1)


# The report.


@pytest.mark.parametrize(
    "make",
    [
        lambda: (),
        lambda: (L.Dropout(0.5), L.GaussianNoise(0.1)),
        lambda: (L.Reshape((6, 1)), L.GRU(2)),
    ],
)
def test_nothing_to_report(make):
    report = validated(*make())
    assert report == []
    assert report.ok
    assert str(report) == "no problems found"
    report.raise_if_any()


def test_a_normalization_that_saw_no_data_is_public():
    """Models of keras.applications hold such a layer."""
    norm = L.Normalization(name="norm")
    model = plain_model(norm, L.Dense(3))
    private = dp.DPModel(model)
    private.compile(dp.DPSGD(noise_multiplier=1.0), "mse", log_raw_metrics=False)
    x, _ = data()
    private.fit(x, x[:, :3], 10, steps_per_epoch=1, verbose=0)  # also seen while it is traced
    norm.adapt(x)
    with pytest.raises(ValueError, match="'norm' is a Normalization without given mean"):
        dp.DPModel(model)


def test_all_errors_at_once():
    """DPModel raises the first of them, in the same words."""
    model = plain_model(
        L.Normalization(name="norm"), L.Dense(16), L.BatchNormalization(name="bn"), SideEffect()
    )
    x, y = data()
    model.layers[0].adapt(x)
    report = dp.validate(model, lambda y, y_pred: keras.ops.mean(y_pred), x, y)
    wheres = [p.where for p in report.errors]
    assert wheres[:2] == ["Layer 'norm'", "Layer 'bn'"]
    assert wheres[2].startswith("The loss")
    assert "side_effect" in wheres[3]
    assert "AssignAddVariableOp" in wheres[3]
    with pytest.raises(ValueError, match="(?s)'norm'.*'bn'.*reduces the batch.*keeps state"):
        report.raise_if_any()
    with pytest.raises(ValueError, match="'norm'") as raised:
        dp.DPModel(model)
    assert str(raised.value) == str(report[0])
    for line in str(report).splitlines():
        assert len(line) <= 112


def test_errors_come_first():
    report = validated(L.Softmax(axis=0, name="softmax"), L.BatchNormalization(name="bn"))
    assert [p.where for p in report] == ["Layer 'bn'", "Layer 'softmax'"]
    assert not report.ok
    assert [p.where for p in report.warnings] == ["Layer 'softmax'"]


def test_the_model_is_as_it_was():
    model = plain_model(Running(), L.Dropout(0.5), L.Dense(6), L.BatchNormalization())
    before = [v.numpy() for v in model.variables]
    x, y = data()
    dp.validate(model, crossentropy(), x, y)
    for a, b in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    assert "call" not in vars(model.layers[0])


def test_the_values_of_the_data_are_never_used():
    """Out-of-range tokens, labels without a class and non-finite numbers are not reported."""
    model = keras.Sequential([L.Embedding(2, 3), L.Flatten(), L.Dense(3)])
    x, y = np.full((ROWS, 4), 99), np.full(ROWS, 99)
    assert dp.validate(model, crossentropy(), x, y) == []
    assert validated(L.Dense(4)) == dp.validate(
        plain_model(), crossentropy(), np.full((ROWS, 6), np.nan, np.float32), y
    )


def test_layers_with_one_problem_have_one_row():
    """Only the printed table merges layers: the list has each."""
    names = [f"bn_{i}" for i in range(5)]
    stateful = L.LSTM(2, stateful=True, name="lstm")
    report = dp.validate(
        keras.Sequential([*(L.BatchNormalization(name=n) for n in names), stateful])
    )
    assert [p.where for p in report.errors] == [f"Layer {n!r}" for n in (*names, "lstm")]
    first = str(report).splitlines()[1]
    assert first.split()[:5] == ["error", "5", "layers:", "bn_0,", "bn_1,"]
    assert str(report).count("is a BatchNormalization in training") == 1
    assert "bn_4" not in str(report)
    assert "Layer 'lstm'" in str(report)
    for problem in report.errors:
        assert "make_compatible" in problem.fix
    with pytest.raises(ValueError, match="(?s)'bn_0'.*make_compatible.*'bn_4'.*'lstm'"):
        report.raise_if_any()


# What is seen without tracing.


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (lambda: L.Discretization(num_bins=3, name="it"), "without given bin_boundaries", "public"),
        (lambda: L.StringLookup(vocabulary=["a"], num_oov_indices=0, name="it"), "unknown token",
         "num_oov_indices=1"),
        (lambda: L.LSTM(2, stateful=True, name="it"), "stateful", "stateful=False"),
        (lambda: L.SpectralNormalization(L.Dense(3, name="inner"), name="it"), "kernel in place",
         "'inner' by itself"),
    ],
)  # fmt: skip
def test_layers_of_keras(make, what, fix):
    model = keras.Sequential([make()])
    report = dp.validate(model)  # of a model that nobody knows the inputs of
    only(report.errors, "error", "Layer 'it'", what, fix)
    assert "form of its inputs" in report.warnings[0].what
    with pytest.raises(ValueError, match="Layer 'it'"):
        dp.DPModel(model)


def test_a_private_step_would_leave_a_spectral_norm_behind():
    """The layer is refused: training uses a normalised kernel, which a private step drops."""
    layer = L.SpectralNormalization(L.Dense(3, kernel_initializer=keras.initializers.Constant(5)))
    model = plain_model(layer)
    x, y = data()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    example = ExampleLoss(model, None)
    seeds = tf.zeros([0, 2], tf.uint32)
    trained, _ = example.predictions(example.trainable_values(), x, seeds)
    assert float(loss(y, trained)) != pytest.approx(float(loss(y, model(x))), rel=0.1)


def test_training_methods_of_its_own():
    names = ("train_step", "compute_loss", "test_step", "compute_metrics", "predict_step")
    report = dp.validate(type("Own", (InModel,), dict.fromkeys(names, lambda self: 0))())
    found = [(p.what, p.severity) for p in report if p.where == "Own"]
    severities = ["error", "error", "warning", "warning", "warning"]
    assert found == [
        (f"overrides {name}, which a DPModel does not call", severity)
        for name, severity in zip(names, severities, strict=True)
    ]


@pytest.mark.parametrize("name", ["test_step", "compute_metrics", "predict_step"])
def test_methods_of_evaluation_of_its_own_are_announced(name):
    cls = type("Own", (keras.Sequential,), {name: lambda self, *args, **kwargs: {"mine": 1.0}})
    private = dp.DPModel(cls([keras.Input((4,)), L.Dense(3)]))
    private.compile(dp.DPSGD(0.1, noise_multiplier=1.0), "mse", log_raw_metrics=False)
    with pytest.warns(UserWarning, match=f"Own overrides {name}.*`.model`"):
        private.fit(np.ones((8, 4), np.float32), np.ones((8, 3)), batch_size=4, verbose=0)


def test_a_shared_seed_generator():
    class Drops(L.Layer):
        def __init__(self, generator, name):
            super().__init__(name=name)
            self.generator = generator

        def call(self, x):
            return keras.random.dropout(x, 0.5, seed=self.generator)

    generator = keras.random.SeedGenerator(1)
    report = validated(Drops(generator, "one"), Drops(generator, "two"))
    only(report, "warning", "Layer 'two'", "seed generator of layer 'one'")


def test_nothing_to_train_and_labels_of_no_number():
    model = plain_model()
    model.trainable = False
    x, _ = data()
    report = dp.validate(model, None, x, np.array(["a"] * ROWS))
    assert [(p.where, p.what) for p in report] == [
        (f"The model {model.name!r}", "has no trainable weights"), ("y", "has dtype string"),
    ]  # fmt: skip


def test_adapters_that_are_frozen_and_kernels_that_are_not():
    model = plain_model()
    layer = model.layers[-1]
    layer.trainable = False
    layer.enable_lora(2)
    model.add(L.Dense(3, name="after"))
    x, y = data()
    where = f"Layer {layer.name!r}"
    only(dp.validate(model, crossentropy(), x, y), "warning", where, "adapter that is not trained")
    layer.trainable = True  # all of it
    only(dp.validate(model, crossentropy(), x, y), "warning", where, "trains its kernel beside")
    private = dp.DPModel(model)
    private.compile(dp.DPSGD(0.1, noise_multiplier=1.0), crossentropy(), log_raw_metrics=False)
    with pytest.warns(UserWarning, match="before `enable_lora`"):
        private.fit(x, y, batch_size=20, verbose=0)


# What is seen by following a batch.

UNPROVEN = "is not proven to keep examples apart: "
ALONG = UNPROVEN + "the operation {} works along the axis of the examples"
AXES, SEEDS = "Work along other axes", "keras.random.SeedGenerator that is an attribute"


class Tables(L.Layer):
    """Adds a constant."""

    def __init__(self, table):
        super().__init__(name="it")
        self.table = np.asarray(table, np.float32)

    def call(self, x):
        return x + self.table


class Normalises(L.Layer):
    """Assigns its weight before it is used, as a spectral norm does."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        self.scale.assign(self.scale / keras.ops.norm(self.scale))
        return x * self.scale


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (lambda: L.Lambda(lambda x: x - keras.ops.mean(x, 0), name="it"), ALONG.format("Mean"),
         AXES),
        (lambda: L.Dense(4, activation=lambda x: keras.ops.softmax(x, 0), name="it"), UNPROVEN,
         AXES),
        (lambda: L.TimeDistributed(L.Lambda(lambda x: x[::-1], name="it")), UNPROVEN, AXES),
        (lambda: L.Lambda(lambda x: x / keras.ops.cast(keras.ops.shape(x)[0], "float32"),
                          name="it"),
         "RealDiv uses the number of examples", "Leave the batch size out"),
        (lambda: keras.Sequential([L.Dense(4), L.Lambda(mixes_backwards, name="it")]),
         ALONG.format("Mean"), AXES),
        (lambda: L.Lambda(lambda x: x + keras.ops.cumsum(keras.ops.ones_like(x), 0), name="it"),
         ALONG.format("Cumsum"), AXES),
        (lambda: L.Lambda(lambda x: keras.ops.while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, 2 * x), (0, x))[1], name="it"),
         "the operation ", "Write the steps out"),
        (lambda: L.Lambda(lambda x: tf.linalg.svd(x[..., None])[0] + x, name="it"),
         "Svd has no rule", "expect it to be mapped"),
        (lambda: Noise(keras.random.normal), "the same for every batch", SEEDS),
        (lambda: Noise(tf.random.normal), "that no seed generator of the model gives", SEEDS),
    ],
)  # fmt: skip
def test_what_layers_do(make, what, fix):
    """Each with the line of its code, here."""
    layer = make()
    if isinstance(layer, L.TimeDistributed):
        model = keras.Sequential([keras.Input((2, 6)), layer, L.Flatten(), L.Dense(3)])
        x = np.ones((ROWS, 2, 6), np.float32)
    else:
        model, x = plain_model(layer), data()[0]
    report = dp.validate(model, crossentropy(), x, data()[1])
    where = "noise" if isinstance(layer, Noise) else "it"
    only(report, "warning", f"Layer {where!r}", what, fix)
    assert f"{__file__}:" in report[0].what


@pytest.mark.parametrize(("make", "name"), [(Running, "running_sum"), (Normalises, "scale")])
def test_variables_that_a_layer_writes(make, name):
    report = validated(L.Dense(6), make(name="it"))
    only(report, "warning", "Layer 'it'", f"{name}' in training: a private step drops that")


def test_a_constant_of_the_model_is_taken_for_what_it_is():
    """A table of the data looks like a table of public numbers, as `validate` documents."""
    assert validated(Tables(np.ones((1, 6)))) == []


@pytest.mark.extended
def test_operations_of_keras_without_a_rule_are_reported_and_not_announced():
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), L.Hashing(5, output_mode="multi_hot", name="it"),
         L.Dense(3)]
    )  # fmt: skip
    x, y = np.ones((ROWS, 2), np.int32), data()[1]
    report = dp.validate(model, crossentropy(), x, y)
    only(report, "warning", "Layer 'it'", "has no rule", "expect it to be mapped")
    private_model(model=model).fit(x, y, batch_size=30, verbose=0)  # a warning would be an error


def test_a_recurrent_layer_over_many_steps_is_not_followed():
    model = keras.Sequential([keras.Input((80, 2)), L.GRU(2, name="it"), L.Dense(3)])
    report = dp.validate(model, crossentropy())
    only(report, "warning", "Layer 'it'", "the layer 'it' loops", "mapped")


@keras.saving.register_keras_serializable()  # Bidirectional copies by the config
def centred(x):
    return keras.ops.tanh(x - keras.ops.mean(x, 0))


def penalty(weight):
    return keras.ops.sum(keras.ops.square(weight))


@pytest.mark.representative(1, 3)
@pytest.mark.parametrize(
    ("make", "announced"),
    [
        (lambda: L.SimpleRNN(2, activation=centred), True),
        (lambda: L.LSTM(2), False),
        (lambda: L.Bidirectional(L.GRU(2, recurrent_activation=centred)), True),
        (lambda: L.RNN([L.LSTMCell(2), L.LSTMCell(2, activation=centred)]), True),
        (lambda: L.SimpleRNN(2, activation=tf.tanh, kernel_regularizer=penalty), False),
    ],
)
def test_training_warns_of_activations_in_long_loops(make, announced):
    """A function of the user's may mix examples in every step."""
    model = keras.Sequential([keras.Input((80, 2)), make(), L.Dense(3)])
    x = np.ones((ROWS, 80, 2), np.float32)
    report = dp.validate(model, crossentropy(), x, data()[1])
    assert ["loops" in problem.what for problem in report] in ([True], [True] * 2)
    private = private_model(model=model, metrics=[])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        private.fit(x, data()[1], batch_size=60, steps_per_epoch=1, verbose=0)
    assert any("loops" in str(w.message) for w in caught) == announced


def test_axes_of_unknown_size_are_followed_at_one_length():
    model = keras.Sequential([keras.Input((None, 2)), L.GRU(2), L.Dense(3)])
    assert dp.validate(model, crossentropy()) == []


def flat_errors(y_true, y_pred):
    errors = keras.ops.square(y_true - y_pred)
    return keras.ops.mean(keras.ops.reshape(errors, (keras.ops.shape(errors)[0], -1)), -1)


def of_any_length():
    return keras.Sequential([keras.Input((None, 2)), L.Conv1D(3, 3), L.Conv1D(3, 2, strides=2)])


def unknown_lengths(*classes):
    """Lots of inputs [B, 9, 2] and labels for `of_any_length`, whose length no spec tells."""
    x = np.ones((30, 9, 2), np.float32)
    y = np.zeros((30, 3, *classes), np.float32 if classes else np.int32)
    specs = [tf.TensorSpec((None, None, *a.shape[2:]), a.dtype) for a in (x, y)]
    dataset = tf.data.Dataset.from_generator(lambda: [(x, y)], output_signature=tuple(specs))
    law = dp.accounting.FixedSizeSampling(ROWS, 30)
    return dp.sampling.DeclaredLots(dataset, law, steps_per_epoch=1)


@pytest.mark.representative(1)
@pytest.mark.parametrize(("loss", "classes"), [(flat_errors, [3]), (crossentropy(), [])])
def test_losses_of_axes_of_unknown_size_are_too(loss, classes):
    """Labels get the length that the model computes from its inputs'."""
    assert dp.validate(of_any_length(), loss) == []
    lots = unknown_lengths(*classes)
    assert dp.validate(of_any_length(), loss, lots) == []
    private = private_model(model=of_any_length(), loss=loss, metrics=[])
    private.fit(lots, verbose=0)  # a warning would be an error


def test_losses_that_mix_axes_of_unknown_size():
    for_loss = "The loss 'contrasts'", ALONG.format("Mean"), "its own labels"
    only(dp.validate(of_any_length(), contrasts), "warning", *for_loss)
    private = private_model(model=of_any_length(), loss=contrasts, metrics=[])
    with pytest.warns(UserWarning, match="The loss 'contrasts' is not proven"):
        private.fit(unknown_lengths(3), verbose=0)


def test_ways_out_are_found_by_words_that_are_said():
    """A reason that is reworded must keep its fix."""
    texts = [path.read_text("utf-8") for path in (ROOT / "tf_adadp/gradients").rglob("*.py")]
    said = " ".join(" ".join(texts).replace('"', "").split())
    for words, fix in mixing._FIXES:
        for word in words:
            assert word in said, (word, fix)


def test_mixing_between_the_layers_of_a_model():
    x, y = data()
    only(
        dp.validate(InModel(), crossentropy(), x, y),
        "warning",
        "The model 'in_model'",
        UNPROVEN,
        AXES,
    )
    report = dp.validate(keras.Sequential([InModel(), L.Dense(3)]), crossentropy(), x, y)
    only(report, "warning", "Layer 'in_model'", UNPROVEN, AXES)


@pytest.mark.extended
@pytest.mark.parametrize("wrap", [{}, {"gradient_engine": "vectorized"}])
def test_training_warns_once_of_layers_and_losses_that_mix(recwarn, wrap):
    """Checks this whether or not an engine follows the model."""
    x, y = data()
    layer = L.Lambda(lambda x: x - keras.ops.mean(x, 0), name="centre")
    private = private_model(model=plain_model(layer), wrap=wrap, loss=contrasts, metrics=[])
    for _ in range(2):
        private.fit(x, np.eye(3)[y], batch_size=30, verbose=0)
        found = [w for w in recwarn if UNPROVEN in str(w.message)]
        assert [str(w.message).split(" is ")[0] for w in found] == [
            "Layer 'centre'", "The loss 'contrasts'",
        ]  # fmt: skip
        assert {w.filename for w in found} == {__file__}


@pytest.mark.extended
def test_training_goes_on_where_a_batch_stops_a_layer():
    class Picky(L.Layer):
        picky = False

        def call(self, x):
            if self.picky and x.shape[0] is None:
                raise ValueError("not these")
            return x

    x, y = data()
    private = private_model(model=plain_model(Picky()))
    private.model.layers[0].picky = True
    match = f"Layer {private.model.layers[0].name!r} .*cannot be traced for a batch: not these"
    with pytest.warns(UserWarning, match=match):
        private.fit(x, y, batch_size=30, verbose=0)
    assert private.ledger.steps == 4


def one_by_one(y_true, y_pred):
    """Counts on a batch of known size."""
    squares = keras.ops.square(y_true - y_pred)
    return keras.ops.stack([keras.ops.mean(squares[i]) for i in range(squares.shape[0])])


def of_some(y_true, y_pred):
    assert y_pred.shape[0] is not None, "how many?"
    return keras.ops.mean(keras.ops.square(y_true - y_pred), -1)


@pytest.mark.representative(1)
@pytest.mark.parametrize("engine", ["auto", "vectorized"])
@pytest.mark.parametrize("loss", [one_by_one, of_some])
def test_a_loss_that_a_batch_stops(loss, engine):
    """`validate` and `fit` report the same problem, and training maps over single examples."""
    x, y = data()
    y = np.eye(3, dtype=np.float32)[y]
    private = private_model(loss=loss, metrics=[], wrap={"gradient_engine": engine})
    report = dp.validate(private, x=x, y=y)
    where = f"The loss {loss.__name__!r}"
    only(report, "warning", where, "cannot be traced for a batch: ", "batches of any size")
    assert f"{__file__}:" in report[0].what
    with pytest.warns(UserWarning, match=f"{where} .*cannot be traced for a batch"):
        private.fit(x, y, batch_size=60, verbose=0)
    assert private.ledger.steps == 2


class Branches(L.Layer):
    """Branches in Python, which AutoGraph makes an operation of."""

    @tf.function
    def call(self, x):
        if keras.ops.sum(x) > 0.0:
            x = 2.0 * x
        return x


def test_a_layer_that_branches_in_python():
    """TensorFlow's advice to write @tf.function does not help a user who did."""
    x, y = data()
    private = private_model(model=plain_model(L.Dense(4), Branches(name="it")))
    report = dp.validate(private, x=x, y=y)
    only(report, "warning", "Layer 'it'", "branches, or loops, in Python", "keras.ops.where")
    assert f"{__file__}:" in report[0].what
    with pytest.warns(UserWarning, match="Layer 'it' .*branches, or loops, in Python"):
        private.fit(x, y, batch_size=60, verbose=0)
    assert private.gradient_plan().mapped == ("it",)


class Shrinks(keras.losses.Loss):
    """Adds the squares of a weight of the model, which `read` gives."""

    def __init__(self, read):
        super().__init__(name="shrinks")
        self.read = read

    def call(self, y_true, y_pred):
        squares = keras.ops.square(self.read())
        return keras.ops.mean(keras.ops.square(y_true - y_pred), -1) + keras.ops.sum(squares)


class Raw(L.Layer):
    """Reads its weight past Keras."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale._value


@pytest.mark.parametrize("engine", ["auto", "vectorized", "ghost"])
@pytest.mark.parametrize("reader", ["loss", "loss, as a tensor", "layer"])
def test_a_weight_whose_gradient_would_be_lost(reader, engine):
    x, y = data()
    y = np.eye(3, dtype=np.float32)[y]
    last = L.Dense(3, name="last")
    model = plain_model(Raw(name="raw"), last) if reader == "layer" else plain_model(last)
    loss = {
        "loss": Shrinks(lambda: last.kernel),
        "loss, as a tensor": Shrinks(lambda: tf.convert_to_tensor(last.kernel.value)),
        "layer": "mse",
    }[reader]
    private = private_model(model=model, loss=loss, metrics=[], wrap={"gradient_engine": engine})
    path = "raw/scale" if reader == "layer" else "last/kernel"
    (problem,) = dp.validate(private, x=x, y=y).errors
    assert problem.where.startswith("The trainable weight '")
    assert problem.where.endswith(f"{path}'")
    assert "gradient from there would be lost" in problem.what
    with pytest.raises(ValueError, match=f"{path}' is read by the loss, or past Keras"):
        private.fit(x, y, batch_size=60, verbose=0)
    assert private.ledger.steps == 0


def test_one_layer_that_mixes_hides_no_other():
    first, second = (L.Lambda(lambda x: x - keras.ops.mean(x, 0), name=n) for n in ("a", "b"))
    report = validated(Noise(tf.random.normal), first, L.Dense(4), second)
    assert [(p.where, p.fix) for p in report] == [
        ("Layer 'noise'", report[0].fix), ("Layer 'a'", report[1].fix), ("Layer 'b'", report[1].fix)
    ]  # fmt: skip
    assert (SEEDS in report[0].fix, AXES in report[1].fix) == (True, True)


def test_a_foreign_seed_generator_draws_the_same_numbers_always():
    """The layer gets no seed of an example or a step, as the report states."""
    model = plain_model(Noise(keras.random.normal))
    example = ExampleLoss(model, None)
    assert example.num_seed_generators == 0
    run = tf.function(lambda x: example.predictions(example.trainable_values(), x, ())[0])
    x, _ = data()
    np.testing.assert_array_equal(run(x[:1]), run(x[:1]))


@pytest.mark.parametrize("labels", [True, False])
def test_a_loss_that_mixes(labels):
    x, y = data()
    model = plain_model()
    report = dp.validate(model, contrasts, x, np.eye(3)[y] if labels else None)
    only(report, "warning", "The loss 'contrasts'", ALONG.format("Mean"), "its own labels")
    assert f"{__file__}:" in report[0].what


@pytest.mark.extended
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_keras_are_followed(name):
    cls = getattr(keras.losses, name)
    x, y = data()
    sparse = name in ("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy")
    y = y if sparse or name == "Circle" else np.eye(3, dtype=np.float32)[y]
    report = dp.validate(plain_model(L.Dense(4), L.Dense(3, "softmax")), cls(), x, y)
    expected = MIXING_LOSSES.get(name)
    assert len(report) == (expected is not None)
    assert not report or expected in report[0].what


def test_a_loss_that_compares_sizes():
    """TensorFlow asserts that logits and labels of sequences have the same shape."""
    model = keras.Sequential([keras.Input((5, 6)), L.Dense(3)])
    x, y = np.ones((ROWS, 5, 6), np.float32), np.zeros((ROWS, 5), np.int32)
    assert dp.validate(model, crossentropy(), x, y) == []


@pytest.mark.extended
def test_several_outputs_in_a_dict():
    inputs = {"a": keras.Input((6,), name="a"), "t": keras.Input((2,), dtype="int32", name="t")}
    hidden = L.Concatenate()([inputs["a"], L.Flatten()(L.Embedding(5, 3)(inputs["t"]))])
    outputs = {"one": L.Dense(3, name="one")(hidden), "two": L.Dense(1, name="two")(hidden)}
    model = keras.Model(inputs, outputs)
    x, y = data()
    x = {"a": x, "t": np.zeros((ROWS, 2), np.int32)}
    y = {"one": y, "two": np.zeros((ROWS, 1), np.float32)}
    assert dp.validate(model, {"one": crossentropy(), "two": "mse"}, x, y) == []
    y["one"] = np.eye(3)[y["one"]]
    two = keras.losses.MeanSquaredError(name="contrasts")  # of one name
    for loss in ({"one": contrasts, "two": two}, {"one": two, "two": contrasts}):
        report = dp.validate(model, loss, x, y)
        only(report, "warning", "The loss 'contrasts'", UNPROVEN)


def test_a_private_model_brings_its_loss():
    x, y = data()
    private = private_model(loss=contrasts, metrics=[])
    only(dp.validate(private, x=x), "warning", "The loss 'contrasts'", UNPROVEN)
    lots = dp.PoissonLots(x, np.eye(3)[y], expected_size=30)
    only(dp.validate(private, x=lots), "warning", "The loss 'contrasts'", UNPROVEN)


def test_a_model_that_does_not_run():
    _, y = data()
    report = dp.validate(plain_model(), crossentropy(), np.ones((ROWS, 5)), y)
    only(report, "error", report[0].where, "cannot be traced", "the form of x and y")
    with pytest.raises(TypeError, match="give a keras.Model"):
        dp.validate("model")


# Layers that changed since the engine was made.


@pytest.fixture(scope="module")
def trained():
    private = private_model(
        model=plain_model(
            L.Dense(8, activation="tanh", name="dense"), L.Softmax(name="softmax"),
        ),
    )  # fmt: skip
    fit(private)
    return private


def fit(private, **kwargs):
    x, y = data()
    return private.fit(**{"x": x, "y": y, "batch_size": 60, "verbose": 0, **kwargs})


@pytest.mark.parametrize(
    ("layer", "name", "value", "match"),
    [
        ("softmax", "axis", 0, "'softmax' has axis=0, and had -1"),
        ("softmax", "axis", (0, 1), r"'softmax' has axis=\(0, 1\), and had -1"),
        ("dense", "activation", lambda x: x - keras.ops.mean(x, 0), "had tanh"),
        ("dense", "activation", keras.activations.relu, "activation=relu, and had tanh"),
        ("dense", "call", lambda x: keras.ops.flip(x, 0), "call=<lambda>, and had nothing"),
    ],
)
def test_a_layer_changed_after_training_began(trained, layer, name, value, match):
    layer, steps = trained.model.get_layer(layer), trained.ledger.steps
    x, y = data()
    before = vars(layer).get(name)
    layer.__dict__[name] = value
    try:
        with pytest.raises(ValueError, match=match):
            fit(trained)
        with pytest.raises(ValueError, match=match):
            trained.train_on_batch(x, y, law=dp.accounting.PoissonSampling(ROWS, 60))
        with pytest.raises(ValueError, match=match):
            trained.train_step(None)  # when a graph is traced anew, or of every eager step
    finally:
        if before is None:
            del layer.__dict__[name]
        else:
            layer.__dict__[name] = before
    assert trained.ledger.steps == steps


def test_layers_as_they_were_train_on(trained):
    """Evaluating, predicting and compiling the plain model change no recorded setting."""
    x, y = data()
    trained.evaluate(x, y, verbose=0)
    trained.model.compile("sgd", crossentropy())
    trained.model.evaluate(x, y, verbose=0)
    steps = trained.ledger.steps
    fit(trained)
    assert trained.ledger.steps == steps + 2


def test_a_replaced_layer():
    settings = LayerSettings(plain_model(L.Dense(4), L.Dense(4)))
    settings.check_unchanged()
    settings._model.layers[0].activation = settings._model.layers[1].activation
    settings.check_unchanged()  # the same function
    settings._model.pop()
    with pytest.raises(ValueError, match="other layers than when training was prepared"):
        settings.check_unchanged()


# Tokens.


@pytest.mark.extended
@pytest.mark.parametrize("given", ["array", "dict", "list"])
def test_tokens_beyond_a_table_in_arrays(given):
    """The error comes before any charge; in lots such records contribute nothing (test_indices)."""
    a, t = keras.Input((6,), name="a"), keras.Input((2,), dtype="int32", name="t")
    table = L.Flatten()(L.Embedding(5, 3, name="table")(t))
    if given == "array":
        model = keras.Sequential([L.Embedding(5, 3, name="table"), L.Flatten(), L.Dense(3)])
    else:
        inputs = {"a": a, "t": t} if given == "dict" else [a, t]
        model = keras.Model(inputs, L.Dense(3)(L.Concatenate()([a, table])))
    x, y = data()
    tokens = np.zeros((ROWS, 2), np.int32)
    inputs = {"array": tokens, "dict": {"t": tokens, "a": x}, "list": [x, tokens]}[given]
    model.build({"array": (None, 2)}.get(given))
    dp.validation.check_tokens(model, inputs)
    tokens[3, 1] = 5
    match = "tokens from 0 to 5.*'table' has input_dim=5.*0..4"
    with pytest.raises(ValueError, match=match):
        dp.validation.check_tokens(model, inputs)
    if given == "array":
        private = private_model(model=model, metrics=[])
        with pytest.raises(ValueError, match=match):
            fit(private, x=inputs)
        assert private.ledger.steps == 0
        private.fit(dp.PoissonLots(tokens, y, expected_size=120), verbose=0)
        assert private.ledger.steps == 1
        assert all(np.isfinite(w).all() for w in private.get_weights())
