"""A configuration as a TOML file, environment variables, a command line, a container or a Kubernetes deployment.

TOML is written here: `tomli-w` writes a list over several lines, which cannot be commented out as one default.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from reference_server.config import ServerConfig
from reference_server.config_fields import text_of, variables_of
from tuner.servers.launch_command import OURS, tgi_words
from tuner.space.settings import UNSET

BEST_FILE = "best.toml"


def render_toml(settings: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Comment lines and settings as TOML; a setting at its default is commented out.

    >>> print(render_toml({"port": 3000, "max_waiting_tokens": 7, "tuned_by": "s/1"}, ["found by a study"]))
    # found by a study
    <BLANKLINE>
    # port = 3000
    max_waiting_tokens = 7
    tuned_by = "s/1"
    <BLANKLINE>
    """
    lines = [f"# {comment}".rstrip() for comment in comments]
    lines.append("")
    for name, value in settings.items():
        default = ServerConfig.model_fields[name].default
        line = f"{name} = {toml_value(value)}"
        lines.append(f"# {line}" if value == default else line)
    return "\n".join(lines) + "\n"


def write_best(path: Path, settings: Mapping[str, Any], comments: Sequence[str]) -> None:
    """Write `best.toml` atomically, without unset settings."""
    chosen = {name: value for name, value in settings.items() if value not in (None, *UNSET)}
    part = path.with_name(path.name + ".part")
    part.write_text(render_toml(chosen, comments))
    part.replace(path)


def toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case _:
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML refuses a bare DEL


FORMATS = ("toml", "env", "cli", "docker", "k8s")
IMAGE = "ghcr.io/huggingface/text-generation-inference:latest"
CONTAINER_PORT = 80
# Shared memory and the volume for weights, which every container needs.
SHM_SIZE, VOLUME = "1g", "$PWD/data:/data"


def render(kind: str, settings: Mapping[str, Any], comments: Sequence[str], image: str = IMAGE) -> str:
    """The settings in one of `FORMATS`. Settings that TGI does not have are listed in a comment."""
    chosen = {name: value for name, value in settings.items() if value not in (None, *UNSET)}
    match kind:
        case "toml":
            return render_toml(chosen, comments)
        case "env":
            return render_env(chosen, comments)
        case "cli":
            return shlex.join(["text-generation-launcher", *ServerConfig.model_validate(chosen).to_argv()]) + "\n"
        case "docker":
            return render_docker(chosen, comments, image)
        case "k8s":
            return render_k8s(chosen, comments, image)
    raise AssertionError(f"unchecked format {kind}")


def render_env(settings: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Launcher variables as an env file; a setting at its default is commented out."""
    fields = ServerConfig.model_fields
    lines = [f"# {comment}".rstrip() for comment in comments]
    for name, value in settings.items():
        variable = next(iter(variables_of(name, fields[name])), name.upper())
        line = f"{variable}={text_of(_typed(value))}"
        lines.append(f"# {line}" if value == fields[name].default else line)
    return "\n".join(lines) + "\n"


def render_docker(settings: Mapping[str, Any], comments: Sequence[str], image: str = IMAGE) -> str:
    """A shell script that runs TGI in a container with these settings."""
    words, environment, left_out = _for_tgi(settings)
    lines = ["#!/bin/sh", *(f"# {comment}".rstrip() for comment in comments)]
    lines += [f"# TGI has no {name}: left out" for name in left_out]
    flags = [
        "docker run --rm --gpus all",
        f"--shm-size {SHM_SIZE}",
        f"-p 127.0.0.1:8080:{CONTAINER_PORT}",
        f'-v "{VOLUME}"',
        *(shlex.join(["-e", f"{name}={value}"]) for name, value in environment.items()),
        shlex.quote(image),
        *_flag_lines(words),
    ]
    return "\n".join([*lines, " \\\n  ".join(flags)]) + "\n"


def render_k8s(settings: Mapping[str, Any], comments: Sequence[str], image: str = IMAGE) -> str:
    """A deployment and its service; strings are quoted as in JSON, so that YAML reads no value as another type."""
    words, environment, left_out = _for_tgi(settings)
    lines = [f"# {comment}".rstrip() for comment in comments]
    lines += [f"# TGI has no {name}: left out" for name in left_out]
    variables = [
        line
        for name, value in environment.items()
        for line in (f"            - name: {json.dumps(name)}", f"              value: {json.dumps(value)}")
    ]
    lines += [
        "apiVersion: apps/v1",
        "kind: Deployment",
        "metadata:",
        "  name: tgi",
        "spec:",
        "  replicas: 1",
        "  selector: {matchLabels: {app: tgi}}",
        "  template:",
        "    metadata: {labels: {app: tgi}}",
        "    spec:",
        "      containers:",
        "        - name: tgi",
        f"          image: {json.dumps(image)}",
        f"          args: {json.dumps(words)}",
        *(["          env:", *variables] if variables else []),
        f"          ports: [{{containerPort: {CONTAINER_PORT}}}]",
        f"          readinessProbe: {{httpGet: {{path: /health, port: {CONTAINER_PORT}}}, periodSeconds: 5}}",
        "          resources: {limits: {nvidia.com/gpu: 1}}",
        "          volumeMounts: [{name: shm, mountPath: /dev/shm}, {name: data, mountPath: /data}]",
        "      volumes:",
        "        - {name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}",
        "        - {name: data, emptyDir: {}}",
        "---",
        "apiVersion: v1",
        "kind: Service",
        "metadata:",
        "  name: tgi",
        "spec:",
        "  selector: {app: tgi}",
        f"  ports: [{{port: 80, targetPort: {CONTAINER_PORT}}}]",
    ]
    return "\n".join(lines) + "\n"


def _for_tgi(settings: Mapping[str, Any]) -> tuple[list[str], dict[str, str], list[str]]:
    left_out = sorted(OURS.intersection(settings))
    words, environment = tgi_words(
        ServerConfig.model_validate({name: value for name, value in settings.items() if name not in OURS})
    )
    return words, environment, [name for name in left_out if name != "tuned_by"]


def _flag_lines(words: Sequence[str]) -> list[str]:
    """One line for each flag with its value."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append([word])
        else:
            lines[-1].append(word)
    return [shlex.join(line) for line in lines]


def _typed(value: Any) -> Any:
    """A list as the tuple that the field expects."""
    return tuple(value) if isinstance(value, list) else value


def tuned_by(
    study: str, trial: int, *, is_confirmed: bool, gain: Sequence[float | None] | None, metric: str, load: str
) -> str:
    """The provenance that a tuned server reports: study, trial, and its gain under a load.

    >>> tuned_by("s", 3, is_confirmed=True, gain=[1.12, 1.08, 1.17], metric="requests_per_s", load="closed, 8 users")
    's/3/confirmed?gain=1.12,1.08,1.17&metric=requests_per_s&load=closed%2C+8+users'
    """
    origin = f"{study}/{trial}" + ("/confirmed" if is_confirmed else "")
    facts: dict[str, str] = {}
    if gain is not None and all(value is not None for value in gain):
        facts = {"gain": ",".join(f"{value:.6g}" for value in gain if value is not None), "metric": metric}
    gained = "".join(f"{name}={quote(value, safe=',')}&" for name, value in facts.items())
    return f"{origin}?{gained}{urlencode({'load': load})}"
