"""Uses of single operations that keep the examples of a batch apart, and uses that do not."""

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tests.gradients.proof.experiments import specs, usual
from tf_adadp.gradients.indices import no_index_stops

R = tf.raw_ops


@dataclasses.dataclass
class Case:
    """A use of an operation.

    Attributes:
        op: its type.
        function: `function(key, *batches)`.
        keeps: whether it keeps examples apart.
        shapes, dtypes: of the batches, per example.
        low, high: bounds of their values.
        differentiable: whether to look at its gradient as well.
        moves: whether a row is the same at other places of a batch.
    """

    op: str
    function: Callable
    keeps: bool
    shapes: tuple
    dtypes: list | None = None
    low: float | None = None
    high: float | None = None
    differentiable: bool = True
    moves: bool = True

    @property
    def specs(self):
        return specs(*self.shapes, dtypes=self.dtypes)

    @property
    def sample(self):
        return usual(*self.shapes, dtypes=self.dtypes, low=self.low, high=self.high)


CASES: list[Case] = []


def keeps(op, function, *shapes, **options):
    CASES.append(Case(op, lambda key, *x: function(*x), True, shapes, **options))


def mixes(op, function, *shapes, **options):
    CASES.append(Case(op, lambda key, *x: function(*x), False, shapes, **options))


def with_key(op, function, *shapes, keeps=False, **options):
    CASES.append(Case(op, function, keeps, shapes, **options))


def size(x):
    """B, int32."""
    return tf.shape(x)[0]


def floating(number):
    return tf.cast(number, tf.float32)


def ones(*shape):
    return tf.constant(0.1 + np.arange(np.prod(shape, dtype=int)).reshape(shape), tf.float32)


def turned(x):
    """[B, n, ...] as [n, B, ...]."""
    return tf.transpose(x, [1, 0, *range(2, x.shape.rank)])


# --- along axes -----------------------------------------------------------------------------------


def counted(x, most, factors=None):
    """Counts how often each of 0..3 is in a row, as Keras's layers for categories count them."""
    with no_index_stops():
        return tf.math.bincount(x, factors, minlength=4, maxlength=most, axis=-1)


keeps("DenseBincount", lambda x: counted(x, 4), (3,), dtypes=[tf.int32], low=-2, high=5)
mixes("DenseBincount", lambda x: tf.math.bincount(x, minlength=4, maxlength=4, axis=-1), (3,),
      dtypes=[tf.int32], low=0, high=5)  # fmt: skip
keeps("DenseBincount", lambda x: counted(x, 3, tf.cast(x, tf.float32)), (3,), dtypes=[tf.int32],
      low=0, high=5)  # fmt: skip
mixes("DenseBincount", lambda x: counted(tf.ensure_shape(x, [None]), 4), (), dtypes=[tf.int32],
      low=0, high=5)  # fmt: skip
mixes("DenseBincount", lambda x: R.DenseBincount(
    input=tf.where(x < 0, 9, x), size=size(x), weights=tf.zeros([0])), (3,), dtypes=[tf.int32],
    low=0, high=5)  # fmt: skip
mixes("DenseBincount", lambda x: R.DenseBincount(
    input=tf.where(x < 0, 4, x), size=4, weights=ones(4, 3)), (3,), dtypes=[tf.int32], low=0,
    high=5)  # fmt: skip
# The size of what they return depends on the largest number in the batch.
mixes("Max", lambda x: counted(x, 5), (3,), dtypes=[tf.int32], low=0, high=5)
mixes("Max", lambda x: counted(x, None), (3,), dtypes=[tf.int32], low=0, high=5)

