"""The quality guard: whether other weights or another cache type still give the defaults' answers.

A fixed set of prompts is answered at temperature 0 by both; what counts is the share of equal tokens in the first 64.
"""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.errors import LoadgenError, UsageError
from loadgen.launch import split_command
from loadgen.target import LaunchedTarget, Target
from tuner.config import QualitySection
from tuner.device_lock import device_lock
from tuner.errors import CannotMeasureError
from tuner.evaluate import Bench
from tuner.outcome import TrialResult
from tuner.space import server_config
from tuner.targets import launch_of, remove_container

ANSWER_TOKENS = 64
GUARDED = ("quantize", "kv_cache_dtype")
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

Answers = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class QualityGuard:
    """Speaks against a finalist whose answers differ too much. `answers` makes them; a test passes its own."""

    section: QualitySection
    bench: Bench
    baseline: TrialResult
    folder: Path
    answers: Callable[[Mapping[str, Any], "QualityGuard", Path], Answers] | None = None

    @property
    def off(self) -> str | None:
        """Why the guard is off, for the report; None where it is on."""
        if self.section.command is None and self.baseline.settings.get("load_format") == "dummy":
            return "the weights are random, so agreement of answers means nothing"
        if self.section.command is None and _is_weightless(self.baseline.settings):
            return "the preset has random weights, so agreement of answers means nothing"
        return None

    def __call__(self, finalist: TrialResult) -> str | None:
        """Why a finalist is rejected; None where it keeps its place."""
        differing = [name for name in GUARDED if _plain(finalist, name) != _plain(self.baseline, name)]
        if not differing or self.off is not None:
            return None
        if self.section.command is not None:
            return self._judged_by_command(finalist)
        ask = self.answers or answers_of
        theirs = ask(finalist.settings, self, self.folder / f"{finalist.number:04d}")
        ours = ask(self.baseline.settings, self, self.folder / "0000")
        share = agreement(ours, theirs)
        if share >= self.section.min_agreement:
            return None
        return (
            f"its answers agree with the defaults' in {share:.0%} of the tokens, "
            f"and {self.section.min_agreement:.0%} are asked for"
        )

    def _judged_by_command(self, finalist: TrialResult) -> str | None:
        command = split_command(self.section.command or "")
        with _served(finalist.settings, self, self.folder / f"{finalist.number:04d}") as target:
            done = subprocess.run([*command, target.url], timeout=JUDGE_TIMEOUT_S, check=False, capture_output=True)
        return None if done.returncode == 0 else f"the quality command ended with exit code {done.returncode}"


def agreement(ours: Answers, theirs: Answers) -> float:
    """The share of tokens that are equal, place by place, among the first 64 of each answer.

    >>> agreement([[1, 2, 3, 4]], [[1, 2, 9, 4]])
    0.75
    """
    equal = total = 0
    for mine, other in zip(ours, theirs, strict=True):
        equal += sum(a == b for a, b in zip(mine[:ANSWER_TOKENS], other[:ANSWER_TOKENS], strict=False))
        total += max(len(mine[:ANSWER_TOKENS]), len(other[:ANSWER_TOKENS]))
    return equal / total if total else 1.0


def answers_of(settings: Mapping[str, Any], guard: QualityGuard, directory: Path) -> Answers:
    """The fixed prompts answered by a launched configuration; kept, so that resuming does not ask again."""
    kept = directory / "answers.json"
    if kept.exists():
        found: list[list[int]] = json.loads(kept.read_text())
        return found
    with _served(settings, guard, directory) as target:
        found = [_answer(target, prompt) for prompt in PROMPTS]
    kept.write_text(json.dumps(found))
    return found


def _answer(target: Target, prompt: str) -> list[int]:
    control = target.control()
    parameters = {"max_new_tokens": ANSWER_TOKENS, "details": True, "do_sample": False}
    try:
        body = json.dumps({"inputs": prompt, "parameters": parameters}).encode()
        status, content = control.post("/generate", body, timeout_s=600.0)
    finally:
        control.close()
    if status != 200:
        raise CannotMeasureError(f"a quality prompt was answered with status {status}")
    return [int(token["id"]) for token in json.loads(content)["details"]["tokens"]]


class _served:
    """A configuration, launched for as long as the block lasts."""

    def __init__(self, settings: Mapping[str, Any], guard: QualityGuard, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._bench = guard.bench
        self._launch = launch_of(guard.bench.server, server_config(settings), directory)
        self._target = LaunchedTarget(
            self._launch.command,
            directory / "server.log",
            ready_timeout_s=guard.bench.ready_timeout_s,
            environment=self._launch.environment,
        )
        self._lock = device_lock(guard.bench.server.gpus, guard.bench.progress.say)

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
    return None if value in ("none", "auto") else value


def _is_weightless(settings: Mapping[str, Any]) -> bool:
    from reference_server.presets.catalog import find

    preset = find(str(settings.get("model_id", "")))
    return preset is not None and not preset.has_weights
