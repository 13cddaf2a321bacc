"""Writes the files of a model whole or not at all, and refuses damaged ones."""

import contextlib
import os
import zipfile
from collections.abc import Iterator

import h5py

from tf_adadp.accounting.files.atomic import replacing
from tf_adadp.utils.keras_compat import saves_legacy_format


@contextlib.contextmanager
def whole_file(
    path: str | os.PathLike, overwrite: bool = True, single: bool = True
) -> Iterator[str | os.PathLike]:
    """Yields where to write so that the file at `path` is replaced at once, and durably.

    That is `path` itself if it is not a single local `.weights.h5` or `.keras` file: sharded,
    remote, a folder, or one that the user is to be asked about (`overwrite=False`).
    """
    name = os.fspath(path)
    known = name.endswith((".weights.h5", ".keras")) and not _is_remote(name)
    known = known and os.path.isdir(os.path.dirname(name) or ".") and not os.path.isdir(name)
    if not single or not known or (os.path.exists(name) and not overwrite):
        yield path
        return
    with replacing(name) as temporary:
        yield temporary


def check_whole(path: str | os.PathLike) -> None:
    """Refuses a damaged local file before anything of it is loaded.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is not a whole `.h5` or `.keras` file.
    """
    name = os.fspath(path)
    if _is_remote(name) or not name.endswith((".h5", ".keras")):
        return
    if not os.path.exists(name):
        raise FileNotFoundError(f"{name}: there is no such file. Nothing was loaded.")
    try:
        if name.endswith(".h5"):
            h5py.File(name, "r").close()
        else:
            zipfile.ZipFile(name).close()
    except (OSError, zipfile.BadZipFile) as error:
        raise OSError(
            f"{name} is damaged, or its writing was cut short ({error}). Nothing was loaded. Load "
            "an earlier file; or delete this one, and what a BackupAndRestore has beside it, to "
            "start anew. The ledger file of a PrivacyCallback still has what was spent."
        ) from error


def refuse_legacy_format(filepath: str | os.PathLike = "") -> None:
    """Refuses Keras's HDF5 format for whole models, which has no place for a ledger.

    Called where a model is saved, and where Keras reads or writes its configuration, which it does
    for this format in a scope of its own. So no way of reading or writing it gets past this check.

    Raises:
        ValueError: for a file of that format, or in that scope.
    """
    in_scope = saves_legacy_format()
    if in_scope or os.fspath(filepath).endswith((".h5", ".hdf5")):
        raise ValueError(
            "A DPModel in Keras's legacy .h5 format would lose its ledger, and with it what its "
            'weights cost. Use `model.save("….keras")` or `model.save_weights("….weights.h5")`; '
            'the plain model may be saved in any format, `model.model.save("….h5")`.'
        )


def _is_remote(name):
    return "://" in name
