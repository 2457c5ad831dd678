"""`python -m tests.support.servers.noisy_server`: the stream server whose speed differs a little from launch to launch.

The n-th launch draws its factor from the seed and n, which a file counts, so that a comparison repeats.
"""

import argparse
import math
import os
import random
from http.server import ThreadingHTTPServer
from pathlib import Path

from tests.support.servers.stream_server import Handler, Script, ServerState


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--noise", type=float, default=0.04)
    parser.add_argument("--launches", type=Path, required=True)
    given = parser.parse_args()
    with given.launches.open("a") as file:
        file.write("launched\n")
    number = len(given.launches.read_text().splitlines())
    gap_s = given.gap * math.exp(random.Random(f"{given.launches.name}:{number}").gauss(0.0, given.noise))
    state = ServerState(script=lambda body: Script(first_s=gap_s, gap_s=gap_s))
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), type("Noisy", (Handler,), {"state": state}))
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
