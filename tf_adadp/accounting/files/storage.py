"""The ledger's file: versioned JSON with a checksum, written whole or not at all, by one process.

The checksum tells damage and careless edits from a ledger; it is no signature, whoever can write
the file can also write a matching checksum.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import platform
import shutil
import uuid
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from tf_adadp.utils import process as _process

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_FORMAT = "tf_adadp.PrivacyLedger"
_VERSION = 2
_CONTENT = {
    1: {"history_lost", "entries"},
    2: {"history_lost", "entries", "dataset", "budgets", "readings", "plan"},
}
_OPTIONAL = {"not_covered"}  # written where there is any
_LISTS = {"history_lost", "entries", "budgets", "readings", "not_covered"}


def format_document(content: Mapping[str, Any]) -> str:
    """Returns ledger content (a mapping of `_CONTENT`'s names) as a checksummed JSON document."""
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "sha256": checksum_of(content),
        "ledger": content,
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def parse_document(text: str) -> Mapping[str, Any]:
    """Returns the content that `format_document` wrote, now or in an earlier version.

    Raises:
      ValueError: the text is truncated, edited, of a newer version, or no ledger at all.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is truncated or no JSON ({error}).") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(f'its "format" is not "{_FORMAT}".')
    version = document.get("version")
    if version not in _CONTENT or isinstance(version, bool):
        raise ValueError(
            f"its version is {version!r}, this tf_adadp reads versions 1 to {_VERSION}; "
            "it was written by a newer release, or edited."
        )
    content = document.get("ledger")
    if not isinstance(content, dict) or set(content) - _OPTIONAL != _CONTENT[version]:
        raise ValueError("its content is incomplete.")
    if not all(isinstance(content[name], list) for name in _LISTS & set(content)):
        raise ValueError("its content is malformed.")
    try:
        checksum = checksum_of(content)
    except ValueError as error:
        raise ValueError("its content holds a number that is not finite.") from error
    if checksum != document.get("sha256"):
        raise ValueError("its content does not match its checksum; it was edited or damaged.")
    return content


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Replaces the file at `path` by `text`: a reader, or a crash, sees the old file or the new."""
    with replacing(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
        file.write(text)


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a new name beside `path`; the file written there replaces `path`, at once and durably.

    It has the suffixes of `path`, and gets its mode. After an exception `path` is as it was; a
    crash may leave the other name, which starts with a dot.
    """
    path = pathlib.Path(path).resolve()  # of a link, the file that it leads to
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp.{path.name}")
    try:
        yield temporary
        with contextlib.suppress(FileNotFoundError):  # nothing there yet
            shutil.copymode(path, temporary)
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path)


def sync_folder(path: pathlib.Path) -> None:
    """Makes durable which names there are beside `path`, where the system can."""
    with contextlib.suppress(OSError):  # a directory cannot be synced everywhere
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


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
        real = pathlib.Path(path).resolve()  # a link to the file is no second way in
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
        """Whether this process may write."""
        return self._file is not None and self._process is _process.token()

    def release(self) -> None:
        """Lets others write. Nothing happens where it is not held."""
        if self.held:
            # Removed while held: whoever opened it meanwhile sees that it is not the file there.
            self._path.unlink(missing_ok=True)
        self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


def lock_if_possible(path: str | os.PathLike) -> contextlib.AbstractContextManager:
    """`FileLock(path)`, or nothing on a system without locks: for a single write."""
    return contextlib.nullcontext() if fcntl is None else FileLock(path)


# A child's copy of the open file would hold the lock for as long as the child lives.
_LOCKS: weakref.WeakSet[FileLock] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [lock._forget() for lock in list(_LOCKS)])


def _is_at(file, path: pathlib.Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False


def checksum_of(content: Any) -> str:
    """Returns the SHA-256 of JSON content, whatever the order of its keys.

    Raises:
      ValueError: it holds a number that is not finite.
    """
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()
