"""Exports of a profile's server: variables, a command line, a shell script, a container, or a deployment."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.target.launched.launch import split_command
from tuner.errors import SpaceError
from tuner.servers.compose_file import compose_file
from tuner.servers.docker_script import docker_script
from tuner.servers.exported_container import ExportedContainer
from tuner.servers.exported_text import comment_lines, image_note
from tuner.servers.k8s_manifest import k8s_manifest
from tuner.servers.server_profile import ServerProfile

LOOPBACK, ALL_INTERFACES = "127.0.0.1", "0.0.0.0"


@dataclass(frozen=True, slots=True)
class ProfiledExport:
    """One configuration to export. `template`: command line with `{port}` and `{model}`; `words`: its flags."""

    profile: ServerProfile
    template: str
    model: str
    words: Sequence[str]
    environment: Mapping[str, str]
    num_gpus: int

    def render(self, form: str, comments: Sequence[str], image: str | None) -> str:
        """The text of a form. Raises SpaceError for a preset in a container of another server."""
        match form:
            case "env":
                variables = [f"{name}={text}" for name, text in self.environment.items()]
                return "\n".join([*comment_lines(comments), *variables]) + "\n"
            case "cli":
                assignments = [f"{name}={shlex.quote(text)}" for name, text in self.environment.items()]
                command = [word.replace("{port}", str(self.profile.port)) for word in self._command]
                return " ".join([*assignments, shlex.join([*command, *self.words])]) + "\n"
            case "script":
                exports = [f"export {name}={shlex.quote(text)}" for name, text in self.environment.items()]
                line = " ".join(_shell_word(word, self.profile.port) for word in (*self._command, *self.words))
                return "\n".join(["#!/bin/sh", *comment_lines(comments), *exports, f'exec {line} "$@"']) + "\n"
        return self._render_container(form, comments, image)

    def container(self, comments: Sequence[str], image: str | None) -> ExportedContainer | None:
        """The container; None without an image. Raises SpaceError for a preset."""
        name, program = self.profile.name, self.profile.image_program
        if self.model.startswith("preset:"):
            raise SpaceError(f"`model_id` is {self.model}, a preset of this package, which {name} cannot load")
        image = image or self.profile.image
        if image is None:
            return None
        return ExportedContainer(
            name=name,
            image=image,
            words=[*self._container_words(), *self.words],
            environment=self.environment,
            comments=[*comments, *image_note(image)],
            port=self.profile.port,
            ready=self.profile.ready,
            command=() if program is None else (program,),
            gpus=self.num_gpus,
        )

    def _render_container(self, form: str, comments: Sequence[str], image: str | None) -> str:
        container = self.container(comments, image)
        if container is None:
            note = f"profile {self.profile.name} has no image: export with --image"
            return "\n".join(comment_lines([*comments, note])) + "\n"
        if form == "k8s":
            return k8s_manifest(container)
        if form == "compose":
            return compose_file(container, published=container.port)
        port, program = container.port, self.profile.image_program
        entrypoint = [f"--entrypoint {program}"] if program is not None else []
        gpus = ["--gpus all"] if self.num_gpus else []
        options = [*entrypoint, *gpus, "--shm-size 1g", f"-p {LOOPBACK}:{port}:{port}", '-v "$PWD/data:/data"']
        return docker_script(container, options)

    @property
    def _command(self) -> list[str]:
        return [word.replace("{model}", self.model) for word in split_command(self.template)]

    def _container_words(self) -> list[str]:
        """The arguments of the program in the container, which listens on all interfaces.

        A template that starts another program than the profile's does not apply to the profile's image.
        """
        program = Path(split_command(self.template)[0]).name
        is_profile_program = program == split_command(self.profile.command)[0]
        template = self.template if is_profile_program else self.profile.command
        values = {"{port}": str(self.profile.port), "{model}": self.model, LOOPBACK: ALL_INTERFACES}
        return [values.get(word, word) for word in split_command(template)[1:]]


def _shell_word(word: str, port: int) -> str:
    """A word of a shell script. The port is the variable PORT if it is set."""
    return f'"${{PORT:-{port}}}"' if word == "{port}" else shlex.quote(word)
