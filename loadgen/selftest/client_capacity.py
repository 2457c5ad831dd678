"""The event rate up to which this machine's client is accurate, as `tgi-bench selftest` measured and stored it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadgen.config import parsing
from loadgen.target import machine
from reports.run_store import write_json

CAPACITY_FILE = "capacity.json"


@dataclass(frozen=True, slots=True)
class StoredCapacity:
    """Events per second up to which one worker is accurate."""

    events_per_s: float
    measured_at: str


def machine_key() -> str:
    """The processor and the versions that a capacity holds for."""
    about = machine.describe_machine()
    versions = machine.library_versions()
    parts = (about["cpu"], about["cpu_count"], about["cpus_usable"], versions.get("gevent"), machine.product_version())
    return " | ".join(str(part) for part in parts)


def store_capacity(capacity: StoredCapacity) -> Path:
    """Store a capacity for later runs; returns the file."""
    path = parsing.cache_directory() / CAPACITY_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**_stored(path), machine_key(): asdict(capacity)})
    return path


def stored_capacity() -> float | None:
    """The stored events per second of this machine; None without a self-test."""
    found = _stored(parsing.cache_directory() / CAPACITY_FILE).get(machine_key())
    rate = found.get("events_per_s") if isinstance(found, dict) else None
    return float(rate) if isinstance(rate, int | float) else None


def _stored(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
