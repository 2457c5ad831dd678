"""Forks load processes from one that has imported locust: `python -m loadgen.generator.load_forker FD`.

Each message on the socket FD starts a load. It is JSON, the working directory and the environment of the load, with
four descriptors: its stdin, stdout and stderr, and a socket that receives its process id and its exit code.
"""

import contextlib
import gc
import json
import os
import select
import socket
import struct
import sys
import traceback
from typing import Any

NUMBER = struct.Struct("i")
MAX_MESSAGE_BYTES = 1 << 20
NUM_DESCRIPTORS = 4


def main(descriptor: int) -> None:
    """Fork loads until the other end of the socket closes."""
    # locust replaces these by cooperative ones when it is imported.
    fork, waitpid, close, poller, blocking_socket = os.fork, os.waitpid, os.close, select.poll(), socket.socket
    control = blocking_socket(fileno=descriptor)
    import loadgen.generator.worker  # noqa: F401

    # Each load collects garbage before it begins; it need not scan the imported objects again.
    gc.collect()
    gc.freeze()
    poller.register(control, select.POLLIN)
    loads: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready, _ in poller.poll():
            if ready in loads:
                pid, report = loads.pop(ready)
                _, status = waitpid(pid, 0)
                with contextlib.suppress(OSError), report:  # Its reader may be gone.
                    report.send(NUMBER.pack(os.waitstatus_to_exitcode(status)))
                poller.unregister(ready)
                close(ready)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, NUM_DESCRIPTORS)
            if not message:
                return
            pid = fork()
            if pid == 0:
                os._exit(run_load(json.loads(message), descriptors))
            report = blocking_socket(fileno=descriptors.pop())
            for each in descriptors:
                close(each)
            report.send(NUMBER.pack(pid))
            ended = os.pidfd_open(pid)
            loads[ended] = (pid, report)
            poller.register(ended, select.POLLIN)


def run_load(start: dict[str, Any], descriptors: list[int]) -> int:
    """Become the load process; returns its exit code."""
    import gevent

    from loadgen.generator import worker

    os.setsid()
    for standard, each in enumerate(descriptors[:3]):
        os.dup2(each, standard)
    os.chdir(start["directory"])
    os.environ.clear()
    os.environ.update(start["environ"])
    # The variable may have changed since the forker's start.
    paths = start["environ"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    gevent.reinit()
    try:
        return worker.main()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