for _name in ("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm"):
    _reduce = getattr(R, _name)
    # EuclideanNorm has no gradient of TensorFlow's.
    _options = {"differentiable": _name != "EuclideanNorm"}
    for _keep in (False, True):
        keeps(_name, lambda x, f=_reduce, k=_keep: f(input=x, axis=[-1], keep_dims=k),
              (2, 3), **_options)  # fmt: skip
        keeps(_name, lambda x, f=_reduce, k=_keep: f(input=turned(x), axis=[0, 2], keep_dims=k),
              (2, 3), **_options)  # fmt: skip
    mixes(_name, lambda x, f=_reduce: f(input=x, axis=[0], keep_dims=True), (2, 3))
    mixes(_name, lambda x, f=_reduce: f(input=x, axis=[-3, 1], keep_dims=False), (2, 3))
    mixes(_name, lambda x, f=_reduce: f(input=x, axis=tf.range(tf.rank(x))), (2, 3))
    mixes(_name, lambda x, f=_reduce: f(input=x, axis=[size(x) - 1]), (2, 3))
for _name in ("Any", "All"):
    _reduce = getattr(R, _name)
    keeps(_name, lambda x, f=_reduce: f(input=x > 0, axis=[1]), (3,))
    mixes(_name, lambda x, f=_reduce: f(input=x > 0, axis=[0]), (3,))
for _name in ("ArgMax", "ArgMin"):
    _find = getattr(R, _name)
    keeps(_name, lambda x, f=_find: f(input=x, dimension=-1), (2, 3))
    keeps(_name, lambda x, f=_find: f(input=turned(x), dimension=0), (2, 3))
    mixes(_name, lambda x, f=_find: f(input=x, dimension=-3), (2, 3))
for _name in ("Cumsum", "Cumprod", "CumulativeLogsumexp"):
    _scan = getattr(R, _name)
    keeps(_name, lambda x, f=_scan: f(x=x, axis=-1, exclusive=True), (2, 3))
    keeps(_name, lambda x, f=_scan: f(x=turned(x), axis=0, reverse=True), (2, 3))
    mixes(_name, lambda x, f=_scan: f(x=x, axis=0), (2, 3))
    mixes(_name, lambda x, f=_scan: f(x=x, axis=-3), (2, 3))
keeps("ReverseV2", lambda x: tf.reverse(x, [1, -1]), (2, 3))
mixes("ReverseV2", lambda x: tf.reverse(x, [1, -3]), (2, 3))
keeps("Roll", lambda x: tf.roll(x, [1, 2], [1, -1]), (2, 3))
mixes("Roll", lambda x: tf.roll(x, [1, 0], [1, 0]), (2, 3))
mixes("Roll", lambda x: tf.roll(x, size(x), 1), (3,))
with_key("Roll", lambda key, x: tf.roll(x, key[0], 1), (3,))
for _name in ("Softmax", "LogSoftmax"):
    _soft = getattr(R, _name)
    keeps(_name, lambda x, f=_soft: f(logits=x), (3,))
    mixes(_name, lambda x, f=_soft: f(logits=turned(x)), (3,))
    mixes(_name, lambda x, f=_soft: f(logits=x), ())
keeps("TopKV2", lambda x: R.TopKV2(input=x, k=2)[0], (3,))
keeps("TopKV2", lambda x: R.TopKV2(input=x, k=2)[1], (3,))
mixes("TopKV2", lambda x: R.TopKV2(input=turned(x), k=1), (3,))
mixes("TopKV2", lambda x: R.TopKV2(input=x, k=tf.minimum(size(x), 2)), (3,))
for _name in ("Sum", "Max", "Min", "Prod"):
    _name = f"UnsortedSegment{_name}"
    _segment = getattr(R, _name)
    _options = {"differentiable": "Sum" in _name}  # the others look up by computed places
    keeps(_name, lambda x, f=_segment: f(data=turned(x), segment_ids=[0, 2, 0], num_segments=3),
          (3, 2), **_options)  # fmt: skip
    keeps(_name, lambda x, f=_segment: f(data=tf.transpose(x, [1, 2, 0]), num_segments=2,
                                         segment_ids=[[0, 1], [1, 1]]),
          (2, 2), **_options)  # fmt: skip
    mixes(_name, lambda x, f=_segment: f(data=x, segment_ids=[0, 1, 0], num_segments=2), (3,))
    mixes(
        _name,
        lambda x, f=_segment: f(
            data=turned(x), segment_ids=tf.zeros_like(turned(x), tf.int32), num_segments=2
        ),
        (2,),
    )
    mixes(_name, lambda x, f=_segment: f(
        data=turned(x), segment_ids=[0, 1], num_segments=size(x) + 1), (2,))  # fmt: skip
    mixes(_name, lambda x, f=_segment: f(
        data=x, segment_ids=tf.cast(x > 0, tf.int32), num_segments=2), ())  # fmt: skip


