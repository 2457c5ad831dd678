"""A router for launcher tests: it prints that it runs, writes its signals to STUB_LOG, and reads STUB_ROUTER.

STUB_ROUTER: `deaf` ignores SIGTERM, `exit=N` leaves with N at once.
"""

import json
import os
import signal
import sys
from pathlib import Path


def note(event: str) -> None:
    with Path(os.environ["STUB_LOG"]).open("a") as log:
        log.write(f"{event} {os.getpid()}\n")


def main() -> int:
    orders = dict(part.partition("=")[::2] for part in os.environ.get("STUB_ROUTER", "").split(",") if part)

    def stop(*_: object) -> None:
        note("router-sigterm")
        if "deaf" not in orders:
            sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    Path(os.environ["STUB_LOG"] + ".argv").write_text(json.dumps(sys.argv[1:]))
    print("stub router listens", flush=True)
    print("a line on stderr", file=sys.stderr, flush=True)
    note("router-serving")
    if "exit" in orders:
        return int(orders["exit"])
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
