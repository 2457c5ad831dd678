"""Ties a child process to its parent: when the parent is gone, however it went, the child gets a signal.

`python -m loadgen.tether PARENT_PID COMMAND…` does so for a command: it ties itself, then becomes the command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127


def tie_to_parent(parent_pid: int, death_signal: signal.Signals) -> bool:
    """Ask for a signal when the parent dies; false when it is gone already. Does nothing where the system cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    return os.getppid() == parent_pid


def main(arguments: list[str]) -> int:
    parent_pid, *command = arguments
    if not tie_to_parent(int(parent_pid), signal.SIGTERM):
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
    return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