def _matrices(x):
    return tf.matmul(x, x, transpose_b=True) + tf.eye(3)


for _name, _work in {
    "MatrixBandPart": lambda x: tf.linalg.band_part(x, 1, 0),
    "MatrixInverse": lambda x: tf.linalg.inv(_matrices(x)),
    "MatrixDeterminant": lambda x: tf.linalg.det(_matrices(x)),
    "Cholesky": lambda x: tf.linalg.cholesky(_matrices(x)),
    "CholeskyGrad": lambda x: R.CholeskyGrad(l=tf.linalg.cholesky(_matrices(x)), grad=x),
}.items():
    keeps(_name, _work, (3, 3), differentiable=_name != "CholeskyGrad", low=0.0, high=1.0)
mixes("MatrixBandPart", lambda x: tf.linalg.band_part(x, 1, 0), (3,))
mixes("MatrixBandPart", lambda x: tf.linalg.band_part(x, size(x), 0), (3, 3))
mixes("MatrixInverse", lambda x: tf.linalg.inv(tf.transpose(x, [1, 2, 0])), (3, 3))
mixes("MatrixDeterminant", lambda x: tf.linalg.det(turned(x[:, :, None])), (3,))
mixes("Cholesky", lambda x: tf.linalg.cholesky(x), (3,))
mixes("CholeskyGrad", lambda x: R.CholeskyGrad(l=x, grad=x), (3,))


def _complex(x):
    return tf.complex(x, tf.sin(x))


for _name in ("FFT", "IFFT", "FFT2D", "IFFT2D"):
    _transform = getattr(R, _name)
    keeps(_name, lambda x, f=_transform: f(input=_complex(x)), (2, 3), differentiable=False)
    mixes(_name, lambda x, f=_transform: f(input=_complex(turned(x[..., None])[..., 0, :])), (4, 3))
for _name in ("RFFT", "RFFT2D"):
    _transform, _length = getattr(R, _name), [4, 4] if "2D" in _name else [4]
    keeps(_name, lambda x, f=_transform, n=_length: f(input=x, fft_length=n), (4, 4),
          differentiable=False)  # fmt: skip
    mixes(_name, lambda x, f=_transform, n=_length: f(input=tf.transpose(x), fft_length=n), (4,))
    mixes(_name, lambda x, f=_transform, n=_length: f(input=x, fft_length=[size(x)] * len(n)),
          (4, 4))  # fmt: skip
for _name in ("IRFFT", "IRFFT2D"):
    _transform, _length = getattr(R, _name), [4, 4] if "2D" in _name else [4]
    keeps(_name, lambda x, f=_transform, n=_length: f(input=_complex(x), fft_length=n), (4, 3),
          differentiable=False)  # fmt: skip
    mixes(_name, lambda x, f=_transform, n=_length: f(input=_complex(tf.transpose(x)),
                                                      fft_length=n), (3,))  # fmt: skip
keeps("SoftmaxCrossEntropyWithLogits",
      lambda x: R.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.nn.softmax(-x)),
      (3,))  # fmt: skip
mixes("SoftmaxCrossEntropyWithLogits",
      lambda x: R.SoftmaxCrossEntropyWithLogits(features=x, labels=ones(3, 3)), (3,))  # fmt: skip
mixes("SoftmaxCrossEntropyWithLogits",
      lambda x: R.SoftmaxCrossEntropyWithLogits(features=tf.transpose(x), labels=tf.transpose(x)),
      (3,))  # fmt: skip
keeps("SparseSoftmaxCrossEntropyWithLogits",
      lambda x, y: R.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=y), (3,), (),
      dtypes=[tf.float32, tf.int32])  # fmt: skip
