"""Trains on copies of an example that are made beforehand, such as its mirror image."""

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="records")
class DrawnCopy(keras.layers.Layer):
    """Takes one of k copies at random in training, and their mean else: [n, k, d] to [n, d].

    With `augmentation_multiplicity=K` of an optimizer the gradient of an example is the mean over K
    draws (De et al. 2022); it is clipped after that, so the copies cost no privacy.
    """

    def __init__(self, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def compute_output_shape(self, input_shape):
        """Returns [n, d]."""
        return input_shape[0], input_shape[2]

    def call(self, copies, training=False):
        """Returns the copies that are drawn, or the means."""
        if not training:
            return tf.reduce_mean(copies, axis=1)
        places = keras.random.uniform(
            [tf.shape(copies)[0]], 0, copies.shape[1], seed=self.seed_generator
        )
        return tf.gather(copies, tf.cast(places, tf.int32), axis=1, batch_dims=1)

    def get_config(self):
        """Returns the arguments."""
        return {**super().get_config(), "seed": self.seed}
