"""Counts the releases from each lot: one charge pays for one release from one lot."""

import collections
import threading
import weakref
import zlib

import numpy as np
import tensorflow as tf

_REMEMBERED_BYTES = 16 * 2**20  # of masks, which are kept so that no other lot gets their place
_SAMPLED_BYTES = 2**14
_of_ledgers = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def when_run(function, lot):
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
    """The lots that releases were made from, for one ledger, and what each was charged for.

    Two releases from one Poisson lot share its sampling, so they cost one release of multiplier
    σ*/√2, which is more than two releases from two lots. A lot therefore allows as many releases as
    one charge of it paid for: one, or the `releases_per_lot` of `DPOptimizer.charge`. Under a law
    whose lots hold every record nothing is amplified, and every charge allows a release from any
    lot.

    A lot is known by the memory that its tensors are in. The mask of a lot is kept, so that its
    place stays taken: 16 MiB of masks, of the lots used last. A lot of no rows has no place in
    memory, and is not known again.
    """

    def __init__(self):
        self._lots = collections.OrderedDict()  # key: [mask, references, releases left]
        self._bytes = 0
        self._tickets = collections.deque()  # of charges that pay for several releases from a lot
        self._again = 0  # charges of full batches: each allows one release from any lot

    @classmethod
    def of(cls, ledger):
        """Returns the releases of a ledger; the same object for the same ledger."""
        with _lock:
            if ledger not in _of_ledgers:
                _of_ledgers[ledger] = cls()
            return _of_ledgers[ledger]

    def pay(self, law, lots, releases_per_lot):
        """Records a charge of `lots` lots drawn by `law`, with so many releases from each."""
        with _lock:
            if law.full_batch:
                self._again += lots * releases_per_lot
            elif releases_per_lot > 1:
                self._tickets.extend([releases_per_lot] * lots)

    def claim(self, lot, full_batch=False):
        """Takes one release from a lot, before it is made.

        Args:
            lot: `((x, y, sample_weight), mask)` of eager tensors.
            full_batch: whether the release is charged under a law whose lots hold every record.

        Returns:
            Whether the lot had a release before, which a charge of several releases paid for.

        Raises:
            ValueError: every release that the lot was charged for was made.
        """
        _, mask = lot
        if 0 in mask.shape:
            return False
        key, references = _place(lot)
        with _lock:
            known = self._lots.get(key)
            if known is None or any(r() is None for r in known[1]):
                left = self._tickets.popleft() if self._tickets and not full_batch else 1
                self._remember(key, [mask, references, left - 1])
                return False
            if full_batch:
                return False
            if known[2] > 0:
                known[2] -= 1
                return True
            if self._again > 0:
                self._again -= 1
                return False
        raise ValueError(
            "lot: this lot had a release already, and one charge pays for one release from one "
            "lot. Several releases from a lot share its sampling and cost more than releases from "
            "as many lots. Draw a new lot for every release; or charge K releases from each lot "
            "together, `optimizer.charge(ledger, law, releases_per_lot=K)`, and make them with "
            "`clipped_sum` and `apply_private`."
        )

    def _remember(self, key, entry):
        self._bytes += _size(entry[0]) - _size(self._lots.pop(key, [None])[0])
        self._lots[key] = entry
        while self._bytes > _REMEMBERED_BYTES and len(self._lots) > 1:
            _, (mask, *_) = self._lots.popitem(last=False)
            self._bytes -= _size(mask)

    def __reduce__(self):
        return LotReleases, ()  # copies release from lots of their own


def _size(tensor):
    return 0 if tensor is None else 4 * int(np.prod(tensor.shape))


def _place(lot):
    """Returns a hashable key of where a lot's tensors are, and weak references that it holds for.

    Besides their addresses the key has a checksum of some of their bytes: a mask that serves many
    lots can meet different records in one place.
    """
    key, references = [], []
    for tensor in tf.nest.flatten(lot):
        if tensor is None or tensor.dtype == tf.string:
            continue
        if "CPU" not in getattr(tensor, "device", "CPU"):
            key.append(id(tensor))
            references.append(weakref.ref(tensor))
            continue
        try:
            rows = np.asarray(memoryview(tensor))
        except (TypeError, ValueError, BufferError, RuntimeError):  # a type that NumPy has not
            continue
        some = rows.reshape(-1).view(np.uint8)
        some = some[:: 1 + some.size // _SAMPLED_BYTES].tobytes()
        key.append((rows.__array_interface__["data"][0], zlib.crc32(some)))
    return tuple(key), references
