"""`python -m tests.support.servers.serve_stream`: the scripted stream server, on PORT or --port."""

import argparse
import os
import signal
import sys
import time
from http.server import ThreadingHTTPServer

from tests.support.servers.stream_server import Handler, Script, ServerState


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=int(os.environ.get("PORT", "0")))
    parser.add_argument("--gap", type=float, default=0.002)
    parser.add_argument("--model", default="scripted", help="For commands that name a model; not used.")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--slow-start", type=float, default=0.0)
    parser.add_argument("--ignore-sigterm", action="store_true")
    given = parser.parse_args()
    if given.fail:
        sys.exit("scripted failure: no memory left")
    if given.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(given.slow_start)
    state = ServerState(script=lambda body: Script(first_s=given.gap, gap_s=given.gap))
    server = ThreadingHTTPServer(("127.0.0.1", given.port), type("Scripted", (Handler,), {"state": state}))
    server.daemon_threads = True
    names = ("PORT", "HOSTNAME", "SHARD_UDS_PATH", "MASTER_PORT", "PROMETHEUS_PORT")
    print("environment", {name: os.environ.get(name) for name in names}, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
