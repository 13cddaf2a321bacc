"""TensorFlow Privacy: `DPSequential` with XLA (the default) and without, and fast clipping.

Fast clipping takes gradient norms from the layers of the library's registry, dense and embedding
ones. With a convolution in the model the library uses the ordinary way instead and only logs it:
here that is refused.
"""

import time

import measuring
import tensorflow as tf
from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
from tensorflow_privacy.privacy.keras_models import dp_keras_model

MODES = ("fast", "fast_xla", "model", "model_xla")


class EndTimes(tf.keras.callbacks.Callback):
    """Notes when each step ended."""

    def __init__(self):
        super().__init__()
        self.times = []

    def on_train_batch_end(self, batch, logs=None):
        """Notes the time."""
        self.times.append(time.perf_counter())


def build(model, mode):
    """The private model, compiled."""
    layers = tf.keras.layers
    stacks = {
        "mlp": [
            tf.keras.Input([784]),
            layers.Dense(1000, activation="relu"),
            layers.Dense(10),
        ],
        "cnn": [
            tf.keras.Input([28, 28, 1]),
            layers.Conv2D(16, 8, strides=2, padding="same", activation="tanh"),
            layers.MaxPooling2D(2, strides=1),
            layers.Conv2D(32, 4, strides=2, activation="tanh"),
            layers.MaxPooling2D(2, strides=1),
            layers.Flatten(),
            layers.Dense(32, activation="tanh"),
            layers.Dense(10),
        ],
    }
    fast = mode.startswith("fast")
    private = dp_keras_model.DPSequential(
        l2_norm_clip=measuring.L2_NORM_CLIP,
        noise_multiplier=measuring.NOISE_MULTIPLIER,
        use_xla=mode.endswith("xla"),
        layer_registry=layer_registry.make_default_layer_registry() if fast else None,
        layers=stacks[model],
    )
    if fast and not private._enable_fast_peg_computation:
        raise ValueError(f"--mode={mode}: the registry does not know a layer of {model}.")
    private.compile(
        optimizer=tf.keras.optimizers.SGD(measuring.LEARNING_RATE),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return private


def main():
    args = measuring.parse_arguments(MODES)
    tf.reduce_sum(tf.ones([8, 8]) @ tf.ones([8, 8])).numpy()

    def train(lots, steps):
        dataset = tf.data.Dataset.from_tensor_slices(lots).repeat().prefetch(2)
        ends = EndTimes()
        build(args.model, args.mode).fit(
            dataset, steps_per_epoch=steps, callbacks=[ends], verbose=0
        )
        return ends.times

    measuring.measure(args, train, ("tensorflow", "tensorflow-privacy"))


if __name__ == "__main__":
    main()
