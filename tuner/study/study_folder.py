"""The folder of a study: its identity, results, noise floor and notes. Every write is atomic."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from reports.run_store import links_in, replace_file
from tuner.errors import StudyError
from tuner.study.identity import BUILD, DEVICE, LOAD, SPACE
from tuner.study.statistics.noise_floor import NoiseFloor
from tuner.trial.outcome import TrialResult, read_result

STUDY_FILE = "study.json"
NOISE_FILE = "noise.json"
NOTES_FILE = "notes.json"
LOAD_FILE = "load.toml"
LOCK_FILE = "run.lock"
TRIALS, NOISE, DRIFT_CHECKS, CONFIRM = "trials", "noise", "drift_checks", "confirm"
# The constant parts of a study's identity, with their names in messages.
CONSTANT = {SPACE: "space", LOAD: "load", BUILD: "server build", DEVICE: "device class"}


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """Reads and writes one folder under studies/."""

    path: Path

    def claim(self, identity: Mapping[str, str], *, is_leader: bool = True, is_mixed: bool = False) -> None:
        """Create the folder for a study, or check that it belongs to this study.

        Changed ranges are accepted, and earlier trials remain. Raises StudyError with the other differing parts.
        """
        known = self.identity()
        differing = [name for key, name in CONSTANT.items() if known and known.get(key) != identity[key]]
        if differing and not (is_mixed and CONSTANT[SPACE] not in differing):
            raise StudyError(
                f"{self.path} has a study with another {' and '.join(differing)}: use another --study, or remove it"
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.path / TRIALS).mkdir(exist_ok=True)
        if known != identity and is_leader:
            self.update(STUDY_FILE, {"identity": dict(identity)})

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the study for one `tgi-tune run`. Raises StudyError with the process that has the lock, or for links."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        links = links_in(self.path)
        if links:
            raise StudyError(
                f"{self.path} contains links ({', '.join(links)}): a study does not write through them; remove them"
            )
        path = self.path / LOCK_FILE
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            holder = path.read_text() or "?"
            raise StudyError(f"process {holder} is searching {self.path}: join it with `tgi-tune worker`") from None
        try:
            path.write_text(str(os.getpid()))
            yield
        finally:
            lock.release()

    def identity(self) -> dict[str, str]:
        """The stored identity; empty for a new folder."""
        found = self.read(STUDY_FILE).get("identity", {})
        return {str(name): str(value) for name, value in found.items()}

    def results(self, kind: str) -> list[TrialResult]:
        """Every result of a kind, by number."""
        directories = sorted((self.path / kind).glob("[0-9]*"))
        return [result for directory in directories if (result := read_result(directory)) is not None]

    def alike(self) -> list[TrialResult]:
        """Measured results of other studies in the same parent folder with the same load, build and device."""
        own = self.identity()
        found = []
        for other in sorted(self.path.parent.glob(f"*/{STUDY_FILE}")):
            files = StudyFolder(other.parent)
            identity = files.identity()
            if other.parent == self.path or any(identity.get(key) != own.get(key) for key in (LOAD, BUILD, DEVICE)):
                continue
            measured = [each for each in files.results(TRIALS) if each.was_launched and each.outcome == "measured"]
            found += [replace(each, attributes={"from": other.parent.name}) for each in measured]
        return found

    def noise(self) -> NoiseFloor | None:
        content = self.read(NOISE_FILE)
        return NoiseFloor(**content) if content else None

    def deviation(self, metric: str) -> float | None:
        """The run-to-run deviation of ln(metric); None if noise was not measured."""
        floor = self.noise()
        return floor.of(metric) if floor is not None else None

    def write_noise(self, floor: NoiseFloor) -> None:
        write_json(self.path / NOISE_FILE, dataclasses.asdict(floor))

    def note(self, name: str, value: Any) -> None:
        """Store a sentence for the report."""
        self.update(NOTES_FILE, {name: value})

    def notes(self) -> dict[str, Any]:
        return self.read(NOTES_FILE)

    def read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not path.exists():
            return {}
        try:
            content = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise StudyError(f"{path}: not JSON ({error})") from None
        return content if isinstance(content, dict) else {}

    def update(self, name: str, values: Mapping[str, Any]) -> None:
        write_json(self.path / name, {**self.read(name), **values})


def write_json(path: Path, content: Any) -> None:
    replace_text(path, json.dumps(content, indent=2, default=str) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())
