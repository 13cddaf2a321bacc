"""Makes the model, data, lots and optimizer that a case of `cases` describes."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tf_adadp as dp
from verification.fuzzing.operations import Operations

L = keras.layers
CLASSES = 3
_VOCABULARY = 7
_FEATURES = {"vector": (4,), "image": (6, 6, 2), "sequence": (5, 3), "tokens": (5,)}
_AGD = {"total_epsilon": 50.0, "total_delta": 1e-3, "num_candidates": 3, "splits": 10}
_KERAS = ("Nadam", "Adadelta", "Adafactor", "Ftrl", "Lion", "Adamax")


@keras.saving.register_keras_serializable("fuzzing")
class OwnLayer(L.Layer):
    """A layer that no engine knows."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        return keras.ops.sin(inputs * self.scale)


@keras.saving.register_keras_serializable("fuzzing")
class AddedLoss(L.Layer):
    """A loss that depends on the example, from within the model."""

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


@keras.saving.register_keras_serializable("fuzzing")
class WritesState(L.Layer):
    """Keeps a running mean of what passes, beside Keras's variables: to be refused."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = tf.Variable(0.0, trainable=False)

    def call(self, inputs):
        self.mean.assign(tf.reduce_mean(tf.cast(inputs, tf.float32)))
        return inputs * tf.cast(self.mean, inputs.dtype)


class Subclassed(keras.Model):
    """The same layers, called by a model of one's own."""

    def __init__(self, branches, trunk, heads, inputs, outputs):
        super().__init__()
        self.parts = [[f for f in chain if isinstance(f, L.Layer)] for chain in branches]
        self.trunk = [f for f in trunk if isinstance(f, L.Layer)]
        self.heads = [f for chain in heads for f in chain if isinstance(f, L.Layer)]
        self._functions = branches, trunk, heads
        self._forms = inputs, outputs

    def call(self, inputs):
        branches, trunk, heads = self._functions
        tensors = keras.tree.flatten(inputs)
        ends = [_through(chain, t) for chain, t in zip(branches, tensors, strict=True)]
        h = ends[0] if len(ends) == 1 else keras.ops.concatenate(ends, -1)
        h = _through(trunk, h)
        return _formed([_through(chain, h) for chain in heads], self._forms[1], "out")


@contextlib.contextmanager
def precision(policy):
    """Keras's precision for the time of one case."""
    try:
        if policy.startswith("floatx_"):
            keras.config.set_floatx(policy.removeprefix("floatx_"))
        keras.config.set_dtype_policy(policy.removeprefix("floatx_"))
        yield
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def plain_model(case):
    """The Keras model of a case."""
    form = case["model"]
    with_first = {"branches": True}

    def refused():
        name = form["refused"]
        if not name or not with_first.pop("branches", False):
            return []
        return {
            "batch_norm": lambda: [L.BatchNormalization()],
            "normalization": lambda: [L.Normalization()],
            "stateful": lambda: [L.Reshape((1, -1)), L.LSTM(2, stateful=True)],
            "writes_state": lambda: [WritesState()],
        }[name]()

    branches, inputs = [], []
    for branch in form["branches"]:
        inputs.append(_input(branch))
        branches.append(_branch(branch))
    trunk = refused() + _chain(form["trunk"], _vector_layer)
    if form["wide"]:
        trunk.append(L.Dense(2000, activation="relu"))
    heads = [_head(head) for head in form["heads"]]
    style = form["style"]
    if style == "sequential" and len(branches) == len(heads) == 1 and form["inputs"] == "single":
        layers = branches[0] + trunk + heads[0]
        if form["outputs"] == "single" and all(isinstance(f, L.Layer) for f in layers):
            return keras.Sequential([inputs[0], *layers])
    if style == "subclassed":
        return Subclassed(branches, trunk, heads, form["inputs"], form["outputs"])
    ends = [_through(chain, i) for chain, i in zip(branches, inputs, strict=True)]
    h = ends[0] if len(ends) == 1 else L.Concatenate()(ends)
    if style == "nested" and trunk and all(isinstance(f, L.Layer) for f in trunk):
        h = keras.Sequential(trunk)(h)
    else:
        h = _through(trunk, h)
    outputs = [_through(chain, h) for chain in heads]
    return keras.Model(
        _formed(inputs, form["inputs"], "in"), _formed(outputs, form["outputs"], "out")
    )


