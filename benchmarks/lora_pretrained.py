"""A transformer that has learned classes 0 to 4 without privacy, for LoRA on the others.

    TF_ADADP_DATA_DIR=folder python -m benchmarks.lora_pretrained

Half of the classes stand for public data, and the other half for private data of the same kind.
Reads mnist.npz and fashion_mnist.npz from the folder, averages their images to 14×14 pixels, trains
an encoder on those of classes 0 to 4, and writes its weights beside them, as mnist_lora.weights.h5
and fashion_mnist_lora.weights.h5. `adapted` makes the model that is then trained privately.
"""

import argparse

import keras

from benchmarks import harness, models

DATA = ("mnist", "fashion_mnist")
SHAPE = (14, 14, 1)
PUBLIC, PRIVATE = range(5), range(5, 10)
_RANK = 4
_WIDTH, _HEADS, _FEED_FORWARD, _BLOCKS = 48, 3, 96, 2


def weights_name(data):
    """Returns the name of the file of weights in the data folder."""
    return f"{data}_lora.weights.h5"


def encoder():
    """Returns a transformer encoder over patches of 2×2 pixels, [14, 14, 1] to 48 features."""
    layers, side = keras.layers, SHAPE[0] // 2
    inputs = keras.Input(SHAPE)
    x = layers.Reshape((side, 2, side, 2))(inputs)
    x = layers.Reshape((side * side, 4))(layers.Permute((1, 3, 2, 4))(x))
    # A bias for each position and feature: the positions are weights of the model, and learned.
    x = layers.EinsumDense(
        "npc,cw->npw",
        (side * side, _WIDTH),
        bias_axes="pw",
        bias_initializer=keras.initializers.RandomNormal(stddev=0.02),
    )(x)
    for _ in range(_BLOCKS):
        x = models.encoder_block(x, _HEADS, _FEED_FORWARD)
    pooled = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, pooled, name="encoder")


def adapted(data):
    """Returns the pre-trained encoder with LoRA and a new head, which alone are trainable.

    Dense kernels have adapters of rank 4: the embedding of patches, the four projections of each
    attention and the two layers of each feed-forward net. Biases and norms are frozen.

    Raises:
        FileNotFoundError: if the weights are not in the data folder.
    """
    base = encoder()
    file = models.data_file(weights_name(data))
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: run python -m benchmarks.lora_pretrained.")
    base.load_weights(file)
    for layer in base._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense):
            layer.enable_lora(_RANK)
    for weight in base.weights:
        weight.trainable = weight.name.startswith("lora_kernel")
    head = keras.layers.Dense(len(PRIVATE), name="head")
    return keras.Model(base.input, head(base.output))


def pretrain(data, epochs):
    """Trains the encoder and a head of its own on the public classes; writes the encoder."""
    keras.utils.set_random_seed(0)
    file = models.data_file(f"{data}.npz")
    x, y, x_test, y_test = models.arrays(file, SHAPE, SHAPE[0], PUBLIC)
    base = encoder()
    model = keras.Sequential([base, keras.layers.Dense(len(PUBLIC))])
    rate = keras.optimizers.schedules.CosineDecay(2e-3, epochs * -(-len(x) // 128))
    model.compile(keras.optimizers.Adam(rate), loss=models.loss(), metrics=["accuracy"])
    model.fit(x, y, batch_size=128, epochs=epochs, validation_data=(x_test, y_test), verbose=2)
    base.save_weights(models.data_file(weights_name(data)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=harness.count, default=6, help="on each data set")
    epochs = parser.parse_args().epochs
    for data in DATA:
        pretrain(data, epochs)
        print(models.data_file(weights_name(data)))


if __name__ == "__main__":
    main()
