"""The ghost engine follows models as others write them, and its sums equal a loop over examples.

The models are the small versions of `benchmarks/real_models`.
"""

import keras
import numpy as np
import pytest

import tf_adadp as dp
from benchmarks.real_models.entry import options
from benchmarks.real_models.zoo import MODELS
from tests.gradients import zoo
from tf_adadp.utils.keras_compat import layers_of

# One of each kind first: these are in every run.
NAMES = sorted(MODELS, key=lambda name: name not in ("transformer", "mobilenetv2_head"))
# One for each way in which DPModel meets a model: functional, frozen parts, subclassed, losses of
# layers, keras_hub's tasks.
WAYS = ("transformer", "mobilenetv2_head", "recommender", "vae", "gemma_lora")


def make(name):
    """The small version of a model, as a builder returns it."""
    entry = MODELS[name]
    if entry.needs:
        pytest.importorskip(entry.needs)
    keras.utils.set_random_seed(7)
    return entry.make(zoo.ROWS, small=True)


def without_randomness(model):
    """The model with dropout and noise switched off: engines draw other masks by design."""
    for layer in layers_of(model):
        for name in ("rate", "stddev"):
            if hasattr(layer, name):
                setattr(layer, name, 0.0)
    return model


@pytest.mark.representative(1, 7)
@pytest.mark.parametrize("name", NAMES)
def test_clipped_sum_equals_a_loop_over_single_examples(name):
    model, x, y, loss = make(name)
    without_randomness(model)
    # Some gradients are larger than the first, and clipped, others are not.
    clip_norm = zoo.norm(zoo.reference(model, loss, x, y, np.inf, rows=1))
    expected = zoo.reference(model, loss, x, y, clip_norm)
    sums, plan = zoo.clipped_sum(model, x, y, loss, clip_norm, max_rows=8)
    assert zoo.norm(expected) > 0.1 * clip_norm
    assert zoo.relative_error(sums, expected) < 1e-5
    assert plan.engine == "ghost", plan.reason


@pytest.mark.representative(2, 11)
@pytest.mark.parametrize("name", NAMES)
def test_models_are_accepted(name):
    dp.DPModel(make(name)[0])


@pytest.mark.representative(1, 4)
@pytest.mark.parametrize("name", WAYS)
def test_fit_is_on_the_ghost_engine(name):
    model, x, y, loss = make(name)
    private = dp.DPModel(model)
    optimizer = dp.DPSGD(noise_multiplier=1.0, l2_norm_clip=1.0)
    private.compile(optimizer=optimizer, **options(loss))
    private.fit(x, y, batch_size=4, steps_per_epoch=1, verbose=0)
    plan = private.gradient_plan()
    assert plan.engine == "ghost", plan.reason
