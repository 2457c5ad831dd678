"""The model of a profiled server as a path on this machine: checked before a study begins."""

from pathlib import Path

from loadgen.errors import UsageError
from loadgen.target.launched.launch import split_command
from tuner.config import ServerSection
from tuner.servers.find_profile import find_profile

# A program that starts the server with other files than those of this machine.
WITH_OTHER_FILES = frozenset(
    ("apptainer", "docker", "enroot", "kubectl", "nerdctl", "podman", "singularity", "srun", "ssh")
)


def check_model_path(section: ServerSection) -> None:
    """Raises UsageError if the model of a profiled server is a path on this machine, and does not exist."""
    if section.profile is None or not is_path(section.model_id):
        return
    command = section.command or find_profile(section.profile).command
    if not has_other_files(command) and "{model}" in command and not Path(section.model_id).exists():
        raise UsageError(
            f"`model_id` is {section.model_id!r}, but there is no such file or directory; give an existing path, "
            "relative to the space file (with --model-id: to the working directory), or a hub id"
        )


def has_other_files(command: str) -> bool:
    """Whether a command line starts its server in a container or on another machine. Raises UsageError."""
    return any(Path(word).name in WITH_OTHER_FILES for word in split_command(command))


def is_path(model_id: str) -> bool:
    """Whether a model is a path. A hub id has at most one separator.

    >>> is_path("tiny.gguf"), is_path("./tiny"), is_path("org/model"), is_path("s3://bucket/tiny.gguf")
    (True, True, False, False)
    """
    if "://" in model_id:
        return False
    return model_id.endswith(".gguf") or model_id.startswith((".", "/")) or model_id.count("/") > 1
