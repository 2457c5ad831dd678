"""The processes that generate the load of a run, and the addresses of the master and the web UI."""

import dataclasses
import ipaddress
import secrets
from dataclasses import dataclass, field
from typing import Any, Self

from loadgen.config.bench_config import BenchConfig
from loadgen.config.bench_settings import MAX_WORKERS
from loadgen.errors import UsageError

LOOPBACK = "127.0.0.1"
MASTER_PORT = 5_557
WEB_PORT = 8_089
JOIN_KEY_VARIABLE = "TGI_BENCH_JOIN_KEY"


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port; port 0 lets the system choose one."""

    host: str
    port: int

    @classmethod
    def parse(cls, flag: str, text: str, default: "Address") -> "Address":
        """Parse `HOST`, `HOST:PORT`, `:PORT` or an empty text. Raises UsageError.

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


def new_join_key() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Distribution:
    """`count` workers: started here or, with `is_open`, on other machines, from which they connect to `bind`.

    `web` is the address of locust's web UI. `key` is the secret that master and workers share; `is_key_drawn` if it is
    not from the environment, so that the master prints it.
    """

    count: int = 1
    is_open: bool = False
    bind: Address = Address(LOOPBACK, 0)
    web: Address | None = None
    key: str = field(default_factory=new_join_key)
    is_key_drawn: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether one process generates the load, without a master."""
        return self.count == 1 and not self.is_open and self.web is None

    def check(self, config: BenchConfig) -> None:
        """Raises UsageError if `concurrency` or `max_in_flight` is less than the number of workers."""
        if not 1 <= self.count <= MAX_WORKERS:
            raise UsageError(f"the number of workers is {self.count} but must be 1 to {MAX_WORKERS}")
        shared = {"max_in_flight": config.max_in_flight}
        if not config.is_open_loop:
            shared["concurrency"] = config.concurrency
        for name, value in shared.items():
            if value is not None and value < self.count:
                raise UsageError(
                    f"`{name}` is {value} but {self.count} workers share it; it must be at least {self.count}"
                )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        web = value["web"] and Address(**value["web"])
        return cls(**{**value, "bind": Address(**value["bind"]), "web": web})
