"""`TgiServer`: the bundled server, TGI's launcher or container, or a command with TGI's settings."""

import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from loadgen.config.bench_config import BenchConfig
from loadgen.target.launched.launch import find_launcher
from loadgen.target.machine import product_version
from loadgen.target.target import Target
from loadgen.workloads.lengths import Lengths
from reference_server.configuration.config_fields import flag_of
from reference_server.presets.catalog import find
from tuner.config import ParamSection, ServerSection
from tuner.errors import CannotMeasureError
from tuner.servers.exported_container import ExportedContainer
from tuner.servers.exported_text import check_values
from tuner.servers.k8s_manifest import k8s_manifest
from tuner.servers.launch_command import LaunchCommand
from tuner.servers.tgi.derive import (
    Demand,
    derived_params,
    disabled_by_fixed,
    facts_of,
    local_devices,
    searched_without_effect,
)
from tuner.servers.tgi.export import FORMS, container_of, render
from tuner.servers.tgi.initial_design import DESIGN_SETTING, initial_design
from tuner.servers.tgi.model_memory import memory_of
from tuner.servers.tgi.settings import DEFAULTS, OPEN_SETTINGS, RISKY_SETTINGS, known_settings, resolved, server_config
from tuner.servers.tgi.tgi_command import launch_command_of
from tuner.servers.tgi.warm_shards import ROUTER_ONLY, WarmShards
from tuner.servers.tuned_server import FailureRule, WarmParts
from tuner.space.configuration import without_unset
from tuner.space.search_space import SearchSpace
from tuner.trial.outcome import Cause, cause_of

# Log line of the router with the size of the K/V pool, in tokens.
POOL = re.compile(r"max batch total tokens to (\d+)", re.IGNORECASE)
# Log texts of a server whose memory is too small for the K/V of one request.
_NO_CACHE_WORDS = (
    "not enough memory to handle",
    "not enough memory for",
    "no k/v block fits",
    "cache below one",
    # The prefill budget is larger than the K/V pool.
    "must be <= `max_batch_total_tokens`",
)
BUDGET, FRACTION = "max_batch_prefill_tokens", "cuda_memory_fraction"


