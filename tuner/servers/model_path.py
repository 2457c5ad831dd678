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
    words = split_command(section.command or find_profile(section.profile).command)
    is_local = not any(Path(word).name in WITH_OTHER_FILES for word in words)
    if is_local and any("{model}" in word for word in words) and not Path(section.model_id).exists():
        raise UsageError(
            f"`model_id` is {section.model_id!r}, but there is no such file or directory; give an existing path, "
            "relative to the working directory, or a hub id"
        )


def is_path(model_id: str) -> bool:
    """Whether a model is a path. A hub id has at most one separator.

    >>> is_path("tiny.gguf"), is_path("./tiny"), is_path("org/model"), is_path("s3://bucket/tiny.gguf")
    (True, True, False, False)
    """
    if "://" in model_id:
        return False
    return model_id.endswith(".gguf") or model_id.startswith((".", "/")) or model_id.count("/") > 1