def data(case, rows, rng):
    """x, y and sample_weight of `rows` ordinary records, structures of numpy arrays."""
    form = case["model"]
    x = [_features(branch["input"], rows, case["x_dtype"], rng) for branch in form["branches"]]
    y = [_labels(head, rows, rng) for head in form["heads"]]
    weights = None
    if case["weights"] not in (None, "class"):
        weights = rng.uniform(0, 2, rows).astype(np.float32)
        some = rng.random(rows) < 0.3
        value = {"zeros": 0.0, "huge": 1e30, "negative": -3.0, "nan": np.nan}
        weights[some] = value.get(case["weights"], 1.0)
    return _formed(x, form["inputs"], "in"), _formed(y, form["outputs"], "out"), weights


def poisoned(x, kind, rng):
    """x with a fifth of its records, and the first one, spoilt."""
    if kind is None:
        return x

    def spoil(a):
        if a.dtype.kind != "f":
            return a
        a = a.copy()
        some = rng.random(len(a)) < 0.2
        some[:1] = True
        values = {"nan": np.nan, "inf": np.inf, "zeros": 0.0}
        a[some] = values.get(kind, 1e30 if a.dtype != np.float16 else 6e4)
        return a

    return keras.tree.map_structure(spoil, x)


def losses(case):
    """Returns the loss that `compile` gets."""
    heads = [_loss(head) for head in case["model"]["heads"]]
    return _formed(heads, case["model"]["outputs"], "out")


def metrics(case):
    """Returns the metrics that `compile` gets."""
    if case["metrics"] is None:
        return None
    many = len(case["model"]["heads"])
    return _formed([[case["metrics"]]] * many, case["model"]["outputs"], "out")


def optimizer(case, arguments, rng):
    """The optimizer of a case, not built; `arguments` go before those of the case."""
    name, rate = case["optimizer"], case["learning_rate"]
    if name == "AGD":
        return dp.AGD(**{**_AGD, **case["arguments"]})
    if rate == "schedule":
        rate = keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)
    given = {"noise_multiplier": case["noise_multiplier"], **case["arguments"]}
    if rate is not None:
        given["learning_rate"] = rate
    if name == "SADPSGD":
        calm = {**case, "weights": None}
        given |= {"energy_batch_size": 8, "energy_data": data(calm, 6, rng)[:2]}
    make = dp.make_private(getattr(keras.optimizers, name)) if name in _KERAS else getattr(dp, name)
    return make(**{**given, **arguments})


def sizes(case):
    """The expected size of a lot, and the largest for lots that have one."""
    rows, size = case["rows"], case["fraction"] * case["rows"]
    whole = max(1, round(size))
    if case["lots"] == "truncated":
        return size, min(rows, whole + 3)
    if case["lots"] in ("fixed", "shuffled", "declared"):
        return whole, whole
    if case["lots"] == "users":
        return 0.5 * size / 3, None  # a public guess
    return size, None


def users(case):
    """Whose each record is: three of each user, up to the last one."""
    return np.arange(case["rows"]) // 3


def lots(case, x, y, weights):
    """Lots of a case; None where it trains from arrays."""
    kind, rows = case["lots"], case["rows"]
    size, most = sizes(case)
    made = {
        "poisson": (dp.PoissonLots, {"expected_size": size}),
        "truncated": (dp.TruncatedPoissonLots, {"expected_size": size, "max_size": most}),
        "fixed": (dp.FixedSizeLots, {"size": size}),
        "shuffled": (dp.ShuffledLots, {"size": size}),
        "users": (
            dp.UserLots,
            {
                "user_ids": users(case),
                "expected_users": case["fraction"] * (users(case)[-1] + 1),
                "max_records_per_user": 2,
                "expected_size": size,
            },
        ),
    }
    if kind in made:
        make, arguments = made[kind]
        return make(x, y, sample_weight=weights, **arguments)
    if kind == "declared":
        parts = (x, y) if weights is None else (x, y, weights)
        dataset = tf.data.Dataset.from_tensor_slices(keras.tree.lists_to_tuples(parts))
        dataset = dataset.repeat().shuffle(rows).batch(size)
        return dp.DeclaredLots(dataset, law=dp.accounting.PoissonSampling(rows, size))
    return None


