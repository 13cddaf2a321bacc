"""Stores records column by column: in memory, or in a folder that later runs open again."""

import contextlib
import io
import json
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from tf_adadp.accounting.files.atomic import write_atomically
from tf_adadp.accounting.files.lock import lock_if_possible

try:
    import resource
except ImportError:  # Windows
    resource = None

_FORMAT = "tf_adadp.records"
_VERSION = 1
_ON_DISK = "Keep them on disk: PoissonLots.from_dataset(dataset, ..., cache_dir=<a folder>)."
_COMMIT_BYTES = 2**26  # an interrupted read repeats at most so much


class Columns:
    """Arrays that grow by batches of rows, in memory.

    Args:
        names, dtypes: of the columns.
        limit: the largest size of the arrays, in bytes.
        fix: advice for the error if they would be larger.
    """

    def __init__(
        self,
        names: Sequence[str],
        dtypes: Sequence[np.dtype],
        limit: int | None = None,
        fix: str = _ON_DISK,
    ):
        self._dtypes = dtypes
        self._fix = fix
        self._limit = memory_limit() if limit is None else limit
        self._arrays: list[np.ndarray] | None = None
        self._rows = 0

    def append(self, leaves: Sequence[np.ndarray]) -> None:
        """Adds one batch of rows to each column.

        Raises:
            ValueError: the columns would take more memory than there is.
        """
        first, rows = self._rows, self._rows + len(leaves[0])
        if self._arrays is None:
            self._arrays = [
                np.empty((0, *leaf.shape[1:]), dtype)
                for leaf, dtype in zip(leaves, self._dtypes, strict=True)
            ]
        if rows > len(self._arrays[0]):
            size = max(rows, len(self._arrays[0]) * 5 // 4)
            row_bytes = sum(a.itemsize * int(np.prod(a.shape[1:])) for a in self._arrays)
            if rows * row_bytes > self._limit:
                raise ValueError(
                    f"The first {rows:,} records take {rows * row_bytes:,} bytes, and "
                    f"this process may keep {self._limit:,} in memory. {self._fix}"
                )
            size = min(size, max(rows, self._limit // max(row_bytes, 1)))
            for array in self._arrays:
                array.resize((size, *array.shape[1:]), refcheck=False)  # no second copy
        for array, leaf in zip(self._arrays, leaves, strict=True):
            array[first:rows] = leaf
        self._rows = rows

    def finish(self) -> list[np.ndarray]:
        """Returns the arrays, cut to their rows."""
        for array in self._arrays or ():
            array.resize((self._rows, *array.shape[1:]), refcheck=False)
        return self._arrays or []


class FolderColumns:
    """Arrays that grow by batches of rows, each in a NumPy file of a folder.

    `records.json` has the number of complete rows; it is written after them. The columns, and
    the folder where it is made here, are readable by their owner alone, since they hold the
    records.

    Args:
        folder: its path; it is made where it does not exist.
        names, dtypes: of the columns.
        elements: how many elements the dataset has, below 0 where that is not known.

    Raises:
        ValueError: the folder holds something else, other columns, or damaged files; strings.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        names: Sequence[str],
        dtypes: Sequence[np.dtype],
        elements: int,
    ):
        for name, dtype in zip(names, dtypes, strict=True):
            if np.dtype(dtype).hasobject:
                raise ValueError(
                    f"{name} holds strings, which cache_dir={os.fspath(folder)!r} cannot keep. "
                    "Encode them in the pipeline, e.g. with keras.layers.StringLookup or a "
                    "tokenizer, or leave cache_dir out."
                )
        self._folder = pathlib.Path(folder).expanduser()
        if self._folder.is_file():
            raise ValueError(f"cache_dir={os.fspath(folder)!r} is a file: give a folder.")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._elements = elements
        self._names, self._dtypes = list(names), [np.dtype(d) for d in dtypes]
        self._files = None
        self._lock = contextlib.nullcontext()
        self._uncommitted = 0
        self._open()

    def _open(self):
        self._about = self._read_about()
        self.rows: int = self._about["rows"]
        self._shapes = self._about["shapes"]
        if self.rows:
            self._check_files()

    @property
    def complete(self) -> bool:
        """Tells whether all records of the dataset are there."""
        return self._about["complete"]

    def begin(self, ordered: bool) -> None:
        """Opens the files for writing: after their complete rows, or anew where not `ordered`."""
        try:
            self._lock = lock_if_possible(self._folder / "records.json")
        except BlockingIOError as error:
            raise ValueError(
                f"cache_dir={os.fspath(self._folder)!r} is being written by another process. Wait "
                "for it, or give another folder."
            ) from error
        self._open()  # another process may have written it meanwhile
        if self.complete:
            return
        if not ordered:
            self.rows, self._shapes = 0, None
        self._write_about(complete=False)  # before any column is made or cut
        self._uncommitted = 0

    def append(self, leaves: Sequence[np.ndarray]) -> None:
        """Adds one batch of rows to each column."""
        if self._shapes is None:
            self._shapes = [list(leaf.shape[1:]) for leaf in leaves]
        if self._files is None:
            self._files = [self._opened(column) for column in range(len(leaves))]
        for file, leaf, dtype in zip(self._files, leaves, self._dtypes, strict=True):
            rows = np.ascontiguousarray(leaf, dtype)
            file.write(rows.data if rows.size else b"")
            self._uncommitted += rows.nbytes
        self.rows += len(leaves[0])
        if self._uncommitted >= _COMMIT_BYTES:
            self._commit(complete=False)

    def finish(self) -> list[np.ndarray]:
        """Completes the files and returns them as memory-mapped arrays."""
        if not self.complete:
            self._commit(complete=self.rows > 0)
        return self.arrays()

    def close(self) -> None:
        """Closes the files, e.g. after an error, and lets others write them."""
        with self._lock:
            for file in self._files or ():
                file.close()
            self._files = None

    def arrays(self) -> list[np.ndarray]:
        """Returns the complete rows as memory-mapped arrays."""
        if not self.rows:
            return []
        return [self._mapped(column) for column in range(len(self._names))]

    def _mapped(self, column):
        dtype, shape = self._layout(column, self.rows)
        if 0 in shape:  # no bytes to map
            return np.zeros(shape, dtype)
        return np.memmap(self._path(column), dtype, "r", self._header_bytes(column), shape)

    def _header_bytes(self, column):
        return len(_header(*self._layout(column, 0)))

    def _file_bytes(self, column):
        """Returns the size of a column's file with all complete rows."""
        row_bytes = self._dtypes[column].itemsize * int(np.prod(self._shapes[column]))
        return self._header_bytes(column) + self.rows * row_bytes

    def _path(self, column):
        return self._folder / f"{column}.npy"

    def _layout(self, column, rows):
        return self._dtypes[column], (rows, *self._shapes[column])

    def _opened(self, column):
        descriptor = os.open(self._path(column), os.O_RDWR | os.O_CREAT, 0o600)
        file = os.fdopen(descriptor, "r+b")
        file.truncate(self._file_bytes(column))
        file.seek(0, os.SEEK_END)
        return file

    def _commit(self, complete):
        for column, file in enumerate(self._files or ()):
            file.seek(0)
            file.write(_header(*self._layout(column, self.rows)))
            file.seek(0, os.SEEK_END)
            file.flush()
            os.fsync(file.fileno())
        self._write_about(complete)
        self._uncommitted = 0

    def _write_about(self, complete):
        self._about |= {"rows": self.rows, "shapes": self._shapes, "complete": complete}
        path = self._folder / "records.json"
        write_atomically(path, json.dumps(self._about, indent=1) + "\n")

    def _read_about(self):
        columns = [[n, d.str] for n, d in zip(self._names, self._dtypes, strict=True)]
        path = self._folder / "records.json"
        if not path.exists():
            # A crash, or another process that begins, may leave names of ours with a dot.
            if any(path.name[0] != "." for path in self._folder.iterdir()):
                raise ValueError(
                    f"cache_dir={os.fspath(self._folder)!r} holds other files. Give a "
                    "folder of its own, which is made where it does not exist."
                )
            return {
                "format": _FORMAT, "version": _VERSION, "columns": columns,
                "elements": self._elements,
                "rows": 0, "shapes": None, "complete": False,
            }  # fmt: skip
        about = None
        with contextlib.suppress(ValueError):
            about = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(about, dict) or (about.get("format"), about.get("version")) != (
            _FORMAT,
            _VERSION,
        ):
            self._refuse("is damaged, or of another version")
        if about["columns"] != columns:
            self._refuse(f"holds another dataset, with the columns {about['columns']}")
        if about["elements"] != self._elements:
            self._refuse(
                f"holds another dataset, of {about['elements']} elements, and this one has "
                f"{self._elements}"
            )
        return about

    def _check_files(self):
        for column in range(len(self._names)):
            path = self._path(column)
            if not path.exists() or path.stat().st_size < self._file_bytes(column):
                self._refuse(f"is damaged: {path.name} has fewer than {self.rows:,} rows")

    def _refuse(self, why):
        raise ValueError(
            f"cache_dir={os.fspath(self._folder)!r} {why}. Delete the folder to read the dataset "
            "again, or give another one."
        )


def memory_limit() -> int:
    """Returns the number of bytes this process may keep in arrays: half of its memory limit."""
    allowed = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if resource else [2**33]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA) if resource else ():
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            allowed.append(soft)
    with contextlib.suppress(OSError, ValueError):  # of a container; ValueError: "max"
        allowed.append(int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(allowed) // 2


def _header(dtype, shape):
    """Returns the header of a NumPy file; NumPy leaves room in it for any number of rows."""
    header = io.BytesIO()
    described = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()
