"""Trains convolutions on CIFAR-100, to be frozen and used on CIFAR-10 (see cifar10_frozen.py).

    python examples/records/public_convolutions.py --data_dir=<folder> --data=cifar100_20k

As in ADADP's CIFAR-10 experiment: no image of CIFAR-10 is read here. A residual network of three
blocks is trained by SGD on shifted and mirrored images, two of which are mixed. An epoch of 20,000
images takes 1 to 2 minutes on 2 cores. Writes convolutions_<data>.keras into the folder.
"""

import os
import pathlib

import images
from absl import app, flags

FILE = "convolutions_{}.keras"
DATA = ["cifar100", "cifar100_20k"]  # <name>.npz in the folder, or of tensorflow-datasets
_CLASSES, _LOT, _RATE, _DECAY = 100, 128, 0.1, 3e-4
_STARTING = 20  # the rate rises in the first twentieth of the steps


def network():
    """Returns a model of images [32, 32, 3] of pixels in [0, 1] to 100 logits."""
    import keras
    from keras import layers

    def convolution(x, width, side=3, stride=1):
        x = layers.Conv2D(
            width,
            side,
            stride,
            padding="same",
            use_bias=False,
            kernel_regularizer=keras.regularizers.L2(_DECAY),
        )(x)
        return layers.BatchNormalization(momentum=0.9)(x)

    def block(x, width, stride):
        y = layers.ReLU()(convolution(x, width, stride=stride))
        return layers.ReLU()(convolution(y, width) + convolution(x, width, 1, stride))

    images = keras.Input([32, 32, 3])
    x = layers.Normalization(mean=[0.5] * 3, variance=[0.0625] * 3)(images)
    x = layers.MaxPooling2D()(layers.ReLU()(convolution(x, 32)))
    for width, stride in ((64, 1), (128, 2), (256, 2)):
        x = block(x, width, stride)
    x = layers.GlobalAveragePooling2D(name="pooled")(x)
    return keras.Model(images, layers.Dense(_CLASSES)(x))


def batches(x, y):
    """Returns a dataset of shifted and mirrored images, each mixed with another (mixup)."""
    import tensorflow as tf

    def changed(image, label):
        image = tf.image.random_flip_left_right(image)
        wide = tf.pad(image, [[4, 4], [4, 4], [0, 0]], mode="REFLECT")
        image = tf.image.random_crop(wide, image.shape)
        return image, tf.one_hot(label, _CLASSES)

    def mixed(x, y):
        share = tf.random.uniform([], 0.5, 1.0)
        other = tf.random.shuffle(tf.range(_LOT))
        return tuple(share * a + (1 - share) * tf.gather(a, other) for a in (x, y))

    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).map(changed)
    return data.batch(_LOT, drop_remainder=True).map(mixed).prefetch(2)


def main(argv):
    """Trains and writes the network."""
    del argv
    import keras

    data, epochs = images.load(flags.FLAGS.data, flags.FLAGS.data_dir), flags.FLAGS.epochs
    keras.utils.set_random_seed(0)
    model = network()
    steps = epochs * (len(data.y) // _LOT)
    rise = max(1, steps // _STARTING)
    rate = keras.optimizers.schedules.CosineDecay(
        0.001 * _RATE, steps - rise, warmup_target=_RATE, warmup_steps=rise
    )
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
        keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    test = data.x_test, keras.utils.to_categorical(data.y_test, _CLASSES)
    model.fit(batches(data.x, data.y), epochs=epochs, validation_data=test, verbose=2)
    model.save(pathlib.Path(flags.FLAGS.data_dir) / FILE.format(flags.FLAGS.data))


if __name__ == "__main__":
    flags.DEFINE_string("data_dir", os.environ.get("TF_ADADP_DATA_DIR", "."), "Folder of data.")
    flags.DEFINE_enum("data", DATA[0], DATA, "Public images.")
    flags.DEFINE_integer("epochs", 45, "Epochs.", lower_bound=1)
    app.run(main)
