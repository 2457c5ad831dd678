"""A TGI configuration as a TOML file, environment variables, a command line, a container or a deployment."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from reference_server.config import ServerConfig
from reference_server.config_fields import text_of, variables_of
from tuner.servers.exported_text import CONTAINER_PORT, comment_lines, docker_script, k8s_manifest, render_toml
from tuner.servers.tgi.launch_command import OURS, tgi_words
from tuner.space.configuration import without_unset

FORMS = ("toml", "env", "cli", "docker", "k8s", "launcher")
IMAGE = "ghcr.io/huggingface/text-generation-inference:latest"
# Shared memory and the volume for weights, which every container needs.
SHM_SIZE, VOLUME = "1g", "$PWD/data:/data"
DEFAULTS: Mapping[str, Any] = {name: field.default for name, field in ServerConfig.model_fields.items()}


def render(form: str, settings: Mapping[str, Any], comments: Sequence[str], image: str = IMAGE) -> str:
    """The settings in one of `FORMS`. Settings that TGI does not have are listed in a comment."""
    chosen = without_unset(settings)
    match form:
        case "toml":
            return render_toml(chosen, DEFAULTS, comments)
        case "env":
            return render_env(chosen, comments)
        case "cli":
            return shlex.join(["text-generation-launcher", *ServerConfig.model_validate(chosen).to_argv()]) + "\n"
        case "launcher":
            return '#!/bin/sh\nexec text-generation-launcher --config-file "$(dirname "$0")/best.toml" "$@"\n'
        case "docker":
            words, environment, notes = _for_tgi(chosen)
            options = [
                *("--gpus all", f"--shm-size {SHM_SIZE}"),
                *(f"-p 127.0.0.1:8080:{CONTAINER_PORT}", f'-v "{VOLUME}"'),
            ]
            return docker_script(image, words, environment, [*comments, *notes], options)
        case "k8s":
            words, environment, notes = _for_tgi(chosen)
            return k8s_manifest("tgi", image, words, environment, [*comments, *notes])
    raise AssertionError(f"unchecked form {form}")


def render_env(settings: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Launcher variables as an env file; a setting at its default is commented out."""
    fields = ServerConfig.model_fields
    lines = comment_lines(comments)
    for name, value in settings.items():
        variable = next(iter(variables_of(name, fields[name])), name.upper())
        line = f"{variable}={text_of(_typed(value))}"
        lines.append(f"# {line}" if value == DEFAULTS[name] else line)
    return "\n".join(lines) + "\n"


def _for_tgi(settings: Mapping[str, Any]) -> tuple[list[str], dict[str, str], list[str]]:
    """Flags, variables, and notes about settings that TGI does not have."""
    left_out = sorted(OURS.intersection(settings) - {"tuned_by"})
    words, environment = tgi_words(
        ServerConfig.model_validate({name: value for name, value in settings.items() if name not in OURS})
    )
    return words, environment, [f"TGI has no {name}: left out" for name in left_out]


def _typed(value: Any) -> Any:
    """A list as the tuple that the field expects."""
    return tuple(value) if isinstance(value, list) else value
