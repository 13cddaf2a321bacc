"""Reads and writes the ledger's document: versioned JSON with a checksum.

The checksum detects damage and careless edits. It is not a signature: anyone who can write
the file can also write a matching checksum.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

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


def checksum_of(content: Any) -> str:
    """Returns the SHA-256 of JSON content, for any order of its keys.

    Raises:
      ValueError: it holds a number that is not finite.
    """
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()
