"""Keeps the ledger file of a running training: locked, and written before the releases."""

import os
import pathlib

from tf_adadp.accounting.files.atomic import write_atomically
from tf_adadp.accounting.files.lock import FileLock
from tf_adadp.accounting.ledger import PrivacyLedger


class LedgerFile:
    """A ledger file that one training writes, from opening to `close`.

    Guarantee: at any moment, also after SIGKILL or a power cut, the file records what was last
    written, whole. Written ahead, with the releases to come added to `PrivacyLedger.announced`, it
    is never behind what was released, and ahead of it by no more than was announced.

    Nothing but this object writes the file meanwhile (see `lock.FileLock`), and it writes
    nothing over a file that someone changed all the same.

    Args:
      path: the file; need not exist.

    Raises:
      BlockingIOError: another run has it open; the message names file and holder.
      ValueError: the file is not a usable ledger; it is not changed.
      OSError: the file cannot be read, or its lock cannot be made.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = pathlib.Path(path)
        self._lock = FileLock(path)
        try:
            self._seen = self._state()
            self._stored = PrivacyLedger.load(path) if self._seen is not None else PrivacyLedger()
        except BaseException:
            self._lock.release()
            raise

    @property
    def stored(self) -> PrivacyLedger:
        """Returns the ledger that was in the file when it was opened; an empty one if none was."""
        return self._stored

    def write(self, ledger: PrivacyLedger) -> None:
        """Replaces what the file holds, durably: it is on the disk when this returns.

        Raises:
          RuntimeError: after `close`, or in a child of `os.fork`.
          ValueError: someone else changed the file; it is left as it is.
          OSError: the file cannot be written; its old content is still there.
        """
        if not self._lock.held:
            raise RuntimeError(
                f"{self._path}: this process does not hold the ledger's lock; it was closed, or "
                "opened before os.fork. Open it in the process that trains."
            )
        state = self._state()
        if state is not None and state != self._seen:
            raise ValueError(
                f"{self._path} was changed by someone else while a training writes it, and was not "
                "overwritten. Keep to one writer; merge the two ledgers."
            )
        write_atomically(self._path, ledger.to_json())
        self._seen = self._state()

    def close(self) -> None:
        """Lets other runs open the file."""
        self._lock.release()

    def _state(self) -> tuple | None:
        """Returns a mark that distinguishes the file from later ones; None if there is no file."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size
