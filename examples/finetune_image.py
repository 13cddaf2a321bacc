"""Trains a new head on a frozen keras_hub image classifier, with differential privacy.

    pip install "tf_adadp[examples,hub]"
    python examples/finetune_image.py --target_epsilon=3

takes scikit-learn's digits, with no download. The images of the lower half of the classes are
declared public: a small ResNet learns them first, without privacy. Then its backbone is frozen, its
batch normalisation with the statistics of the public images, and a new head learns the other
classes, which are private. `fit` takes raw images: the task's own preprocessor resizes and scales
each alone, once.

With --preset=<a name or folder of keras_hub> a pre-trained backbone is used, and all classes are
private. The last line on stdout is a JSON object.
"""

import json
import math
import sys
import time

import datasets
import finetuning
from absl import app, flags

_SIDE = 32

_DATASET = flags.DEFINE_string("dataset", "digits", "As for train.py: digits, or e.g. cifar10.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "As for train.py.")
_PRESET = flags.DEFINE_string(
    "preset",
    None,
    "An image classifier or backbone of keras_hub: a local folder, or a name that is downloaded, "
    "e.g. resnet_18_imagenet. Its weights must be public. Default: a small ResNet, trained here.",
)
_TARGET_EPSILON = flags.DEFINE_float("target_epsilon", 3.0, "ε of the training of the head.")
_TARGET_DELTA = flags.DEFINE_float("target_delta", 1e-5, "δ; below 1/N to mean anything.")
_EPOCHS = flags.DEFINE_integer("epochs", 30, "Private epochs.", lower_bound=1)
_LOT_SIZE = flags.DEFINE_integer("lot_size", 128, "Expected lot size L.", lower_bound=1)
_PUBLIC_EPOCHS = flags.DEFINE_integer(
    "public_epochs", 10, "Epochs of training on public images; 0 for random weights.", 0
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the weights.", 0)

for _holder in (_TARGET_EPSILON, _TARGET_DELTA):
    flags.register_validator(
        _holder, lambda value: 0 < value < math.inf, message="give a finite number above 0."
    )


def split(data):
    """Returns the public images, and the private ones for training and test, each with labels.

    Images are uint8 of three channels, as cameras give them and presets take them.
    """
    import numpy as np

    def part(x, y, classes):
        chosen = np.isin(y, classes)
        x = (255 * x[chosen]).round().astype(np.uint8)
        x = x if x.shape[-1] == 3 else np.repeat(x[..., :1], 3, axis=-1)
        return x, np.searchsorted(classes, y[chosen]).astype(np.int32)

    border = data.num_classes // 2 if _PRESET.value is None else 0
    private = range(border, data.num_classes)
    return (
        part(data.x_train, data.y_train, range(border)),
        part(data.x_train, data.y_train, private),
        part(data.x_test, data.y_test, private),
    )


def small_resnet(images, labels):
    """Returns a ResNet backbone that learned to tell the public classes apart."""
    import keras
    import keras_hub

    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 128],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        use_pre_activation=True,
        image_shape=(_SIDE, _SIDE, 3),
    )
    if _PUBLIC_EPOCHS.value:
        task = classifier(backbone, int(labels.max()) + 1)
        task.compile(
            keras.optimizers.Adam(2e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        task.fit(
            images, labels, batch_size=32, epochs=_PUBLIC_EPOCHS.value, shuffle=False, verbose=2
        )
    return backbone


def classifier(backbone, num_classes):
    """Returns a task with a new head, which takes raw images."""
    import keras_hub

    converter = keras_hub.layers.ResNetImageConverter(image_size=(_SIDE, _SIDE), scale=1 / 255)
    return keras_hub.models.ResNetImageClassifier(
        backbone,
        num_classes=num_classes,
        preprocessor=keras_hub.models.ResNetImageClassifierPreprocessor(converter),
    )


def private_task(public, num_classes):
    """Returns the classifier of the private classes, of which the head alone trains."""
    import keras_hub

    if _PRESET.value is None:
        task = classifier(small_resnet(*public), num_classes)
    else:
        task = keras_hub.models.ImageClassifier.from_preset(_PRESET.value, num_classes=num_classes)
    # BatchNormalization in training mode would mix the images of a lot, and is refused.
    task.backbone.trainable = False
    return task


def train():
    """Trains as the flags say, and returns the summary."""
    import keras

    started = time.perf_counter()
    try:
        data = datasets.load(_DATASET.value, _DATA_DIR.value)
    except ValueError as error:
        sys.exit(f"--dataset={_DATASET.value}: {error}")
    public, (images, labels), test = split(data)
    if _LOT_SIZE.value > len(images):
        sys.exit(f"--lot_size={_LOT_SIZE.value}: there are {len(images)} private records.")
    keras.utils.set_random_seed(_SEED.value)  # weights; the noise has its own, secret key
    num_classes = data.num_classes - (data.num_classes // 2 if _PRESET.value is None else 0)
    task = private_task(public, num_classes)
    summary = finetuning.fine_tune(
        task,
        (images, labels),
        test,
        epsilon=_TARGET_EPSILON.value,
        delta=_TARGET_DELTA.value,
        epochs=_EPOCHS.value,
        lot_size=_LOT_SIZE.value,
        started=started,
    )
    return {"dataset": data.name, "preset": _PRESET.value, **summary}


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: flags start with --.")
    print(json.dumps(train()), flush=True)


if __name__ == "__main__":
    app.run(main)