mixes("SparseSoftmaxCrossEntropyWithLogits",
      lambda x: R.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=[1, 2]), (3,))  # fmt: skip

# --- products -------------------------------------------------------------------------------------

keeps("MatMul", lambda x: tf.matmul(x, ones(3, 2)), (3,))
keeps("MatMul", lambda x: tf.matmul(ones(3, 2), x, transpose_a=True, transpose_b=True), (3,))
keeps("MatMul", lambda x: tf.matmul(tf.transpose(x), ones(3, 2), transpose_a=True), (3,))
mixes("MatMul", lambda x: tf.matmul(x, x, transpose_b=True), (3,))
mixes("MatMul", lambda x: tf.matmul(x, x, transpose_a=True), (3,))
mixes("MatMul", lambda x: tf.matmul(x, ones(4, 2), transpose_a=True), (3,))
mixes("MatMul", lambda x: tf.matmul(x, ones(3, 2) * floating(size(x))), (3,))
for _name in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
    _multiply = getattr(R, _name)
    _type = {"Tout": tf.float32} if _name.endswith("3") else {}
    keeps(_name, lambda x, f=_multiply, t=_type: f(x=x, y=x, adj_x=True, **t), (4, 2, 3))
    keeps(_name, lambda x, f=_multiply, t=_type: f(x=turned(x), y=turned(x), adj_y=True, **t),
          (4, 2, 3))  # fmt: skip
    mixes(_name, lambda x, f=_multiply, t=_type: f(x=x, y=turned(x), **t), (2, 2, 2))
    mixes(_name, lambda x, f=_multiply, t=_type: f(x=x, y=ones(4, 3, 2), **t), (2, 3))
    mixes(_name, lambda x, f=_multiply, t=_type: f(
        x=tf.transpose(x, [1, 2, 0]), y=tf.transpose(x, [1, 0, 2]), **t), (2, 3))  # fmt: skip
keeps("BatchMatMulV2", lambda x: tf.matmul(x, ones(3, 2)), (2, 3))
keeps("BatchMatMulV2", lambda x: tf.matmul(x, ones(1, 4, 3, 2)), (1, 2, 3))
keeps("BatchMatMulV2", lambda x: tf.matmul(ones(4, 2), x), (2, 3))
keeps("BatchMatMulV2", lambda x: tf.matmul(turned(x), ones(4, 3, 2)), (4, 3))
mixes("BatchMatMulV2", lambda x: tf.matmul(x[:, None], x[None]), (3, 3))
mixes("BatchMatMulV2", lambda x: tf.matmul(turned(x), turned(x), transpose_a=True), (4, 3))
mixes("BatchMatMulV2", lambda x: tf.matmul(ones(4, 2, 2), x), (2, 3))
for _equation, _good in {
    "bij,jk->bik": True, "bij,jk->kib": True, "bij,jk->bki": True, "bij,jk->b": True,
    "bij,kl->lbk": True, "jbi,bk->jbk": True, "...ij,jk->...ik": True,
    "i...j,jk->k...i": True, "bij,jk->ik": False,
    "jib,jk->ik": False, "bij,bk->ijk": False, "b...,jk->...": False,
}.items():  # fmt: skip
    (keeps if _good else mixes)(
        "Einsum", lambda x, e=_equation: tf.einsum(e, x, ones(3, 3)), (3, 3), high=0
    )
