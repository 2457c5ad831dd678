"""Signals a child process when its parent dies.

`python -m loadgen.parent_death PARENT_PID COMMAND…` does so for itself, then becomes COMMAND.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127


def end_with_parent(parent_pid: int, death_signal: signal.Signals) -> bool:
    """Request a signal for the parent's death (Linux only). Returns False if the parent is already gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    return os.getppid() == parent_pid


def main(arguments: list[str]) -> int:
    parent_pid, *command = arguments
    if not end_with_parent(int(parent_pid), signal.SIGTERM):
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
    return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
