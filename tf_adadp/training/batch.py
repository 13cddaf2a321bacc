"""Turns the arguments of `train_on_batch` into one lot and its law."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tf_adadp import validation
from tf_adadp.accounting import UnknownSampling
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.sampling.sources import ArraySource
from tf_adadp.training.arguments import class_weights


@dataclasses.dataclass(frozen=True)
class Batch:
    """Holds a batch that the caller sampled.

    Attributes:
        arrays: `(x, y, sample_weight)`.
        law: as declared by the caller, or an `UnknownSampling`.
        expected_size: L, by the law; the size of the batch where that is unknown.
    """

    arrays: tuple
    law: SamplingLaw
    expected_size: float

    @property
    def element_spec(self) -> tuple:
        """Returns the TensorSpecs of such a batch, of any size."""
        return ArraySource(*self.arrays).spec


def batch_of(x: Any, y: Any, sample_weight: Any, class_weight: Any, law: Any) -> Batch:
    """Makes a `Batch` of the arguments of `train_on_batch`.

    Raises:
        TypeError, ValueError: the law is of another kind, or does not fit the batch.
    """
    if class_weight is not None:
        sample_weight = class_weights(y, class_weight, sample_weight)
    arrays = tf.nest.map_structure(
        lambda a: None if a is None else np.asarray(a), (x, y, sample_weight)
    )
    size = len(tf.nest.flatten(x)[0])
    if law is None:
        law = UnknownSampling(
            "train_on_batch was called without `law`: pass how the batches were sampled, e.g. "
            "law=PoissonSampling(num_examples=N, expected_size=L)"
        )
    else:
        law = validation.declared_law(law, size)
    return Batch(arrays, law, law.expected_lot_size or size)