def _input(branch):
    kind = branch["input"].removesuffix("_masked")
    shape = _FEATURES[kind]
    if branch["unknown_length"] and kind in ("sequence", "tokens") and branch["end"] == "pool":
        shape = (None, *shape[1:])
    return keras.Input(shape, dtype="int32" if kind == "tokens" else None)


def _branch(branch):
    kind, end = branch["input"], branch["end"]
    if kind == "vector":
        return _chain(branch["layers"], _vector_layer)
    if kind == "image":
        last = L.Flatten() if end == "flatten" else L.GlobalAveragePooling2D()
        return [*_chain(branch["layers"], _image_layer), last]
    first = [L.Embedding(_VOCABULARY, 3, mask_zero=kind == "tokens_masked")]
    last = L.Flatten() if end == "flatten" else L.GlobalAveragePooling1D()
    chain = _chain(branch["layers"], _sequence_layer)
    return [*(first if kind != "sequence" else []), *chain, last]


def _chain(layers, make):
    return [
        Operations(number, _FEATURES["sequence"][0]) if name == "operations" else make(name, number)
        for name, number in layers
    ]


def _through(chain, tensor):
    for step in chain:
        tensor = step(tensor)
    return tensor


def _vector_layer(name, width):
    make = {
        "dense": lambda: L.Dense(width, "tanh"),
        "relu": lambda: L.Dense(width, "relu", use_bias=False),
        "regularized": lambda: L.Dense(width, kernel_regularizer="l2", bias_regularizer="l1"),
        "activity": lambda: L.Dense(width, activity_regularizer="l2"),
        "residual": lambda: Residual(),
        "shared": lambda: Shared(width),
        "einsum": lambda: L.EinsumDense("ab,bc->ac", output_shape=width, bias_axes="c"),
        "layer_norm": lambda: L.LayerNormalization(),
        "group_norm": lambda: L.GroupNormalization(1),
        "rms_norm": lambda: L.RMSNormalization(),
        "batch_norm_frozen": lambda: L.BatchNormalization(trainable=False),
        "unit_norm": lambda: L.UnitNormalization(),
        "dropout": lambda: L.Dropout(0.4),
        "noise": lambda: L.GaussianNoise(0.1),
        "frozen_dense": lambda: L.Dense(width, trainable=False),
        "float64_dense": lambda: L.Dense(width, dtype="float64"),
        "half_dense": lambda: L.Dense(width, dtype="mixed_float16"),
        "own_layer": lambda: OwnLayer(),
        "added_loss": lambda: AddedLoss(),
        "lambda_mix": lambda: L.Lambda(lambda t: t - keras.ops.mean(t, 0, keepdims=True)),
        "lora": lambda: L.Dense(width, lora_rank=1),
    }
    return make[name]()


def _image_layer(name, width):
    make = {
        "conv": lambda: L.Conv2D(width, 2, padding="same", activation="tanh"),
        "depthwise": lambda: L.DepthwiseConv2D(2, padding="same"),
        "separable": lambda: L.SeparableConv2D(width, 2, padding="same"),
        "transposed": lambda: L.Conv2DTranspose(width, 2, padding="same"),
        "max_pool": lambda: L.MaxPooling2D(2, strides=1),
        "group_norm": lambda: L.GroupNormalization(1),
        "layer_norm": lambda: L.LayerNormalization(),
        "dropout": lambda: L.Dropout(0.4),
        "spatial_dropout": lambda: L.SpatialDropout2D(0.4),
        "flip": lambda: L.RandomFlip(),
    }
    return make[name]()


