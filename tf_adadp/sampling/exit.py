"""Stops TensorFlow's threads from drawing lots ahead when the process ends."""

import atexit
import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator

_PATIENCE = 10  # seconds
_ending = threading.Event()
_drawing = weakref.WeakSet()  # of the locks of all iterations over lots


def drawing_lock() -> threading.Lock:
    """Returns a lock for one iteration, to be held while it draws; see `until_exit`."""
    lock = threading.Lock()
    _drawing.add(lock)
    return lock


@contextlib.contextmanager
def until_exit(lock: threading.Lock) -> Iterator[bool]:
    """Yields True while lots may be drawn, False once the process is ending.

    A TensorFlow thread that runs Python during interpreter shutdown never returns, and TensorFlow
    would wait for it forever.
    """
    with lock:
        yield not _ending.is_set()


@atexit.register
def _end():
    _ending.set()
    for lock in list(_drawing):
        # Finish the lot that is being drawn; in a forked process no thread is left to do so.
        if lock.acquire(timeout=_PATIENCE):
            lock.release()
    gc.collect()  # iterators that training left in the middle, while Python can still end them
