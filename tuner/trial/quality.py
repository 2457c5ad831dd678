"""The quality guard: compares the answers of a finalist with the answers of the defaults.

It applies to finalists with other weights or K/V type. Both configurations answer fixed prompts at temperature 0. The
guard measures the fraction of equal tokens among the first 64.
"""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.errors import LoadgenError, UsageError
from loadgen.target.launched.launch import split_command
from loadgen.target.target import Target
from tuner.config import QualitySection
from tuner.servers.launch_command import remove_container
from tuner.space.configuration import UNSET
from tuner.trial.device_lock import device_lock
from tuner.trial.evaluate import TrialSetup
from tuner.trial.outcome import TrialResult

ANSWER_TOKENS = 64
JUDGE_TIMEOUT_S = 1800.0
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "To make bread you need flour, water,",
    "The three laws of motion say that",
    "def fibonacci(n):",
    "In the winter of that year the river",
    "A good night's sleep is important because",
    "The committee met on Monday to discuss",
)

Answers = Sequence[Sequence[int | str]]


@dataclass(frozen=True, slots=True)
class QualityGuard:
    """Rejects a finalist whose answers differ too much. `answers`: replaces `answers_of` in tests."""

    section: QualitySection
    setup: TrialSetup
    baseline: TrialResult
    folder: Path
    answers: Callable[[Mapping[str, Any], "QualityGuard", Path], Answers] | None = None

    @property
    def why_off(self) -> str | None:
        """The reason why the guard is off; None if it is on."""
        return self.setup.server.why_not_comparable(self.baseline.settings) if self.section.command is None else None

    def __call__(self, finalist: TrialResult) -> str | None:
        """The reason to reject a finalist, or None."""
        differing = [
            name for name in self.setup.server.guarded if _plain(finalist, name) != _plain(self.baseline, name)
        ]
        if not differing or self.why_off is not None:
            return None
        if self.section.command is not None:
            return self._judged_by_command(finalist)
        answer = self.answers or answers_of
        answers = answer(finalist.settings, self, self.folder / f"{finalist.number:04d}")
        reference = answer(self.baseline.settings, self, self.folder / "0000")
        fraction = agreement(reference, answers)
        if fraction >= self.section.min_agreement:
            return None
        return (
            f"{fraction:.0%} of the answers' tokens equal those of the defaults, "
            f"but `min_agreement` is {self.section.min_agreement:.0%}"
        )

    def _judged_by_command(self, finalist: TrialResult) -> str | None:
        command = split_command(self.section.command or "")
        with _Served(finalist.settings, self, self.folder / f"{finalist.number:04d}") as target:
            done = subprocess.run([*command, target.url], timeout=JUDGE_TIMEOUT_S, check=False, capture_output=True)
        return None if done.returncode == 0 else f"the quality command returned exit code {done.returncode}"


def agreement(reference: Answers, answers: Answers) -> float:
    """The fraction of positions with equal tokens, among the first 64 of each answer.

    >>> agreement([[1, 2, 3, 4]], [[1, 2, 9, 4]])
    0.75
    """
    equal = total = 0
    for expected, actual in zip(reference, answers, strict=True):
        equal += sum(a == b for a, b in zip(expected[:ANSWER_TOKENS], actual[:ANSWER_TOKENS], strict=False))
        total += max(len(expected[:ANSWER_TOKENS]), len(actual[:ANSWER_TOKENS]))
    return equal / total if total else 1.0


def answers_of(settings: Mapping[str, Any], guard: QualityGuard, directory: Path) -> Answers:
    """The answers of a configuration to the fixed prompts. Launches it unless they are stored in `directory`."""
    stored = directory / "answers.json"
    if stored.exists():
        known: list[list[int | str]] = json.loads(stored.read_text())
        return known
    with _Served(settings, guard, directory) as target:
        found = [guard.setup.server.answer(target, prompt, ANSWER_TOKENS) for prompt in PROMPTS]
    stored.write_text(json.dumps(found))
    return found


class _Served:
    """A launched configuration as a context manager."""

    def __init__(self, settings: Mapping[str, Any], guard: QualityGuard, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._bench = guard.setup
        self._launch = guard.setup.server.launch(settings, directory)
        self._target = self._launch.target(directory / "server.log", guard.setup.ready_timeout_s)
        self._lock = device_lock(guard.setup.server.section.gpus, guard.setup.progress.show)

    def __enter__(self) -> Target:
        self._lock.__enter__()
        try:
            return self._target.__enter__()
        except (LoadgenError, UsageError):
            self._lock.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._target.__exit__(*error)
            remove_container(self._launch.container)
        finally:
            self._lock.__exit__(None, None, None)


def _plain(result: TrialResult, name: str) -> Any:
    value = result.settings.get(name)
    return None if value in UNSET else value
