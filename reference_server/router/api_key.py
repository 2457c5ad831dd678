"""The API key: the scheme `Bearer` in any case, and the key itself exactly, compared in constant time."""

import hmac

_SCHEME = b"bearer "


class ApiKey:
    """Checks the value of an `Authorization` header. Without a key, no header matches."""

    def __init__(self, key: str | None) -> None:
        self._key = key.encode() if key else None

    @property
    def is_set(self) -> bool:
        return self._key is not None

    def matches(self, authorization: bytes | None) -> bool:
        if self._key is None or authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            return False
        return hmac.compare_digest(authorization[len(_SCHEME) :], self._key)
