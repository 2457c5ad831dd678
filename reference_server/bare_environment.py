"""The environment of a child process that needs no settings: variables of the interpreter, and no secrets."""

import os

_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "TZ", "VIRTUAL_ENV")


def bare_environment() -> dict[str, str]:
    """The variables with which a Python interpreter finds its libraries and directories."""
    return {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith("PYTHON")}
