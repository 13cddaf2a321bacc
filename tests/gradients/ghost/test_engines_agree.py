"""Both engines give the same clipped sums, for every set K: weights, padding, NaN, empty lots."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

from tf_adadp import clipping
from tf_adadp.gradients import make_engine
from tf_adadp.sampling import make_lot

L = keras.layers
ROWS, BATCH = 7, 4
SEED = tf.constant([3, 5], tf.int64)


def _model(shape, *layers, dtype="float32"):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers, L.Dense(3)])


def _shared():
    x = keras.Input((5,))
    layer = L.Dense(5, "tanh")
    return keras.Model(x, L.Dense(3)(layer(layer(x))))


MODELS = {
    "dense": (lambda: _model((5,), L.Dense(6, "relu")), (5,), None),
    "sequence": (
        lambda: _model((3, 5), L.Dense(6, "tanh"), L.LayerNormalization(), L.Flatten()),
        (3, 5),
        None,
    ),
    "convolution": (
        lambda: _model(
            (6, 6, 2),
            L.Conv2D(3, 3, strides=2, padding="same", activation="tanh"),
            L.GroupNormalization(3),
            L.Flatten(),
        ),
        (6, 6, 2),
        None,
    ),
    "embedding": (
        lambda: _model((4,), L.Embedding(6, 5), L.GlobalAveragePooling1D(), dtype="int32"),
        (4,),
        6,
    ),
    "shared": (_shared, (5,), None),
}


SOME_SETS = ("ball", "ellipsoid by row", "normalised")


def _sets(variables, names=None):
    rng = np.random.default_rng(4)

    def scales(low, high, row=False):
        shapes = [(*v.shape[:-1], 1) if row and len(v.shape) > 1 else v.shape for v in variables]
        return [tf.constant(rng.uniform(low, high, s), tf.float32) for s in shapes]

    centers = [tf.constant(0.01 * rng.normal(size=v.shape), tf.float32) for v in variables]
    row, full = scales(0.05, 0.5, row=True), scales(0.05, 0.5)
    sets = {
        "ball": clipping.L2Ball(0.5),
        "layer balls": clipping.LayerBalls([0.2] * len(variables)),
        "ellipsoid by row": clipping.Ellipsoid(row),
        "ellipsoid": clipping.Ellipsoid(full),
        "ellipsoid with centre": clipping.Ellipsoid(full, centers),
        "box": clipping.Box(scales(0.001, 0.05)),
        "normalised": clipping.L2Ball(1.0, gamma=0.01),
        "switch": clipping.Switch(tf.constant(True), clipping.Ellipsoid(row), clipping.L2Ball(1)),
    }
    return {name: sets[name] for name in names or sets}


def _engines(name):
    make, shape, vocabulary = MODELS[name]
    keras.utils.set_random_seed(7)
    model = make()
    rng = np.random.default_rng(0)
    if vocabulary:
        x = rng.integers(0, vocabulary, (ROWS, *shape)).astype(np.int32)
    else:
        x = rng.normal(size=(ROWS, *shape)).astype(np.float32)
        x[2] = np.nan
    y = rng.integers(0, 3, ROWS)
    weights = np.array([1.0, 0.0, 1.0, 5.0, 0.5, 1.0, 2.0], np.float32)
    loss = CompileLoss(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    loss.build(y, model(x))
    spec = [tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (x, y, weights)]
    engines = []
    for gradient_engine in ("ghost", "vectorized"):
        engine, plan = make_engine(
            model,
            loss,
            jit_compile=False,
            gradient_engine=gradient_engine,
            element_spec=tuple(spec),
            max_rows=BATCH,
        )
        assert plan.engine == gradient_engine
        engines.append(engine)
    return model, engines, make_lot(x, y, weights, physical_batch_size=BATCH)


def _sums(engine, sets, lot):
    @tf.function(autograph=False)
    def run(lot):
        return {name: engine.clipped_sum(lot, k, SEED)[0] for name, k in sets.items()}

    return run(lot)


def _apart(ghost, plain):
    """The largest difference over the norm of the plain sum."""
    norm = np.sqrt(sum(float(tf.reduce_sum(tf.square(p))) for p in plain))
    assert norm > 1e-4
    return (
        max(float(tf.reduce_max(tf.abs(g - p))) for g, p in zip(ghost, plain, strict=True)) / norm
    )


_WITH_ALL_SETS = ("dense", "convolution")


@pytest.mark.representative(1, 3)
@pytest.mark.parametrize(
    ("name", "names"),
    [
        *((name, SOME_SETS) for name in MODELS),
        *(pytest.param(n, None, marks=pytest.mark.extended) for n in _WITH_ALL_SETS),
        *(
            pytest.param(n, None, marks=pytest.mark.nightly)
            for n in MODELS
            if n not in _WITH_ALL_SETS
        ),
    ],
)
def test_sums_agree(name, names):
    model, engines, lot = _engines(name)
    sets = _sets(model.trainable_variables, names)
    ghost, plain = (_sums(engine, sets, lot) for engine in engines)
    for k in sets:
        assert _apart(ghost[k], plain[k]) < 1e-4, k


@pytest.mark.extended
@pytest.mark.parametrize("name", ["dense", "convolution"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_sums_agree_in_mixed_precision(name, policy):
    """Sums agree to the precision of the type; the plain engine also rounds gradients."""
    keras.config.set_dtype_policy(policy)
    try:
        model, engines, lot = _engines(name)
        sets = _sets(model.trainable_variables, ("ball", "ellipsoid by row"))
        ghost, plain = (_sums(engine, sets, lot) for engine in engines)
    finally:
        keras.config.set_dtype_policy("float32")
    for k in sets:
        assert all(g.dtype == tf.float32 for g in ghost[k])
        assert _apart(ghost[k], plain[k]) < (2e-2 if policy == "mixed_bfloat16" else 2e-3), k


@pytest.mark.extended
@pytest.mark.parametrize("names", [SOME_SETS, pytest.param(None, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["dense", "embedding"])
def test_an_empty_lot_sums_to_nothing(name, names):
    model, (ghost, _), lot = _engines(name)
    empty = tf.nest.map_structure(lambda t: t[:0], lot)
    sets = _sets(model.trainable_variables, names)
    for k, sums in _sums(ghost, sets, empty).items():
        assert all(np.all(s == 0.0) for s in sums), k
