"""A study's folder: whose it is, what it has measured, and what it knows of its noise. Every write is atomic."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.errors import StudyError
from tuner.identity import BUILD, DEVICE, LOAD, SPACE
from tuner.noise import NoiseFloor
from tuner.outcome import TrialResult, read_result

STUDY_FILE = "study.json"
NOISE_FILE = "noise.json"
NOTES_FILE = "notes.json"
TRIALS, NOISE, ANCHORS, CONFIRM = "trials", "noise", "anchors", "confirm"
# What may not differ between the trials of a study, and how it is called where it does.
WHAT = {SPACE: "space", LOAD: "load", BUILD: "server build", DEVICE: "device class"}


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """Reads and writes one folder under studies/."""

    path: Path

    def claim(self, identity: Mapping[str, str], *, is_leader: bool = True, is_mixed: bool = False) -> None:
        """Make it a study's folder, or check that it is that study's.

        Ranges may have become wider or narrower: trials of the old ones stay as evidence where they fit. Raises
        StudyError naming what differs otherwise.
        """
        known = self.identity()
        differing = [name for key, name in WHAT.items() if known and known.get(key) != identity[key]]
        if differing and not (is_mixed and WHAT[SPACE] not in differing):
            raise StudyError(
                f"{self.path} holds a study of another {' and '.join(differing)}; give another --study, or remove it"
            )
        (self.path / TRIALS).mkdir(parents=True, exist_ok=True)
        if known != identity and is_leader:
            self.update(STUDY_FILE, {"identity": dict(identity)})

    def identity(self) -> dict[str, str]:
        """The digests of what it holds; empty for a new folder."""
        found = self.read(STUDY_FILE).get("identity", {})
        return {str(name): str(value) for name, value in found.items()}

    def results(self, kind: str) -> list[TrialResult]:
        """Every result of a kind, by number."""
        directories = sorted((self.path / kind).glob("[0-9]*"))
        return [result for directory in directories if (result := read_result(directory)) is not None]

    def alike(self) -> list[TrialResult]:
        """What other studies beside this one have measured under the same load, with the same build and device."""
        mine = self.identity()
        found = []
        for other in sorted(self.path.parent.glob(f"*/{STUDY_FILE}")):
            theirs = StudyFolder(other.parent)
            identity = theirs.identity()
            if other.parent == self.path or any(identity.get(key) != mine.get(key) for key in (LOAD, BUILD, DEVICE)):
                continue
            measured = [each for each in theirs.results(TRIALS) if each.was_launched and each.outcome == "measured"]
            found += [replace(each, attributes={"from": other.parent.name}) for each in measured]
        return found

    def noise(self) -> NoiseFloor | None:
        content = self.read(NOISE_FILE)
        return NoiseFloor(**content) if content else None

    def write_noise(self, floor: NoiseFloor) -> None:
        write_json(self.path / NOISE_FILE, dataclasses.asdict(floor))

    def note(self, name: str, value: Any) -> None:
        """Keep something the report has to say."""
        self.update(NOTES_FILE, {name: value})

    def notes(self) -> dict[str, Any]:
        return self.read(NOTES_FILE)

    def read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not path.exists():
            return {}
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}

    def update(self, name: str, values: Mapping[str, Any]) -> None:
        write_json(self.path / name, {**self.read(name), **values})


def write_json(path: Path, content: Any) -> None:
    replace_text(path, json.dumps(content, indent=2, default=str) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
