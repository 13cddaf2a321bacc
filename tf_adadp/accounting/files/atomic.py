"""Writes files atomically."""

import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Replaces the file at `path` by `text`: a reader, or a crash, sees the old file or the new."""
    with replacing(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
        file.write(text)


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a new name in the folder of `path`; the file written there replaces it atomically.

    The replacement is durable. The file has the suffixes and the mode of `path`. After an exception
    `path` is unchanged; a crash may leave the file of the new name, which starts with a dot.
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
    """Syncs the folder of `path`, if the system can."""
    with contextlib.suppress(OSError):  # a directory cannot be synced everywhere
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