@dataclass(frozen=True, slots=True)
class TgiServer:
    """A server whose settings are the fields of `ServerConfig`. Its default space has the `Tunable` fields."""

    section: ServerSection

    api = "auto"
    known = known_settings()
    defaults = DEFAULTS
    guarded = ("quantize", "kv_cache_dtype")
    design_setting = DESIGN_SETTING
    # The fraction is the memory for prefill and K/V together. A larger budget leaves less of it for K/V.
    failure_rules: ClassVar[Mapping[str, FailureRule]] = {
        "memory": FailureRule(grows_with=(BUDGET, FRACTION)),
        "no_cache": FailureRule(grows_with=(BUDGET,), shrinks_with=(FRACTION,)),
    }
    compared = ("quantize", "cuda_graphs", "kv_cache_dtype", "model_id", "num_shard")
    meanings: ClassVar[Mapping[str, str]] = {}
    forms = FORMS
    artefacts: ClassVar[Mapping[str, str]] = {
        "best.env": "env",
        "run-own.sh": "launcher",
        "run-tgi-docker.sh": "docker",
        "k8s.yaml": "k8s",
    }

    @property
    def build(self) -> str:
        match self.section.kind:
            case "own":
                return f"tgi-bench {product_version()}"
            case "tgi-docker":
                return self.section.image
            case _:
                return self.section.command or "text-generation-launcher"

    @property
    def writes_steps(self) -> bool:
        return self.section.kind == "own"

    def is_open(self, name: str) -> bool:
        return name in OPEN_SETTINGS or name in RISKY_SETTINGS or name not in self.known

    def params(self) -> dict[str, ParamSection]:
        return derived_params(self.section.fixed, is_own=self.section.kind == "own")

    def explained(self, _searched: Mapping[str, ParamSection]) -> dict[str, Any]:
        """Empty: docs/settings.md lists the settings."""
        return {}

    def implied(self, load: BenchConfig) -> dict[str, Any]:
        """Limits of input and total tokens, from the load's lengths. The server's default budgets depend on them."""
        lengths = ("max_input_tokens", "max_total_tokens")
        if load.workload != "synthetic" or any(name in self.section.fixed for name in lengths):
            return {}
        inputs, outputs = (Lengths.parse(text) if text else None for text in (load.input_tokens, load.output_tokens))
        if inputs is None or outputs is None or inputs.longest is None or outputs.longest is None:
            return {}
        return dict(zip(lengths, (inputs.longest, inputs.longest + outputs.longest), strict=True))

    def without_effect(self, space: SearchSpace, load: BenchConfig) -> dict[str, str]:
        fixed = self.section.fixed
        facts = facts_of(self.section.model_id) if self.section.kind == "own" else None
        searched = searched_without_effect(space, fixed, Demand.of(load), facts, local_devices())
        return {**disabled_by_fixed(fixed), **searched}

    def initial_design(self, space: SearchSpace, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
        return initial_design(space, fixed)

    def resolved(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return resolved(settings)

    def validate(self, settings: Mapping[str, Any]) -> None:
        server_config(settings)

    def launch(self, settings: Mapping[str, Any], directory: Path, steps: Path | None = None) -> LaunchCommand:
        traced = {**settings, "step_trace": steps.resolve()} if steps is not None else settings
        return launch_command_of(self.section, server_config(traced), directory)

    def keep_warm(self, searched: AbstractSet[str]) -> WarmParts | None:
        """A model server that keeps running between trials that differ only in settings of the router."""
        if self.section.kind != "own" or not ROUTER_ONLY & searched:
            return None
        return WarmShards(self.section.ready_timeout_s)

    def cause_of(self, log_tail: str, *, exit_code: int | None) -> Cause:
        is_full = any(word in log_tail.lower() for word in _NO_CACHE_WORDS)
        return "no_cache" if is_full else cause_of(log_tail, exit_code=exit_code)

    def failure_line(self, _log: str) -> str | None:
        """None: the end of the log contains the cause."""
        return None

    def facts_of(self, log: str) -> dict[str, float]:
        found = POOL.findall(log)
        return {"kv_tokens": float(found[-1])} if found else {}

    def names_setting(self, text: str, name: str) -> bool:
        return flag_of(name) in text or f"`{name}`" in text

    def why_not_comparable(self, settings: Mapping[str, Any]) -> str | None:
        if settings.get("load_format") == "dummy":
            return "the weights are random, so answers cannot be compared"
        preset = find(str(settings.get("model_id", "")))
        if preset is not None and not preset.has_weights:
            return "the preset has random weights, so answers cannot be compared"
        return None

    def answer(self, target: Target, prompt: str, max_tokens: int) -> Sequence[int | str]:
        control = target.control()
        parameters = {"max_new_tokens": max_tokens, "details": True, "do_sample": False}
        try:
            body = json.dumps({"inputs": prompt, "parameters": parameters}).encode()
            status, content = control.post("/generate", body, timeout_s=600.0)
        finally:
            control.close()
        if status != 200:
            raise CannotMeasureError(f"a prompt of the quality guard returned status {status}")
        return [int(token["id"]) for token in json.loads(content)["details"]["tokens"]]

    def export(self, form: str, settings: Mapping[str, Any], comments: Sequence[str], image: str | None = None) -> str:
        has_gpus = bool(self.section.gpus) or self.section.kind == "tgi-docker"
        if form == "k8s":
            return k8s_manifest(self.container(settings, comments, image))
        return render(form, settings, comments, image or self.section.image, has_gpus=has_gpus)

    def container(
        self, settings: Mapping[str, Any], comments: Sequence[str], image: str | None = None
    ) -> ExportedContainer:
        chosen = without_unset(settings)
        check_values(chosen)
        gpus = max(1, len(self.section.gpus)) if self.section.gpus or self.section.kind == "tgi-docker" else 0
        memory = memory_of(chosen, has_gpus=bool(gpus))
        return container_of(chosen, comments, image or self.section.image, gpus=gpus, memory=memory)

    def serve_command(self, best: Path, extra: Sequence[str]) -> LaunchCommand:
        return LaunchCommand((find_launcher(), "--config-file", str(best), *extra))
