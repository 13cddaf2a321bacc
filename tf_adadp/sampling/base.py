"""Defines the base class of lots: steps, padding, structures and datasets."""

import abc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import ClassVar

import keras
import tensorflow as tf

from tf_adadp.accounting import SamplingLaw
from tf_adadp.sampling.exit import drawing_lock, until_exit
from tf_adadp.sampling.keys import LotKey, StepCounter
from tf_adadp.sampling.packing import Lot, check_physical_batch_size, pack, physical_batches
from tf_adadp.sampling.sources import Rows, Source, Spec, padding
from tf_adadp.utils.checks import check_integer


class Lots(abc.ABC):
    """Hands out a stream of lots, together with the law that drew them.

    A lot of n examples is an element `((x, y, sample_weight), mask)`. With B =
    `physical_batch_size` and P = ⌈n/B⌉ every tensor has shape [P, B, ...]: B is static, P differs
    from lot to lot, and P = 0 is a legal, empty lot. `mask` [P, B] float32 is 1 for the n real
    rows, which come first, and 0 for the padding, whose rows are zeros (empty strings). No example
    is ever left out. `y` and `sample_weight` are None where absent.

    Every lot has a step index and every index is handed out once, so that no lot is used for two
    releases. Where the law draws passes of several lots (`law.lots_per_pass`), indices are handed
    out by whole passes: every iteration begins a new pass, and the rest of its last pass is
    skipped. The number of rows of a lot is private like the rows; N and the expected size are
    public. P is static where the law bounds the size of a lot.

    A subclass gives its law to `__init__`. Overriding `law` raises a TypeError.

    Class keywords, not inherited by further subclasses, which may draw differently:
        enforces_law: True if the class itself draws every lot by its law. Otherwise `law`, and
            every report, marks the law as declared by the user.
        splits_over_hosts: True if each of several hosts can draw its part of every lot by itself,
            under the same law: records enter a lot independently of each other, `num_examples`
            counts those of all hosts and `num_local_examples` those of this one.

    Args:
        law: a `SamplingLaw` with an expected lot size.
        element_spec: `(x, y, sample_weight)` of `tf.TensorSpec`s of one batch, shape [None, ...].

    Attributes:
        element_spec: as given.
        enforces_law, splits_over_hosts: see the class.

    Raises:
        TypeError: `law` is not a sampling law.
        ValueError: `law` has no expected lot size.
    """

    enforces_law: ClassVar[bool] = False
    splits_over_hosts: ClassVar[bool] = False

    def __init_subclass__(
        cls, *, enforces_law: bool = False, splits_over_hosts: bool = False, **kwargs
    ):
        super().__init_subclass__(**kwargs)
        if cls.law is not Lots.law:
            raise TypeError(
                f"{cls.__name__} overrides `law`, and would bypass the mark of declared laws: "
                "give the law to Lots.__init__."
            )
        cls.enforces_law, cls.splits_over_hosts = enforces_law, splits_over_hosts

    def __init__(self, law: SamplingLaw, element_spec: Spec):
        if not isinstance(law, SamplingLaw):
            raise TypeError(f"law={law!r}: give a sampling law, an object of tf_adadp.accounting.")
        if law.expected_lot_size is None:
            raise ValueError(f"law={law!r} has no expected lot size, by which sums are divided.")
        self._law = law
        self.element_spec = element_spec
        self.counter = StepCounter()

    @property
    def law(self) -> SamplingLaw:
        """Returns the sampling law, which sets the cost of a step."""
        return self._law if self.enforces_law else self._law.as_declared()

    @property
    def num_examples(self) -> int | None:
        """Returns N, the number of examples that lots are drawn from; None where it is private."""
        return self.law.num_examples

    @property
    def expected_size(self) -> float:
        """Returns L, the expected number of examples in a lot. Sums are divided by it."""
        return float(self.law.expected_lot_size)

    @property
    def steps_per_epoch(self) -> int:
        """Returns ⌈N/L⌉."""
        return math.ceil(self.num_examples / self.expected_size)

    @property
    def num_local_examples(self) -> int | None:
        """Returns the number of examples that this host draws from; None where that is private."""
        return self.num_examples

    @property
    def seed(self) -> int | None:
        """Returns the seed, or None when the lots cannot be reproduced."""
        return None

    @property
    def secret_key(self) -> LotKey | None:
        """Returns the secret key of the lots, to continue them later; None without one."""
        return None

    @property
    def source(self) -> Source | None:
        """Returns the source of the lots; None where examples cannot be read one by one."""
        return None

    @property
    def step(self) -> int:
        """Returns the index of the next lot, after those already drawn ahead by a dataset.

        Setting it resumes seeded lots at any step. Lots without a seed can only skip forward:
        going back raises ValueError.
        """
        return self.counter.next

    @step.setter
    def step(self, step: int) -> None:
        step = check_integer("step", step, at_least=0, wrong_type=TypeError)
        if step % self.law.lots_per_pass:
            raise ValueError(
                f"step={step} is within a pass of {self.law.lots_per_pass} lots: give the first "
                f"lot of a pass, {step - step % self.law.lots_per_pass} for this one."
            )
        if self.seed is None:
            self.counter.advance_to(step)
        else:
            # A new counter: iterators still running on the old one do not disturb the new count.
            self.counter = StepCounter(step)

    def as_dataset(
        self, physical_batch_size: int, num_lots: int | None = None, start_step: int | None = None
    ) -> tf.data.Dataset:
        """Returns the lots as a prefetched `tf.data.Dataset`.

        Each iteration of the dataset continues where the last one ended; no lot is repeated. With
        `num_lots` an iteration reserves that many steps when it begins, so `step` does not depend
        on prefetching. Without it, `step` runs ahead by the prefetched lots: to resume, count the
        lots that you use.

        Args:
            physical_batch_size: B, rows per physical batch.
            num_lots: lots per iteration; None for lots without end.
            start_step: first step of the first iteration, as if `step` had been set to it; None for
                `step` at that time. Setting `step` later does not move a seeded dataset that has a
                `start_step`.

        Returns:
            A dataset of `((x, y, sample_weight), mask)`, see the class.

        Raises:
            TypeError, ValueError: an argument is no integer or too small; `start_step` lies before
                `step` and there is no seed.
        """
        size = check_physical_batch_size(physical_batch_size)
        if num_lots is not None:
            num_lots = check_integer("num_lots", num_lots, at_least=1, wrong_type=TypeError)
        own_counter = None
        if start_step is not None:
            self.step = start_step
            own_counter = self.counter

        def lots():
            counter = own_counter or self.counter
            p = self.law.lots_per_pass
            if num_lots is None:
                passes = (counter.claim(p) for _ in itertools.count())
                steps = itertools.chain.from_iterable(range(first, first + p) for first in passes)
            else:
                first = counter.claim(-(-num_lots // p) * p)
                steps = range(first, first + num_lots)
            lock = drawing_lock()
            for step in steps:
                with until_exit(lock) as go_on:
                    if not go_on:
                        return
                    leaves = tuple(physical_batches(*self._padded_rows(step, size), size))
                yield leaves

        largest = self.law.max_lot_size
        batches = None if largest is None else -(-largest // size)
        signature = [
            tf.TensorSpec((batches, size, *spec.shape[1:]), spec.dtype)
            for spec in self._present_specs()
        ]
        dataset = tf.data.Dataset.from_generator(
            lots, output_signature=(*signature, tf.TensorSpec((batches, size), tf.float32))
        )
        pack_tensors = tf.autograph.experimental.do_not_convert(
            lambda *tensors: pack(self.element_spec, tensors)
        )
        dataset = dataset.map(pack_tensors)
        cardinality = tf.data.INFINITE_CARDINALITY if num_lots is None else num_lots
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(cardinality))
        return dataset.prefetch(1)

    def take(self, num_lots: int | None, physical_batch_size: int) -> Iterator[Lot]:
        """Iterates over the next `num_lots` lots (None: without end), for custom training loops.

        Yields the elements of `as_dataset`, as eager tensors. Each lot is drawn when it is asked
        for, so `step` is exactly the number of lots handed out (the rest of a pass included).

        Raises:
            TypeError, ValueError: an argument is not an integer, or less than 1.
        """
        size = check_physical_batch_size(physical_batch_size)
        if num_lots is not None:
            num_lots = check_integer("num_lots", num_lots, at_least=1, wrong_type=TypeError)

        def lot(step):
            leaves = physical_batches(*self._padded_rows(step, size), size)
            return pack(self.element_spec, map(tf.convert_to_tensor, leaves))

        def lots():
            p, first = self.law.lots_per_pass, None
            for taken in itertools.count() if num_lots is None else range(num_lots):
                if taken % p == 0:
                    first = self.counter.claim(p)
                yield lot(first + taken % p)

        return lots()

    def _padded_rows(self, step: int, size: int) -> Rows:
        """Pads `_rows` to the physical batches of the largest lot, if lots are bounded.

        Then the shape of a lot, and the work on it, do not reveal the number of real rows.
        """
        largest = self.law.max_lot_size
        if largest is None:
            return self._rows(step, size)
        total = -(-largest // size) * size
        count, leaves = self._rows(step, total)
        if count == 0:
            leaves = [padding(spec, total, total) for spec in self._present_specs()]
        return count, leaves

    def supply(self) -> Callable[[int], None]:
        """Returns a function `reserve(count)`, to be called before `count` further lots are used.

        It raises a ValueError if they cannot all be drawn. Sampled lots never end.
        """
        return lambda count: None

    @abc.abstractmethod
    def _rows(self, step: int, multiple: int) -> Rows:
        """Returns the size n of lot `step`, and its rows padded to a multiple of `multiple`.

        One array per leaf of `element_spec` that is not None.
        """

    def _present_specs(self) -> list[tf.TensorSpec]:
        return [spec for spec in keras.tree.flatten(self.element_spec) if spec is not None]

    def __repr__(self):
        return (
            f"{type(self).__name__}(num_examples={self.num_examples}, "
            f"expected_size={self.expected_size}, step={self.step}, seed={self.seed})"
        )
