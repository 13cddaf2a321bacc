"""Remembers lots that had a release: one charge covers one release from one lot."""

import collections
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_adadp.accounting import PrivacyLedger, SamplingLaw

_REMEMBERED_BYTES = 64 * 2**20  # of masks that nothing else keeps
_ENTRY_BYTES = 1000  # further memory of one entry
_lock = threading.RLock()
_lots = {}  # address of the mask: _Lot
_kept = collections.OrderedDict()  # the same, those whose mask is kept here
_kept_bytes = 0


def when_run(function: Callable[[tuple], None], lot: tuple) -> list[tf.Operation]:
    """Calls `function(lot)` on eager tensors: now, or whenever the graph that is traced runs.

    Returns:
        In a graph, the operations that do so, for `tf.control_dependencies`; else none. An
        exception of the function is then a `tf.errors.InvalidArgumentError`.
    """
    tensors = [t for t in tf.nest.flatten(lot) if t is not None]
    if not any(tf.is_symbolic_tensor(t) for t in tensors):
        function(lot)
        return []

    def call(*values):
        values = iter(values)
        flat = [None if t is None else next(values) for t in tf.nest.flatten(lot)]
        function(tf.nest.pack_sequence_as(lot, flat))

    return [tf.py_function(call, tensors, [])]


class LotReleases:
    """The releases that one optimizer may make, from the lots it was charged for.

    Two releases from one Poisson lot share its sampling, so they cost one release of multiplier
    σ*/√2, which is more than two releases from two lots. A lot therefore allows as many releases as
    one charge of it paid for: one, or the `releases_per_lot` of `DPOptimizer.charge`. That holds
    for all releases about the same weights or in the same ledger, by whichever optimizer. Under a
    law whose lots hold every record nothing is amplified, and a lot may be used again.

    A lot is identified by the memory of its mask, not by its records: every lot needs a
    mask of its own, as `take`, `as_dataset` and `make_lot` give it. It is known as long as its mask
    is anywhere in memory, and the masks of the last lots are kept (64 MiB, thousands of lots). A
    lot of no rows has no place in memory, and is not known again; nor is one whose mask is copied.
    """

    def __init__(self):
        self._tickets = collections.deque()  # of charges for several releases from a lot
        self._full_batches = 0  # charges under laws whose lots hold every record
        self._left_of_empty = 0
        self._weights = None  # weak references, shared by all claims
        self._ledger = None  # a weak reference to the one charged last
        self._paid = None  # law and releases per lot of that charge, and where it ended

    def position(
        self, ledger: PrivacyLedger, law: SamplingLaw, position: int, releases_per_lot: int
    ) -> int:
        """Returns where in a pass of lots a charge begins.

        That is `position`, or 0, a new pass, where the last charge of that ledger did not end
        there, or had another price: then the pass that it lies in was not paid for.
        """
        if position % law.lots_per_pass == 0:
            return position
        last = None if self._ledger is None else self._ledger()
        goes_on = last is not None and last.is_one_with(ledger)
        return position if goes_on and self._paid == (law, releases_per_lot, position) else 0

    def pay(
        self,
        ledger: PrivacyLedger,
        law: SamplingLaw,
        lots: int,
        position: int,
        releases_per_lot: int,
    ) -> None:
        """Records a charge of `lots` lots drawn by `law`, with so many releases from each."""
        with _lock:
            self._ledger = weakref.ref(ledger)
            self._paid = law, releases_per_lot, position + lots
            if law.full_batch:
                self._full_batches += lots * releases_per_lot
            elif releases_per_lot > 1:
                self._tickets.extend([releases_per_lot] * lots)

    def expire(self) -> None:
        """Forgets charges that no release was made for."""
        with _lock:
            self._tickets.clear()
            self._full_batches = self._left_of_empty = 0

    def claim(
        self,
        lot: tuple,
        variables: Sequence[tf.Variable],
        ledger: PrivacyLedger | None = None,
        full_batch: bool = False,
    ) -> "Claim":
        """Takes one release from a lot, before it is made.

        Args:
            lot: `((x, y, sample_weight), mask)` of eager tensors.
            variables: the weights that the release is about.
            ledger: the ledger that is charged; None for the one that was charged last.
            full_batch: whether it is charged under a law whose lots hold every record.

        Returns:
            A `Claim`.

        Raises:
            ValueError: every release that the lot was charged for was made.
        """
        mask = lot[1]
        with _lock:
            if 0 in mask.shape:
                return self._claim_empty()
            self._left_of_empty = 0
            if self._weights is None:
                self._weights = [weakref.ref(v) for v in variables]
            if ledger is None and self._ledger is not None:
                ledger = self._ledger()
            known = _find(mask)
            used = [c for c in known.claims if c.shares(ledger, variables)]
            if not used:
                if full_batch or self._full_batches:
                    left, full_batch = 0, True
                    self._full_batches = max(0, self._full_batches - 1)
                else:
                    left = (self._tickets.popleft() if self._tickets else 1) - 1
                claim = Claim(known, self, ledger, self._weights, left, full_batch)
                known.claims.append(claim)
                return claim
            if all(c.full_batch for c in used) and (full_batch or self._full_batches):
                self._full_batches = max(0, self._full_batches - 1)
                return Claim()
            own = next((c for c in used if c.owner is self), None)
            if len(used) == 1 and own is not None and own.left > 0:
                own.left -= 1
                return Claim(of_several=True)
        raise ValueError(
            "lot: this lot had a release already, and one charge pays for one release from one "
            "lot. Several releases from a lot share its sampling and cost more than releases from "
            "as many lots. Draw a new lot for every release, with a mask of its own; or charge K "
            "releases from each lot together, `optimizer.charge(ledger, law, releases_per_lot=K)`, "
            "and make them with `clipped_sum` and `apply_private`."
        )

    def _claim_empty(self):
        """Takes a release from an empty lot: one after the other are taken to be from the same."""
        of_several = self._left_of_empty > 0
        if of_several:
            self._left_of_empty -= 1
        elif self._tickets:
            self._left_of_empty = self._tickets.popleft() - 1
        return Claim(of_several=of_several)

    def __reduce__(self):
        return LotReleases, ()  # a copy was charged for nothing


