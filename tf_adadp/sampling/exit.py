"""Lots that are drawn ahead, in threads of TensorFlow's, when the process ends."""

import atexit
import contextlib
import gc
import threading
import weakref

_PATIENCE = 10  # seconds
_ending = threading.Event()
_drawing = weakref.WeakSet()  # of the locks of all iterations over lots


def drawing_lock():
    """A lock for one iteration, to be held while it draws; see `until_exit`."""
    lock = threading.Lock()
    _drawing.add(lock)
    return lock


@contextlib.contextmanager
def until_exit(lock):
    """Yields whether another lot may be drawn: not once the process is ending.

    A thread of TensorFlow's that is inside of Python while the interpreter is taken down never
    comes back, and TensorFlow would wait for it without end.
    """
    with lock:
        yield not _ending.is_set()


@atexit.register
def _end():
    _ending.set()
    for lock in list(_drawing):
        # What is being drawn is drawn to its end; in a forked process nobody is there to do so.
        if lock.acquire(timeout=_PATIENCE):
            lock.release()
    gc.collect()  # iterators that training left in the middle, while Python can still end them