keeps("Einsum", lambda x: R.Einsum(inputs=[x], equation="bij->jb"), (2, 3))
keeps("Einsum", lambda x: R.Einsum(inputs=[x, x], equation="bij,bik->bjk"), (2, 3))
keeps("Einsum", lambda x: R.Einsum(inputs=[x, x[:, 0]], equation="b...i,bi->b..."), (2, 3))
keeps("Einsum", lambda x: R.Einsum(inputs=[x], equation="bii->b"), (3, 3))
keeps("Einsum", lambda x: R.Einsum(inputs=[x, ones(1, 3)], equation="...i,...i->..."), (2, 3))
mixes("Einsum", lambda x: R.Einsum(inputs=[x], equation="bij->ij"), (2, 3))
mixes("Einsum", lambda x: R.Einsum(inputs=[x], equation="bij->bbij"), (2, 3))
mixes("Einsum", lambda x: R.Einsum(inputs=[x], equation="bbj->bj"), (2, 3))
mixes("Einsum", lambda x: R.Einsum(inputs=[x, x], equation="bij,cij->bc"), (2, 3))
mixes("Einsum", lambda x: R.Einsum(inputs=[x[:, None], x], equation="...i,...i->..."), (3,))
mixes("Einsum", lambda x: R.Einsum(inputs=[x, ones(4, 3)], equation="bi,bi->b"), (3,))
mixes("Einsum", lambda x: R.Einsum(inputs=[x, x], equation="bi,ib->b"), (3,))
mixes("Einsum", lambda x: R.Einsum(inputs=[x, ones(4, 3)], equation="...i,...i->..."), (3,))

# --- images ---------------------------------------------------------------------------------------

