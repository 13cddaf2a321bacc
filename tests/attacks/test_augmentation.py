"""Layers that augment images mix nothing, whatever shape the images have.

Keras takes a tensor of rank 3 for ONE image: given rows without an axis of channels, the layers
would move, zoom or turn the rows of a batch into each other. A trial on random data does not see
it where the shift rounds to nothing; the operations show it.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import crossentropy
from tf_adadp.sampling import make_lot

L = keras.layers
LAYERS = {
    "translation": lambda: L.RandomTranslation(0.1, 0, interpolation="nearest"),
    "small translation": lambda: L.RandomTranslation(1e-4, 0),
    "zoom": lambda: L.RandomZoom((-0.15, -0.1), 0, interpolation="nearest"),
    "rotation": lambda: L.RandomRotation(0.02, interpolation="nearest"),
    "flip": lambda: L.RandomFlip("vertical"),
}


def _sums(layer, shape, masked_row):
    """The clipped sum of 64 rows, the last of which is masked and has these values."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input(shape), layer(), L.Flatten(), L.Dense(3)])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, *shape)).astype(np.float32)
    x[-1] = masked_row
    (x, y, weight), mask = make_lot(x, np.zeros(64, np.int32), physical_batch_size=64)
    mask = tf.tensor_scatter_nd_update(mask, [[0, 63]], [0.0])
    optimizer = dp.DPSGD(noise_multiplier=1.0, seed=1)
    optimizer.build(model.trainable_variables)
    return dp.clipped_sum(model, crossentropy(), ((x, y, weight), mask), optimizer)


@pytest.mark.representative(1)
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 1)], ids=["rank 3", "rank 4"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_masked_row_changes_nothing(name, shape):
    before, after = (_sums(LAYERS[name], shape, value) for value in (0.0, 1e4))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", LAYERS)
def test_only_batches_of_images_are_followed(name):
    """A layer that takes the batch for one image is mapped over the examples."""
    for shape, mapped in (((5, 4, 1), 0), ((5, 4), 1)):
        model = dp.DPModel(
            keras.Sequential([keras.Input(shape), LAYERS[name](), L.Flatten(), L.Dense(3)])
        )
        model.compile(dp.DPSGD(noise_multiplier=1.0), loss=crossentropy())
        plan = model.gradient_plan()
        assert (plan.engine, len(plan.mapped)) == ("ghost", mapped)
