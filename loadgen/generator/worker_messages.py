"""Messages between the processes of a load.

The command sends a `WorkerPlan` or a `JoinPlan` on stdin and receives lines of JSON on stdout. Master and workers use
two of locust's custom messages, each with a `type`:

worker to master (FROM_WORKER)                   master to worker (TO_WORKER)
  hello     identity: `Hello`                      refused     the reason
  ready     the digests of its workload            plan        the load, the partition, the input files
  pong      the reading of its clock               ping        requests a pong
  warm      each of its users has an answer        start       when the load begins, by the worker's clock
  progress  the numbers of one second              measure     when the warm-up ended in every worker
  rows      finished records, in batches           end_window  when the window ended, by the worker's clock, and why
  starts    when its requests started              drained     no request of the window is left, or the limit passed
  draining  its window has ended: requests left    stop        send nothing more, and the reason
  stopping  it sends nothing more, and the reason  end         all rows have arrived; exit
  done      how its load ended, and its health
  failed    why it cannot make the load
"""

import dataclasses
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from loadgen.config.bench_config import BenchConfig
from loadgen.config.bench_settings import MAX_WORKERS
from loadgen.dialects.dialect import Sampling
from loadgen.generator.distributed.clocks import clock_id
from loadgen.target import machine
from loadgen.workloads.lengths import EMPIRICAL

FROM_WORKER = "tgi_from_worker"
TO_WORKER = "tgi_to_worker"
# Longest text of a hello.
MAX_TEXT = 255
# Incremented whenever the meaning of a message changes.
PROTOCOL = 4
# The command sends these signals to stop a load, or to end its window, after which the load goes on through the drain.
# The worker reports STOP_REQUESTED; the command has the real reason.
STOP_SIGNAL, END_SIGNAL = signal.SIGUSR1, signal.SIGUSR2
STOP_REQUESTED = "server_unhealthy"
FILE_SETTINGS = ("prompts_file", "trace_file", "length_pairs", "schemas_file")
LENGTH_SETTINGS = ("input_tokens", "output_tokens", "turns")


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One load. `config` is a BenchConfig as JSON, without its secrets; `headers` go with every request.

    A worker builds the workload from `config`; the result must have `workload_hash` and `schedule_hash`.
    """

    run_id: str
    directory: str
    parent_pid: int
    url: str
    api: str
    config: dict[str, Any]
    sampling: Sampling
    limits: dict[str, int | None]
    vocabulary: dict[str, Any] | None = None
    answer_tokens: list[int | None] | None = None
    cache: dict[str, int] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    tls: dict[str, Any] = field(default_factory=dict)
    reuses_connections: bool = True
    workload_hash: str | None = None
    schedule_hash: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(
            **{
                **value,
                "sampling": Sampling(
                    **{**value["sampling"], "length_fields": tuple(value["sampling"]["length_fields"])}
                ),
            }
        )


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """The master's address and the join key, from which the keys of the connection are derived.

    `directory` is where the worker writes records; None: it sends them to the master. `index` is set for a worker that
    the master started.
    """

    host: str
    port: int
    parent_pid: int
    key: str = ""
    directory: str | None = None
    index: int | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Hello:
    """Identity of a process: versions that must agree between master and worker, and where it runs."""

    protocol: int
    version: str
    locust: str
    host: str
    pid: int
    clock: str | None
    index: int | None = None

    @classmethod
    def of_this_process(cls, index: int | None = None) -> Self:
        return cls(
            PROTOCOL,
            machine.product_version(),
            version("locust"),
            socket.gethostname(),
            os.getpid(),
            clock_id(),
            index,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self | None:
        """None if a field is missing, of another type, or out of bounds."""
        numbers = [value.get(name) for name in ("protocol", "pid")]
        texts = [value.get(name) for name in ("version", "locust", "host")]
        clock, index = value.get("clock"), value.get("index")
        is_valid = (
            all(_is_number(each) for each in numbers)
            and all(_is_text(each) for each in texts)
            and (clock is None or _is_text(clock))
            and (index is None or (_is_number(index) and index < MAX_WORKERS))
        )
        return cls(**{name: value.get(name) for name in cls.__slots__}) if is_valid else None  # type: ignore[arg-type]

    def mismatch(self, worker: "Hello") -> str | None:
        """Why a worker's version does not fit this master; None if it fits."""
        if worker.protocol != self.protocol:
            return f"the master has protocol {self.protocol} and this worker {worker.protocol}; install one version"
        if worker.version != self.version:
            return f"the master is tgi-bench {self.version} and this worker {worker.version}; install one version"
        if worker.locust.split(".")[:2] != self.locust.split(".")[:2]:
            return f"the master has locust {self.locust} and this worker {worker.locust}; install one version"
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def pack_files(config: BenchConfig) -> dict[str, tuple[str, str, bytes]]:
    """The input files of a load, by setting: the text before the path in its value, the file's name, the content."""
    packed = {}
    for name in (*FILE_SETTINGS, *LENGTH_SETTINGS):
        value = getattr(config, name)
        prefix = f"{EMPIRICAL}:" if name in LENGTH_SETTINGS else ""
        if names_file(name, value):
            path = Path(value.removeprefix(prefix))
            packed[name] = (prefix, path.name, path.read_bytes())
    return packed


def names_file(setting: str, value: str | None) -> bool:
    """Whether the value of a setting is the path of a file.

    >>> names_file("prompts_file", "a.txt"), names_file("input_tokens", "empirical:a.txt"), names_file("turns", "3")
    (True, True, False)
    """
    prefix = f"{EMPIRICAL}:" if setting in LENGTH_SETTINGS else ""
    return setting in (*FILE_SETTINGS, *LENGTH_SETTINGS) and value is not None and str(value).startswith(prefix)


def unpack_files(packed: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Write packed files; returns the settings with their new paths. Raises ValueError for another setting."""
    settings = {}
    for name, (prefix, file_name, content) in packed.items():
        if name not in (*FILE_SETTINGS, *LENGTH_SETTINGS) or Path(file_name).name in ("", ".."):
            raise ValueError(f"the master sent a file for `{name}`, named {file_name!r}")
        path = directory / name / Path(file_name).name
        path.parent.mkdir(mode=0o700)
        path.write_bytes(content)
        settings[name] = f"{prefix}{path}"
    return settings
