"""The protocol of a server under study: its settings, its launch, the meaning of its log, and exports.

`TgiServer` serves the bundled server and TGI, `ProfiledServer` any server that a TOML profile describes.
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
from tuner.servers.launch_command import LaunchCommand
from tuner.space.search_space import SearchSpace
from tuner.trial.outcome import Cause


@dataclass(frozen=True, slots=True)
class FailureRule:
    """When a failure of one cause rules out another configuration.

    The other has no smaller value of each setting in `grows_with` and no larger value of each in `shrinks_with`.
    """

    grows_with: tuple[str, ...] = ()
    shrinks_with: tuple[str, ...] = ()


class WarmParts(Protocol):
    """A part of a server that keeps running between trials that do not change it."""

    @property
    def state(self) -> str: ...

    @property
    def exit_code(self) -> int | None: ...

    def launch_for(
        self, settings: Mapping[str, Any], launch: LaunchCommand, directory: Path, steps: Path | None
    ) -> LaunchCommand: ...

    def log_tail(self) -> str: ...

    def stop(self) -> None: ...


class TunedServer(Protocol):
    """A server under study. Settings are plain values by name; names of settings are `known`."""

    @property
    def section(self) -> ServerSection:
        """`[server]` of the study."""
        ...

    @property
    def build(self) -> str:
        """The server's build: results of different builds are not comparable."""
        ...

    @property
    def api(self) -> str:
        """The API of the load, unless the load names one."""
        ...

    @property
    def known(self) -> frozenset[str]:
        """The names of its settings."""
        ...

    def is_open(self, name: str) -> bool:
        """Whether a setting takes any text or path, lets foreign code run, or is unknown.

        A study of a shared storage may set it only with permission.
        """
        ...

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Default values, as far as they are known before a launch."""
        ...

    @property
    def guarded(self) -> tuple[str, ...]:
        """Settings that change answers, so that the quality guard compares them."""
        ...

    @property
    def design_setting(self) -> str | None:
        """The choice of which the initial design launches every value; None for no design."""
        ...

    @property
    def failure_rules(self) -> Mapping[str, FailureRule]:
        """The rules by cause. They hold between configurations that are equal in `compared`."""
        ...

    @property
    def compared(self) -> tuple[str, ...]: ...

    @property
    def meanings(self) -> Mapping[str, str]:
        """The settings that are part of the simulator's batching rule of a server with slots; empty without any."""
        ...

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of `export`."""
        ...

    @property
    def artefacts(self) -> Mapping[str, str]:
        """The files that a study leaves for its winner, with their form of `export`."""
        ...

    @property
    def writes_steps(self) -> bool:
        """Whether it writes a step trace, which the simulator reads."""
        ...

    def params(self) -> dict[str, ParamSection]:
        """The space of a study without `[param]`."""
        ...

    def explained(self, searched: Mapping[str, ParamSection]) -> dict[str, Any]:
        """The profile as plain values: each setting, and the default command line; empty without a profile."""
        ...

    def implied(self, load: BenchConfig) -> dict[str, Any]:
        """Fixed settings that follow from the load, unless the study fixes them."""
        ...

    def without_effect(self, space: SearchSpace, load: BenchConfig) -> dict[str, str]:
        """Settings without effect on this machine under this load, with the reason."""
        ...

    def initial_design(self, space: SearchSpace, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One configuration for each value of `design_setting`, beside the fixed settings."""
        ...

    def resolved(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings as the server changes them itself."""
        ...

    def validate(self, settings: Mapping[str, Any]) -> None:
        """Raises SpaceError with the rule that the settings break."""
        ...

    def launch(self, settings: Mapping[str, Any], directory: Path, steps: Path | None = None) -> LaunchCommand:
        """The command of a configuration; `steps` is the file of its step trace. Raises SpaceError, UsageError."""
        ...

    def keep_warm(self, searched: AbstractSet[str]) -> WarmParts | None:
        """The part that trials can share if these settings are searched; None if there is none."""
        ...

    def cause_of(self, log_tail: str, *, exit_code: int | None) -> Cause:
        """The cause of the server's end, from the tail of its log and its exit code."""
        ...

    def failure_line(self, log: str) -> str | None:
        """The first line of a log that names a known failure; None if there is none."""
        ...

    def facts_of(self, log: str) -> dict[str, float]:
        """Numbers that the log states, by name."""
        ...

    def names_setting(self, text: str, name: str) -> bool:
        """Whether an error message names the setting."""
        ...

    def random_answers(self, settings: Mapping[str, Any]) -> str | None:
        """Why answers of this configuration cannot be compared; None if they can."""
        ...

    def answer(self, target: Target, prompt: str, max_tokens: int) -> Sequence[int | str]:
        """The tokens of a greedy answer. Raises CannotMeasureError."""
        ...

    def export(self, form: str, settings: Mapping[str, Any], comments: Sequence[str], image: str | None = None) -> str:
        """The settings in one of `forms`. Raises SpaceError for settings that the form or its target cannot have."""
        ...

    def serve_command(self, best: Path, extra: Sequence[str]) -> LaunchCommand:
        """The command that serves the settings of the TOML file `best`, with more words at its end."""
        ...


def why_rejected(settings: Mapping[str, Any], space: SearchSpace, server: TunedServer) -> str | None:
    """The rule of the server or of the space that settings break, or None."""
    try:
        server.validate(settings)
    except SpaceError as error:
        return str(error)
    return space.why_forbidden(settings)
