"""The ledger's file format: versioned JSON with a checksum, written whole or not at all.

The checksum tells damage and careless edits from a ledger; it is no signature, whoever can write
the file can also write a matching checksum.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

_FORMAT = "tf_adadp.PrivacyLedger"
_VERSION = 1


def format_document(content: Mapping[str, Any]) -> str:
    """Returns ledger content ("history_lost" and "entries") as a checksummed JSON document."""
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "sha256": _checksum(content),
        "ledger": content,
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def parse_document(text: str) -> Mapping[str, Any]:
    """Returns the content that `format_document` wrote.

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
    if version != _VERSION:
        raise ValueError(
            f"its version is {version!r}, this tf_adadp reads version {_VERSION}; "
            "it was written by a newer release, or edited."
        )
    content = document.get("ledger")
    if not isinstance(content, dict) or set(content) != {"history_lost", "entries"}:
        raise ValueError("its content is incomplete.")
    if not all(isinstance(content[name], list) for name in content):
        raise ValueError("its content is malformed.")
    try:
        checksum = _checksum(content)
    except ValueError as error:
        raise ValueError("its content holds a number that is not finite.") from error
    if checksum != document.get("sha256"):
        raise ValueError("its content does not match its checksum; it was edited or damaged.")
    return content


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Replaces the file at `path` by `text`: a reader, or a crash, sees the old file or the new."""
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a directory cannot be synced everywhere
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()