IMAGE, VOLUME = (4, 4, 2), (3, 3, 3, 2)
# Filters of ones and images, all at the usual place; then what stands at another one.
_IMAGES = {
    "Conv2D": lambda x, s=1: R.Conv2D(
        input=x, filter=ones(2, 2, 2, 3), strides=[s, 1, 1, 1], padding="SAME"),
    "DepthwiseConv2dNative": lambda x, s=1: R.DepthwiseConv2dNative(
        input=x, filter=ones(2, 2, 2, 2), strides=[s, 1, 1, 1], padding="VALID"),
    "MaxPool": lambda x, s=1: R.MaxPool(
        input=x, ksize=[s, 2, 2, 1], strides=[s, 2, 2, 1], padding="SAME"),
    "AvgPool": lambda x, s=1: R.AvgPool(
        value=x, ksize=[s, 2, 2, 1], strides=[s, 2, 2, 1], padding="SAME"),
    "ExtractImagePatches": lambda x, s=1: R.ExtractImagePatches(
        images=x, ksizes=[s, 2, 2, 1], strides=[s, 2, 2, 1], rates=[1] * 4, padding="SAME"),
    "SpaceToDepth": lambda x: R.SpaceToDepth(input=x, block_size=2),
    "LRN": lambda x: R.LRN(input=x),
    "ResizeBilinear": lambda x: R.ResizeBilinear(images=x, size=[3, 5]),
    "ResizeNearestNeighbor": lambda x: R.ResizeNearestNeighbor(images=x, size=[3, 5]),
    "ResizeBicubic": lambda x: R.ResizeBicubic(images=x, size=[3, 5]),
    "ResizeArea": lambda x: R.ResizeArea(images=x, size=[3, 5]),
    "ResizeNearestNeighborGrad": lambda x: R.ResizeNearestNeighborGrad(grads=x, size=[2, 3]),
    "DepthToSpace": lambda x: R.DepthToSpace(input=tf.concat([x, x], 3), block_size=2),
    "FusedBatchNorm": lambda x: R.FusedBatchNorm(
        x=x, scale=ones(2), offset=ones(2), mean=ones(2), variance=ones(2), is_training=False)[0],
    "FusedBatchNormV2": lambda x: R.FusedBatchNormV2(
        x=x, scale=ones(2), offset=ones(2), mean=ones(2), variance=ones(2), is_training=False)[0],
    "FusedBatchNormV3": lambda x: R.FusedBatchNormV3(
        x=x, scale=ones(2), offset=ones(2), mean=ones(2), variance=ones(2), is_training=False)[0],
    "AdjustContrastv2": lambda x: R.AdjustContrastv2(
        images=tf.concat([x, x[..., :1]], 3), contrast_factor=0.5),
    "AdjustHue": lambda x: R.AdjustHue(images=tf.concat([x, x[..., :1]], 3), delta=0.2),
    "AdjustSaturation": lambda x: R.AdjustSaturation(
        images=tf.concat([x, x[..., :1]], 3), scale=0.3),
    "RGBToHSV": lambda x: R.RGBToHSV(images=tf.concat([x, x[..., :1]], 3)),
    "HSVToRGB": lambda x: R.HSVToRGB(images=tf.concat([x, x[..., :1]], 3)),
    "MaxPoolGrad": lambda x: R.MaxPoolGrad(
        orig_input=x, orig_output=x[:, ::2, ::2], grad=x[:, 1::2, 1::2], ksize=[1, 2, 2, 1],
        strides=[1, 2, 2, 1], padding="VALID"),
    "MaxPoolGradGrad": lambda x: R.MaxPoolGradGrad(
        orig_input=x, orig_output=x[:, ::2, ::2], grad=x, ksize=[1, 2, 2, 1],
        strides=[1, 2, 2, 1], padding="VALID"),
    "AvgPoolGrad": lambda x: R.AvgPoolGrad(
        orig_input_shape=tf.stack([size(x), 8, 8, 2]), grad=x, ksize=[1, 2, 2, 1],
        strides=[1, 2, 2, 1], padding="VALID"),
    "Conv2DBackpropInput": lambda x: R.Conv2DBackpropInput(
        input_sizes=tf.stack([size(x), 8, 8, 3]), filter=ones(2, 2, 3, 2), out_backprop=x,
        strides=[1, 2, 2, 1], padding="SAME"),
    "DepthwiseConv2dNativeBackpropInput": lambda x: R.DepthwiseConv2dNativeBackpropInput(
        input_sizes=tf.stack([size(x), 8, 8, 2]), filter=ones(2, 2, 2, 1), out_backprop=x,
        strides=[1, 2, 2, 1], padding="SAME"),
    "ResizeBilinearGrad": lambda x: R.ResizeBilinearGrad(grads=x, original_image=x[..., :2, :]),
    "ResizeBicubicGrad": lambda x: R.ResizeBicubicGrad(grads=x, original_image=x[..., :2, :]),
    "LRNGrad": lambda x: R.LRNGrad(input_grads=x, input_image=x, output_image=tf.sin(x)),
    "ImageProjectiveTransformV2": lambda x: R.ImageProjectiveTransformV2(
        images=x, transforms=ones(1, 8), output_shape=[3, 3], interpolation="BILINEAR"),
    "ImageProjectiveTransformV3": lambda x: R.ImageProjectiveTransformV3(
        images=x, transforms=tf.reshape(x, [-1, 32])[:, :8], output_shape=[3, 3], fill_value=0.0,
        interpolation="BILINEAR"),
    "FusedBatchNormGrad": lambda x: R.FusedBatchNormGrad(
        y_backprop=x, x=x, scale=ones(2), reserve_space_1=ones(2), reserve_space_2=ones(2),
        is_training=False)[0],
    "FusedBatchNormGradV2": lambda x: R.FusedBatchNormGradV2(
        y_backprop=x, x=x, scale=ones(2), reserve_space_1=ones(2), reserve_space_2=ones(2),
        is_training=False)[0],
    "FusedBatchNormGradV3": lambda x: R.FusedBatchNormGradV3(
        y_backprop=x, x=x, scale=ones(2), reserve_space_1=ones(2), reserve_space_2=ones(2),
        reserve_space_3=ones(2), is_training=False)[0],
}  # fmt: skip
_VOLUMES = {
    "Conv3D": lambda x, s=1: R.Conv3D(
        input=x, filter=ones(2, 2, 2, 2, 3), strides=[s, 1, 1, 1, 1], padding="SAME"),
    "MaxPool3D": lambda x, s=1: R.MaxPool3D(
        input=x, ksize=[s, 2, 2, 2, 1], strides=[s, 1, 1, 1, 1], padding="SAME"),
    "AvgPool3D": lambda x, s=1: R.AvgPool3D(
        input=x, ksize=[s, 2, 2, 2, 1], strides=[s, 1, 1, 1, 1], padding="SAME"),
    "ExtractVolumePatches": lambda x, s=1: R.ExtractVolumePatches(
        input=x, ksizes=[s, 2, 2, 2, 1], strides=[s, 1, 1, 1, 1], padding="SAME"),
    "MaxPool3DGrad": lambda x: R.MaxPool3DGrad(
        orig_input=x, orig_output=x[:, :2, :2, :2], grad=x[:, :2, :2, :2],
        ksize=[1, 2, 2, 2, 1], strides=[1, 1, 1, 1, 1], padding="VALID"),
    "MaxPool3DGradGrad": lambda x: R.MaxPool3DGradGrad(
        orig_input=x, orig_output=x[:, :2, :2, :2], grad=x, ksize=[1, 2, 2, 2, 1],
        strides=[1, 1, 1, 1, 1], padding="VALID"),
    "AvgPool3DGrad": lambda x: R.AvgPool3DGrad(
        orig_input_shape=tf.stack([size(x), 6, 6, 6, 2]), grad=x, ksize=[1, 2, 2, 2, 1],
        strides=[1, 2, 2, 2, 1], padding="VALID"),
    "Conv3DBackpropInputV2": lambda x: R.Conv3DBackpropInputV2(
        input_sizes=tf.stack([size(x), 6, 6, 6, 3]), filter=ones(2, 2, 2, 3, 2), out_backprop=x,
        strides=[1, 2, 2, 2, 1], padding="SAME"),
}  # fmt: skip
_FIRST_ORDER = ("Grad", "Adjust", "RGBToHSV", "HSVToRGB", "ResizeArea", "Extract", "Transform",
                "FusedBatchNorm", "LRN")  # fmt: skip