class Claim:
    """One release, or several, that an optimizer took from a lot.

    Attributes:
        of_several: whether a charge of several releases from the lot paid for it, and it is not
            the first of them.
    """

    def __init__(
        self,
        lot: "_Lot | None" = None,
        owner: LotReleases | None = None,
        ledger: PrivacyLedger | None = None,
        weights: Sequence[weakref.ref] = (),
        left: int = 0,
        full_batch: bool = False,
        of_several: bool = False,
    ):
        self.left, self.full_batch, self.of_several = left, full_batch, of_several
        self.owner = owner
        self._lot, self._weights = lot, weights
        self._ledger = None if ledger is None else weakref.ref(ledger)

    def shares(self, ledger: PrivacyLedger | None, variables: Sequence[tf.Variable]) -> bool:
        """Tells whether another release is in the same ledger, or about the same weights."""
        mine = None if self._ledger is None else self._ledger()
        if mine is not None and ledger is not None and mine.is_one_with(ledger):
            return True
        return any(r() is v for r in self._weights for v in variables)

    def undo(self) -> None:
        """Gives the release back: it was not made, and nothing was charged."""
        with _lock:
            if self._lot is not None:
                self._lot.claims.remove(self)


class _Lot:
    """A lot that had a release: its mask, where that is kept, and who took one."""

    def __init__(self, mask, forget):
        self.kept, self.claims = mask, []
        try:
            self.seen = weakref.ref(mask, lambda _: forget(self))
        except TypeError:
            self.seen = lambda: None

    @property
    def alive(self) -> bool:
        """Tells whether the mask is still in its place."""
        return self.kept is not None or self.seen() is not None


def _find(mask):
    """Returns the `_Lot` of a mask, new where it was not seen; the last ones are kept in memory."""
    global _kept_bytes
    key = _address(mask)
    lot = _lots.get(key)
    if lot is None or not lot.alive:

        def forget(lot):
            with _lock:
                if not lot.alive and _lots.get(key) is lot:
                    del _lots[key]

        lot = _lots[key] = _kept[key] = _Lot(mask, forget)
        _kept_bytes += _size(mask)
        while _kept_bytes > _REMEMBERED_BYTES and len(_kept) > 1:
            old, dropped = _kept.popitem(last=False)
            _kept_bytes -= _size(dropped.kept)
            dropped.kept = None
            if not dropped.alive and _lots.get(old) is dropped:
                del _lots[old]
    return lot


def _size(mask):
    return 4 * int(np.prod(mask.shape)) + _ENTRY_BYTES


def _address(mask):
    """Returns a tensor's address in memory, or its object's where it is on another device."""
    if "CPU" not in str(getattr(mask, "device", "cpu")).upper():
        return "object", id(mask)
    return "memory", np.asarray(memoryview(mask)).__array_interface__["data"][0]
