"""The environment of a child process that is told everything else: what an interpreter starts with, and no secret."""

import os

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "TZ", "VIRTUAL_ENV")


def bare_environment() -> dict[str, str]:
    """This process's variables by which a Python interpreter, its libraries and its folders are found."""
    return {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("PYTHON")}
