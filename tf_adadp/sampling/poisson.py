"""Draws Poisson lots: each example enters each lot independently."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tf_adadp.accounting import PoissonSampling
from tf_adadp.sampling.sampled import SampledLots, poisson_subset
from tf_adadp.sampling.sources import as_source
from tf_adadp.utils.checks import check_integer


class PoissonLots(SampledLots, enforces_law=True, splits_over_hosts=True):
    """Draws each example into each lot independently, with probability q = L/N.

    The size n of a lot is drawn from Binomial(N, q), then n distinct examples uniformly. This is
    exactly Poisson sampling: a set S is drawn with probability

        C(N, |S|) q^|S| (1−q)^(N−|S|) / C(N, |S|) = q^|S| (1−q)^(N−|S|),

    the product of N independent coins. It costs O(n) per step instead of O(N) (numpy draws the
    subset with Floyd's algorithm, or shuffles once n > N/20). The law holds up to the rounding of
    float64 arithmetic, as for every sampler that draws floats.

    Lots differ in size and are never truncated: truncation is another law with another cost
    (`TruncatedPoissonLots`). Empty lots are valid. With expected_size = N every lot holds all
    examples, and a step costs Gaussian(σ*).

    Guarantee: for neighbours by adding or removing one example (N and q are public constants), a
    step that releases a sum over the lot is a Poisson-subsampled mechanism with probability q
    (`dp_accounting.PoissonSampledDpEvent`), and steps are independent. This requires that the draws
    are secret; the lots' sizes, timing and memory are not protected.

    Args:
        x: array, nested dict, tuple or list of arrays (lists become tuples), tf tensors,
            memory-mapped arrays (only the rows drawn are read); anything else with `__array__` is
            converted once. Or a random-access source: an object with `__len__` and `__getitem__`
            that is not an array, such as `tfds.data_source(...)`, whose items are
            `(x, y)` or `(x, y, sample_weight)`, all of one structure, shape and type. Its items are
            read one by one in Python, O(lot) calls per step, or in one call if it has
            `__getitems__`. Or a `keras.utils.PyDataset`, whose batches are taken apart: a step
            reads every batch that holds a record of its lot.
        y: targets in the same forms, one row per example; None if there are none.
        expected_size: L, a number in (0, N].
        sample_weight: weights of the examples' losses, one row per example, or None.
        seed: None (draw a secret key from the operating system) or, FOR TESTS, an integer: then lot
            t is a function of (seed, t), the same in every process with the same numpy.
        transform: for a random-access source, a function that makes `(x, y)` or
            `(x, y, sample_weight)` of an item.
        present: None, or booleans [N]: an absent record is in no lot. N, q and L count all N places
            and are public; the presence of a record is private. So datasets that differ in the
            presence of one record are neighbours with the same q, exactly as the guarantee assumes
            (`tf_adadp.audit` includes or excludes canaries this way).
        num_examples: None, or N where x is one host's part of N records that several hosts train on
            (`tf.distribute.MultiWorkerMirroredStrategy`): each record enters a lot with probability
            L/N. No record may be in two parts.

    Floats become `keras.config.floatx()`; integers, booleans and strings stay as they are.

    Pickling or deep-copying lots without a seed gives lots with a new key.

    Raises:
        TypeError: `x` is a tf.data.Dataset (see `from_dataset`), a generator or no array; `seed` is
            no integer.
        ValueError: empty data, arrays of unequal length, `expected_size` missing or outside (0, N],
            `present` of another shape or type, num_examples below the number of records.

    Source: Abadi et al. 2016, "Deep learning with differential privacy", section 3.1 (lots).

    Example:
        >>> lots = dp.PoissonLots(np.zeros((1000, 4)), np.zeros(1000), expected_size=100)
        >>> print(lots.steps_per_epoch, lots.law.probability)
        10 0.1
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        expected_size: float | None = None,
        sample_weight: Any = None,
        seed: int | None = None,
        transform: Callable[[Any], tuple] | None = None,
        present: np.ndarray | None = None,
        num_examples: int | None = None,
    ):
        source = as_source(x, y, sample_weight, transform)
        if num_examples is None:
            num_examples = len(source)
        check_integer("num_examples", num_examples, at_least=1, wrong_type=TypeError)
        if num_examples < len(source):
            raise ValueError(
                f"num_examples={num_examples} for {len(source)} records: it counts these and those "
                "that other hosts hold."
            )
        law = PoissonSampling(num_examples=num_examples, expected_size=expected_size)
        if present is not None:
            present = np.array(present)  # copied, since the caller's array may change
            if present.dtype != bool or present.shape != (len(source),):
                raise ValueError(
                    f"present has shape {present.shape} and type {present.dtype}: give one boolean "
                    f"for each of the {len(source)} records."
                )
        super().__init__(source, law, seed, present)

    def _indices(self, step: int) -> np.ndarray:
        return poisson_subset(
            self._key.generator(step), self.num_local_examples, self.law.probability
        )
