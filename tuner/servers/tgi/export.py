"""Exports a TGI configuration: TOML file, variables, command line, launcher script, containers, or deployment."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from reference_server.configuration.config import ServerConfig
from reference_server.configuration.config_fields import text_of, variables_of
from tuner.errors import SpaceError
from tuner.servers.compose_file import compose_file
from tuner.servers.docker_script import docker_script
from tuner.servers.exported_container import ExportedContainer, ModelMemory
from tuner.servers.exported_text import CONTAINER_PORT, check_values, comment_lines, image_note, render_toml
from tuner.servers.k8s_manifest import k8s_manifest
from tuner.servers.tgi.tgi_command import BUNDLED_ONLY, is_bundled_only, tgi_words
from tuner.space.configuration import without_unset

FORMS = ("toml", "env", "cli", "docker", "compose", "k8s", "launcher")
IMAGE = "ghcr.io/huggingface/text-generation-inference:latest"
LENGTHS = ("max_input_tokens", "max_total_tokens")
# Shared memory, and the volume for weights.
SHM_SIZE, VOLUME = "1g", "$PWD/data:/data"
DEFAULTS: Mapping[str, Any] = {name: field.default for name, field in ServerConfig.model_fields.items()}


def render(
    form: str, settings: Mapping[str, Any], comments: Sequence[str], image: str = IMAGE, *, has_gpus: bool = True
) -> str:
    """The settings in one of `FORMS`. Its comments also list left-out settings and assumptions.

    Raises SpaceError for a value with control characters, and for a preset in a container.
    """
    chosen = without_unset(settings)
    check_values(chosen)
    match form:
        case "toml":
            return render_toml(chosen, DEFAULTS, comments)
        case "env":
            return render_env(chosen, comments)
        case "cli":
            return shlex.join(["text-generation-launcher", *ServerConfig.model_validate(chosen).to_argv()]) + "\n"
        case "launcher":
            return '#!/bin/sh\nexec text-generation-launcher --config-file "$(dirname "$0")/best.toml" "$@"\n'
    container = container_of(chosen, comments, image, gpus=1 if has_gpus else 0)
    match form:
        case "docker":
            options = [
                *(["--gpus all"] if has_gpus else []),
                f"--shm-size {SHM_SIZE}",
                *(f"-p 127.0.0.1:8080:{CONTAINER_PORT}", f'-v "{VOLUME}"'),
            ]
            return docker_script(container, options)
        case "compose":
            return compose_file(container, published=8080)
        case "k8s":
            return k8s_manifest(container)
    raise AssertionError(f"unchecked form {form}")


def render_env(settings: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Launcher variables as an env file. A setting at its default is commented out."""
    fields = ServerConfig.model_fields
    lines = comment_lines(comments)
    for name, value in settings.items():
        variable = next(iter(variables_of(name, fields[name])), name.upper())
        line = f"{variable}={text_of(_typed(value))}"
        lines.append(f"# {line}" if value == DEFAULTS[name] else line)
    return "\n".join(lines) + "\n"


def container_of(
    settings: Mapping[str, Any],
    comments: Sequence[str],
    image: str = IMAGE,
    *,
    gpus: int = 1,
    memory: ModelMemory | None = None,
) -> ExportedContainer:
    """The container of TGI. Its comments list left-out settings and assumptions. `num_shard` replaces `gpus` above 0.

    Raises SpaceError for a preset.
    """
    model = str(settings.get("model_id", ""))
    if model.startswith("preset:"):
        raise SpaceError(
            f"`model_id` is {model}, a preset of this package, which TGI cannot load: tune a model of the hub"
        )
    left_out = {name: value for name, value in settings.items() if is_bundled_only(name, value)}
    words, environment = tgi_words(
        ServerConfig.model_validate({name: value for name, value in settings.items() if name not in left_out})
    )
    notes = [
        f"Left out, because TGI does not have it: {name if name in BUNDLED_ONLY else f'{name} {value}'}"
        for name, value in sorted(left_out.items())
        if name != "tuned_by"
    ] + image_note(image)
    if not gpus:
        notes.append("The study used no GPU, so this container uses none.")
    caps = [f"{name} {settings[name]}" for name in LENGTHS if name in settings]
    if caps:
        notes.append(f"Limits from the study's load; raise them for longer requests: {', '.join(caps)}.")
    return ExportedContainer(
        name="tgi",
        image=image,
        words=words,
        environment=environment,
        comments=[*comments, *notes],
        gpus=int(settings.get("num_shard", gpus)) if gpus else 0,
        memory=memory,
    )


def _typed(value: Any) -> Any:
    """A list as a tuple, which the field expects."""
    return tuple(value) if isinstance(value, list) else value
