"""The protocol of a server under study: its settings, its launch, the meaning of its log, and its exports.

`TgiServer` implements it for the bundled server and TGI, `ProfiledServer` for a server with a TOML profile.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from loadgen.config.bench_config import BenchConfig
from loadgen.target.target import Target
from tuner.config import ParamSection, ServerSection
from tuner.errors import SpaceError
from tuner.servers.exported_container import ExportedContainer
from tuner.servers.launch_command import LaunchCommand
from tuner.space.search_space import SearchSpace
from tuner.trial.outcome import Cause


@dataclass(frozen=True, slots=True)
class FailureRule:
    """The configurations that are expected to fail like a failed one.

    They have an equal or larger value of each setting in `grows_with`, and an equal or smaller value of each in
    `shrinks_with`.
    """

    grows_with: tuple[str, ...] = ()
    shrinks_with: tuple[str, ...] = ()


class WarmParts(Protocol):
    """A part of a server, such as its model server, that keeps running between trials with equal settings of it."""

    @property
    def state(self) -> str:
        """`started` or `kept` for the current trial, `none` if the part is not running."""
        ...

    @property
    def exit_code(self) -> int | None:
        """None while the part runs, and if it is not started."""
        ...

    def launch_for(
        self, settings: Mapping[str, Any], launch: LaunchCommand, directory: Path, steps: Path | None
    ) -> LaunchCommand:
        """Start the part if needed, and return the command of the rest of the server. Raises StartError.

        launch: the command of the whole server. steps: file of its step trace.
        """
        ...

    def log_tail(self) -> str: ...

    def stop(self) -> None: ...


class TunedServer(Protocol):
    """A server under study. Settings are plain values by name."""

    @property
    def section(self) -> ServerSection:
        """`[server]` of the study."""
        ...

    @property
    def build(self) -> str:
        """An identifier of the server's build. Results of different builds are not comparable."""
        ...

    @property
    def api(self) -> str:
        """The API of the load, unless the load names one."""
        ...

    @property
    def known(self) -> frozenset[str]:
        """The names of all settings."""
        ...

    def is_open(self, name: str) -> bool:
        """Whether a setting is unsafe in a study from a shared storage: free text, path, foreign code, or unknown.

        A worker accepts it there only with `--allow-command`.
        """
        ...

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The default values that are known before a launch."""
        ...

    @property
    def guarded(self) -> tuple[str, ...]:
        """Settings that change answers. The quality guard checks finalists that differ in them."""
        ...

    @property
    def design_setting(self) -> str | None:
        """The choice whose values the initial design launches; None without an initial design."""
        ...

    @property
    def failure_rules(self) -> Mapping[str, FailureRule]:
        """The rules by cause. They apply between configurations with equal `compared` settings."""
        ...

    @property
    def compared(self) -> tuple[str, ...]:
        """The settings that change memory use in ways that no rule describes."""
        ...

    @property
    def meanings(self) -> Mapping[str, str]:
        """Name of a setting to its role in the simulator's batching rule of a server with slots (`SlotRule`)."""
        ...

    @property
    def forms(self) -> tuple[str, ...]:
        """The possible forms of `export`."""
        ...

    @property
    def artefacts(self) -> Mapping[str, str]:
        """The files that a study writes for its winner: file name to form of `export`."""
        ...

    @property
    def writes_steps(self) -> bool:
        """Whether the server can write a step trace, which the simulator reads."""
        ...

    def params(self) -> dict[str, ParamSection]:
        """The parameters that a study without `[param]` searches."""
        ...

    def explained(self, searched: Mapping[str, ParamSection]) -> dict[str, Any]:
        """The profile as plain values for `tgi-tune check`; empty without a profile."""
        ...

    def implied(self, load: BenchConfig) -> dict[str, Any]:
        """Fixed settings that follow from the load, unless the study fixes them."""
        ...

    def without_effect(self, space: SearchSpace, load: BenchConfig) -> dict[str, str]:
        """Settings without effect on this machine under this load: name to reason."""
        ...

    def initial_design(self, space: SearchSpace, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One configuration for each value of `design_setting`, without the fixed settings."""
        ...

    def resolved(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings after the server's own adjustments."""
        ...

    def validate(self, settings: Mapping[str, Any]) -> None:
        """Raises SpaceError with the rule that the settings violate."""
        ...

    def launch(self, settings: Mapping[str, Any], directory: Path, steps: Path | None = None) -> LaunchCommand:
        """The command of a configuration. `steps`: file for its step trace. Raises SpaceError, UsageError."""
        ...

    def keep_warm(self, searched: AbstractSet[str]) -> WarmParts | None:
        """The part that can keep running between trials that search these settings; None if there is none."""
        ...

    def cause_of(self, log_tail: str, *, exit_code: int | None) -> Cause:
        """Why the server ended, from the tail of its log and its exit code."""
        ...

    def failure_line(self, log: str) -> str | None:
        """The first line of a log that matches a known failure; None if there is none."""
        ...

    def facts_of(self, log: str) -> dict[str, float]:
        """Numbers in the log, by name."""
        ...

    def names_setting(self, text: str, name: str) -> bool:
        """Whether an error message names the setting."""
        ...

    def why_not_comparable(self, settings: Mapping[str, Any]) -> str | None:
        """Why answers of this configuration cannot be compared; None if they can."""
        ...

    def answer(self, target: Target, prompt: str, max_tokens: int) -> Sequence[int | str]:
        """The tokens of a greedy answer. Raises CannotMeasureError."""
        ...

    def export(self, form: str, settings: Mapping[str, Any], comments: Sequence[str], image: str | None = None) -> str:
        """The settings in one of `forms`. Raises SpaceError for settings that the form cannot express."""
        ...

    def container(
        self, settings: Mapping[str, Any], comments: Sequence[str], image: str | None = None
    ) -> ExportedContainer:
        """The container of the settings, for Kubernetes. Raises SpaceError as `export` does."""
        ...

    def serve_command(self, best: Path, extra: Sequence[str]) -> LaunchCommand:
        """The command that serves the settings of the TOML file `best`. `extra` arguments are appended."""
        ...


def why_rejected(settings: Mapping[str, Any], space: SearchSpace, server: TunedServer) -> str | None:
    """The rule of the server or of the space that the settings violate, or None."""
    try:
        server.validate(settings)
    except SpaceError as error:
        return str(error)
    return space.why_forbidden(settings)
