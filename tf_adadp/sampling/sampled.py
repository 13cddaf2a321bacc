"""Lots drawn at random from data with random access."""

import abc

import numpy as np

from tf_adadp.accounting import FixedSizeSampling, PoissonSampling
from tf_adadp.sampling.base import Lots
from tf_adadp.sampling.keys import LotKey
from tf_adadp.sampling.packing import checked_integer
from tf_adadp.sampling.sources import as_source


class SampledLots(Lots):
    """Lots that are a pure function of (key, step) and of the data."""

    def __init__(self, source, law, seed, present=None):
        super().__init__(law, source.spec)
        self._source = source
        self._present = present
        self._key = LotKey(seed)

    @property
    def seed(self):
        """The seed, or None when the key is secret."""
        return self._key.seed

    @abc.abstractmethod
    def _indices(self, step):
        """The indices of the examples of lot `step`, in any order."""

    def _rows(self, step, multiple):
        indices = self._indices(step)
        if self._present is not None:
            indices = indices[self._present[indices]]
        # The order within a lot means nothing; sorted, a memory-mapped file is read front to back.
        return self._source.rows(np.sort(indices), multiple)


def subset(generator, number, size):
    """A uniformly random set of `size` of the indices 0..number − 1, in O(size)."""
    return generator.choice(number, size, replace=False, shuffle=False)


def poisson_subset(generator, number, probability):
    """A set with each of the indices 0..number − 1 by a coin of its own, in O(its size)."""
    return subset(generator, number, generator.binomial(number, probability))


class PoissonLots(SampledLots):
    """Every example enters every lot independently with probability q = L/N.

    The size n of a lot is drawn from Binomial(N, q), then n distinct examples uniformly. That IS
    Poisson sampling: a set S is drawn with probability

        C(N, |S|) q^|S| (1−q)^(N−|S|) / C(N, |S|) = q^|S| (1−q)^(N−|S|),

    the product of N independent coins. Only, it costs O(n) a step, not O(N) (numpy draws the subset
    with Floyd's algorithm, or shuffles once n > N/20). The law holds up to the rounding of float64
    arithmetic, as for every sampler that draws floats.

    Lots differ in size; they are never truncated, for truncation is a different law with another
    cost (`TruncatedPoissonLots`). An empty lot is a lot. With expected_size = N every lot holds all
    examples: full batches, which cost Gaussian(σ*) a step.

    Guarantee: for neighbours that differ by one example more or less (N and q being public
    constants), a step that releases a sum over the lot is a Poisson-subsampled mechanism with
    probability q (`dp_accounting.PoissonSampledDpEvent`), and steps are independent. This holds as
    long as nobody knows which examples were drawn; the lots' sizes, timing and memory are not
    protected.

    Args:
        x: array, nested dict, tuple or list of arrays (lists become tuples), tf tensors,
            memory-mapped arrays (only the rows drawn are read); anything else with `__array__` is
            converted once. Or a random-access source: an object with `__len__` and `__getitem__`
            that is not an array, such as `tfds.data_source(...)`, whose items are
            `(x, y)` or `(x, y, sample_weight)`, all of one structure, shape and type. Its items are
            read one by one in Python, O(lot) calls a step, or in one call if it has `__getitems__`.
        y: targets in the same forms, one row per example; None if there are none.
        expected_size: L, a number in (0, N].
        sample_weight: weights of the examples' losses, one row per example, or None.
        seed: None (draw a secret key from the operating system) or, FOR TESTS, an integer: then lot
            t is a function of (seed, t), the same in every process with the same numpy.
        transform: for a random-access source, a function that makes `(x, y)` or
            `(x, y, sample_weight)` of an item.
        present: None, or booleans [N]: a record that is not present is in no lot. N, q and L stay
            those of all N places, which are public; which of them are taken is private. So data
            sets that differ in one record present are neighbours with one q, to the letter of the
            guarantee (`tf_adadp.audit` leaves canaries in or out this way).
        num_examples: None, or N where x is one host's part of N records that several hosts train
            on (`tf.distribute.MultiWorkerMirroredStrategy`): each of these enters a lot with
            probability L/N. No record may be in two parts.

    Floats become `keras.config.floatx()`; integers, booleans and strings stay as they are.

    Pickling or deep-copying lots without a seed gives lots with a new key.

    Raises:
        TypeError: `x` is a tf.data.Dataset, a PyDataset, a generator or no array; `seed` is no
            integer.
        ValueError: empty data, arrays of unequal length, `expected_size` missing or outside (0, N],
            `present` of another shape or type, num_examples below the number of records.

    Source: Abadi et al. 2016, "Deep learning with differential privacy", section 3.1 (lots).
    """

    def __init__(
        self,
        x,
        y=None,
        expected_size=None,
        sample_weight=None,
        seed=None,
        transform=None,
        present=None,
        num_examples=None,
    ):
        source = as_source(x, y, sample_weight, transform)
        if num_examples is None:
            num_examples = len(source)
        elif checked_integer("num_examples", num_examples, least=1) < len(source):
            raise ValueError(
                f"num_examples={num_examples} for {len(source)} records: it counts these and those "
                "that other hosts hold."
            )
        law = PoissonSampling(num_examples=num_examples, expected_size=expected_size)
        if present is not None:
            present = np.array(present)  # a copy: the caller's may change
            if present.dtype != bool or present.shape != (len(source),):
                raise ValueError(
                    f"present has shape {present.shape} and type {present.dtype}: give one boolean "
                    f"for each of the {len(source)} records."
                )
        super().__init__(source, law, seed, present)

    def _indices(self, step):
        return poisson_subset(
            self._key.generator(step), self.num_local_examples, self.law.probability
        )

    @property
    def num_local_examples(self):
        """How many records these lots are drawn from: N, or those of this host."""
        return len(self._source)


class FixedSizeLots(SampledLots):
    """Every lot is a uniformly random subset of exactly `size` examples, without replacement.

    Lots of different steps are independent; an example may be in consecutive lots. Reading costs
    O(size).

    Guarantee: for neighbours of which one example is replaced, a step that releases a sum over the
    lot is a mechanism sampled without replacement
    (`dp_accounting.SampledWithoutReplacementDpEvent`). A replaced example moves a sum clipped at C
    by up to 2C, so the noise counts half: σ*/2.

    Args:
        x, y, sample_weight, seed, transform: as for `PoissonLots`.
        size: the number of examples in a lot, an integer in 1..N.

    Raises:
        TypeError: as for `PoissonLots`.
        ValueError: empty data, arrays of unequal length, `size` missing or no integer in 1..N.
    """

    def __init__(self, x, y=None, size=None, sample_weight=None, seed=None, transform=None):
        source = as_source(x, y, sample_weight, transform)
        law = FixedSizeSampling(num_examples=len(source), size=size)
        super().__init__(source, law, seed)

    def _indices(self, step):
        return subset(self._key.generator(step), self.num_examples, self.law.size)
