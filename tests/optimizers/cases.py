"""Every optimizer in every mode, and variables to put it on."""

import math

import keras
import numpy as np
import tensorflow as tf

import tf_adadp as dp

SIGMA = 1.7
OPTIMIZERS = {
    "dpsgd": lambda **k: dp.DPSGD(**k),
    "dpsgd_per_layer": lambda **k: dp.DPSGD(
        l2_norm_clip={"first": 0.5, "": 2.0}, momentum=0.9, nesterov=True, **k
    ),
    "dpadam": lambda **k: dp.DPAdam(l2_norm_clip=0.3, **k),
    "dprmsprop": lambda **k: dp.DPRMSprop(**k),
    "adadp": lambda **k: dp.ADADP(l2_norm_clip=2.5, **k),
    "adadp_root": lambda **k: dp.ADADP(prior_exponent=0.5, prior_decay=0.99, **k),
    "adadp_local": lambda **k: dp.ADADP(clipping="local", warmup_steps=2, **k),
    "adan": lambda **k: dp.ADAN(**k),
    "autosgd": lambda **k: dp.AutoSGD(gamma=0.1, momentum=0.5, **k),
    "automatic_per_layer": lambda **k: dp.DPAdam(
        l2_norm_clip={"first": 0.5, "": 2.0}, automatic_clipping=0.01, **k
    ),
    "automatic_adadp": lambda **k: dp.ADADP(automatic_clipping=0.05, l2_norm_clip=0.3, **k),
    "adaclip": lambda **k: dp.AdaCliP(center_decay=0.9, **k),
    "adaclip_free": lambda **k: dp.AdaCliP(scale="free", l2_norm_clip=2.0, **k),
    "adaclip_free_unbounded": lambda **k: dp.AdaCliP(scale="free", max_variance=1e6, **k),
    "dpopt": lambda **k: dp.DPOPT(**k),
    "dpopt_uniform": lambda **k: dp.DPOPT(directions="uniform", pruning=0.6, **k),
    "dpopt_box": lambda **k: dp.DPOPT(clipping="local", local_clip_factor=1.3, **k),
    "dpopt_public": lambda **k: dp.DPOPT(
        directions=[np.linspace(0, 1, math.prod(s)).reshape(s) for s in SHAPES.values()], **k
    ),
    "dpnadam": lambda **k: dp.make_private(keras.optimizers.Nadam)(**k),
    "dpadadelta": lambda **k: dp.make_private(keras.optimizers.Adadelta)(**k),
    "quantile_dpsgd": lambda **k: dp.DPSGD(l2_norm_clip=dp.QuantileClip(), **k),
    "quantile_adadp": lambda **k: dp.ADADP(
        l2_norm_clip=dp.QuantileClip(0.3, initial_norm=0.1, budget_share=0.2), **k
    ),
    "quantile_adaclip": lambda **k: dp.AdaCliP(l2_norm_clip=dp.QuantileClip(0.9), **k),
    "quantile_dpopt": lambda **k: dp.DPOPT(l2_norm_clip=dp.QuantileClip(), **k),
    "adan_local": lambda **k: dp.ADAN(clipping="local", local_clip_factor=0.7, **k),
}
SHAPES = {"first/kernel": (7, 5), "first/bias": (5,), "second/kernel": (2, 3, 5, 1), "scale": ()}


def make_variables():
    """Keras variables of several ranks; their paths are the names in SHAPES."""
    variables = []
    for path, shape in SHAPES.items():
        scope, _, name = path.rpartition("/")
        with keras.name_scope(scope or "top"):
            variables.append(keras.Variable(np.zeros(shape, np.float32), trainable=True, name=name))
    return variables


def make(name, **arguments):
    """A built optimizer with noise_multiplier SIGMA unless told."""
    optimizer = OPTIMIZERS[name](**{"noise_multiplier": SIGMA, **arguments})
    optimizer.build(make_variables())
    return optimizer


def random_grads(rng, rows, scale=1.0):
    """Per-example gradients [rows, *shape] whose coordinates differ in size."""
    return [
        tf.constant(
            scale * rng.normal(size=(rows, *shape)) * np.exp(rng.normal(size=shape)), tf.float32
        )
        for shape in SHAPES.values()
    ]


def step(optimizer, grads, expected_lot_size=None, losses=None):
    """Takes one private step on rows of gradients; without a lot size, on one of so many rows.

    losses: of the rows; None is 1 for each.
    """
    rows = grads[0].shape[0]
    losses = tf.ones([rows]) if losses is None else losses
    sums = optimizer.clipping_set().sums_beside(grads, tf.ones([rows]), losses)
    optimizer.apply_private(sums, float(expected_lot_size or rows))


def advance(optimizer, rng, steps, rows=20, scale=1.0):
    """Takes private steps on random gradients, so that the state is one that training reaches."""
    direction = random_grads(rng, 1, scale)
    for _ in range(steps):
        grads = [
            d + g for d, g in zip(direction, random_grads(rng, rows, 0.3 * scale), strict=True)
        ]
        step(optimizer, grads)
