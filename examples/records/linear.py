"""Trains a private linear classifier on features that are fixed or public.

1. `DPPCA.whitening` shrinks the directions in which the private records exceed its noise, if the
   recipe wants it.
2. A softmax regression is trained privately, and its weights are averaged.

ε is that of both together.
"""

import dataclasses
import functools

import charged_search
import record

import tf_adadp as dp  # loads TensorFlow when a name of it is first used

_COMPONENTS = 200  # at most; about 20 stand out of the noise


@dataclasses.dataclass(frozen=True)
class Recipe(record.Recipe):
    """Holds how to train by DP-SGD for one ε.

    Attributes:
        steps: T.
        learning_rate: η.
        l2_norm_clip: C.
        lot_size: expected lot size L.
        momentum: of the step.
        average: momentum of the average of the weights; None takes the last weights.
        pca_noise_multiplier: σ of the components; None trains on the features as they are.
        augmentation_multiplicity: K copies of an example that its gradient is the mean over.
        accountant: by which σ* is found.
        delta: δ.
    """

    steps: int
    learning_rate: float
    l2_norm_clip: float = 0.1
    lot_size: int = 4096
    momentum: float = 0.9
    average: float | None = 0.95
    pca_noise_multiplier: float | None = 6.0
    augmentation_multiplicity: int = 1
    accountant: str = "pld"
    delta: float = 1e-5

    def optimizer(self, **private):
        """Returns the optimizer, with private arguments such as its noise."""
        return dp.DPSGD(
            self.learning_rate,
            momentum=self.momentum,
            l2_norm_clip=self.l2_norm_clip,
            augmentation_multiplicity=self.augmentation_multiplicity,
            **record.averaging(self.average),
            **private,
        )


@dataclasses.dataclass(frozen=True)
class Defaults(record.Recipe):
    """Trains by `ADADP()` with nothing chosen, on the features as they are.

    Lots and steps have no default. These are one choice for all data: a few hundred steps of a lot
    from which σ*/L hardly falls (docs/explanation/choosing.md).
    """

    steps: int = 400
    lot_size: int = 1024
    pca_noise_multiplier: None = None
    accountant: str = "rdp"
    delta: float = 1e-5

    def optimizer(self):
        """Returns the optimizer."""
        return dp.ADADP()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searched(charged_search.Plan):
    """Says how to search for the rate η and the clip norm C of a `Recipe`.

    Attributes:
        speeds: values of η·C.
        clips: values of C.
    """

    speeds: tuple = (2, 4, 8, 16, 32)
    clips: tuple = (0.1, 1.0)

    @property
    def space(self):
        """Returns what trials draw from."""
        return {"speed": self.speeds, "l2_norm_clip": self.clips}

    def trial(self, speed, l2_norm_clip):
        """Returns the `Recipe` of a trial."""
        return Recipe(
            self.steps, speed / l2_norm_clip, l2_norm_clip, self.lot_size, average=self.average
        )


def unchosen(recipes):
    """Returns variants {title: recipes} for the budgets of recipes that choose nothing, or pay."""
    return {
        title: {epsilon: kind(delta=recipe.delta) for epsilon, recipe in recipes.items()}
        for title, kind in (("defaults", Defaults), ("searched", Searched))
    }


def parts(recipe):
    """Returns variants {title: recipes} of a recipe of ε = 3, each without one of its parts."""
    without = {
        "without private whitening": {"pca_noise_multiplier": None},
        "without averaged weights": {"average": None},
        "without momentum": {"momentum": 0.0, "learning_rate": 10 * recipe.learning_rate},
        "a quarter of the lot": {
            "lot_size": recipe.lot_size // 4,
            "steps": 4 * recipe.steps,
        },
        "noise by RDP": {"accountant": "rdp"},
    }
    return {
        title: {3.0: dataclasses.replace(recipe, **changes)} for title, changes in without.items()
    }


def trainer(features, classes):
    """Returns a function (recipe, ε, seed) that trains on a `Split` of features.

    Args:
        features: a `record.Split`, x of shape [n, d], or [n, k, d] with k copies of every example:
            training draws one of them for each gradient, and a prediction takes their mean.
        classes: number of classes, public: not read off the labels.
    """

    @functools.lru_cache(maxsize=1)
    def whitened(noise_multiplier, seed):
        """Makes one release for all ε of a seed, charged to each of them."""
        import keras

        if noise_multiplier is None:
            return dp.PrivacyLedger(), features
        components = min(_COMPONENTS, features.x.shape[-1])
        examples = features.x if features.x.ndim == 2 else features.x.mean(axis=1)
        pca = dp.DPPCA(components, noise_multiplier).fit(examples)
        layer = keras.Sequential([keras.Input(features.x.shape[-1:]), pca.whitening()])

        def whiten(x):
            rows = layer.predict(x.reshape(-1, x.shape[-1]), batch_size=1000, verbose=0)
            return rows.reshape(x.shape)

        return pca.ledger, features.map(whiten)

    def classifier(shape):
        import keras

        keras.backend.clear_session()
        layers = [keras.Input(shape), keras.layers.Dense(classes, kernel_initializer="zeros")]
        if len(shape) == 2:
            from copies import DrawnCopy

            layers.insert(1, DrawnCopy())
        return dp.DPModel(keras.Sequential(layers))

    def train(recipe, epsilon, seed):
        import keras

        if isinstance(recipe, Searched):
            parts = record.held_out(features, seed=1 + seed)
            found = charged_search.searched(parts, classifier, recipe, epsilon)
            return found, record.test_accuracy(found, features)
        ledger, split = whitened(recipe.pca_noise_multiplier, seed)
        keras.utils.set_random_seed(seed)
        model = classifier(split.x.shape[1:])
        model.ledger.merge(ledger)
        record.fit(model, recipe, split, epsilon)
        return model, record.test_accuracy(model, split)

    return train
