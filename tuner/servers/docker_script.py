"""A shell script that runs an exported container with Docker."""

import shlex
from collections.abc import Sequence

from tuner.servers.exported_container import ExportedContainer
from tuner.servers.exported_text import comment_lines


def docker_script(container: ExportedContainer, options: Sequence[str]) -> str:
    """A shell script that runs a container. `options`: options of `docker run`, already quoted for the shell."""
    flags = [
        *("docker run --rm", *options),
        *(shlex.join(["-e", f"{name}={value}"]) for name, value in container.environment.items()),
        shlex.quote(container.image),
        *flag_lines(container.words),
    ]
    return "\n".join(["#!/bin/sh", *comment_lines(container.comments), " \\\n  ".join(flags)]) + "\n"


def flag_lines(words: Sequence[str]) -> list[str]:
    """One line for each flag with its value."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not lines:
            lines.append([word])
        else:
            lines[-1].append(word)
    return [shlex.join(line) for line in lines]
