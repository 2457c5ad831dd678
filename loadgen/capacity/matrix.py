"""A sweep of two settings: every load at every value of another setting, and which points are measured already."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.capacity.point_load import Point
from loadgen.config.bench_config import BenchConfig
from loadgen.errors import UsageError
from loadgen.target.open_target import server_command
from reports.run_store import RunDirectoryError, load_manifest, read_json, write_json

LOADS = ("concurrency", "rate")
OF_SERVER = "server."
PLAN_FILE = "plan.json"
# A run that a signal ended is measured again.
INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class MatrixPoint:
    """One point of a matrix: a load at a value of the other setting."""

    setting: str
    value: str
    point: Point

    @property
    def name(self) -> str:
        """The directory of the run, `input_tokens-128/concurrency-4`; of a long value its digest."""
        short = self.value if self.value.replace(".", "").isalnum() else hashlib.sha256(self.value.encode()).hexdigest()
        return f"{self.setting}-{short[:16]}/{self.point.name}"

    def load(self, series: BenchConfig) -> BenchConfig:
        """The series' load with the value of the setting, or with a server that has it. Raises ValueError."""
        if self.setting.startswith(OF_SERVER):
            flag = "--" + self.setting.removeprefix(OF_SERVER).replace("_", "-")
            command = shlex.join([*(server_command(series) or ()), flag, self.value])
            return BenchConfig.model_validate(series.model_dump() | {"server": command})
        return BenchConfig.model_validate(series.model_dump() | {self.setting: self.value})


@dataclass(frozen=True, slots=True)
class Matrix:
    """The loads, ascending, and the values of the other setting in their given order."""

    quantity: str
    loads: Sequence[float]
    setting: str
    values: Sequence[str]

    @property
    def is_of_server(self) -> bool:
        """Whether the other setting is one of the server, which is launched for each value."""
        return self.setting.startswith(OF_SERVER)

    def cells(self, needed: int) -> Iterator[MatrixPoint]:
        """Every point, the loads of the first value first."""
        for value in self.values:
            for load in self.loads:
                yield MatrixPoint(self.setting, value, Point(self.quantity, load, needed=needed))

    def plan(self, load: BenchConfig) -> dict[str, Any]:
        """Everything that the points of a directory have in common; equal plans may share a directory."""
        target = {name: getattr(load, name) for name in ("url", "server", "model_id", "model", "replicas")}
        return {
            "load": load.load_description(),
            "target": json.loads(json.dumps(target)),
            "quantity": self.quantity,
            "loads": list(self.loads),
            "setting": self.setting,
            "values": list(self.values),
        }


def parse_settings(texts: Sequence[str]) -> tuple[tuple[str, str], tuple[str, str]]:
    """The two settings of `--points NAME=LIST` with their lists, the load first. Raises UsageError.

    >>> parse_settings(["input_tokens=128,1024", "concurrency=1..64"])
    (('concurrency', '1..64'), ('input_tokens', '128,1024'))
    """
    pairs = []
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        is_known = name in BenchConfig.model_fields or re.fullmatch(r"server\.[a-z][a-z0-9_]*", name)
        if not equals or not is_known or not values:
            raise UsageError(
                f"`points` is {text!r}: with several, each is SETTING=LIST, as in input_tokens=128,1024 or, of a "
                "server that is launched for each value, server.speculate=0,4"
            )
        pairs.append((name, values))
    if len(pairs) != 2 or sum(name in LOADS for name, _ in pairs) != 1:
        raise UsageError(
            f"`points` names {', '.join(name for name, _ in pairs)}: give {' or '.join(LOADS)} and one other setting"
        )
    first, second = pairs
    return (first, second) if first[0] in LOADS else (second, first)


def split_load(text: str) -> tuple[str | None, str]:
    """The load setting that one `--points` names, and its list; None for a list alone, and for another setting.

    >>> split_load("concurrency=1,4"), split_load("1..64"), split_load("input_tokens=8,16")
    (('concurrency', '1,4'), (None, '1..64'), (None, 'input_tokens=8,16'))
    """
    name, _, values = text.partition("=")
    return (name.strip(), values) if name.strip() in LOADS else (None, text)


def parse_values(setting: str, text: str) -> list[str]:
    """The values of a setting: separated by commas, or by semicolons where a value has commas. Raises UsageError.

    >>> parse_values("input_tokens", "uniform:8,16;512")
    ['uniform:8,16', '512']
    """
    values = [value.strip() for value in text.split(";" if ";" in text else ",")]
    if len(values) < 2 or len(set(values)) < len(values) or not all(values):
        raise UsageError(f"`points` is {setting}={text}: give at least two different values")
    return values


def claim(out: Path, plan: dict[str, Any]) -> bool:
    """Store the plan of a directory. Returns whether it was there before; raises UsageError if it holds another."""
    path = out / PLAN_FILE
    if not path.exists():
        write_json(path, plan)
        return False
    if read_json(path) != plan:
        raise UsageError(f"{out} holds the points of another sweep; choose another --out or repeat its command")
    return True


def is_measured(directory: Path) -> bool:
    """Whether a directory holds a run that ended in order."""
    try:
        manifest = load_manifest(directory)
    except RunDirectoryError:
        return False
    return manifest.stop_reason not in (None, INTERRUPTED) and (directory / "requests.parquet").exists()
