"""Takes lots that the user draws, under a declared law."""

import collections
import threading
import weakref
from collections.abc import Callable

import keras
import tensorflow as tf

from tf_adadp.accounting import SamplingLaw
from tf_adadp.sampling.base import Lots
from tf_adadp.sampling.lot_sizes import ContradictedLaw, SizeCheck, check_batch_size, ends_in_repeat
from tf_adadp.sampling.sources import Rows, Spec, batch_spec, leaf_dtype, leaf_names, padding
from tf_adadp.utils.checks import check_bool, check_integer
from tf_adadp.utils.silence import silent

_EMPTY = "dataset is empty. It must have at least one batch."
_ENDED = (
    "dataset came to its end after {} batches. Reading it again would use the same lots twice, and "
    "each was charged as drawn once. Give a dataset that goes on, train for fewer steps, or say "
    "resamples=True if every iteration over it draws its lots anew."
)
_already_read = weakref.WeakSet()


class DeclaredLots(Lots):
    """Takes each batch of a `tf.data.Dataset` as one lot, under a law that the user states.

    Guarantee: this class adds none. Steps are charged by `law`, marked as declared; ε holds only if
    every batch was drawn by that law, independently of all others. Shuffling and batching is
    NEITHER Poisson sampling NOR sampling without replacement per step: use `PoissonLots` or
    `FixedSizeLots` wherever the data can be read at random.

    The dataset is read once, as one stream: a second `as_dataset` continues where the first one
    stopped. Where it ends, drawing stops with a ValueError; reading it again would use the same
    lots twice. `fit` reads ahead, and stops before it charges an execution for which lots are
    missing. `step` counts lots; setting it forward does not skip anything in the dataset.

    Batches that contradict the law are refused: a pipeline that ends in `batch` under a Poisson
    law, and a run of lots of one size whose probability under the law is below 1e-9 (over the whole
    stream; a true law is refused with at most that probability). `fit` marks the ledger, since the
    charges before then were for other lots.

    Args:
        dataset: elements `(x, y)` or `(x, y, sample_weight)`, dense tensors with one row per
            example; an empty batch is an empty lot. Floats become `keras.config.floatx()`.
        law: a law that can be declared: `tf_adadp.accounting.PoissonSampling(num_examples,
            expected_size)` or `FixedSizeSampling(num_examples, size)`.
        steps_per_epoch: an integer; None for ⌈N/L⌉.
        resamples: True if every iteration over `dataset` draws its lots anew (a generator that
            samples, say). It is then iterated again when it ends. Like the law, this is declared,
            not checked.

    Raises:
        TypeError: `dataset`, `law` or `resamples` is of another type, or an element has another
            form.
        ValueError: the dataset is empty, or ends in `repeat` without resamples=True; its batches
            have a constant size that the law does not give them. While reading: rows do not agree
            in number; the dataset ended, or other DeclaredLots have read it.
        ContradictedLaw: a ValueError, while reading: the sizes of the batches contradict the law
            (a last batch that is short: batch with drop_remainder=True).

    Example:
        >>> x, y, rng = np.zeros((1000, 4)), np.zeros(1000), np.random.default_rng()
        >>> def draw():
        ...     for _ in range(10):
        ...         rows = rng.choice(1000, 100, replace=False)
        ...         yield x[rows], y[rows]
        ...
        >>> spec = tf.TensorSpec([None, 4]), tf.TensorSpec([None])
        >>> batches = tf.data.Dataset.from_generator(draw, output_signature=spec)
        >>> law = accounting.FixedSizeSampling(num_examples=1000, size=100)
        >>> dp.DeclaredLots(batches, law, steps_per_epoch=10).law.declared
        True
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        law: SamplingLaw,
        steps_per_epoch: int | None = None,
        resamples: bool = False,
    ):
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"dataset must be a tf.data.Dataset, got a {type(dataset).__name__}. For arrays "
                "and random-access sources use PoissonLots, which knows its law."
            )
        if not (isinstance(law, SamplingLaw) and law.can_be_declared):
            raise TypeError(
                f"law={law!r}: give a PoissonSampling or a FixedSizeSampling. It states how "
                "the dataset draws its batches; without it no ε can be given."
            )
        check_bool("resamples", resamples, wrong_type=TypeError)
        if dataset.cardinality() == 0:
            raise ValueError(_EMPTY)
        element_spec = _element_spec(dataset)
        if resamples or dataset.cardinality() != 1:  # one lot may have any size
            check_batch_size(dataset, law)
        if not (resamples or law.full_batch or not ends_in_repeat(dataset)):
            raise ValueError(
                "dataset ends in repeat, which reads the same lots again: leave it out, or say "
                "resamples=True if every iteration over it draws its lots anew."
            )
        super().__init__(law, element_spec)
        self._steps_per_epoch = (
            super().steps_per_epoch
            if steps_per_epoch is None
            else check_integer("steps_per_epoch", steps_per_epoch, at_least=1, wrong_type=TypeError)
        )
        self._stream = _Stream(dataset, self.law, resamples)

    @property
    def steps_per_epoch(self) -> int:
        """Returns the argument, or ⌈N/L⌉."""
        return self._steps_per_epoch

    def supply(self) -> Callable[[int], None]:
        """Returns a function that reads ahead, and raises if the dataset ends; see `Lots`."""
        return self._stream.supply()

    def _rows(self, step: int, multiple: int) -> Rows:
        count, leaves = self._stream.next()
        padded = []
        for leaf, spec in zip(leaves, self._present_specs(), strict=True):
            shaped = tf.TensorSpec((None, *leaf.shape[1:]), spec.dtype)
            padded.append(padding(shaped, count, multiple))
            with silent():
                padded[-1][:count] = leaf
        return count, padded


class _Stream:
    """Reads each batch of a dataset once, in order; some of them ahead."""

    def __init__(self, dataset: tf.data.Dataset, law: SamplingLaw, resamples: bool):
        self._dataset, self._resamples, self._iterator = dataset, resamples, None
        self._sizes = SizeCheck(law)
        self._ahead = collections.deque()
        self._read = 0
        self._lock = threading.RLock()
        self._error = None  # why nothing more can be read

    def next(self) -> Rows:
        """Returns the number of rows and the leaves of the next batch."""
        with self._lock:
            if not self._ahead:
                self._read_one()
            return self._ahead.popleft()

    def supply(self) -> Callable[[int], None]:
        """Returns a function `take(count)`, which raises unless `count` more can be drawn."""
        with self._lock:
            taken = self._read - len(self._ahead)

        def take(count):
            nonlocal taken
            with self._lock:
                if isinstance(self._error, ContradictedLaw):
                    raise self._error
                while self._read < taken + count:
                    self._read_one()
            taken += count

        return take

    def _begin(self):
        dataset = self._dataset.repeat() if self._resamples else self._dataset
        if not self._resamples and self._dataset in _already_read:
            raise ValueError(
                "dataset was read before, by other DeclaredLots: its lots would be used twice, and "
                "each was charged as drawn once. Keep the DeclaredLots and go on with them, or say "
                "resamples=True if every iteration over the dataset draws its lots anew."
            )
        self._iterator = iter(dataset)
        _already_read.add(self._dataset)

    def _read_one(self):
        if self._error is not None:
            raise self._error
        try:
            if self._iterator is None:
                self._begin()
            batch = next(self._iterator, None)
            if batch is None:
                raise ValueError(_ENDED.format(self._read) if self._read else _EMPTY)
            leaves = [leaf.numpy() for leaf in keras.tree.flatten(batch) if leaf is not None]
            sizes = {len(leaf) for leaf in leaves}
            if len(sizes) > 1:
                raise ValueError(
                    f"the tensors of a batch of dataset differ in rows: {sorted(sizes)}."
                )
            self._sizes.see(count := sizes.pop())
        except Exception as error:
            self._error = error  # later batches would be other lots
            raise
        self._ahead.append((count, leaves))
        self._read += 1


def _element_spec(dataset: tf.data.Dataset) -> Spec:
    element = dataset.element_spec
    if not isinstance(element, tuple) or len(element) not in (2, 3):
        raise TypeError(
            f"dataset must give (x, y) or (x, y, sample_weight), got {element}. Map it to that "
            "form."
        )
    element = (*element, None)[:3]
    leaves = []
    for spec, name in zip(keras.tree.flatten(element), leaf_names(element), strict=True):
        if spec is None or type(spec).__name__ == "NoneTensorSpec":
            leaves.append(None)
        elif not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            raise TypeError(
                f"{name} in dataset is {spec}, not a dense tensor with one row per example. "
                "Batch the dataset; make sparse data dense, pad ragged data."
            )
        else:
            leaves.append((spec.shape[1:], leaf_dtype(spec.dtype, name)))
    return batch_spec(leaves, element)
