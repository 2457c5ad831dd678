"""Which processes make the load of a run, and where they and their watchers meet. Plain values."""

import dataclasses
import ipaddress
from dataclasses import dataclass
from typing import Any, Self

from loadgen.config import MAX_WORKERS, BenchConfig
from loadgen.errors import UsageError

LOOPBACK = "127.0.0.1"
MASTER_PORT = 5_557
WEB_PORT = 8_089


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port; port 0 lets the system choose one."""

    host: str
    port: int

    @classmethod
    def parse(cls, flag: str, text: str, default: "Address") -> "Address":
        """Of `HOST`, `HOST:PORT`, `:PORT` or nothing. Raises UsageError.

        >>> Address.parse("join", "10.0.0.1", Address("127.0.0.1", 5557))
        Address(host='10.0.0.1', port=5557)
        """
        host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
        if not colon:
            host, port = text, ""
        host = host.strip("[]")
        if (port and not (port.isdigit() and int(port) < 65_536)) or any(sign in host for sign in "/@ "):
            raise UsageError(f"`{flag}` is {text!r}, not HOST or HOST:PORT")
        return cls(host or default.host, int(port) if port else default.port)

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Distribution:
    """`count` workers: started here, or where `is_open`, joined from anywhere at `bind`. `web` has locust's page.

    `key` is what a joining worker must know.
    """

    count: int = 1
    is_open: bool = False
    bind: Address = Address(LOOPBACK, 0)
    web: Address | None = None
    key: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether one process makes the load without a master."""
        return self.count == 1 and not self.is_open and self.web is None

    def check(self, config: BenchConfig) -> None:
        """Raises UsageError where there is less to share than there are workers."""
        if not 1 <= self.count <= MAX_WORKERS:
            raise UsageError(f"a load is made by 1 to {MAX_WORKERS} workers, not {self.count}")
        shared = {"max_in_flight": config.max_in_flight}
        if not config.is_open_loop:
            shared["concurrency"] = config.concurrency
        for name, value in shared.items():
            if value is not None and value < self.count:
                raise UsageError(f"`{name}` is {value} but there are {self.count} workers to share it")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        web = value["web"] and Address(**value["web"])
        return cls(**{**value, "bind": Address(**value["bind"]), "web": web})
