"""Trains a private linear classifier on features that are fixed or public.

1. `DPPCA.whitening` shrinks the directions in which the private records exceed its noise, if the
   recipe wants it.
2. A softmax regression is trained by DP-SGD with momentum, and its weights are averaged.

ε is that of both together.
"""

import dataclasses
import functools

import record

import tf_adadp as dp  # loads TensorFlow when a name of it is first used

_COMPONENTS = 200  # at most; about 20 stand out of the noise


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Holds how to train for one ε.

    Attributes:
        steps: T.
        learning_rate: η, at momentum 0.9.
        l2_norm_clip: C.
        lot_size: expected lot size L.
        average: momentum of the average of the weights.
        pca_noise_multiplier: σ of the components; None trains on the features as they are.
    """

    steps: int
    learning_rate: float
    l2_norm_clip: float = 0.1
    lot_size: int = 4096
    average: float = 0.95
    pca_noise_multiplier: float | None = 6.0


def trainer(features, classes):
    """Returns a function (recipe, ε, seed) that trains on a `Split` of features.

    Args:
        features: a `record.Split`, x of shape [n, d].
        classes: number of classes, public: not read off the labels.
    """

    @functools.lru_cache(maxsize=1)
    def whitened(noise_multiplier, seed):
        """Makes one release for all ε of a seed, charged to each of them."""
        import keras

        if noise_multiplier is None:
            return dp.PrivacyLedger(), features.x, features.x_test
        components = min(_COMPONENTS, features.x.shape[1])
        pca = dp.DPPCA(components, noise_multiplier).fit(features.x)
        layer = keras.Sequential([keras.Input(features.x.shape[1:]), pca.whitening()])
        arrays = (features.x, features.x_test)
        return pca.ledger, *(layer.predict(x, batch_size=1000, verbose=0) for x in arrays)

    def train(recipe, epsilon, seed):
        import keras

        ledger, x, x_test = whitened(recipe.pca_noise_multiplier, seed)
        keras.backend.clear_session()
        keras.utils.set_random_seed(seed)
        layer = keras.layers.Dense(classes, kernel_initializer="zeros")
        model = dp.DPModel(keras.Sequential([keras.Input(x.shape[1:]), layer]))
        model.ledger.merge(ledger)
        model.compile(
            dp.DPSGD(
                recipe.learning_rate,
                momentum=0.9,
                l2_norm_clip=recipe.l2_norm_clip,
                use_ema=True,
                ema_momentum=recipe.average,
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            log_raw_metrics=False,
            steps_per_execution=5,
            target_epsilon=epsilon,
            target_delta=record.DELTA,
            accountant="pld",
        )
        lot_size, steps = recipe.lot_size, recipe.steps
        model.fit(x, features.y, batch_size=lot_size, steps_per_epoch=steps, verbose=0)
        return model, model.evaluate(x_test, features.y_test, batch_size=1000, verbose=0)[1]

    return train
