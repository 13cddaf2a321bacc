"""Networks of keras.applications for transfer learning: a new head, or fine-tuning.

Fine-tuning leaves BatchNormalization alone, as Keras's guide to transfer learning advises and as
private training requires: its statistics are of the raw data.
"""

import keras

from benchmarks.real_models.entry import classes, crossentropy, images

_CLASSES = 10
# Where the small versions end: after the first blocks of each kind.
_CUTS = {
    "MobileNetV2": "block_2_add",
    "ResNet50V2": "conv2_block2_out",
    "EfficientNetB0": "block2b_add",
    "DenseNet121": "pool2_pool",
    "ConvNeXtTiny": "convnext_tiny_stage_0_block_1_layer_scale",
}
NAMES = tuple(_CUTS)


def head(name, rows, small=False):
    """A frozen backbone in inference mode and a new classifier on top."""
    backbone, x, y = _backbone(name, rows, small)
    backbone.trainable = False
    return _classifier(backbone, training=False), x, y, crossentropy()


def all_but_batch_norm(name, rows, small=False):
    """The same network with every layer but BatchNormalization trainable."""
    backbone, x, y = _backbone(name, rows, small)
    for layer in backbone.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    return _classifier(backbone), x, y, crossentropy()


def _backbone(name, rows, small):
    shape = (32, 32, 3) if small else (64, 64, 3)
    make = getattr(keras.applications, name)
    backbone = make(weights=None, include_top=False, input_shape=shape)
    if small:
        backbone = keras.Model(backbone.inputs, backbone.get_layer(_CUTS[name]).output)
    for weight in backbone.weights:
        # ConvNeXt's branches start at a millionth of their size: no gradient would pass.
        if weight.path.endswith("layer_scale/gamma"):
            weight.assign(keras.ops.full(weight.shape, 0.1))
    return backbone, 255 * images(rows, *shape), classes(rows, _CLASSES)


def _classifier(backbone, **call):
    inputs = keras.Input(backbone.input_shape[1:])
    x = backbone(inputs, **call)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dropout(0.2)(x)
    return keras.Model(inputs, keras.layers.Dense(_CLASSES)(x))
