"""A server for failing trials: it has TGI's API, and the fault that its first argument names. Its port is $PORT.

`well` serves; `no-memory` ends at start with a message; `usage` as a launcher refuses a flag; `hang` never listens;
`dies` ends in the middle of a load; `errors` answers 500; `deaf` ignores SIGTERM; `forks` leaves a grandchild that
ignores it too. $PIDS is a file that gets the process ids.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

from tests.support.servers.stream_server import Handler, Script, ServerState

DIES_AFTER = 20


def main() -> int:
    how = sys.argv[1]
    note(os.getpid())
    if how in ("deaf", "forks"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "forks":
        words = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
        note(subprocess.Popen(words).pid)
    if how == "no-memory":
        print("torch.OutOfMemoryError: CUDA out of memory", file=sys.stderr)
        return 1
    if how == "usage":
        print("error: invalid value for '--max-batch-prefill-tokens'", file=sys.stderr)
        return 2
    if how == "hang":
        time.sleep(600)
    serve(how)
    return 0


def serve(how: str) -> None:
    answered = 0
    lock = threading.Lock()

    def script(body: dict[str, object]) -> Script:
        nonlocal answered
        with lock:
            answered += 1
            count = answered
        if how == "dies" and count > DIES_AFTER:
            print("RuntimeError: cannot allocate memory", file=sys.stderr, flush=True)
            os._exit(1)
        # The first is the tuner's own, which asks whether it serves at all.
        if how == "errors" and count > 1:
            return Script(status=500)
        return Script(first_s=0.02, gap_s=0.002)

    handler = type("MisbehavingHandler", (Handler,), {"state": ServerState(script=script)})
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), handler).serve_forever()


def note(pid: int) -> None:
    with Path(os.environ["PIDS"]).open("a") as file:
        file.write(f"{pid}\n")


if __name__ == "__main__":
    sys.exit(main())
