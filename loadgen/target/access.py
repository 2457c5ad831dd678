"""How a server admits requests: the headers that they carry, and the check of its certificate."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.config import parsing
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.http.tls import SYSTEM_TLS, TlsSettings


@dataclass(frozen=True, slots=True)
class Access:
    """Headers of every request, and the settings of its TLS connection."""

    headers: Mapping[str, str] = field(default_factory=dict)
    tls: TlsSettings = SYSTEM_TLS

    @classmethod
    def with_key(cls, key: str) -> "Access":
        """Access by a bearer token."""
        return cls({"Authorization": f"Bearer {key}"})

    @classmethod
    def of(cls, config: BenchConfig) -> "Access":
        """The access of a load. Raises UsageError if its key's variable is not set or its CA file cannot be read."""
        key = config.api_key.get_secret_value() if config.api_key else _key_in(config.api_key_env)
        headers = {} if key is None else dict(cls.with_key(key).headers)
        for header in config.header:
            name, _, value = header.get_secret_value().partition("=")
            headers[name] = value
        return cls(headers, TlsSettings(_content(config.ca_file), config.insecure))


NO_ACCESS = Access()


def _key_in(variable: str | None) -> str | None:
    if variable is None:
        return None
    found = parsing.environment(variable)
    if not found:
        raise UsageError(f"`api_key_env` is {variable!r}, but this environment variable is not set or empty")
    return found[variable]


def _content(ca_file: str | None) -> str | None:
    """The certificates of a file, which a worker on another machine may lack. Raises UsageError."""
    if ca_file is None:
        return None
    try:
        return Path(ca_file).read_text(encoding="ascii")
    except OSError as error:
        raise UsageError(f"`ca_file` is {ca_file!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"`ca_file` is {ca_file!r}: not a PEM file") from error
