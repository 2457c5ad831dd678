"""The API keys: the scheme `Bearer` in any case, and a key itself exactly, compared in constant time."""

import hmac
from collections.abc import Sequence
from pathlib import Path

from reference_server.errors import ArgumentError

_SCHEME = b"bearer "


class ApiKeys:
    """Checks the value of an `Authorization` header. Without a key, no header matches."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys if key]

    @property
    def is_set(self) -> bool:
        return bool(self._keys)

    def match(self, authorization: bytes | None) -> int | None:
        """The number of the key in the header; None if the header has no valid key. Compares with every key."""
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        given = authorization[len(_SCHEME) :]
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return matches.index(True) if any(matches) else None


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file: one on each line; empty lines and comments (`#`) are left out. Raises `ArgumentError`."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ArgumentError(f"cannot read `api_key_file` {path}: {reason}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ArgumentError(f"`api_key_file` {path} has no key: write one on each line")
    return keys
