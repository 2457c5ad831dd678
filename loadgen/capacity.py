"""How many events a second the load generator bears on this machine, as its self-test found and stored it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadgen import machine, settings
from reports.results import write_json

CAPACITY_FILE = "capacity.json"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Events a second that one worker of this machine bears with true times."""

    events_per_s: float
    measured_at: str


def machine_key() -> str:
    """What a capacity belongs to: this processor with these versions."""
    about = machine.describe_machine()
    versions = machine.library_versions()
    parts = (about["cpu"], about["cpu_count"], about["cpus_usable"], versions.get("gevent"), machine.product_version())
    return " | ".join(str(part) for part in parts)


def store(capacity: Capacity) -> Path:
    """Keep a capacity for the runs to come; returns the file."""
    path = settings.cache_directory() / CAPACITY_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**_stored(path), machine_key(): asdict(capacity)})
    return path


def stored_capacity() -> float | None:
    """Events a second that this machine was found to bear; None where no self-test has run."""
    found = _stored(settings.cache_directory() / CAPACITY_FILE).get(machine_key())
    rate = found.get("events_per_s") if isinstance(found, dict) else None
    return float(rate) if isinstance(rate, int | float) else None


def _stored(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
