"""Features of images that are fixed and public, and a record task of a linear classifier on them.

1. Images become features of patches (patches.py), of scattering (scattering.py), or of both. Those
   of an image and of its mirror image are added where left and right mean nothing; handwriting is
   straightened first (straighten.py).
2. Features are standardised and whitened by those of images that are drawn at random. What filters
   that overlap have in common is the same for all images.
"""

import functools
import time

import linear
import record

_DRAWN = 6000
_CLASSES = 10


def task(name, recipes, **arguments):
    """Returns the `record.Task` of an image data set, see `datasets.load` and `feature_model`."""
    return record.Task(
        load=functools.partial(load, name),
        prepare=functools.partial(prepare, **arguments),
        recipes=recipes,
        variants={**linear.unchosen(recipes), **linear.parts(recipes[3.0])},
        settings={**arguments, "features": arguments["features"].__name__},
    )


def pixels():
    """Returns a function of images to their pixels."""
    return lambda images: images


def patch_features():
    """Returns a function of images [n, h, w, c] to features of patches."""
    from patches import PatchFeatures

    return PatchFeatures()


def scattering_features(groups=27):
    """Returns a function of images to scattering features, normalised by groups of channels."""
    import keras

    scattering = plain_scattering_features()
    normalise = keras.layers.GroupNormalization(groups, epsilon=1e-6, center=False, scale=False)
    return lambda images: normalise(scattering(images))


def plain_scattering_features():
    """Returns a function of images to scattering features."""
    from scattering import Scattering

    return Scattering()


def scattering_and_patch_features():
    """Returns a function of images to both, side by side, [n, d]."""
    import keras

    both, flatten = (scattering_features(), patch_features()), keras.layers.Flatten()
    return lambda images: keras.ops.concatenate([flatten(find(images)) for find in both], axis=-1)


def feature_model(public, features, floor, mirror, straighten=False):
    """Returns a model of images to whitened features, of length 1.

    Features are standardised by mean and variance of those of public images. Directions of second
    moment λ, of a total of 1, are scaled by √(floor/(λ + floor)).

    Args:
        public: images, [n, h, w, c].
        features: `patch_features`, `scattering_features`, or another function that returns a
            function of images to features.
        floor: of the whitening; None for features as they are, scaled to length 1.
        mirror: True to add features of the mirror image; "copies" to make them a second copy,
            [2, d]; False for none.
        straighten: whether images are straightened first (straighten.py).
    """
    import keras

    pictures, layer = keras.Input(public.shape[1:]), features()
    views = [pictures, pictures[:, :, ::-1]] if mirror else [pictures]
    if straighten:
        from straighten import Straighten

        views = [Straighten()(view) for view in views]
    rows = [keras.layers.Flatten()(layer(view)) for view in views]
    if mirror is True:
        rows = [rows[0] + rows[1]]
    if floor is None:
        finish = keras.layers.UnitNormalization()
    else:
        found = keras.Model(pictures, rows[0]).predict(public, batch_size=200)
        finish = _whitening(found, floor)
    rows = [finish(view) for view in rows]
    return keras.Model(pictures, rows[0] if len(rows) == 1 else keras.ops.stack(rows, axis=1))


def _whitening(rows, floor):
    """Returns a function that standardises and whitens features by rows of public ones."""
    import keras
    import numpy as np

    import tf_adadp as dp

    standardise = keras.layers.Normalization()
    standardise.adapt(rows)
    rows = standardise(rows).numpy()
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    whitening = dp.ZCAWhitening(len(values), len(values), public=True)
    whitening.set_weights([vectors.T, np.sqrt(floor / (np.maximum(values, 0) + floor))])
    return lambda features: whitening(standardise(features))


def load(name, data_dir):
    """Returns the images of a data set as a `record.Split`."""
    import datasets  # in the folder above, which `record` has put on the path

    data = datasets.load(name, data_dir)
    return record.Split(data.x_train, data.y_train, data.x_test, data.y_test)


def prepare(images, **arguments):
    """Returns the trainer of a linear classifier on features of a `record.Split` of images.

    Arguments are those of `feature_model` but for public.
    """
    from drawn_images import drawn_images

    public = drawn_images(_DRAWN, *images.x.shape[1:], seed=1)
    return linear.trainer(featured(images, feature_model(public, **arguments)), _CLASSES)


def featured(images, model):
    """Returns the `record.Split` of features of images."""
    start = time.perf_counter()
    found = images.map(functools.partial(model.predict, batch_size=200))
    print(f"features {found.x.shape}: {time.perf_counter() - start:.0f} s")
    return found
