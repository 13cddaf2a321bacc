"""Operations on batches of images and other grids, whose first axis is that of examples."""

from tf_adadp.gradients.proof.rules.registry import one_place, plain, rule
from tf_adadp.gradients.proof.values import Mixed, Mixes, Public, Rows, public, rows


def batch_of(values, wanted):
    """Checks which operands are rows along axis 0; the others must be plain."""
    found = [i for i, v in enumerate(values) if isinstance(v, Rows)]
    if found != list(wanted):
        raise Mixes("has examples in other operands than its images")
    value = one_place(values)
    if value.axis != 0:
        raise Mixes("takes another axis than that of the examples for the batch")
    for other in values:
        if isinstance(other, Public):
            plain(other)
    return value


@rule("Conv2D", "Conv3D", "DepthwiseConv2dNative")
def convolution(op, values):
    """Convolves every image with public filters."""
    value = batch_of(values, [0])
    return rows(op.outputs[0], 0, value.stride)


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput")
def transposed_convolution(op, values):
    """Convolves back: (shape of the images, filters, gradients)."""
    sizes, filters, gradients = values
    if not isinstance(gradients, Rows) or gradients.axis != 0:
        raise Mixes("takes another axis than that of the examples for the batch")
    plain(filters)
    _fits(sizes, gradients)
    return rows(op.outputs[0], 0, gradients.stride, tuple(sizes.value))


@rule("MaxPool", "MaxPool3D", "AvgPool", "AvgPool3D")
def pooling(op, values):
    """Pools every image."""
    _one_image_at_a_time(op)
    value = batch_of(values, [0])
    return rows(op.outputs[0], 0, value.stride)


@rule("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradGrad", "MaxPool3DGradGrad")
def max_pooling_gradient(op, values):
    """Sends gradients back to the largest entries: (images, pooled, gradients)."""
    _one_image_at_a_time(op)
    value = batch_of(values, [0, 1, 2])
    return rows(op.outputs[0], 0, value.stride)


@rule("AvgPoolGrad", "AvgPool3DGrad")
def average_pooling_gradient(op, values):
    """Spreads gradients: (shape of the images, gradients)."""
    _one_image_at_a_time(op)
    sizes, gradients = values
    if not isinstance(gradients, Rows) or gradients.axis != 0:
        raise Mixes("takes another axis than that of the examples for the batch")
    _fits(sizes, gradients)
    return rows(op.outputs[0], 0, gradients.stride, tuple(sizes.value))


@rule("ExtractImagePatches", "ExtractVolumePatches")
def patches(op, values):
    """Cuts windows out of every image."""
    _one_image_at_a_time(op)
    value = batch_of(values, [0])
    return rows(op.outputs[0], 0, value.stride)


@rule("SpaceToDepth", "DepthToSpace", "LRN", "ResizeBilinear", "ResizeNearestNeighbor",
      "ResizeBicubic", "ResizeArea", "ResizeNearestNeighborGrad", "AdjustContrastv2", "AdjustHue",
      "AdjustSaturation", "RGBToHSV", "HSVToRGB")  # fmt: skip
def image_by_image(op, values):
    """Works on every image [height, width, channels] by itself, in one way."""
    value = batch_of(values, [0])
    if value.rank != 4:
        raise Mixes("takes the examples for one image")
    return rows(op.outputs[0], 0, value.stride)


@rule("ResizeBilinearGrad", "ResizeBicubicGrad", "LRNGrad")
def resized_gradient(op, values):
    """Has gradients and images as operands."""
    value = batch_of(values, range(len(values)))
    return rows(op.outputs[0], 0, value.stride)


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def transform(op, values):
    """Moves every image by its own transform, or all by one."""
    images, transforms, *others = values
    for other in others:
        plain(other)
    if not isinstance(images, Rows) or images.axis != 0:
        raise Mixes("takes another axis than that of the examples for the batch")
    if isinstance(transforms, Rows):
        one_place([images, transforms])
    elif plain(transforms).dims is None or transforms.dims[0] != 1:
        raise Mixes("has a transform of its own for every place in the batch")
    return rows(op.outputs[0], 0, images.stride)


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def normalization(op, values):
    """Normalises by public statistics."""
    if op.get_attr("is_training"):
        raise Mixes("normalises over the batch")
    value = batch_of(values, [0])
    # The other outputs are statistics for the gradient of public operands.
    weights = frozenset().union(*(v.weights for v in values if isinstance(v, Public)))
    return [rows(op.outputs[0], 0, value.stride, value.dims)] + [
        public(t, weights=weights) for t in op.outputs[1:]
    ]


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def normalization_gradient(op, values):
    """Gives the gradient of the images; those of scale and offset sum over the batch."""
    if op.get_attr("is_training"):
        raise Mixes("normalises over the batch")
    value = batch_of(values, [0, 1])
    others = [Mixed(op, "sums over the examples") for _ in op.outputs[1:]]
    return [rows(op.outputs[0], 0, value.stride, value.dims), *others]


def _one_image_at_a_time(op):
    for name in ("ksize", "ksizes", "strides"):
        try:
            sizes = op.get_attr(name)
        except ValueError:
            continue
        if sizes[0] != 1:
            raise Mixes("has windows along the axis of the examples")


def _fits(sizes, gradients):
    """Checks that a shape is that of as many images as there are gradients."""
    if not isinstance(sizes, Public) or sizes.value is None:
        raise Mixes("has a shape that is not known")
    if sizes.value.size and sizes.value[0] != gradients.dims[0]:
        raise Mixes("has a shape of another number of examples")
