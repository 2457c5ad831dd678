"""`ProfiledServer`: a server with a TOML profile, such as vLLM, SGLang or llama.cpp."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.target.launched.launch import split_command
from loadgen.target.target import Target
from tuner.config import ParamSection, ServerSection
from tuner.errors import CannotMeasureError, SpaceError
from tuner.servers.exported_container import ExportedContainer
from tuner.servers.exported_text import check_values, render_toml
from tuner.servers.launch_command import LaunchCommand
from tuner.servers.profiled_export import ProfiledExport
from tuner.servers.server_profile import ServerProfile
from tuner.servers.setting_row import setting_rows
from tuner.servers.tuned_server import FailureRule, WarmParts
from tuner.space.configuration import without_unset
from tuner.space.nearest_name import nearest_name
from tuner.space.search_space import SearchSpace
from tuner.trial.outcome import Cause, cause_of

# Settings that are not in a profile: the model, and the provenance of an exported configuration.
MODEL, PROVENANCE = "model_id", "tuned_by"
FORMS = ("toml", "env", "cli", "docker", "compose", "k8s", "script")
NUMBERS = ("int", "float")


@dataclass(frozen=True)
class ProfiledServer:
    """A server whose settings, rules and log patterns all come from its profile."""

    section: ServerSection
    profile: ServerProfile

    design_setting = None
    forms = FORMS
    writes_steps = False

    @property
    def build(self) -> str:
        return f"{self.profile.name}: {self._template}"

    @property
    def api(self) -> str:
        return self.profile.api

    @property
    def known(self) -> frozenset[str]:
        return frozenset((*self.profile.setting, MODEL))

    def is_open(self, name: str) -> bool:
        setting = self.profile.setting.get(name)
        return setting is None or setting.type == "text"

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.profile.defaults

    @property
    def meanings(self) -> Mapping[str, str]:
        return self.profile.meanings

    @property
    def guarded(self) -> tuple[str, ...]:
        return tuple(name for name, each in self.profile.setting.items() if each.changes_answers)

    @cached_property
    def failure_rules(self) -> Mapping[str, FailureRule]:
        """One rule for each cause. It has the settings of all failures of the cause, so it prunes cautiously."""
        found: dict[str, FailureRule] = {}
        for each in self.profile.failure:
            if each.grows_with or each.shrinks_with:
                known = found.get(each.cause, FailureRule())
                found[each.cause] = FailureRule(
                    tuple(dict.fromkeys((*known.grows_with, *each.grows_with))),
                    tuple(dict.fromkeys((*known.shrinks_with, *each.shrinks_with))),
                )
        return found

    @property
    def compared(self) -> tuple[str, ...]:
        """The model, and every setting that is not a number."""
        return (MODEL, *(name for name, each in self.profile.setting.items() if each.type not in NUMBERS))

    @property
    def artefacts(self) -> Mapping[str, str]:
        return {"best.env": "env", "run.sh": "script", "run-docker.sh": "docker", "k8s.yaml": "k8s"}

    def params(self) -> dict[str, ParamSection]:
        return {
            name: each.param()
            for name, each in self.profile.setting.items()
            if each.searched and each.type != "text" and name not in self.section.fixed
        }

    def explained(self, searched: Mapping[str, ParamSection]) -> dict[str, Any]:
        return {
            "name": self.profile.name,
            "version": self.profile.version,
            "settings": setting_rows(self.profile, self.section.fixed, searched),
            "refused": [each.when for each in self.profile.forbid],
            "facts": sorted(self.profile.facts),
            "defaults": self.export("cli", {}, ()).strip(),
        }

    def implied(self, _load: BenchConfig) -> dict[str, Any]:
        return {}

    def without_effect(self, space: SearchSpace, _load: BenchConfig) -> dict[str, str]:
        return {each.name: "it has only one value here" for each in space.parameters if each.cannot_vary}

    def initial_design(self, _space: SearchSpace, _fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
        return []

    def resolved(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return dict(settings)

    def validate(self, settings: Mapping[str, Any]) -> None:
        for name, value in without_unset(settings).items():
            if name in (MODEL, PROVENANCE):
                continue
            if name not in self.profile.setting:
                near = nearest_name(name, self.known)
                raise SpaceError(f"`{name}` is not a setting of profile {self.profile.name}{near}")
            if reason := self.profile.setting[name].mismatch(value):
                raise SpaceError(f"`{name}` is {value!r}: {reason}")
        values = {**self.defaults, **without_unset(settings)}
        for expression in self.profile.forbidden:
            if expression.names <= values.keys() and expression.evaluate(values):
                raise SpaceError(f"profile {self.profile.name} forbids `{expression.text}`")

    def launch(self, settings: Mapping[str, Any], _directory: Path, _steps: Path | None = None) -> LaunchCommand:
        self.validate(settings)
        words, environment = self._words(settings)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.section.gpus))} if self.section.gpus else {}
        command = [
            word.replace("{model}", str(settings.get(MODEL, self.section.model_id)))
            for word in split_command(self._template)
        ]
        return LaunchCommand((*command, *words), {**environment, **visible}, ready=self.profile.ready)

    def keep_warm(self, _searched: AbstractSet[str]) -> WarmParts | None:
        return None

    def cause_of(self, log_tail: str, *, exit_code: int | None) -> Cause:
        for failure in self.profile.failure:
            if re.search(failure.match, log_tail, re.IGNORECASE):
                return failure.cause
        return cause_of(log_tail, exit_code=exit_code)

    def failure_line(self, log: str) -> str | None:
        patterns = [re.compile(each.match, re.IGNORECASE) for each in self.profile.failure]
        return next((line.strip() for line in log.splitlines() if any(each.search(line) for each in patterns)), None)

    def facts_of(self, log: str) -> dict[str, float]:
        """The last match of each pattern of the profile, without commas between thousands."""
        found = {}
        for name, pattern in self.profile.facts.items():
            for match in re.finditer(pattern, log):
                found[name] = float(match[1].replace(",", ""))
        return found

    def names_setting(self, text: str, name: str) -> bool:
        setting = self.profile.setting.get(name)
        if setting is None:
            return False
        words = (setting.flag, setting.flag_true, setting.flag_false, setting.env)
        return any(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) for word in words if word)

    def why_not_comparable(self, _settings: Mapping[str, Any]) -> str | None:
        return None

    def answer(self, target: Target, prompt: str, max_tokens: int) -> Sequence[int | str]:
        """The words of a greedy completion, because not every server returns tokens."""
        control = target.control()
        body = {"model": target.facts().model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "seed": 0}
        try:
            status, content = control.post("/v1/completions", json.dumps(body).encode(), timeout_s=600.0)
        finally:
            control.close()
        if status != 200:
            raise CannotMeasureError(f"a prompt of the quality guard returned status {status}")
        return str(json.loads(content)["choices"][0]["text"]).split()[:max_tokens]

    def export(self, form: str, settings: Mapping[str, Any], comments: Sequence[str], image: str | None = None) -> str:
        chosen = without_unset(settings)
        check_values(chosen)
        if form == "toml":
            return render_toml(chosen, {}, comments)
        return self._exported(chosen).render(form, comments, image)

    def container(
        self, settings: Mapping[str, Any], comments: Sequence[str], image: str | None = None
    ) -> ExportedContainer:
        chosen = without_unset(settings)
        check_values(chosen)
        container = self._exported(chosen).container(comments, image)
        if container is None:
            raise SpaceError(f"profile {self.profile.name} has no image: export with --image")
        return container

    def _exported(self, chosen: Mapping[str, Any]) -> ProfiledExport:
        words, environment = self._words(chosen)
        model, gpus = str(chosen.get(MODEL, self.section.model_id)), self.section.gpus
        return ProfiledExport(self.profile, self._template, model, words, environment, len(gpus))

    def serve_command(self, best: Path, extra: Sequence[str]) -> LaunchCommand:
        launch = self.launch(tomllib.loads(best.read_text()), best.parent)
        return LaunchCommand((*launch.command, *extra), launch.environment)

    @property
    def _template(self) -> str:
        return self.section.command or self.profile.command

    def _words(self, settings: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """The flags and the environment variables of the settings."""
        words: list[str] = []
        environment = dict(self.profile.environment)
        for name, value in without_unset(settings).items():
            setting = self.profile.setting.get(name)
            if setting is None:
                continue
            if setting.env is not None:
                environment[setting.env] = _text(value)
            elif setting.type == "bool":
                words += filter(None, [setting.flag_true if value else setting.flag_false])
            elif setting.flag is not None:
                words += [setting.flag, _text(value)]
        return words, environment


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