def _sequence_layer(name, width):
    make = {
        "conv": lambda: L.Conv1D(width, 2, padding="same", activation="tanh"),
        "depthwise": lambda: L.DepthwiseConv1D(2, padding="same"),
        "separable": lambda: L.SeparableConv1D(width, 2, padding="same"),
        "lstm": lambda: L.LSTM(width, return_sequences=True),
        "gru": lambda: L.GRU(width, return_sequences=True),
        "rnn": lambda: L.SimpleRNN(width, return_sequences=True),
        "unrolled_lstm": lambda: L.LSTM(width, return_sequences=True, unroll=True),
        "bidirectional": lambda: L.Bidirectional(L.GRU(width, return_sequences=True)),
        "time_distributed": lambda: L.TimeDistributed(L.Dense(width)),
        "attention": lambda: SelfAttention(width),
        "dense": lambda: L.Dense(width, "tanh"),
        "layer_norm": lambda: L.LayerNormalization(),
        "dropout": lambda: L.Dropout(0.4),
        "masking": lambda: L.Masking(),
    }
    return make[name]()


class Residual(L.Layer):
    """x + Dense(x)."""

    def build(self, shape):
        self.dense = L.Dense(shape[-1], "tanh")
        self.dense.build(shape)

    def call(self, inputs):
        return inputs + self.dense(inputs)


class Shared(L.Layer):
    """One dense layer, applied twice."""

    def __init__(self, width):
        super().__init__()
        self.before, self.shared = L.Dense(width), L.Dense(width, "tanh")

    def call(self, inputs):
        return self.shared(self.shared(self.before(inputs)))


class SelfAttention(L.Layer):
    """Attention of a sequence to itself."""

    def __init__(self, heads):
        super().__init__()
        self.attention = L.MultiHeadAttention(heads, 2)

    def call(self, inputs):
        return inputs + self.attention(inputs, inputs)


def _head(head):
    activation = None if head["from_logits"] else "softmax"
    if head["task"] in ("sparse", "onehot"):
        return [L.Dense(CLASSES, activation)]
    if head["task"] == "binary":
        return [L.Dense(1, None if head["from_logits"] else "sigmoid")]
    if head["task"] == "sequence":
        return [L.RepeatVector(2), L.Dense(CLASSES, activation)]
    return [L.Dense(2)]


def _loss(head):
    logits, task = head["from_logits"], head["task"]
    reduction = {"sum": "sum", "none": None}.get(head["loss"], "sum_over_batch_size")
    classes, options = {
        "sparse": ("sparse_categorical_crossentropy", {"from_logits": logits}),
        "sequence": ("sparse_categorical_crossentropy", {"from_logits": logits}),
        "onehot": (
            "categorical_crossentropy",
            {"from_logits": logits, "label_smoothing": 0.1},
        ),
        "binary": ("binary_crossentropy", {"from_logits": logits}),
        "regression": ("huber", {}),
    }[task]
    if head["loss"] == "text":
        return classes
    if head["loss"] == "function":
        return lambda y, y_pred: getattr(keras.losses, classes)(y, y_pred, **options)
    made = {
        "sparse_categorical_crossentropy": keras.losses.SparseCategoricalCrossentropy,
        "categorical_crossentropy": keras.losses.CategoricalCrossentropy,
        "binary_crossentropy": keras.losses.BinaryCrossentropy,
        "huber": keras.losses.Huber,
    }[classes]
    return made(reduction=reduction, **options)


def _features(kind, rows, dtype, rng):
    kind = kind.removesuffix("_masked")
    shape = (rows, *_FEATURES[kind])
    if kind == "tokens":
        return rng.integers(0, _VOCABULARY, shape).astype(np.int32)
    if dtype == "uint8":
        return rng.integers(0, 3, shape).astype(np.uint8)
    return rng.normal(size=shape).astype(dtype)


def _labels(head, rows, rng):
    dtype, task = head["label_dtype"], head["task"]
    if task == "regression":
        return rng.normal(size=(rows, 2)).astype("float32")
    if task == "binary":
        return rng.integers(0, 2, (rows, 1)).astype(dtype)
    if task == "sequence":
        return rng.integers(0, CLASSES, (rows, 2)).astype(dtype)
    labels = rng.integers(0, CLASSES, rows)
    return np.eye(CLASSES, dtype=dtype)[labels] if task == "onehot" else labels.astype(dtype)


def _formed(items, form, prefix):
    if form == "single":
        return items[0]
    if form == "list":
        return list(items)
    return {f"{prefix}_{i}": item for i, item in enumerate(items)}