_POOLS = ("MaxPool", "AvgPool", "ExtractImagePatches", "MaxPool3D", "AvgPool3D",
          "ExtractVolumePatches")  # fmt: skip


for _uses, _shape in ((_IMAGES, IMAGE), (_VOLUMES, VOLUME)):
    for _name, _work in _uses.items():
        _smooth = not any(part in _name for part in _FIRST_ORDER)
        keeps(_name, _work, _shape, differentiable=_smooth, low=0.1, high=0.9)
        mixes(_name, lambda x, f=_work: f(turned(x)), (_shape[0], *_shape))
        if _name in _POOLS:
            # Both a window and a step of one example are that of the operation alone.
            mixes(_name, lambda x, f=_work: f(x, 2), _shape)
mixes("Conv2D", lambda x: tf.nn.conv2d(ones(1, 4, 4, 2), x[..., None], 1, "SAME"), (2, 2))
mixes("Conv2DBackpropInput", lambda x: tf.nn.conv2d_transpose(
    x, ones(2, 2, 3, 2), tf.stack([4, 8, 8, 3]), 2), IMAGE)  # fmt: skip
mixes("Conv2DBackpropInput", lambda x: tf.nn.conv2d_transpose(
    x, ones(2, 2, 3, 2), tf.stack([size(x), size(x), 8, 3]), 2), IMAGE)  # fmt: skip
mixes("AvgPoolGrad", lambda x: R.AvgPoolGrad(
    orig_input_shape=tf.stack([3, 8, 8, 2]), grad=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1],
    padding="VALID"), IMAGE)  # fmt: skip
mixes("ResizeBilinear", lambda x: R.ResizeBilinear(images=x, size=[size(x), 3]), IMAGE)
mixes("ImageProjectiveTransformV2", lambda x: R.ImageProjectiveTransformV2(
    images=x, transforms=ones(4, 8), output_shape=[3, 3], interpolation="BILINEAR"),
    IMAGE)  # fmt: skip
for _name in ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"):
    _normalise = getattr(R, _name)
    mixes(_name, lambda x, f=_normalise: f(
        x=x, scale=ones(2), offset=ones(2), mean=ones(0), variance=ones(0))[0], IMAGE)  # fmt: skip
mixes("FusedBatchNormGradV3", lambda x: R.FusedBatchNormGradV3(
    y_backprop=x, x=x, scale=ones(2), reserve_space_1=ones(2), reserve_space_2=ones(2),
    reserve_space_3=ones(2), is_training=False)[1], IMAGE)  # fmt: skip
