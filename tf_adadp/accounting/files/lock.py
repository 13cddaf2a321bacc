"""The lock on a ledger's file: one writer at a time."""

import contextlib
import errno
import os
import pathlib
import platform
import weakref

from tf_adadp.utils import process as _process

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class FileLock:
    """The right to write a ledger's file: one holder at a time, among and within processes.

    An advisory lock (POSIX `flock`) on the file `.<name>.lock` beside the ledger. It dies with its
    process, also under SIGKILL; a lock file that such a process left behind is no obstacle. A child
    of `os.fork` does not hold it. On network file systems it is as good as their `flock`, which may
    not reach from one machine to another.

    Raises:
      BlockingIOError: another run holds the lock; the message names file and holder.
      OSError: the lock file cannot be made; or this system has no `flock` (Windows).
    """

    def __init__(self, path: str | os.PathLike):
        if fcntl is None:
            raise OSError(
                errno.ENOSYS,
                "this system has no flock, so nothing would keep two runs from writing one ledger. "
                "Leave ledger_path out, and call ledger.save(path) yourself",
                os.fspath(path),
            )
        real = pathlib.Path(path).resolve()  # a link has the same lock
        self._path = real.with_name(f".{real.name}.lock")
        self._process = _process.token()
        self._file = None
        while self._file is None:
            file = open(self._path, "a+b", buffering=0)  # noqa: SIM115 (open while it is locked)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                with file:
                    file.seek(0)
                    holder = file.read(200).decode(errors="replace") or "an unknown process"
                raise BlockingIOError(
                    errno.EAGAIN,
                    f"this privacy ledger is in use by another run ({holder}), and two writers "
                    "would lose releases. Wait for it; or give another ledger_path, and merge the "
                    "ledgers afterwards",
                    os.fspath(path),
                ) from error
            if _is_at(file, self._path):
                self._file = file
            else:  # its holder removed it between our opening and our locking
                file.close()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {platform.node()}".encode())
        _LOCKS.add(self)

    @property
    def held(self) -> bool:
        """Tells whether this process may write."""
        return self._file is not None and self._process is _process.token()

    def release(self) -> None:
        """Lets others write. Nothing happens where it is not held."""
        if self.held:
            # Removed while held: a process that opened it meanwhile finds another file there.
            self._path.unlink(missing_ok=True)
        self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_if_possible(path: str | os.PathLike) -> contextlib.AbstractContextManager:
    """Returns `FileLock(path)`, or nothing on a system without locks: for a single write."""
    return contextlib.nullcontext() if fcntl is None else FileLock(path)


# A child's copy of the open file would hold the lock for as long as the child lives.
_LOCKS: weakref.WeakSet[FileLock] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [lock._forget() for lock in list(_LOCKS)])


def _is_at(file, path: pathlib.Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False
