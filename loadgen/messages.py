"""What a master and its workers say to each other: two of locust's custom messages, each carrying a `type`.

worker to master (SAID)                          master to worker (TOLD)
  hello     who it is: `Hello`                     refused   why it may not take part
  ready     the digests of the load it made        plan      the load, its seat, the files it reads
  pong      its clock's reading                    ping      asks for that
  warm      its users have all had an answer       start     when the load begins, by its own clock
  progress  the numbers of a second                measure   when the warm-up was over everywhere
  rows      finished records, in batches           stop      send nothing more, and why
  stopping  it sends nothing more, and why         end       everything has arrived; go
  done      how its load ended, and its health
  failed    why it could not make the load
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Self

from loadgen import machine
from loadgen.clocks import clock_id

SAID = "tgi_said"
TOLD = "tgi_told"
# Raised with every change of what a message means.
PROTOCOL = 1


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a process is: what must agree between master and worker, and where it runs."""

    protocol: int
    version: str
    locust: str
    host: str
    pid: int
    clock: str | None
    key: str
    seat: int | None = None

    @classmethod
    def of_this_process(cls, key: str, seat: int | None = None) -> Self:
        return cls(
            PROTOCOL,
            machine.product_version(),
            version("locust"),
            socket.gethostname(),
            os.getpid(),
            clock_id(),
            key,
            seat,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self | None:
        """None for anything that is no hello of this protocol's shape."""
        try:
            return cls(**{name: value[name] for name in cls.__slots__})
        except KeyError:
            return None

    def mismatch(self, worker: "Hello") -> str | None:
        """Why a worker may not take part in a load of this master's; None when it may."""
        if worker.protocol != self.protocol:
            return f"the master speaks protocol {self.protocol} and this worker {worker.protocol}; install one version"
        if worker.version != self.version:
            return f"the master is tgi-bench {self.version} and this worker {worker.version}; install one version"
        if worker.locust.split(".")[:2] != self.locust.split(".")[:2]:
            return f"the master has locust {self.locust} and this worker {worker.locust}; install one version"
        return None
