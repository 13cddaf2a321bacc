"""Rule (R) in other precisions: both engines, three kinds of sets, adversarial examples.

In half precision an example's forward pass or scaled gradient may overflow. It must then contribute
exactly zero; whatever it is, it moves the float32 sums by at most 1/σ* in the metric of the noise.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

from tf_adadp import clipping
from tf_adadp.gradients import make_engine
from tf_adadp.gradients.choose import FLOAT16_LOSS_SCALE

L = keras.layers
POLICIES = ("mixed_bfloat16", "mixed_float16", "float64", "per layer")
SEED = tf.constant([3, 5], tf.int64)
ORDINARY, BATCH = 3, 5
SIGMA = 1.7
# Factors on the inputs of one more example each; NaN and the infinite give no finite gradient.
FACTORS = {
    "ordinary": 1.0,
    "large": 1e3,
    "huge": 1e18,
    "beyond": 1e38,
    "nan": np.nan,
    "inf": np.inf,
}
PLACES = {name: ORDINARY + i for i, name in enumerate([*FACTORS, "overflow"])}
FAR = 100.0  # a label so far away that 1024 times the gradient overflows float16


def _model(policy):
    of = {"per layer": {"first": "mixed_float16", "norm": "float64", "head": "mixed_bfloat16"}}.get(
        policy, {}
    )
    dtypes = {name: of.get(name, policy) for name in ("first", "norm", "head")}
    return keras.Sequential(
        [
            keras.Input((4,)),
            L.Dense(5, dtype=dtypes["first"]),
            L.LayerNormalization(dtype=dtypes["norm"]),
            L.Dense(2, dtype=dtypes["head"]),
        ]
    )


def _lot():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(15, 4)).astype(np.float32)
    y = rng.normal(size=(15, 2)).astype(np.float32)
    for name, factor in FACTORS.items():
        with np.errstate(over="ignore"):
            x[PLACES[name]] *= factor
    y[PLACES["overflow"]] = FAR
    return tuple(tf.constant(a.reshape(-1, BATCH, *a.shape[1:])) for a in (x, y))


def _sets(variables):
    """A ball, an ellipsoid and a box."""
    rng = np.random.default_rng(1)
    scales = [tf.constant(rng.uniform(0.1, 2.0, v.shape), tf.float32) for v in variables]
    center = [0.1 * s for s in scales]
    return {
        "ball": clipping.L2Ball(0.5),
        "ellipsoid": clipping.Ellipsoid(scales, center),
        "box": clipping.Box([0.1 * s for s in scales], "least_squares"),
    }


def _mask(*names):
    mask = np.zeros(15, np.float32)
    mask[:ORDINARY] = 1
    mask[[PLACES[name] for name in names]] = 1
    return tf.constant(mask.reshape(-1, BATCH))


@pytest.mark.representative(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_adversarial_example_moves_the_float32_sums_by_at_most_one_over_sigma(policy):
    model = _model(policy)
    loss = CompileLoss(keras.losses.MeanSquaredError())
    loss.build(tf.zeros([1, 2]), tf.zeros([1, 2]))
    spec = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 2)), None)
    sets, count = _sets(model.trainable_variables), len(model.trainable_variables)
    x, y = _lot()
    for gradient_engine in ("ghost", "vectorized"):
        engine, plan = make_engine(
            model, loss, jit_compile=False, gradient_engine=gradient_engine, element_spec=spec
        )
        assert plan.engine == gradient_engine

        @tf.function(autograph=False)
        def run(mask, engine=engine):
            lot = (x, y, None), mask
            return [s for k in sets.values() for s in engine.clipped_sum(lot, k, SEED)[0]]

        def moved(one, other):
            """Per set, ‖u/s‖₂·σ*."""
            distances = {}
            for i, (name, clipping_set) in enumerate(sets.items()):
                part = slice(i * count, (i + 1) * count)
                stddevs = clipping_set.noise_stddev(SIGMA, count)
                assert {s.dtype for s in (*one[part], *stddevs)} == {tf.float32}
                total = 0.0
                for a, b, s in zip(one[part], other[part], stddevs, strict=True):
                    u = np.float64(a) - np.float64(b)
                    s = np.broadcast_to(np.float64(s), u.shape)
                    assert not np.any(u[s == 0])
                    total += np.sum((u[s > 0] / s[s > 0]) ** 2)
                distances[name] = np.sqrt(total) * SIGMA
            return distances

        without = run(_mask())
        largest = dict.fromkeys(sets, 0.0)
        for name in PLACES:
            by = moved(run(_mask(name)), without)
            assert max(by.values()) <= 1 + 1e-5, (gradient_engine, name, by)
            largest = {k: max(largest[k], d) for k, d in by.items()}
            if name in ("nan", "inf"):
                assert max(by.values()) == 0.0, (gradient_engine, name, by)
            if name == "overflow" and policy in ("mixed_float16", "per layer"):
                assert float(np.finfo(np.float16).max) < FAR * FLOAT16_LOSS_SCALE
                assert max(by.values()) == 0.0, (gradient_engine, by)
            elif name in ("ordinary", "overflow"):
                assert min(by.values()) > 0.0, (gradient_engine, name, by)
        assert min(largest.values()) > 0.5, largest  # the bound is no empty one
        # A lot with all of them is their sum: none has spoilt another.
        everyone = run(_mask(*PLACES))
        assert all(np.all(np.isfinite(s)) for s in everyone)
